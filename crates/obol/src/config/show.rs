//! The configuration for people: effective values, and the reference page.

use std::fmt::{self, Write as _};

use crate::config::Subcommand;
use crate::config::table::{ALL, Unset, Variable};
use crate::out::one_line;

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The table.
    Default,
    /// The environment.
    Environment,
    /// The command line.
    Option(&'static str),
}

/// One effective value, redacted.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) variable: &'static Variable,
    pub(crate) value: Option<String>,
    pub(crate) source: Source,
}

/// What a command runs with, secrets redacted: the answer to `--print-config`.
#[derive(Debug, Clone)]
pub struct Effective {
    command: Subcommand,
    lines: Vec<Line>,
}

impl Effective {
    pub(super) fn new(command: Subcommand, lines: Vec<Line>) -> Self {
        Self { command, lines }
    }
}

impl fmt::Display for Effective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# obol {}", self.command)?;
        for Line { variable, value, source } in &self.lines {
            match (value, source) {
                (Some(value), Source::Default) => {
                    writeln!(f, "{}={}  # default", variable.name, one_line(value))?;
                }
                (Some(value), Source::Environment) => writeln!(f, "{}={}", variable.name, one_line(value))?,
                (Some(value), Source::Option(option)) => {
                    writeln!(f, "{}={}  # {option}", variable.name, one_line(value))?;
                }
                (None, _) => writeln!(f, "# {} is not set: {}", variable.name, meaning(variable.default))?,
            }
        }
        Ok(())
    }
}

fn meaning(default: Unset) -> &'static str {
    match default {
        Unset::Value(text) | Unset::Means(text) => text,
        Unset::Refused => "required",
    }
}

/// `docs/configuration.md`.
pub fn reference() -> String {
    let mut page = String::from(INTRODUCTION);
    page.push_str("\n| variable | default | read by |\n|---|---|---|\n");
    for v in ALL {
        line(
            &mut page,
            format_args!("| [`{}`](#{}) | {} | {} |", v.name, v.name.to_lowercase(), default(v), readers(v)),
        );
    }
    for v in ALL {
        line(&mut page, format_args!("\n## `{}`\n", v.name));
        for text in v.doc.lines() {
            line(&mut page, format_args!("{}", text.trim_start()));
        }
        line(&mut page, format_args!("\n- Value: {}", v.shape.form()));
        if let Some(range) = v.shape.range() {
            line(&mut page, format_args!("- Range: {range}"));
        }
        line(&mut page, format_args!("- Default: {}", default(v)));
        if let Some(option) = v.option {
            line(&mut page, format_args!("- Option: `{option}` wins over it"));
        }
        line(&mut page, format_args!("- Read by: {}", readers(v)));
    }
    page
}

fn default(v: &Variable) -> String {
    match v.default {
        Unset::Value(value) => format!("`{value}`"),
        Unset::Means(words) => words.to_owned(),
        Unset::Refused => "none, required".to_owned(),
    }
}

fn readers(v: &Variable) -> String {
    v.used_by.iter().map(|c| format!("`{c}`")).collect::<Vec<_>>().join(", ")
}

fn line(page: &mut String, text: fmt::Arguments<'_>) {
    // Writing to a `String` cannot fail.
    if writeln!(page, "{text}").is_err() {
        page.clear();
    }
}

const INTRODUCTION: &str = "\
<!-- Written by `make docs` from crates/obol/src/config/table.rs; a test compares the two. -->

# Configuration

Obol is configured by environment variables. What they hold in common:

- A bad value refuses the start (exit code 2). All problems are reported at once, each with the variable, the form of a
  value and its range; values of secrets are never shown.
- A variable that starts with `OBOL_` and is not listed here is a warning that names the nearest known one.
- An empty value counts as not set.
- A command ignores the variables of other commands, so that all of them can share one environment.
- `obol run --print-config` (also `control` and `dev`) shows the effective values, secrets redacted, and ends.
- Names end in their unit: `_S` are whole seconds.
- Secrets of workspace files (`env:NAME`) may name any variable but these: whoever writes a workspace file must not be
  able to send Obol's own credentials somewhere.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_page_is_fresh() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(page == reference(), "docs/configuration.md is stale: run `make docs`");
    }
}
