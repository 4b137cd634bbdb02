CREATE TABLE obol_store (
    one bool PRIMARY KEY DEFAULT true CHECK (one),
    identity text NOT NULL,
    generation int8 NOT NULL
);
INSERT INTO obol_store (identity, generation) VALUES (replace(gen_random_uuid()::text, '-', ''), 0);

-- What each workspace is now.
CREATE TABLE obol_workspace (
    workspace text PRIMARY KEY,
    epoch int8 NOT NULL,
    number int8 NOT NULL,
    published bool NOT NULL,
    held bool NOT NULL,
    file text,
    file_epoch int8,
    file_number int8
);

CREATE TABLE obol_revision (
    workspace text NOT NULL,
    epoch int8 NOT NULL,
    number int8 NOT NULL,
    info text NOT NULL,
    workspace_document bytea NOT NULL,
    policy_document bytea NOT NULL,
    fingerprint bytea NOT NULL,
    PRIMARY KEY (workspace, epoch, number)
);

-- Hashes of keys, never keys.
CREATE TABLE obol_key (
    key_id text PRIMARY KEY,
    hash text NOT NULL UNIQUE,
    workspace text NOT NULL,
    record text NOT NULL
);

CREATE TABLE obol_audit (
    id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    workspace text NOT NULL,
    epoch int8,
    number int8,
    key_id text
);
