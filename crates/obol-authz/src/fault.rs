use std::fmt;

use cedar_policy::ffi::DetailedError;
use cedar_policy::{Policy, PolicyId};
use obol_model::snapshot::PolicyFile;

/// What is wrong with a policy file, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyFault {
    /// Name of the file, as [`PolicyFile::name`] gives it.
    pub file: String,
    /// From 1.
    pub line: u64,
    /// In characters, from 1.
    pub column: u64,
    /// What is wrong.
    pub message: String,
    /// The way out, when there is one to name.
    pub help: Option<String>,
}

impl fmt::Display for PolicyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)?;
        self.help.as_ref().map_or(Ok(()), |help| write!(f, "\n  help: {help}"))
    }
}

/// The file that a policy came from: ids are `FILE#NUMBER`, both numbers.
pub(crate) fn file_of<'a>(files: &'a [PolicyFile], id: &PolicyId) -> Option<&'a PolicyFile> {
    let id: &str = id.as_ref();
    files.get(id.split('#').next()?.parse::<usize>().ok()?)
}

/// Where a policy begins in its file, its annotations included.
pub(crate) fn offset_of(policy: &Policy) -> usize {
    let Some(loc) = policy.as_ref().loc() else { return 0 };
    loc.start()
}

/// Cedar's word on a policy.
pub(crate) fn fault_of_policy(files: &[PolicyFile], id: &PolicyId, error: &DetailedError) -> PolicyFault {
    match file_of(files, id) {
        Some(file) => fault_in(file, error),
        None => PolicyFault {
            file: id.to_string(),
            line: 1,
            column: 1,
            message: error.message.clone(),
            help: None,
        },
    }
}

/// Cedar's word on a file.
pub(crate) fn fault_in(file: &PolicyFile, error: &DetailedError) -> PolicyFault {
    let offset = error.source_locations.first().map_or(0, |label| label.loc.start);
    let label = error.source_locations.first().and_then(|label| label.label.as_deref());
    let message = error.message.strip_prefix("for policy `").and_then(|m| m.split_once("`, ")).map_or_else(
        // Cedar repeats its internal id of the policy; the position says more.
        || error.message.clone(),
        |(_, rest)| rest.to_owned(),
    );
    fault_at(file, offset, message, error.help.clone().or_else(|| label.map(str::to_owned)))
}

/// Our own word on what stands at a place of a file.
pub(crate) fn fault_at(
    file: &PolicyFile,
    offset: usize,
    message: impl Into<String>,
    help: Option<String>,
) -> PolicyFault {
    let (line, column) = line_and_column(&file.text, offset);
    PolicyFault { file: file.name.clone(), line, column, message: message.into(), help }
}

/// From 1, the column in characters.
pub(crate) fn line_and_column(text: &str, offset: usize) -> (u64, u64) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    let column = before.get(line_start..).unwrap_or_default().chars().count() as u64 + 1;
    (before.matches('\n').count() as u64 + 1, column)
}

/// In the order of the files' names and lines. Cedar checks a policy once for each type of principal and says the same
/// of keys and of users: once is enough.
pub(crate) fn sorted(mut faults: Vec<PolicyFault>) -> Vec<PolicyFault> {
    faults.sort_by(|a, b| {
        (&a.file, a.line, a.column, &a.message).cmp(&(&b.file, b.line, b.column, &b.message))
    });
    let of_any = |fault: &PolicyFault| PolicyFault {
        message: fault.message.replace("type `User`", "type `Key`"),
        ..fault.clone()
    };
    faults.dedup_by(|a, b| of_any(a) == of_any(b));
    faults
}
