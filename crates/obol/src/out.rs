//! Results, on stdout: what other programs read. Everything for people goes to the log on stderr.

use std::fmt::Display;
use std::io::{self, Write as _};

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
