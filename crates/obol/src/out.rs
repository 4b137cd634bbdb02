//! Results, on stdout: what other programs read. Everything for people goes to the log on stderr.

use std::fmt::Display;
use std::io::{self, Write as _};

use jiff::Timestamp;

/// Writes one line and flushes it, so that a reader behind a pipe sees it at once.
///
/// # Errors
/// When stdout is closed.
pub fn line(text: impl Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

/// Writes text that brings its own line ends.
///
/// # Errors
/// When stdout is closed.
pub fn text(text: impl Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{text}")?;
    out.flush()
}

/// Writes why something failed, for people, on stderr. There is nobody to tell when stderr is closed.
pub fn complaint(text: impl Display) {
    drop(writeln!(io::stderr().lock(), "error: {text}"));
}

/// Writes what is doubtful, for people, on stderr, where there is no log.
pub fn warning(text: impl Display) {
    drop(writeln!(io::stderr().lock(), "warning: {text}"));
}

/// Writes what a person should know of a result, on stderr, so that the result stays alone on stdout.
pub fn hint(text: impl Display) {
    drop(writeln!(io::stderr().lock(), "{text}"));
}

/// Text from outside without what moves a terminal's cursor.
pub fn one_line(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut line, c| {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
        line
    })
}

/// Columns as wide as their widest cell; an empty cell is `-`, so that a row can be taken apart at its spaces.
pub fn table(rows: &[impl AsRef<[String]>]) -> String {
    let cell = |text: &String| if text.is_empty() { "-".to_owned() } else { text.clone() };
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.as_ref().iter().map(cell).collect()).collect();
    let mut widths = vec![0; rows.first().map_or(0, Vec::len)];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let line: Vec<String> =
            widths.iter().zip(row).map(|(width, cell)| format!("{cell:width$}")).collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A moment as people read it; `never` for none.
pub fn moment(at: Option<Timestamp>) -> String {
    at.map_or_else(|| "never".to_owned(), |at| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
}

/// Writes a value as JSON for programs.
///
/// # Errors
/// When stdout is closed.
pub fn json(value: &serde_json::Value) -> io::Result<()> {
    line(format_args!("{value:#}"))
}
