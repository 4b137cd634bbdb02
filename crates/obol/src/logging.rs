//! Log lines, on stderr.
//!
//! INVARIANT: targets that are not Obol's never log below `info`, whatever `OBOL_LOG` says. HTTP and Redis libraries
//! print headers and frames at `debug` and `trace`, and with them session ids, keys and credentials that our own types
//! refuse to print (DESIGN §6.1). A cap on targets holds for every library and every version; a list of fields to
//! redact would not.

use std::io::{self, IsTerminal as _};

use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};

use crate::config::{LogFormat, Logging};

/// Sends log lines of the whole process to stderr.
///
/// # Errors
/// When this process already logs.
pub(crate) fn init(config: &Logging) -> Result<(), TryInitError> {
    let terminal = io::stderr().is_terminal();
    let format = config.format.unwrap_or(if terminal { LogFormat::Pretty } else { LogFormat::Json });
    subscriber(config, format, terminal, io::stderr).try_init()
}

fn subscriber<W>(
    config: &Logging,
    format: LogFormat,
    colours: bool,
    writer: W,
) -> impl Subscriber + Send + Sync
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer().with_ansi(colours).with_writer(writer);
    let lines = match format {
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).boxed(),
        LogFormat::Pretty => lines.boxed(),
    };
    registry().with(filter_fn(may_show)).with(config.filter.clone()).with(lines)
}

/// The cap on what is not ours.
fn may_show(metadata: &Metadata<'_>) -> bool {
    // What Postgres says on the way, such as that a table is there already, is nobody's business.
    let most = if metadata.target().starts_with("tokio_postgres") { Level::WARN } else { Level::INFO };
    *metadata.level() <= most || is_ours(metadata.target())
}

fn is_ours(target: &str) -> bool {
    target
        .strip_prefix("obol")
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('_') || rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::config::{Environment, Loaded};

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(filter: &str, format: LogFormat, log: impl FnOnce()) -> String {
        let config = Loaded::check(&Environment::new([("OBOL_LOG", filter)])).unwrap().config;
        let captured = Captured::default();
        let writer = captured.clone();
        tracing::subscriber::with_default(subscriber(&config, format, false, move || writer.clone()), log);
        let bytes = captured.0.lock().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn other_libraries_never_log_below_info_even_when_asked_to() {
        for filter in ["trace", "trace,hyper=trace", "hyper=trace,obolus=trace,h2::codec=debug,obol=trace"] {
            let text = lines(filter, LogFormat::Json, || {
                tracing::trace!(target: "hyper::proto", "authorization: Bearer hunter2");
                tracing::debug!(target: "h2::codec", "hunter2");
                tracing::debug!(target: "obolus", "hunter2");
                let span = tracing::trace_span!(target: "hyper", "conn", token = "hunter2");
                span.in_scope(|| tracing::trace!(target: "obol::edge", "ours"));
                tracing::info!(target: "hyper", "theirs");
            });
            assert!(!text.contains("hunter2"), "{filter}: {text}");
            assert!(text.contains("ours"), "{filter}: {text}");
            assert!(text.contains("theirs"), "{filter}: {text}");
        }
    }

    #[test]
    fn notices_of_postgres_are_not_shown_and_its_warnings_are() {
        let text = lines("trace", LogFormat::Json, || {
            tracing::info!(target: "tokio_postgres::connection", "NOTICE: relation exists, skipping");
            tracing::warn!(target: "tokio_postgres::connection", "a warning");
        });
        assert!(!text.contains("NOTICE") && text.contains("a warning"), "{text}");
    }

    #[test]
    fn the_filter_holds_for_our_own_targets() {
        let text = lines("warn,obol_mcp=debug", LogFormat::Pretty, || {
            tracing::debug!(target: "obol_mcp::pool", "shown");
            tracing::info!(target: "obol_edge", "hidden");
        });
        assert!(text.contains("shown") && !text.contains("hidden"), "{text}");
    }

    #[test]
    fn a_json_line_is_one_flat_object() {
        let text = lines("info", LogFormat::Json, || {
            tracing::info!(target: "obol", workspace = "acme", "publication installed");
        });
        let line: serde_json::Value = serde_json::from_str(text.trim_end()).unwrap();
        assert_eq!(line["message"], "publication installed");
        assert_eq!(line["workspace"], "acme");
        assert_eq!(line["level"], "INFO");
    }
}
