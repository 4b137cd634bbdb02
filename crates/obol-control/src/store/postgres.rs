pub(crate) mod link;
mod tls;

use std::path::PathBuf;
use std::time::SystemTime;

use async_trait::async_trait;
use obol_model::snapshot::Documents;
use obol_model::{KeyHash, KeyId, Revision, Secret, WorkspaceId};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_postgres::{Row, Transaction};

use self::link::{Failed, Link};
use super::{
    Action, AuditEntry, ControlStore, Head, NewRevision, Origin, RevisionInfo, Stamp, StoreError, published,
    superfluous, unpublished,
};
use crate::keys::{KeyChange, KeyRecord, LoadedKeys};

/// Each brings the database from the form before it to the next. They are never edited, only added to.
const MIGRATIONS: [&str; 2] = [include_str!("migrations/0001.sql"), include_str!("migrations/0002.sql")];

/// Whoever migrates holds this advisory lock; the number is that of no other program, for all that is known.
const MIGRATING: i64 = 0x6f62_6f6c_6d69_6772;

const HEAD: &str =
    "SELECT workspace, epoch, number, published, held, file, file_epoch, file_number FROM obol_workspace";

/// A store in Postgres.
///
/// Every change begins by counting up the one row of `obol_store`, which makes changes of all processes happen one after
/// the other; there are few of them.
#[derive(Debug)]
pub struct PostgresStore {
    link: Link,
    migrations: &'static [&'static str],
}

impl PostgresStore {
    /// A store at this URL. Nothing is asked of the database yet.
    ///
    /// # Errors
    /// What is wrong with the URL, in words that show nothing of it.
    pub fn new(url: &Secret<String>) -> Result<Self, String> {
        Ok(Self { link: Link::new(url)?, migrations: &MIGRATIONS })
    }
}

/// Counts up the generation, and with that waits for whoever is changing something.
async fn begin(tx: &Transaction<'_>) -> Result<(), Failed> {
    tx.execute("UPDATE obol_store SET generation = generation + 1", &[]).await?;
    Ok(())
}

async fn head(tx: &Transaction<'_>, workspace: &WorkspaceId) -> Result<Option<Head>, Failed> {
    let row = tx.query_opt(&format!("{HEAD} WHERE workspace = $1"), &[&workspace.as_str()]).await?;
    Ok(row.as_ref().map(head_of).transpose()?)
}

async fn known(tx: &Transaction<'_>, workspace: &WorkspaceId) -> Result<Head, Failed> {
    let head = head(tx, workspace).await?;
    Ok(head.ok_or_else(|| StoreError::NoSuchWorkspace(workspace.clone()))?)
}

async fn set_head(tx: &Transaction<'_>, head: &Head) -> Result<(), Failed> {
    let (epoch, number) = numbers(head.revision);
    let of_file = head.file_revision.map(numbers);
    let file = head.file.as_ref().map(|path| path.to_string_lossy().into_owned());
    tx.execute(
        "INSERT INTO obol_workspace VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
         ON CONFLICT (workspace) DO UPDATE SET epoch = $2, number = $3, published = $4, held = $5, file = $6,
         file_epoch = $7, file_number = $8",
        &[
            &head.workspace.as_str(),
            &epoch,
            &number,
            &head.published,
            &head.held,
            &file,
            &of_file.map(|(epoch, _)| epoch),
            &of_file.map(|(_, number)| number),
        ],
    )
    .await?;
    Ok(())
}

async fn log(tx: &Transaction<'_>, entry: &AuditEntry) -> Result<(), Failed> {
    let revision = entry.revision.map(numbers);
    tx.execute(
        "INSERT INTO obol_audit (at, actor, action, workspace, epoch, number, key_id)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
        &[
            &SystemTime::try_from(entry.at).map_err(|e| damaged(&e))?,
            &entry.actor,
            &word(&entry.action)?.trim_matches('"'),
            &entry.workspace.as_str(),
            &revision.map(|(epoch, _)| epoch),
            &revision.map(|(_, number)| number),
            &entry.key_id.as_ref().map(KeyId::as_str),
        ],
    )
    .await?;
    Ok(())
}

#[async_trait]
impl ControlStore for PostgresStore {
    async fn prepare(&self) -> Result<(), StoreError> {
        let migrations = self.migrations;
        self.link
            .run(async |client| {
                let tx = client.transaction().await?;
                tx.execute("SELECT pg_advisory_xact_lock($1)", &[&MIGRATING]).await?;
                tx.batch_execute("CREATE TABLE IF NOT EXISTS obol_schema (version int8 NOT NULL)").await?;
                let row = tx.query_one("SELECT coalesce(max(version), 0) FROM obol_schema", &[]).await?;
                let found = u32::try_from(row.try_get::<_, i64>(0)?).unwrap_or(u32::MAX);
                let known = u32::try_from(migrations.len()).unwrap_or(u32::MAX);
                if found > known {
                    return Err(StoreError::Newer { what: "the database".to_owned(), found, known }.into());
                }
                for (migration, version) in migrations.iter().zip(1_i64..).skip(found as usize) {
                    tx.batch_execute(migration).await?;
                    tx.execute("INSERT INTO obol_schema VALUES ($1)", &[&version]).await?;
                    tracing::info!(version, "database migrated");
                }
                Ok(tx.commit().await?)
            })
            .await
    }

    async fn identity(&self) -> Result<String, StoreError> {
        self.link
            .run(async |client| {
                Ok(client.query_one("SELECT identity FROM obol_store", &[]).await?.try_get(0)?)
            })
            .await
    }

    async fn generation(&self) -> Result<u64, StoreError> {
        let generation: i64 = self
            .link
            .run(async |client| {
                Ok(client.query_one("SELECT generation FROM obol_store", &[]).await?.try_get(0)?)
            })
            .await?;
        Ok(generation.unsigned_abs())
    }

    async fn heads(&self) -> Result<Vec<Head>, StoreError> {
        let rows = self.link.run(async |client| Ok(client.query(HEAD, &[]).await?)).await?;
        rows.iter().map(head_of).collect()
    }

    async fn head(&self, workspace: &WorkspaceId) -> Result<Option<Head>, StoreError> {
        let query = format!("{HEAD} WHERE workspace = $1");
        let row =
            self.link.run(async |client| Ok(client.query_opt(&query, &[&workspace.as_str()]).await?)).await?;
        row.as_ref().map(head_of).transpose()
    }

    async fn history(&self, workspace: &WorkspaceId) -> Result<Vec<RevisionInfo>, StoreError> {
        let query = "SELECT info FROM obol_revision WHERE workspace = $1 ORDER BY epoch DESC, number DESC";
        let rows =
            self.link.run(async |client| Ok(client.query(query, &[&workspace.as_str()]).await?)).await?;
        rows.iter().map(|row| json(&text(row, 0)?)).collect()
    }

    async fn documents(
        &self,
        workspace: &WorkspaceId,
        revision: Revision,
    ) -> Result<Option<Documents>, StoreError> {
        let (epoch, number) = numbers(revision);
        let query = "SELECT workspace_document, policy_document, fingerprint FROM obol_revision
                     WHERE workspace = $1 AND epoch = $2 AND number = $3";
        let row = self
            .link
            .run(async |client| Ok(client.query_opt(query, &[&workspace.as_str(), &epoch, &number]).await?))
            .await?;
        let Some(row) = row else { return Ok(None) };
        let document = |i| row.try_get(i).map_err(|e| damaged(&e));
        Ok(Some(Documents { workspace: document(0)?, policy: document(1)?, fingerprint: document(2)? }))
    }

    async fn keys(&self) -> Result<LoadedKeys, StoreError> {
        let query = "SELECT record FROM obol_key ORDER BY key_id";
        let rows = self.link.run(async |client| Ok(client.query(query, &[]).await?)).await?;
        let records: Result<Vec<KeyRecord>, StoreError> =
            rows.iter().map(|row| json(&text(row, 0)?)).collect();
        Ok(LoadedKeys::complete(records?))
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<KeyRecord>, StoreError> {
        let query = "SELECT record FROM obol_key WHERE hash = $1";
        let row = self.link.run(async |client| Ok(client.query_opt(query, &[&hash.hex()]).await?)).await?;
        row.map(|row| json(&text(&row, 0)?)).transpose()
    }

    async fn audit(&self, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        let query = "SELECT at, actor, action, workspace, epoch, number, key_id FROM obol_audit
                     ORDER BY id DESC LIMIT $1";
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = self.link.run(async |client| Ok(client.query(query, &[&limit]).await?)).await?;
        rows.iter().map(entry_of).collect()
    }

    async fn publish(&self, new: NewRevision, by: &Stamp) -> Result<(), StoreError> {
        let (epoch, number) = numbers(new.revision);
        let info = word(&new.info(by))?;
        self.link
            .run(async |client| {
                let tx = client.transaction().await?;
                begin(&tx).await?;
                let workspace = new.workspace.as_str();
                let next = published(head(&tx, &new.workspace).await?.as_ref(), &new)?;
                let docs = &new.documents;
                tx.execute(
                    "INSERT INTO obol_revision VALUES ($1, $2, $3, $4, $5, $6, $7)",
                    &[&workspace, &epoch, &number, &info, &docs.workspace, &docs.policy, &docs.fingerprint],
                )
                .await?;
                set_head(&tx, &next).await?;
                log(&tx, &AuditEntry::of_revision(&new, by)).await?;
                let query = "SELECT epoch, number FROM obol_revision WHERE workspace = $1
                             ORDER BY epoch DESC, number DESC";
                let kept: Result<Vec<Revision>, StoreError> =
                    tx.query(query, &[&workspace]).await?.iter().map(|row| revision(row, 0)).collect();
                for old in superfluous(&kept?, &next) {
                    let (epoch, number) = numbers(old);
                    tx.execute(
                        "DELETE FROM obol_revision WHERE workspace = $1 AND epoch = $2 AND number = $3",
                        &[&workspace, &epoch, &number],
                    )
                    .await?;
                }
                Ok(tx.commit().await?)
            })
            .await
    }

    async fn unpublish(
        &self,
        workspace: &WorkspaceId,
        this: Option<Revision>,
        origin: Origin,
        by: &Stamp,
    ) -> Result<(), StoreError> {
        self.link
            .run(async |client| {
                let tx = client.transaction().await?;
                begin(&tx).await?;
                let Some(next) = unpublished(&known(&tx, workspace).await?, this, origin)? else {
                    return Ok(());
                };
                set_head(&tx, &next).await?;
                let entry = AuditEntry::new(Action::Unpublish, workspace, by).with_revision(next.revision);
                log(&tx, &entry).await?;
                Ok(tx.commit().await?)
            })
            .await
    }

    async fn set_file(&self, workspace: &WorkspaceId, file: PathBuf) -> Result<(), StoreError> {
        self.link
            .run(async |client| {
                let tx = client.transaction().await?;
                begin(&tx).await?;
                let head = known(&tx, workspace).await?;
                set_head(&tx, &Head { file: Some(file.clone()), ..head }).await?;
                Ok(tx.commit().await?)
            })
            .await
    }

    async fn insert_key(&self, record: KeyRecord, by: &Stamp) -> Result<(), StoreError> {
        let text = word(&record)?;
        self.link
            .run(async |client| {
                let tx = client.transaction().await?;
                begin(&tx).await?;
                let (id, workspace) = (record.key.key_id.as_str(), record.key.workspace_id.as_str());
                tx.execute(
                    "INSERT INTO obol_key VALUES ($1, $2, $3, $4)",
                    &[&id, &record.hash.hex(), &workspace, &text],
                )
                .await?;
                log(&tx, &AuditEntry::of_key(Action::NewKey, &record, by)).await?;
                Ok(tx.commit().await?)
            })
            .await
    }

    async fn change_key(&self, id: &KeyId, change: KeyChange, by: &Stamp) -> Result<KeyRecord, StoreError> {
        self.link
            .run(async |client| {
                let tx = client.transaction().await?;
                begin(&tx).await?;
                let query = "SELECT record FROM obol_key WHERE key_id = $1";
                let row = tx.query_opt(query, &[&id.as_str()]).await?;
                let row = row.ok_or_else(|| StoreError::NoSuchKey(id.clone()))?;
                let mut record: KeyRecord = json(&self::text(&row, 0)?)?;
                if let Some(action) = record.change(change, by.at)? {
                    let query = "UPDATE obol_key SET record = $2 WHERE key_id = $1";
                    tx.execute(query, &[&id.as_str(), &word(&record)?]).await?;
                    log(&tx, &AuditEntry::of_key(action, &record, by)).await?;
                    tx.commit().await?;
                }
                Ok(record)
            })
            .await
    }
}

// Rows.

/// What is stored is within the range: [`published`] refuses more.
fn numbers(revision: Revision) -> (i64, i64) {
    (i64::from(revision.epoch), i64::try_from(revision.number).unwrap_or(i64::MAX))
}

fn damaged(error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Damaged(format!("a row of the database cannot be read: {error}"))
}

fn text(row: &Row, column: usize) -> Result<String, StoreError> {
    row.try_get(column).map_err(|e| damaged(&e))
}

fn json<T: DeserializeOwned>(text: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|e| damaged(&e))
}

fn word<T: Serialize>(value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|e| damaged(&e))
}

/// Two columns.
fn optional_revision(row: &Row, column: usize) -> Result<Option<Revision>, StoreError> {
    let epoch: Option<i64> = row.try_get(column).map_err(|e| damaged(&e))?;
    let number: Option<i64> = row.try_get(column + 1).map_err(|e| damaged(&e))?;
    let (Some(epoch), Some(number)) = (epoch, number) else { return Ok(None) };
    let epoch = u32::try_from(epoch).map_err(|e| damaged(&e))?;
    Ok(Some(Revision { epoch, number: number.unsigned_abs() }))
}

fn revision(row: &Row, column: usize) -> Result<Revision, StoreError> {
    optional_revision(row, column)?.ok_or_else(|| damaged(&"a revision is missing"))
}

fn head_of(row: &Row) -> Result<Head, StoreError> {
    let get = |column| row.try_get::<_, bool>(column).map_err(|e| damaged(&e));
    let file: Option<String> = row.try_get(5).map_err(|e| damaged(&e))?;
    Ok(Head {
        workspace: text(row, 0)?.parse().map_err(|e| damaged(&e))?,
        revision: revision(row, 1)?,
        published: get(3)?,
        held: get(4)?,
        file: file.map(PathBuf::from),
        file_revision: optional_revision(row, 6)?,
    })
}

fn entry_of(row: &Row) -> Result<AuditEntry, StoreError> {
    let key_id: Option<String> = row.try_get(6).map_err(|e| damaged(&e))?;
    let at: SystemTime = row.try_get(0).map_err(|e| damaged(&e))?;
    Ok(AuditEntry {
        at: at.try_into().map_err(|e: jiff::Error| damaged(&e))?,
        actor: text(row, 1)?,
        action: json(&format!("\"{}\"", text(row, 2)?))?,
        workspace: text(row, 3)?.parse().map_err(|e| damaged(&e))?,
        revision: optional_revision(row, 4)?,
        key_id: key_id.map(|id| id.parse().map_err(|e| damaged(&e))).transpose()?,
    })
}
