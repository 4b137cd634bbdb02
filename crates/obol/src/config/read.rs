//! Reads variables one by one and keeps everything that is wrong with them.

use std::num::NonZeroUsize;
use std::time::Duration;

use obol_model::KeyRing;

use crate::config::problem::{Problem, Problems};
use crate::config::show::{Effective, Line, Source};
use crate::config::table::{ALL, Secrecy, Shape, Unset, Variable};
use crate::config::{Environment, Subcommand};
use crate::config::{RedisUrl, value};

/// Reads the variables of one command. A variable that is missing or bad gives `None` and a [`Problem`], so that
/// reading goes on and all of them are reported together.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    env: &'a Environment,
    command: Subcommand,
    problems: Vec<Problem>,
    lines: Vec<Line>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(env: &'a Environment, command: Subcommand) -> Self {
        Self { env, command, problems: Vec::new(), lines: Vec::new() }
    }

    /// The value of a variable that has one: its own or the default.
    pub(super) fn value<T>(
        &mut self,
        variable: &'static Variable,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let value = self.optional(variable, parse);
        if value.is_none() && variable.default == Unset::Refused && !self.env.is_set(variable) {
            self.problems.push(Problem::missing(variable));
        }
        value
    }

    /// The value of a variable that may have none.
    pub(super) fn optional<T>(
        &mut self,
        variable: &'static Variable,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        debug_assert!(
            variable.used_by.contains(&self.command),
            "{} is not for {}",
            variable.name,
            self.command
        );
        let (text, source) = match self.env.get(variable) {
            Some((Ok(text), source)) => (text, source),
            Some((Err(lossy), _)) => {
                self.problems.push(Problem::bad(variable, &lossy, "is not UTF-8"));
                return None;
            }
            None => match variable.default {
                Unset::Value(text) => (text.to_owned(), Source::Default),
                Unset::Means(_) | Unset::Refused => {
                    self.lines.push(Line { variable, value: None, source: Source::Default });
                    return None;
                }
            },
        };
        match parse(&text) {
            Ok(value) => {
                let shown = match variable.secrecy {
                    Secrecy::Open => text,
                    Secrecy::UrlPassword => {
                        RedisUrl::parse(&text).map_or("[secret]".into(), |url| url.to_string())
                    }
                    Secrecy::Secret => "[secret]".into(),
                };
                self.lines.push(Line { variable, value: Some(shown), source });
                Some(value)
            }
            Err(reason) => {
                self.problems.push(Problem::bad(variable, &text, &reason));
                None
            }
        }
    }

    /// Notes that a variable does not go together with another one.
    pub(super) fn conflict(&mut self, variable: &'static Variable, reason: String) {
        self.problems.push(Problem::conflict(variable, reason));
    }

    pub(super) fn is_set(&self, variable: &'static Variable) -> bool {
        self.env.is_set(variable)
    }

    pub(super) fn seconds(&mut self, variable: &'static Variable) -> Option<Duration> {
        self.number(variable).map(Duration::from_secs)
    }

    pub(super) fn count(&mut self, variable: &'static Variable) -> Option<NonZeroUsize> {
        self.number(variable).and_then(|n| usize::try_from(n).ok()).and_then(NonZeroUsize::new)
    }

    fn number(&mut self, variable: &'static Variable) -> Option<u64> {
        self.value(variable, |text| match variable.shape {
            Shape::Seconds { min, max } | Shape::Count { min, max } => value::number(text, min, max),
            Shape::Bytes { min, max } => value::bytes(text, min, max),
            _ => Err("is not a number in the table of variables".into()),
        })
    }

    pub(super) fn key_ring(&mut self, variable: &'static Variable) -> Option<KeyRing> {
        // The ring's errors name entries by position and ids, never by value.
        self.value(variable, |text| KeyRing::parse(text).map_err(|e| format!("is not usable: {e}")))
    }

    /// All problems in the order of the reference, or what makes the configuration.
    pub(super) fn finish<T>(self, config: Option<T>) -> Result<(T, Effective), Problems> {
        let Self { command, mut problems, mut lines, .. } = self;
        let position = |name: &str| ALL.iter().position(|v| v.name == name);
        match config {
            Some(config) if problems.is_empty() => {
                lines.sort_by_key(|line| position(line.variable.name));
                Ok((config, Effective::new(command, lines)))
            }
            _ => {
                problems.sort_by_key(|problem| position(problem.name()));
                Err(Problems { command, list: problems })
            }
        }
    }
}
