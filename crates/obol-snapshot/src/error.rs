use obol_model::snapshot::InvalidPublication;
use obol_model::{Kind, Revision};

use crate::SourceError;

/// Why there is no publication for a request. Reads fail closed: none of these is a reason to go on with what was
/// read before (DESIGN §7.3).
#[derive(Debug, Clone, thiserror::Error)]
pub enum PairError {
    /// The store was asked and has none of the three keys.
    #[error("the workspace is not published")]
    NotPublished,
    /// Some of the three keys are there.
    #[error("the publication is incomplete")]
    Partial,
    /// The three documents are no publication.
    #[error("the publication is invalid")]
    Invalid(#[source] InvalidPublication),
    /// The documents are coherent and cannot be used.
    #[error("publication {revision} does not compile: {reason}")]
    CompileFailed {
        /// Which.
        revision: Revision,
        /// What the compiler said.
        reason: String,
    },
    /// The store went back in time. Rolling back is a new revision with old content.
    #[error("publication {found} is older than {served}, which is served")]
    Older {
        /// What is served.
        served: Revision,
        /// What the store holds.
        found: Revision,
    },
    /// The store holds other content under the revision that is served.
    #[error("publication {revision} was replaced by other content of the same revision")]
    Conflicting {
        /// Which.
        revision: Revision,
    },
    /// The store could not be asked.
    #[error("the publication store could not be asked")]
    Unavailable(#[source] SourceError),
}

impl PairError {
    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotPublished => Kind::NotFound,
            Self::Partial
            | Self::Invalid(_)
            | Self::CompileFailed { .. }
            | Self::Older { .. }
            | Self::Conflicting { .. }
            | Self::Unavailable(_) => Kind::Unavailable,
        }
    }
}
