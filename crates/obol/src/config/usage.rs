//! What `obol usage` runs with.

use super::operator::{StoreAt, store};
use super::read::Reader;
use super::{Environment, Loaded, Logging, Problems, RedisUrl, Subcommand, logging, table, value};

/// What sums of usage need.
#[derive(Debug)]
pub struct Usage {
    /// The log.
    pub logging: Logging,
    /// Where control keeps what it knows.
    pub store: StoreAt,
}

/// What an audit of the ledger needs.
#[derive(Debug)]
pub struct UsageAudit {
    /// The log.
    pub logging: Logging,
    /// The shared Redis.
    pub redis_url: RedisUrl,
    /// What its certificate is checked with, PEM; `None` is the public authorities.
    pub redis_ca: Option<Vec<u8>>,
}

impl Loaded<Usage> {
    /// Reads what `obol usage` needs.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn usage(env: &Environment) -> Result<Self, Problems> {
        let mut reader = Reader::new(env, Subcommand::Usage);
        let (logging, store) = (logging(&mut reader), store(&mut reader));
        let config = (|| Some(Usage { logging: logging?, store: store? }))();
        Self::finish(reader, config)
    }
}

impl Loaded<UsageAudit> {
    /// Reads what `obol usage audit` needs.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn usage_audit(env: &Environment) -> Result<Self, Problems> {
        let mut reader = Reader::new(env, Subcommand::UsageAudit);
        let logging = logging(&mut reader);
        let redis_url = reader.value(&table::REDIS_URL, RedisUrl::parse);
        let redis_ca = reader.optional(&table::REDIS_CA_FILE, value::certificates_file);
        let config = (|| Some(UsageAudit { logging: logging?, redis_url: redis_url?, redis_ca }))();
        Self::finish(reader, config)
    }
}
