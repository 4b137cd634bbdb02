//! What is logged of sessions: a session id is a credential and never in full (DESIGN §6.1).
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "test support: what is broken should fail where it broke"
)]

mod support;

use std::io;
use std::sync::{Arc, Mutex};

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

#[tokio::test]
async fn a_foreign_workspace_is_warned_of_and_no_id_is_logged_in_full() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::TRACE)
        .with_writer(log.clone());
    let guard = tracing::subscriber::set_default(subscriber.finish());

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
