use std::time::Duration;

/// The bounds of a [`super::Pool`].
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// The oldest that an upstream session may be when it is taken (DESIGN §9.4: 45 s, so that it never outlives the
    /// 60 s credential that authorizes it).
    pub max_age: Duration,
    /// How long a session that nobody uses is kept and renewed.
    pub idle: Duration,
    /// The same for sessions of child processes.
    pub durable_idle: Duration,
    /// Longest time to make a transport; starting a process counts.
    pub connect_timeout: Duration,
    /// Longest time for `initialize` and what belongs to it. Generous: a first start may install packages.
    pub initialize_timeout: Duration,
    /// Longest time for the end of one session.
    pub close_timeout: Duration,
    /// Failures in a row after which a connection is not tried for a while.
    pub breaker_failures: u32,
    /// How long it is not tried.
    pub breaker_open: Duration,
    /// The most upstream sessions of this replica.
    pub max_sessions: usize,
    /// The most pages of one list.
    pub max_list_pages: usize,
    /// The most items of one list.
    pub max_list_items: usize,
    /// The most bytes of one list.
    pub max_list_bytes: usize,
    /// The gateway's version, told to upstreams.
    pub version: &'static str,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            max_age: Duration::from_secs(45),
            idle: Duration::from_secs(90),
            durable_idle: Duration::from_mins(30),
            connect_timeout: Duration::from_secs(10),
            initialize_timeout: Duration::from_secs(30),
            close_timeout: Duration::from_secs(10),
            breaker_failures: 5,
            breaker_open: Duration::from_secs(5),
            max_sessions: 4096,
            max_list_pages: 200,
            max_list_items: 10_000,
            max_list_bytes: 32 << 20,
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}
