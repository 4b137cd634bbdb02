//! What is logged of sessions: a session id is a credential and never in full (DESIGN §6.1).
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "test support: what is broken should fail where it broke"
)]

mod support;

use std::io;
use std::sync::{Arc, Mutex};

use obol_model::Kind;
use obol_session::SessionError;
use obol_testkit::logs::{assert_no_secret, lines_with};
use tracing_subscriber::fmt::MakeWriter;

use crate::support::{Fixture, Who};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// The log of everything from now on, and what ends it.
fn listen() -> (Log, tracing::subscriber::DefaultGuard) {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::TRACE)
        .with_writer(log.clone());
    (log, tracing::subscriber::set_default(subscriber.finish()))
}

#[tokio::test]
async fn what_no_release_can_read_is_no_session_and_what_a_later_one_can_is_one() {
    let (log, guard) = listen();
    let f = Fixture::redis().await;
    let server = f.server().unwrap();
    let owner = Who::key("acme", "k1");
    let damages: [(&str, &[&str]); 7] = [
        ("garbage", &["HSET", "KEY", "record", "garbage"]),
        ("a record without its record", &["HDEL", "KEY", "record"]),
        ("a revision that is none", &["HSET", "KEY", "rev", "x"]),
        ("a huge revision", &["HSET", "KEY", "rev", "99999999999999999999999"]),
        ("no revision", &["HDEL", "KEY", "rev"]),
        ("a text", &["SET", "KEY", "x"]),
        ("a huge record", &["HSET", "KEY", "record", &"x".repeat((1 << 20) + 1)]),
    ];
    let mut last4 = Vec::new();
    for (what, command) in damages {
        let session = f.sessions.create(owner.new_session()).await.unwrap().session_id;
        let (id, key) = (session.expose(), format!("sess:{{{}}}", session.expose()));
        let command: Vec<&str> =
            command.iter().map(|arg| if *arg == "KEY" { key.as_str() } else { *arg }).collect();
        server.cli(&command).await;
        let resumed = f.sessions.get_or_resume(&id, &owner.caller()).await.unwrap_err();
        assert!(matches!(resumed, SessionError::NoSuchSession), "{what}: {resumed:?}");
        f.sessions.delete(&id, &owner.caller()).await.unwrap();
        assert!(server.keys(&key).await.is_empty(), "{what}");
        last4.push(session.last4());
    }
    // A place that is none of a number renews itself.
    let session = f.sessions.create(owner.new_session()).await.unwrap();
    let (id, key) = (session.session_id.expose(), format!("sess:{{{}}}", session.session_id.expose()));
    server.cli(&["HSET", &key, "place", "x"]).await;
    f.sessions.save(&f.sessions.get_or_resume(&id, &owner.caller()).await.unwrap()).await.unwrap();

    server.cli(&["HSET", &key, "record", r#"{"schema_version":99,"other":"shape"}"#]).await;
    let newer = f.sessions.get_or_resume(&id, &owner.caller()).await.unwrap_err();
    assert!(matches!(newer, SessionError::Newer { found: 99, .. }), "{newer:?}");
    assert_eq!(newer.kind(), Kind::Unavailable);
    assert_eq!(server.keys(&key).await.len(), 1);

    // What counts sessions heals itself.
    for key in ["sess-live", "sess-of:acme:key:k1"] {
        server.cli(&["SET", key, "x"]).await;
    }
    assert_eq!(f.store.count(f.clock.now()).await.unwrap(), 0);
    f.sessions.create(owner.new_session()).await.unwrap();
    assert_eq!(f.store.count(f.clock.now()).await.unwrap(), 1);
    drop(guard);

    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let warnings = lines_with(&text, "the record of a session is damaged, it counts as none");
    assert_eq!(warnings.len(), last4.len(), "{text}");
    for (warning, last4) in warnings.iter().zip(&last4) {
        assert!(
            warning.contains("WARN") && warning.contains(&format!("session_last4=\"{last4}\"")),
            "{warning}"
        );
    }
    assert_eq!(lines_with(&text, "a session can be served by later releases only").len(), 1, "{text}");
    assert!(!text.contains("garbage"), "nothing of a record");
}

#[tokio::test]
async fn a_foreign_workspace_is_warned_of_and_no_id_is_logged_in_full() {
    let (log, guard) = listen();
    let f = Fixture::redis().await;
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let id = record.session_id.expose();
    f.sessions.get_or_resume(&id, &owner.caller()).await.unwrap();
    for foreign in [Who::key("evil", "k1"), Who::key("acme", "k2")] {
        f.sessions.get_or_resume(&id, &foreign.caller()).await.unwrap_err();
        f.sessions.delete(&id, &foreign.caller()).await.unwrap_err();
    }
    f.sessions.get_or_resume(&id.to_uppercase(), &owner.caller()).await.unwrap_err();
    f.server().unwrap().kill();
    let away = f.sessions.get_or_resume(&id, &owner.caller()).await.unwrap_err();
    tracing::error!(error = %away, debug = ?away, record = ?record, "as somebody might log them");
    drop(guard);

    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let warnings = lines_with(&text, "session of another workspace refused");
    assert_eq!(warnings.len(), 2, "{text}");
    assert!(warnings[0].contains("WARN") && warnings[0].contains("workspace_id=evil"), "{text}");
    assert!(warnings[0].contains(&record.session_id.last4()), "{text}");
    assert!(!lines_with(&text, "as somebody might log them").is_empty());
    let body = id.strip_prefix("mcs_").unwrap();
    assert_no_secret(&text.to_lowercase(), &[("session id", &id), ("its body", &body[..32])]);
}
