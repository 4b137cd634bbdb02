//! What the commands that change control's store run with.

use std::path::PathBuf;

use obol_model::{KeyRing, Secret};

use super::read::Reader;
use super::{Environment, Loaded, Logging, Problems, RedisUrl, Subcommand, logging, table, value};

/// Where control keeps what it knows.
#[derive(Debug, Clone)]
pub enum StoreAt {
    /// Postgres.
    Database(Secret<String>),
    /// A directory.
    Directory(PathBuf),
}

/// What `obol key`, `obol publish` and `obol workspace` run with.
#[derive(Debug)]
pub struct Operator {
    /// The log.
    pub logging: Logging,
    /// Where control keeps what it knows.
    pub store: StoreAt,
    /// The shared Redis; `None` leaves the replicas to a control that runs.
    pub redis_url: Option<RedisUrl>,
    /// What its certificate is checked with, PEM; `None` is the public authorities.
    pub redis_ca: Option<Vec<u8>>,
    /// The keys that seal credentials; there for `obol publish`, and never for `obol key`.
    pub credential_keys: Option<KeyRing>,
}

impl Loaded<Operator> {
    /// Reads what one of these commands needs.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn operator(env: &Environment, command: Subcommand) -> Result<Self, Problems> {
        let mut reader = Reader::new(env, command);
        let logging = logging(&mut reader);
        let store = store(&mut reader);
        let publishes = command == Subcommand::Publish;
        let redis_url = if publishes {
            reader.value(&table::REDIS_URL, RedisUrl::parse)
        } else {
            reader.optional(&table::REDIS_URL, RedisUrl::parse)
        };
        let redis_ca = reader.optional(&table::REDIS_CA_FILE, value::certificates_file);
        let credential_keys = match command {
            Subcommand::Key => None,
            _ if publishes => reader.key_ring(&table::CREDENTIAL_KEY),
            _ => reader.optional(&table::CREDENTIAL_KEY, |text| {
                KeyRing::parse(text).map_err(|e| format!("is not usable: {e}"))
            }),
        };
        let config =
            (|| Some(Operator { logging: logging?, store: store?, redis_url, redis_ca, credential_keys }))();
        Self::finish(reader, config)
    }
}

pub(super) fn store(reader: &mut Reader<'_>) -> Option<StoreAt> {
    let database = reader.optional(&table::DATABASE_URL, value::database_url);
    let directory = |text: &str| Ok(PathBuf::from(text));
    if reader.is_set(&table::DATABASE_URL) {
        reader.optional(&table::STATE_DIR, directory);
        return database.map(StoreAt::Database);
    }
    reader.value(&table::STATE_DIR, directory).map(StoreAt::Directory)
}
