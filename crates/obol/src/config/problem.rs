//! What is wrong with the environment, all of it at once.

use std::fmt;

use crate::config::Subcommand;
use crate::config::table::{Secrecy, Shape, Unset, Variable};
use crate::out;

/// One thing that is wrong with one variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    name: &'static str,
    what: String,
    expected: String,
    default: Option<&'static str>,
}

impl Problem {
    /// A required variable is missing.
    pub(crate) fn missing(variable: &'static Variable) -> Self {
        let what = match variable.option {
            Some(option) => format!("not set, and there is no `{option}`"),
            None => "not set, and there is no default".to_owned(),
        };
        Self::new(variable, what)
    }

    /// A value cannot be used, for this reason. The value itself is shown unless that could show a secret; `reason`
    /// must not repeat it.
    pub(crate) fn bad(variable: &'static Variable, value: &str, reason: &str) -> Self {
        let what = match variable.secrecy {
            // A URL that is refused for the password in it.
            Secrecy::Open if variable.shape == Shape::BaseUrl && value.contains('@') => {
                format!("the value (not shown) {reason}")
            }
            Secrecy::Open => format!("`{}` {reason}", shown(value)),
            // What is no URL has no part that is known to be harmless.
            Secrecy::UrlPassword | Secrecy::Secret => format!("the value (not shown) {reason}"),
        };
        Self::new(variable, what)
    }

    /// A value is fine by itself and does not go together with something else.
    pub(crate) fn conflict(variable: &'static Variable, reason: String) -> Self {
        Self::new(variable, reason)
    }

    fn new(variable: &'static Variable, what: String) -> Self {
        let expected = match variable.shape.range() {
            Some(range) => format!("{}; {range}", variable.shape.form()),
            None => variable.shape.form(),
        };
        let default = match variable.default {
            Unset::Value(value) => Some(value),
            Unset::Means(_) | Unset::Refused => None,
        };
        Self { name: variable.name, what, expected, default }
    }

    /// The variable.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}\n    expected: {}", self.name, self.what, self.expected)?;
        match self.default {
            Some(default) => write!(f, " (default {default})"),
            None => Ok(()),
        }
    }
}

/// Everything that is wrong with the environment of one command. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    pub(crate) command: Subcommand,
    pub(crate) list: Vec<Problem>,
}

impl Problems {
    /// The problems, in the order of the reference.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.list.iter()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.list.len() == 1 { "" } else { "s" };
        write!(f, "`obol {}` cannot start: {} problem{s} in the environment", self.command, self.list.len())?;
        for problem in &self.list {
            write!(f, "\n\n  {}", problem.to_string().replace('\n', "\n  "))?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// A variable that starts with `OBOL_` and that nobody reads. Its value is never shown: it may be a secret whose name
/// has a typo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// The name as it stands in the environment, at most 80 characters of it.
    pub name: String,
    /// The known name that is most like it.
    pub nearest: &'static str,
}

impl Unknown {
    pub(super) fn new(name: &str, nearest: &'static str) -> Self {
        Self { name: shown(name), nearest }
    }
}

/// Text from outside in a message: on one line and of bounded length.
fn shown(value: &str) -> String {
    const MOST: usize = 80;
    let mut text = out::one_line(&value.chars().take(MOST).collect::<String>());
    if value.chars().nth(MOST).is_some() {
        text.push('…');
    }
    text
}
