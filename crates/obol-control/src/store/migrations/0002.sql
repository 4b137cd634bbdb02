-- Usage events, a partition for each month of `started_at`, which are made when they are needed.
--
-- The key has the time in it since a partitioned table wants that; an event's never changes, so it is unique by its id.
CREATE TABLE obol_usage (
    workspace text NOT NULL,
    event_id text NOT NULL,
    started_at timestamptz NOT NULL,
    -- 'request', 'correction' or 'attempt'; the last are for information and in no sum.
    part text NOT NULL,
    kind text NOT NULL,
    -- As the ledger calls who paid, and what it is made of.
    principal text NOT NULL,
    key_id text,
    user_issuer text,
    user_subject text,
    model text,
    provider text,
    upstream_model text,
    connection text,
    tool text,
    outcome text NOT NULL,
    estimated bool NOT NULL,
    overrun bool NOT NULL,
    input_tokens int8 NOT NULL,
    cached_input_tokens int8 NOT NULL,
    cache_write_tokens int8 NOT NULL,
    audio_input_tokens int8 NOT NULL,
    output_tokens int8 NOT NULL,
    reasoning_tokens int8 NOT NULL,
    audio_output_tokens int8 NOT NULL,
    -- Nano-USD.
    cost_nanos int8 NOT NULL,
    reserved_nanos int8 NOT NULL,
    replica text NOT NULL,
    revision text NOT NULL,
    duration_ms int8 NOT NULL,
    -- As it was written.
    event json NOT NULL,
    PRIMARY KEY (workspace, event_id, started_at)
) PARTITION BY RANGE (started_at);

CREATE INDEX ON obol_usage (started_at);
CREATE INDEX ON obol_usage (workspace, started_at);
CREATE INDEX ON obol_usage (workspace, principal, started_at);
CREATE INDEX ON obol_usage (workspace, model, started_at) WHERE model IS NOT NULL;
CREATE INDEX ON obol_usage (workspace, tool, started_at) WHERE tool IS NOT NULL;

-- What stood in a stream of usage events and was none.
CREATE TABLE obol_usage_reject (
    workspace text NOT NULL,
    entry text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    reason text NOT NULL,
    content bytea NOT NULL,
    PRIMARY KEY (workspace, entry)
);
