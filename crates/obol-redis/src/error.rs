use std::io;
use std::sync::Arc;
use std::time::Duration;

use obol_model::Kind;
use redis::{ErrorKind, ServerErrorKind};

use crate::Redis;

/// Why Redis could not be asked. Never says what was asked: keys and arguments may be credentials.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RedisError {
    /// The URL is not one that this release can use.
    #[error("bad Redis URL: {reason}")]
    BadUrl {
        /// What is wrong with it and what would be right.
        reason: String,
    },
    /// The certificates of a private authority cannot be used.
    #[error("the certificates to check Redis with cannot be used: {reason}")]
    BadCa {
        /// What is wrong with them.
        reason: String,
    },
    /// No connection could be made, or not to the right server.
    #[error("cannot connect to Redis at `{server}`: {hint}")]
    Connect {
        /// Which one, for people.
        server: Arc<str>,
        /// What to do about it.
        hint: &'static str,
        /// What the attempt said.
        #[source]
        source: redis::RedisError,
    },
    /// Connections are lost as soon as they are made; the next one is due within half a second.
    #[error("connections to Redis at `{server}` do not last: the last one was {reason}")]
    Lost {
        /// Which one, for people.
        server: Arc<str>,
        /// What became of it.
        reason: &'static str,
    },
    /// The deadline passed. The command may have been executed.
    #[error("Redis at `{server}` did not answer within {} ms", after.as_millis())]
    Timeout {
        /// Which one, for people.
        server: Arc<str>,
        /// The deadline.
        after: Duration,
    },
    /// The connection broke while a command was under way. The command may have been executed.
    #[error("the connection to Redis at `{server}` broke")]
    Io {
        /// Which one, for people.
        server: Arc<str>,
        /// What the socket said.
        #[source]
        source: redis::RedisError,
    },
    /// Redis answered with an error, or with something that the caller cannot read.
    #[error("Redis at `{server}` answered `{code}`: {detail}")]
    Server {
        /// Which one, for people.
        server: Arc<str>,
        /// The error's first word, such as `OOM` or `READONLY`; `UNEXPECTED` for an answer of another type.
        code: String,
        /// The rest of the error, without arguments of the command.
        detail: String,
    },
}

impl RedisError {
    /// What kind of failure it is: whatever happens at runtime is "could not ask".
    pub fn kind(&self) -> Kind {
        match self {
            Self::BadUrl { .. } | Self::BadCa { .. } => Kind::Internal,
            Self::Connect { .. }
            | Self::Lost { .. }
            | Self::Timeout { .. }
            | Self::Io { .. }
            | Self::Server { .. } => Kind::Unavailable,
        }
    }

    /// The `reason` label of [`obol_model::metric::REDIS_ERRORS`].
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Timeout { .. } => "timeout",
            Self::Connect { .. } | Self::Lost { .. } | Self::Io { .. } => "io",
            Self::Server { .. } | Self::BadUrl { .. } | Self::BadCa { .. } => "server",
        }
    }

    /// Whether nothing was heard of the server at all.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if source.is_timeout())
    }

    /// Of an attempt to connect that took too long.
    pub(crate) fn silent(server: &Arc<str>) -> Self {
        Self::connect(server, io::Error::from(io::ErrorKind::TimedOut).into())
    }

    /// Of a slot that no node serves.
    pub(crate) fn unserved(server: &Arc<str>) -> Self {
        let detail = "no node serves the slot of this key".to_owned();
        Self::Server { server: server.clone(), code: "CLUSTERDOWN".into(), detail }
    }

    pub(crate) fn connect(server: &Arc<str>, source: redis::RedisError) -> Self {
        let hint = if source.is_timeout() {
            // A Redis that is greeted by TLS and does not speak it waits for the rest of a command.
            "it does not answer; check the address, that nothing between drops packets, and that it speaks TLS there if \
             the URL says `rediss`"
        } else if source.is_connection_refusal() {
            "nothing listens there; start Redis or correct the address"
        } else if source.kind() == ErrorKind::AuthenticationFailed
            || matches!(source.code(), Some("WRONGPASS" | "NOAUTH" | "NOPERM"))
        {
            "it refuses the user name or password of the URL"
        } else if source.kind() == ErrorKind::RESP3NotSupported {
            "it is too old; Redis 7.0 or newer is needed"
        } else if source.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading) {
            "it is still reading its data; it will be used when it is done"
        } else if source.kind() == ErrorKind::Server(ServerErrorKind::MasterDown) {
            "it is a replica that has lost its master"
        } else if source.to_string().contains("DB index is out of range") {
            "it has no database of that number; the URL ends with one that it has (`databases` in its configuration)"
        } else if source.to_string().contains("InvalidContentType") {
            "it does not speak TLS there; write the URL without the second `s` of `rediss`, or name its TLS port"
        } else if source.to_string().contains("certificate") {
            "its certificate is not trusted; name the authority that issued it, and the server as the certificate does"
        } else {
            "check the host name, the port, and whether it speaks TLS"
        };
        Self::Connect { server: server.clone(), hint, source }
    }

    /// Of a command that was sent.
    pub(crate) fn command(server: &Arc<str>, source: redis::RedisError) -> Self {
        if source.is_io_error() || source.kind() == ErrorKind::Parse {
            return Self::Io { server: server.clone(), source };
        }
        let category = source.category().to_owned();
        match source.into_server_errors().as_deref() {
            Some([(_, first), ..]) => Self::Server {
                server: server.clone(),
                code: first.code().to_owned(),
                detail: without_arguments(first.details().unwrap_or_default()).to_owned(),
            },
            _ => Self::Server { server: server.clone(), code: "ERR".into(), detail: category },
        }
    }

    /// Of one answer of several, in a pipeline that ignores errors.
    pub fn of_answer(redis: &Redis, source: redis::RedisError) -> Self {
        Self::command(redis.name(), source)
    }

    /// Of an answer that is not of the caller's type. Silent about the answer, which may be a record.
    pub(crate) fn unexpected(server: &Arc<str>) -> Self {
        let detail = "its answer is not of the type that was expected".to_owned();
        Self::Server { server: server.clone(), code: "UNEXPECTED".into(), detail }
    }
}

/// Redis quotes the arguments of a command that it does not know, and they may be session ids.
fn without_arguments(detail: &str) -> &str {
    detail.split_once(", with args").map_or(detail, |(before, _)| before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_a_command_are_not_repeated() {
        let told = "unknown command 'EVALSHA', with args beginning with: 'abc' '1' 'sess:{mcs_x}' ";
        let error = RedisError::command(
            &"host:1".into(),
            redis::make_extension_error("ERR".into(), Some(told.into())),
        );
        let text = format!("{error} {error:?}");
        assert!(text.contains("unknown command 'EVALSHA'"), "{text}");
        assert!(!text.contains("mcs_x"), "{text}");
        assert_eq!(error.kind(), Kind::Unavailable);
    }
}
