//! Why a command ends before it is done.

use std::error::Error;
use std::{fmt, io};

use obol_model::Causes;

use crate::config::Problems;

/// Why a command ended, with the exit code that says so.
#[derive(Debug)]
pub enum Failure {
    /// The environment is not usable: exit code 2.
    Environment(Problems),
    /// What was asked for makes no sense: exit code 2.
    Usage(String),
    /// Something failed: exit code 1.
    Runtime(Box<dyn Error + Send + Sync>),
}

impl Failure {
    /// A failure at work.
    pub fn runtime(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Runtime(error.into())
    }

    /// A question that makes no sense.
    pub(crate) fn usage(message: String) -> Self {
        Self::Usage(message)
    }

    /// The exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Environment(_) | Self::Usage(_) => 2,
            Self::Runtime(_) => 1,
        }
    }
}

impl From<Problems> for Failure {
    fn from(problems: Problems) -> Self {
        Self::Environment(problems)
    }
}

/// Of stdout, for the most part: nobody reads the results any more.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::runtime(error)
    }
}

impl fmt::Display for Failure {
    /// The error and everything behind it, on one line: it is the last thing that an operator sees.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment(problems) => problems.fmt(f),
            Self::Usage(message) => f.write_str(message),
            Self::Runtime(error) => Causes(&**error).fmt(f),
        }
    }
}

impl Error for Failure {}
