//! The contract of sessions, on both stores.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "the bodies of the tests are functions that two tests share"
)]

mod support;

use obol_model::{Kind, SessionId};
use obol_session::{SessionError, SessionOptions, SessionRecord, UpstreamNote};
use serde_json::value::RawValue;

use crate::support::{Fixture, LIMIT, MOST, TTL, Who};

macro_rules! contract {
    ($($name:ident),* $(,)?) => {
        mod on_redis {
            $(#[tokio::test] async fn $name() { super::$name(super::Fixture::redis().await).await; })*
        }
        mod embedded {
            $(#[tokio::test] async fn $name() { super::$name(super::Fixture::embedded()).await; })*
        }
    };
}

contract! {
    a_created_session_is_found_as_it_was_sent,
    whatever_may_not_be_used_is_one_answer,
    a_token_refresh_keeps_the_session_and_another_issuer_does_not_get_it,
    a_shared_workspace_shares_its_sessions_and_no_others,
    an_unused_session_expires_and_a_used_one_does_not,
    a_session_that_was_never_used_can_expire_early,
    a_place_outlives_a_session_whose_first_use_came_early,
    renewing_keeps_a_session_and_creates_none,
    an_expired_session_is_not_brought_back_by_anything,
    only_the_owner_deletes_and_then_it_is_gone,
    a_taken_id_is_not_created_again,
    saving_needs_the_revision_that_was_read,
    saving_cannot_change_the_owner,
    changes_of_many_are_all_kept,
    a_principal_has_a_limited_number_of_live_sessions,
    a_place_is_free_again_after_deletion_and_after_expiry,
    using_a_session_keeps_its_place,
    a_failed_creation_gives_its_place_back,
    a_principal_is_counted_per_workspace,
    the_sessions_of_everybody_are_counted,
    the_sessions_of_a_key_are_deleted_together_and_no_others,
    liveness_of_many_is_told_in_order_and_renews_nothing,
    a_record_that_is_too_large_is_refused_and_leaves_everything_as_it_was,
}

fn absent<T: std::fmt::Debug>(outcome: Result<T, SessionError>) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, SessionError::NoSuchSession), "{error:?}");
    // Nothing in the text tells one reason from another.
    assert_eq!((error.to_string().as_str(), error.kind()), ("no such session", Kind::NotFound));
}

async fn a_created_session_is_found_as_it_was_sent(f: Fixture) {
    let alice = Who::user("acme", "https://idp.example", "alice");
    let info = r#"{"name":"x", "n":12345678901234567890123,"f":1.0,"u":"\u00e9"}"#;
    let mut new = alice.new_session();
    new.client_info = Some(RawValue::from_string(info.into()).unwrap());
    new.client_capabilities = Some(RawValue::from_string(r#"{ "roots" : {} }"#.into()).unwrap());
    let created = f.sessions.create(new).await.unwrap();
    let found = f.sessions.get_or_resume(&created.session_id.expose(), &alice.caller()).await.unwrap();
    assert_eq!(found.client_info.unwrap().get(), info);
    assert_eq!(found.client_capabilities.unwrap().get(), r#"{ "roots" : {} }"#);
    assert_eq!((&found.session_id, &found.workspace_id), (&created.session_id, &alice.workspace_id));
    assert_eq!((&found.principal, found.protocol_version.as_str()), (&alice.principal, "2025-11-25"));
    assert_eq!((found.rev, found.created_at), (1, created.created_at));
    assert!(found.last_seen >= created.last_seen);
}

async fn whatever_may_not_be_used_is_one_answer(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let id = f.sessions.create(owner.new_session()).await.unwrap().session_id.expose();
    let never = SessionId::generate(f.clock.now()).unwrap().expose();
    for caller in [Who::key("acme", "k2"), Who::key("other", "k1"), Who::key("other", "k1").sharing()] {
        absent(f.sessions.get_or_resume(&id, &caller.caller()).await);
        absent(f.sessions.delete(&id, &caller.caller()).await);
    }
    let upper = id.to_uppercase();
    for missing in [never.as_str(), "", "garbage!", upper.as_str(), "mcs_", "sess:{x}", "mcs_\r\nPING"] {
        absent(f.sessions.get_or_resume(missing, &owner.caller()).await);
        absent(f.sessions.delete(missing, &owner.caller()).await);
    }
    f.sessions.get_or_resume(&id, &owner.caller()).await.unwrap();
}

async fn a_token_refresh_keeps_the_session_and_another_issuer_does_not_get_it(f: Fixture) {
    let alice = Who::user("acme", "https://a.example", "alice");
    let id = f.sessions.create(alice.new_session()).await.unwrap().session_id.expose();
    let again = Who::user("acme", "https://a.example", "alice");
    f.sessions.get_or_resume(&id, &again.caller()).await.unwrap();
    absent(f.sessions.get_or_resume(&id, &Who::user("acme", "https://b.example", "alice").caller()).await);
    absent(f.sessions.get_or_resume(&id, &Who::key("acme", "alice").caller()).await);
}

async fn a_shared_workspace_shares_its_sessions_and_no_others(f: Fixture) {
    let owner = Who::key("acme", "k1").sharing();
    let other = Who::key("acme", "k2").sharing();
    let id = f.sessions.create(owner.new_session()).await.unwrap().session_id.expose();
    let found = f.sessions.get_or_resume(&id, &other.caller()).await.unwrap();
    assert_eq!(found.principal, owner.principal, "it stays the owner's, whose streams are its own");
    absent(f.sessions.get_or_resume(&id, &Who::key("evil", "k2").sharing().caller()).await);
    f.sessions.delete(&id, &other.caller()).await.unwrap();
    absent(f.sessions.get_or_resume(&id, &owner.caller()).await);
}

async fn an_unused_session_expires_and_a_used_one_does_not(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(f.sessions.create(owner.new_session()).await.unwrap());
    }
    f.pass(MOST).await;
    f.sessions.get_or_resume(&ids[0].session_id.expose(), &owner.caller()).await.unwrap();
    f.sessions.save(&ids[1]).await.unwrap();
    // Asking does not renew, and neither does somebody who may not use it.
    f.sessions.live(&[ids[2].session_id]).await.unwrap();
    absent(f.sessions.get_or_resume(&ids[2].session_id.expose(), &Who::key("acme", "k2").caller()).await);
    f.pass(MOST).await;
    let ids: Vec<_> = ids.iter().map(|record| record.session_id).collect();
    assert_eq!(f.sessions.live(&ids).await.unwrap(), [true, true, false]);
    absent(f.sessions.get_or_resume(&ids[2].expose(), &owner.caller()).await);
}

async fn a_session_that_was_never_used_can_expire_early(f: Fixture) {
    let unused_ttl = Some(TTL / 10);
    let sessions = f.with(SessionOptions { ttl: TTL, unused_ttl, max_per_principal: LIMIT });
    let owner = Who::key("acme", "k1");
    let mut records = Vec::new();
    for _ in 0..3 {
        records.push(sessions.create(owner.new_session()).await.unwrap());
    }
    sessions.get_or_resume(&records[0].session_id.expose(), &owner.caller()).await.unwrap();
    sessions.save(&records[1]).await.unwrap();
    f.pass(TTL / 5).await;
    let ids: Vec<_> = records.iter().map(|record| record.session_id).collect();
    assert_eq!(sessions.live(&ids).await.unwrap(), [true, true, false]);
    f.pass(TTL / 2).await;
    assert_eq!(sessions.live(&ids).await.unwrap(), [true, true, false], "a use gives the whole life");
    // Never longer than any other.
    let sessions = f.with(SessionOptions { ttl: TTL, unused_ttl: Some(10 * TTL), max_per_principal: LIMIT });
    let record = sessions.create(owner.new_session()).await.unwrap();
    f.pass(TTL + MOST).await;
    assert_eq!(sessions.live(&[record.session_id]).await.unwrap(), [false]);
}

async fn a_place_outlives_a_session_whose_first_use_came_early(f: Fixture) {
    let unused_ttl = Some(TTL / 10);
    let sessions = f.with(SessionOptions { ttl: TTL, unused_ttl, max_per_principal: 2 });
    let owner = Who::key("acme", "k1");
    for _ in 0..2 {
        let record = sessions.create(owner.new_session()).await.unwrap();
        sessions.get_or_resume(&record.session_id.expose(), &owner.caller()).await.unwrap();
    }
    // The first places were for a life of a tenth.
    f.pass(MOST).await;
    assert!(matches!(sessions.create(owner.new_session()).await, Err(SessionError::TooMany { limit: 2 })));
    f.pass(TTL).await;
    sessions.create(owner.new_session()).await.unwrap();
}

async fn renewing_keeps_a_session_and_creates_none(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let renew =
        async |who: &Who| f.store.renew(record.session_id, who.owner(), f.clock.now(), TTL).await.unwrap();
    f.pass(MOST).await;
    assert!(renew(&owner).await);
    f.pass(MOST).await;
    let found = f.sessions.get_or_resume(&record.session_id.expose(), &owner.caller()).await.unwrap();
    assert_eq!(found.rev, 1);
    for foreign in [Who::key("acme", "k2"), Who::key("other", "k1")] {
        assert!(!renew(&foreign).await);
    }
    f.sessions.delete(&record.session_id.expose(), &owner.caller()).await.unwrap();
    assert!(!renew(&owner).await);
    assert_eq!(f.sessions.live(&[record.session_id]).await.unwrap(), [false]);
}

async fn an_expired_session_is_not_brought_back_by_anything(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let id = record.session_id.expose();
    f.pass(TTL + MOST).await;
    absent(f.sessions.get_or_resume(&id, &owner.caller()).await);
    absent(f.sessions.save(&record).await);
    absent(f.sessions.update(record.clone(), &owner.caller(), |r| r.log_level = None).await);
    absent(f.sessions.delete(&id, &owner.caller()).await);
    assert_eq!(f.sessions.live(&[record.session_id]).await.unwrap(), [false]);
}

async fn only_the_owner_deletes_and_then_it_is_gone(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let id = record.session_id.expose();
    absent(f.sessions.delete(&id, &Who::key("acme", "k2").caller()).await);
    f.sessions.delete(&id, &owner.caller()).await.unwrap();
    absent(f.sessions.delete(&id, &owner.caller()).await);
    absent(f.sessions.get_or_resume(&id, &owner.caller()).await);
    absent(f.sessions.save(&record).await);
    assert_eq!(f.sessions.live(&[record.session_id]).await.unwrap(), [false]);
}

async fn a_taken_id_is_not_created_again(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let thief = SessionRecord { principal: Who::key("acme", "k2").principal, ..record.clone() };
    let error = f.store.create(&thief, LIMIT, TTL).await.unwrap_err();
    assert!(matches!(error, SessionError::AlreadyExists));
    let found = f.sessions.get_or_resume(&record.session_id.expose(), &owner.caller()).await.unwrap();
    assert_eq!(found.principal, owner.principal);
}

async fn saving_needs_the_revision_that_was_read(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let first = f.sessions.create(owner.new_session()).await.unwrap();
    let note = UpstreamNote {
        protocol_version: "2025-06-18".into(),
        server_name: Some("gh".into()),
        last_seen: f.clock.now(),
    };
    let mut changed = SessionRecord { log_level: Some("debug".into()), ..first.clone() };
    changed.upstreams.insert("github".parse().unwrap(), note.clone());
    let second = f.sessions.save(&changed).await.unwrap();
    assert_eq!(second.rev, 2);
    let error = f.sessions.save(&first).await.unwrap_err();
    assert!(matches!(error, SessionError::Conflict), "{error:?}");
    assert_eq!(error.kind(), Kind::Conflict);
    // Resuming does not count as a change.
    let found = f.sessions.get_or_resume(&first.session_id.expose(), &owner.caller()).await.unwrap();
    assert_eq!((found.rev, found.log_level.as_deref()), (2, Some("debug")));
    assert_eq!(found.upstreams.values().collect::<Vec<_>>(), [&note]);
    assert_eq!(f.sessions.save(&found).await.unwrap().rev, 3);
}

async fn saving_cannot_change_the_owner(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let mine = SessionRecord { principal: Who::key("acme", "k2").principal, ..record.clone() };
    absent(f.sessions.save(&mine).await);
    let elsewhere = SessionRecord { workspace_id: "other".parse().unwrap(), ..record.clone() };
    absent(f.sessions.save(&elsewhere).await);
    f.sessions.get_or_resume(&record.session_id.expose(), &owner.caller()).await.unwrap();
}

async fn changes_of_many_are_all_kept(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let changes = (0..8).map(|n| {
        let (sessions, record, caller) = (&f.sessions, record.clone(), owner.caller());
        async move {
            sessions
                .update(record, &caller, |r| {
                    r.subscriptions.insert(format!("file:///{n}"));
                })
                .await
                .unwrap()
        }
    });
    futures::future::join_all(changes).await;
    let found = f.sessions.get_or_resume(&record.session_id.expose(), &owner.caller()).await.unwrap();
    assert_eq!((found.subscriptions.len(), found.rev), (8, 9));
}

async fn a_principal_has_a_limited_number_of_live_sessions(f: Fixture) {
    let owner = Who::key("acme", "k1");
    for _ in 0..LIMIT {
        f.sessions.create(owner.new_session()).await.unwrap();
    }
    let error = f.sessions.create(owner.new_session()).await.unwrap_err();
    assert!(matches!(error, SessionError::TooMany { limit: LIMIT }), "{error:?}");
    assert_eq!(error.kind(), Kind::RateLimited);
    f.sessions.create(Who::key("acme", "k2").new_session()).await.unwrap();
}

async fn a_place_is_free_again_after_deletion_and_after_expiry(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let mut last = None;
    for _ in 0..LIMIT {
        last = Some(f.sessions.create(owner.new_session()).await.unwrap().session_id.expose());
    }
    f.sessions.delete(&last.unwrap(), &owner.caller()).await.unwrap();
    f.sessions.create(owner.new_session()).await.unwrap();
    assert!(f.sessions.create(owner.new_session()).await.is_err());
    f.pass(TTL + MOST).await;
    for _ in 0..LIMIT {
        f.sessions.create(owner.new_session()).await.unwrap();
    }
}

async fn using_a_session_keeps_its_place(f: Fixture) {
    let owner = Who::key("acme", "k1").sharing();
    let other = Who::key("acme", "k2").sharing();
    let mut records = Vec::new();
    for _ in 0..LIMIT {
        records.push(f.sessions.create(owner.new_session()).await.unwrap());
    }
    f.pass(MOST).await;
    f.sessions.get_or_resume(&records[0].session_id.expose(), &owner.caller()).await.unwrap();
    f.sessions.get_or_resume(&records[1].session_id.expose(), &other.caller()).await.unwrap();
    f.sessions.save(&records[2]).await.unwrap();
    f.pass(MOST).await;
    for _ in 3..LIMIT {
        f.sessions.create(owner.new_session()).await.unwrap();
    }
    assert!(matches!(f.sessions.create(owner.new_session()).await, Err(SessionError::TooMany { .. })));
}

async fn a_failed_creation_gives_its_place_back(f: Fixture) {
    let owner = Who::key("acme", "k1");
    for _ in 0..2 * LIMIT {
        let mut new = owner.new_session();
        let long = format!("\"{}\"", "x".repeat(SessionRecord::MAX_BYTES));
        new.client_info = Some(RawValue::from_string(long).unwrap());
        let error = f.sessions.create(new).await.unwrap_err();
        assert!(matches!(error, SessionError::TooLarge { .. }), "{error:?}");
        assert_eq!(error.kind(), Kind::TooLarge);
    }
    f.sessions.create(owner.new_session()).await.unwrap();
}

async fn a_principal_is_counted_per_workspace(f: Fixture) {
    for workspace in ["acme", "other"] {
        for _ in 0..LIMIT {
            f.sessions.create(Who::key(workspace, "k1").new_session()).await.unwrap();
        }
    }
}

async fn the_sessions_of_everybody_are_counted(f: Fixture) {
    let count = async || f.store.count(f.clock.now()).await.unwrap();
    assert_eq!(count().await, 0);
    let owners = [Who::key("acme", "k1"), Who::key("acme", "k2"), Who::key("other", "k1")];
    let mut last = None;
    for owner in &owners {
        last = Some(f.sessions.create(owner.new_session()).await.unwrap().session_id.expose());
    }
    assert_eq!(count().await, 3);
    f.pass(MOST).await;
    f.sessions.get_or_resume(&last.clone().unwrap(), &owners[2].caller()).await.unwrap();
    f.pass(MOST).await;
    assert_eq!(count().await, 1, "what expired is not counted, what was used is");
    f.sessions.delete(&last.unwrap(), &owners[2].caller()).await.unwrap();
    assert_eq!(count().await, 0);
}

async fn the_sessions_of_a_key_are_deleted_together_and_no_others(f: Fixture) {
    let revoked = Who::key("acme", "k1");
    let others = [Who::key("acme", "k2"), Who::key("other", "k1")];
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(f.sessions.create(revoked.new_session()).await.unwrap().session_id);
    }
    for other in &others {
        ids.push(f.sessions.create(other.new_session()).await.unwrap().session_id);
    }
    let delete = async || f.sessions.delete_of_key(&revoked.workspace_id, &revoked.principal).await.unwrap();
    assert_eq!(delete().await, 3);
    assert_eq!(f.sessions.live(&ids).await.unwrap(), [false, false, false, true, true]);
    assert_eq!(delete().await, 0);
    for _ in 0..LIMIT {
        f.sessions.create(revoked.new_session()).await.unwrap();
    }
}

async fn liveness_of_many_is_told_in_order_and_renews_nothing(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let never = SessionId::generate(f.clock.now()).unwrap();
    let first = f.sessions.create(owner.new_session()).await.unwrap().session_id;
    let second = f.sessions.create(owner.new_session()).await.unwrap().session_id;
    assert_eq!(f.sessions.live(&[first, never, second]).await.unwrap(), [true, false, true]);
    assert!(f.sessions.live(&[]).await.unwrap().is_empty());
    f.pass(MOST).await;
    f.sessions.live(&[first, second]).await.unwrap();
    f.pass(MOST).await;
    assert_eq!(f.sessions.live(&[first, second]).await.unwrap(), [false, false]);
}

async fn a_record_that_is_too_large_is_refused_and_leaves_everything_as_it_was(f: Fixture) {
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let mut large = record.clone();
    large.subscriptions.insert("x".repeat(SessionRecord::MAX_BYTES));
    assert!(matches!(f.sessions.save(&large).await, Err(SessionError::TooLarge { .. })));
    let found = f.sessions.get_or_resume(&record.session_id.expose(), &owner.caller()).await.unwrap();
    assert_eq!((found.rev, found.subscriptions.len()), (1, 0));
}
