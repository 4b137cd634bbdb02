//! Metric names, in one place. Units are suffixes; labels are bounded (never a key, a session or an argument).

/// Requests by `surface` (`mcp`, `v1`, `ops`) and `status`.
pub const HTTP_REQUESTS: &str = "obol_http_requests_total";
/// Seconds until the head of an answer, by `surface`.
pub const HTTP_SECONDS: &str = "obol_http_request_duration_seconds";
/// MCP requests by `method` (known ones; others are `other`) and `outcome`.
pub const MCP_REQUESTS: &str = "obol_mcp_requests_total";
/// Live upstream MCP sessions by `transport`.
pub const MCP_UPSTREAM_SESSIONS: &str = "obol_mcp_upstream_sessions";
/// Exchanges with upstream MCP servers by `outcome`.
pub const MCP_UPSTREAM_CALLS: &str = "obol_mcp_upstream_calls_total";
/// Listings of connections that failed, so that a list was partial.
pub const MCP_PARTIAL_LISTS: &str = "obol_mcp_partial_lists_total";
/// Items of an upstream list that a client would have rejected and that were left out.
pub const MCP_QUARANTINED: &str = "obol_mcp_quarantined_items_total";
/// Lists of connections that this replica looked for, by `source`: `upstream` (it listed), `shared` (another one had).
pub const MCP_CATALOGUE_LOADS: &str = "obol_mcp_catalogue_loads_total";
/// Tools of connections with `catalog: pinned` that are hidden, by `reason` (`added`, `changed`). Alarm on any.
pub const MCP_UNPINNED_TOOLS: &str = "obol_mcp_unpinned_tools_total";
/// Messages to other replicas, by `outcome`.
pub const PEER_SENT: &str = "obol_peer_sent_total";
/// Messages of other replicas that were let in, by `status`.
pub const PEER_RECEIVED: &str = "obol_peer_received_total";
/// Other replicas that live.
pub const PEERS: &str = "obol_peers";
/// LLM attempts by `outcome`.
pub const LLM_ATTEMPTS: &str = "obol_llm_attempts_total";
/// Cedar evaluations that hit an error and were therefore denied.
pub const AUTHZ_EVALUATION_ERRORS: &str = "obol_authz_evaluation_errors_total";
/// Decisions by `action` and `decision`.
pub const AUTHZ_DECISIONS: &str = "obol_authz_decisions_total";
/// Sessions created, resumed and deleted, by `event`.
pub const SESSION_EVENTS: &str = "obol_session_events_total";
/// Sessions that live in the whole installation; every replica tells the same number.
pub const SESSIONS_LIVE: &str = "obol_sessions_live";
/// Sessions that a replica holds: those with an open stream or a request under way.
pub const SESSIONS_HELD: &str = "obol_sessions_held";
/// Access tokens judged, by `outcome` (`ok`, or why not).
pub const OAUTH_TOKENS: &str = "obol_oauth_tokens_total";
/// Fetches of the keys of OAuth issuers, by `outcome` (`ok`, `error`).
pub const OAUTH_KEY_FETCHES: &str = "obol_oauth_key_fetches_total";
/// Redis commands that failed, by `reason` (`timeout`, `io`, `server`).
pub const REDIS_ERRORS: &str = "obol_redis_errors_total";
/// Reads of publications by `outcome` (`installed`, `unchanged`, `invalid`, `absent`, `unavailable`).
pub const SNAPSHOT_READS: &str = "obol_snapshot_reads_total";
/// Publications in the store that were older than the one served, and refused. Alarm on any: the store went back in
/// time.
pub const SNAPSHOT_REGRESSIONS: &str = "obol_snapshot_regressions_total";
/// Questions to control about publications that the store does not have, by `outcome` (`created`, `lost` against
/// another one, `absent`, `failed`).
pub const SNAPSHOT_FALLBACKS: &str = "obol_snapshot_fallbacks_total";
/// Seconds since the subscription to invalidations was last known to stand.
pub const INVALIDATION_SILENCE: &str = "obol_invalidation_silence_seconds";
/// Publications in memory.
pub const SNAPSHOT_LOADED: &str = "obol_snapshot_loaded";
/// The number of the revision served, by `workspace`, 0 for one that is not served any more. For the first 1,000
/// workspaces that a replica loads: the label has to be bounded.
pub const SNAPSHOT_REVISION: &str = "obol_snapshot_revision";
/// Invalidations received, by `type` (`malformed` too).
pub const INVALIDATIONS: &str = "obol_invalidations_total";
/// Usage events by `outcome`.
pub const USAGE_EVENTS: &str = "obol_usage_events_total";
/// Usage events that wait for the flusher.
pub const USAGE_QUEUE: &str = "obol_usage_queue_events";
/// Usage events that could not be written before the process ended. Alarm on any.
pub const USAGE_LOST: &str = "obol_usage_lost_events_total";
/// Usage events that could not be written before the process ended and wait in `OBOL_SPOOL_DIR` for the next one.
pub const USAGE_SPOOLED: &str = "obol_usage_spooled_events_total";
/// Lines of the spool that could not be settled and were set aside. Alarm on any.
pub const USAGE_SET_ASIDE: &str = "obol_usage_set_aside_total";
/// Calls that were refused since too many usage events of their workspace wait to be collected. Alarm on any.
pub const USAGE_STREAM_FULL: &str = "obol_usage_stream_full_total";
/// Reservations of dead or stuck calls that this replica booked.
pub const USAGE_ORPHANED: &str = "obol_usage_orphaned_total";
/// Tasks that run, by `class`.
pub const TASKS: &str = "obol_tasks";
/// Child processes of stdio connections that run.
pub const WORKERS: &str = "obol_workers";
