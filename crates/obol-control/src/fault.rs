use std::fmt;

use obol_authz::PolicyFault;

/// Something wrong with a workspace, where it is, and the way out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// The path of the file, as it was given.
    pub file: String,
    /// From 1; 0 when the whole file is meant.
    pub line: u64,
    /// In characters, from 1; 0 when the whole file is meant.
    pub column: u64,
    /// What is wrong. Never quotes a secret.
    pub message: String,
    /// What to do about it.
    pub help: Option<String>,
}

impl Fault {
    pub(crate) fn of_file(file: &str, message: String, help: Option<&str>) -> Self {
        Self { file: file.to_owned(), line: 0, column: 0, message, help: help.map(str::to_owned) }
    }

    pub(crate) fn no_text(file: &str) -> Self {
        Self::of_file(file, "is not UTF-8 text".to_owned(), Some("save it as UTF-8"))
    }

    /// Of what the parser said, and where.
    pub(crate) fn no_yaml(file: &str, ((line, column), message): ((u64, u64), String)) -> Self {
        let help = Some("this is no YAML any more: look at this line and the one before".to_owned());
        Self { file: file.to_owned(), line, column, message, help }
    }
}

impl Fault {
    /// `file:line:column`, or the file alone.
    pub(crate) fn place(&self) -> String {
        if self.line > 0 { format!("{}:{}:{}", self.file, self.line, self.column) } else { self.file.clone() }
    }
}

impl From<PolicyFault> for Fault {
    fn from(fault: PolicyFault) -> Self {
        let PolicyFault { file, line, column, message, help } = fault;
        Self { file, line, column, message, help }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place(), self.message)?;
        self.help.as_ref().map_or(Ok(()), |help| write!(f, "\n  help: {help}"))
    }
}
