use std::borrow::Cow;
use std::time::Duration;

use obol_model::{Kind, ProviderName};

use crate::translate::RequestError;

/// Longer waits than this are not passed on: an SDK would sleep for all of it (DESIGN §11.4).
const LONGEST_RETRY_AFTER: Duration = Duration::from_mins(1);

/// Why a request got no answer. `Display` is safe to show to callers: it names the workspace's provider, never an
/// address or what the provider wrote; the sources are for the log.
#[derive(Debug, thiserror::Error)]
pub enum LlmError {
    /// The body is not a request.
    #[error("{message}")]
    Invalid {
        /// What is wrong and what would be right.
        message: String,
        /// A stable word for the rule that is broken.
        code: &'static str,
        /// The member that breaks it, when it is one.
        param: Option<Cow<'static, str>>,
    },
    /// The account of the caller does not allow the target; what it says is for the caller.
    #[error("{message}")]
    Denied {
        /// Of which kind.
        kind: Kind,
        /// A stable word.
        code: &'static str,
        /// What is used up, and what to do.
        message: String,
        /// After how long a retry makes sense, if soon.
        retry_after: Option<Duration>,
    },
    /// The target failed too often a moment ago, or asked to be left alone for a while.
    #[error("the provider `{provider}` is given a rest after it failed")]
    Resting {
        /// Which.
        provider: ProviderName,
        /// For how long.
        rest: Duration,
    },
    /// The caller passed no target.
    #[error("no target of the model can be used")]
    NoTarget,
    /// No connection, or it broke before there was an answer.
    #[error("the provider `{provider}` could not be reached")]
    Unreachable {
        /// Which.
        provider: ProviderName,
        /// What the connection said; without addresses of ours.
        #[source]
        source: reqwest::Error,
    },
    /// The provider's address is one that may not be dialled (DESIGN §16).
    #[error("the address of the provider `{provider}` may not be used")]
    AddressRefused {
        /// Which.
        provider: ProviderName,
    },
    /// The answer did not begin, or did not end, in time.
    #[error("the provider `{provider}` did not answer in time")]
    Timeout {
        /// Which.
        provider: ProviderName,
    },
    /// The provider limits our account.
    #[error("the provider `{provider}` limits the rate of requests")]
    RateLimited {
        /// Which.
        provider: ProviderName,
        /// How long it asks to wait.
        retry_after: Option<Duration>,
    },
    /// The provider refused our credential or our account; the caller's own key is fine.
    #[error("the provider `{provider}` refused the gateway's credential")]
    CredentialRefused {
        /// Which.
        provider: ProviderName,
    },
    /// The provider failed.
    #[error("the provider `{provider}` failed with status {status}")]
    Failed {
        /// Which.
        provider: ProviderName,
        /// Its status, or the one that its error frame names.
        status: u16,
    },
    /// The provider answered with something else than a completion.
    #[error("the provider `{provider}` sent {what}")]
    BadAnswer {
        /// Which.
        provider: ProviderName,
        /// What it sent.
        what: &'static str,
    },
}

impl LlmError {
    pub(crate) fn invalid(
        code: &'static str,
        param: Option<&'static str>,
        message: impl Into<String>,
    ) -> Self {
        Self::Invalid { message: message.into(), code, param: param.map(Cow::Borrowed) }
    }

    /// The kind of the failure.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Invalid { .. } => Kind::InvalidRequest,
            Self::NoTarget => Kind::NotFound,
            Self::Denied { kind, .. } => *kind,
            Self::Resting { .. } => Kind::Unavailable,
            Self::Timeout { .. } => Kind::Timeout,
            Self::RateLimited { .. } => Kind::RateLimited,
            Self::Unreachable { .. }
            | Self::AddressRefused { .. }
            | Self::CredentialRefused { .. }
            | Self::Failed { .. }
            | Self::BadAnswer { .. } => Kind::Upstream,
        }
    }

    /// The stable word for error bodies, logs and metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid { code, .. } | Self::Denied { code, .. } => code,
            Self::NoTarget => "no_target",
            Self::Resting { .. } => "upstream_resting",
            Self::Unreachable { .. } => "upstream_unreachable",
            Self::AddressRefused { .. } => "upstream_address_refused",
            Self::Timeout { .. } => "upstream_timeout",
            Self::RateLimited { .. } => "upstream_rate_limited",
            Self::CredentialRefused { .. } => "upstream_auth",
            Self::Failed { .. } => "upstream_error",
            Self::BadAnswer { .. } => "upstream_bad_answer",
        }
    }

    /// The member of the request that is wrong, for the error object.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Invalid { param, .. } => param.as_deref(),
            _ => None,
        }
    }

    /// How long to wait before a retry, when it is short enough to be passed on.
    pub fn retry_after(&self) -> Option<Duration> {
        let wait = match self {
            Self::RateLimited { retry_after, .. } | Self::Denied { retry_after, .. } => *retry_after,
            Self::Resting { rest, .. } => Some(*rest),
            _ => None,
        };
        wait.filter(|wait| *wait <= LONGEST_RETRY_AFTER)
    }

    /// Whether a retry of the same request cannot help (DESIGN §11.4).
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Denied { retry_after: None, .. })
    }
}

impl From<RequestError> for LlmError {
    fn from(e: RequestError) -> Self {
        let param = e.param().map(|param| Cow::Owned(param.to_owned()));
        Self::Invalid { message: e.to_string(), code: e.code(), param }
    }
}

/// Shows an error with its sources, for the log.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(next) = source {
        text.push_str(": ");
        text.push_str(&next.to_string());
        source = next.source();
    }
    text
}
