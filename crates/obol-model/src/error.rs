use std::error::Error;
use std::fmt;

/// An error and everything behind it, on one line. A cause that the line tells already is not told again.
#[derive(Debug, Clone, Copy)]
pub struct Causes<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = self.0.to_string();
        let mut next = self.0.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            if !line.contains(&text) {
                line.push_str(": ");
                line.push_str(&text);
            }
            next = cause.source();
        }
        f.write_str(&line)
    }
}

/// What kind of failure an error is. A short closed list: domain crates choose a kind, only the edge turns it into
/// an HTTP status, a JSON-RPC error or an OpenAI error object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The request is malformed or breaks a rule of its protocol.
    InvalidRequest,
    /// No credential, or one that is not valid.
    Unauthenticated,
    /// The caller is known and may not do this.
    Forbidden,
    /// The thing does not exist, or must look as if it did not.
    NotFound,
    /// The state changed under the caller, or a resource is taken.
    Conflict,
    /// The request is well formed, and contradicts what the caller said before.
    Unprocessable,
    /// The body or a message is larger than the bound.
    TooLarge,
    /// A limit of the caller is reached; waiting helps.
    RateLimited,
    /// A store could not be asked. Never to be confused with [`Kind::NotFound`]: "absent" and "could not ask" are
    /// different answers (DESIGN §6.4).
    Unavailable,
    /// An upstream could not be reached or broke its protocol.
    Upstream,
    /// A deadline passed.
    Timeout,
    /// The upstream may or may not have executed the call, so it is not repeated (DESIGN §9.7).
    OutcomeUnknown,
    /// The replica is draining.
    Stopping,
    /// A fault of ours.
    Internal,
}

/// Who has to act for the failure to go away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The caller.
    Caller,
    /// A server that we call for the caller.
    Upstream,
    /// The gateway or its operator.
    Us,
}

impl Kind {
    /// Who has to act.
    pub fn origin(self) -> Origin {
        match self {
            Self::InvalidRequest
            | Self::Unauthenticated
            | Self::Forbidden
            | Self::NotFound
            | Self::Conflict
            | Self::Unprocessable
            | Self::TooLarge
            | Self::RateLimited => Origin::Caller,
            Self::Upstream | Self::Timeout | Self::OutcomeUnknown => Origin::Upstream,
            Self::Unavailable | Self::Stopping | Self::Internal => Origin::Us,
        }
    }

    /// Whether the same request may succeed when it is sent again, and is safe to send again.
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::RateLimited | Self::Unavailable | Self::Stopping)
    }

    /// The stable word for logs, metrics and error bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Unprocessable => "unprocessable",
            Self::TooLarge => "too_large",
            Self::RateLimited => "rate_limited",
            Self::Unavailable => "unavailable",
            Self::Upstream => "upstream_error",
            Self::Timeout => "timeout",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::Stopping => "stopping",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Link(&'static str, #[source] Option<Box<Link>>);

    #[test]
    fn causes_are_told_once() {
        let chain =
            |[a, b, c]: [&'static str; 3]| Link(a, Some(Box::new(Link(b, Some(Box::new(Link(c, None)))))));
        for (said, told) in [
            (
                ["cannot connect", "refused", "by the other side"],
                "cannot connect: refused: by the other side",
            ),
            (["cannot connect", "refused", "refused"], "cannot connect: refused"),
            (["cannot connect: refused", "refused", "by us"], "cannot connect: refused: by us"),
        ] {
            assert_eq!(Causes(&chain(said)).to_string(), told);
        }
    }
}
