-- 0001: the ground. One record per agent, a numbered log, a chained audit, and the rows they lean on.
-- SQLite: ids are 16 bytes, times are whole microseconds since 1970 UTC.

CREATE TABLE store_head (
    id              INTEGER PRIMARY KEY CHECK (id = 1),
    commit_number   INTEGER NOT NULL,
    sequence        INTEGER NOT NULL,  -- the newest event; locked by whoever writes, so it follows commit order
    horizon         INTEGER NOT NULL,  -- events up to here are no longer kept
    epoch           INTEGER NOT NULL   -- the owner that may write
);
INSERT INTO store_head (id, commit_number, sequence, horizon, epoch) VALUES (1, 0, 0, 0, 0);

CREATE TABLE workspaces (
    id              BLOB PRIMARY KEY,
    name            TEXT NOT NULL,
    tier            TEXT NOT NULL,
    created_at      INTEGER NOT NULL
);

-- The running totals of a workspace: quota, statistics, the end of its audit chain.
CREATE TABLE workspace_ledgers (
    workspace_id        BLOB PRIMARY KEY REFERENCES workspaces (id),
    active              INTEGER NOT NULL CHECK (active >= 0),
    state_initializing  INTEGER NOT NULL,
    state_ready         INTEGER NOT NULL,
    state_processing    INTEGER NOT NULL,
    state_waiting       INTEGER NOT NULL,
    state_suspended     INTEGER NOT NULL,
    state_terminating   INTEGER NOT NULL,
    state_terminated    INTEGER NOT NULL,
    state_failed        INTEGER NOT NULL,
    health_unknown      INTEGER NOT NULL,
    health_healthy      INTEGER NOT NULL,
    health_degraded     INTEGER NOT NULL,
    health_unhealthy    INTEGER NOT NULL,
    spawned             INTEGER NOT NULL,
    terminated          INTEGER NOT NULL,
    restarts            INTEGER NOT NULL,
    running             INTEGER NOT NULL,
    running_created_ms  INTEGER NOT NULL,
    ended               INTEGER NOT NULL,
    ended_uptime_ms     INTEGER NOT NULL,
    audit_number        INTEGER NOT NULL,
    audit_hash          TEXT NOT NULL,
    anchor_number       INTEGER NOT NULL,
    anchor_hash         TEXT NOT NULL
);

INSERT INTO workspaces (id, name, tier, created_at)
VALUES (X'00000000000070008000000000000001', 'home', 'enterprise', 0);

CREATE TABLE definitions (
    id              BLOB PRIMARY KEY,
    name            TEXT NOT NULL,
    kind            TEXT NOT NULL,
    manifest_json   TEXT NOT NULL,
    source          TEXT,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    version         INTEGER NOT NULL
);

CREATE TABLE agent_instances (
    id                  BLOB PRIMARY KEY,
    definition_id       BLOB NOT NULL,
    state               TEXT NOT NULL,
    health_state        TEXT NOT NULL,
    name                TEXT,
    name_key            TEXT,            -- the name with its case folded, for patterns
    owner_id            BLOB,
    workspace_id        BLOB NOT NULL,
    active              INTEGER NOT NULL,   -- holds a place in the quota
    spawn_options_json  TEXT,
    health_json         TEXT NOT NULL,
    metrics_json        TEXT,
    tags_json           TEXT NOT NULL,
    context_json        TEXT,
    enforcement_json    TEXT,
    final_state_json    TEXT,
    error_message       TEXT,
    restart_count       INTEGER NOT NULL DEFAULT 0,
    lifetime_restarts   INTEGER NOT NULL DEFAULT 0,
    attempt             INTEGER NOT NULL,
    version             INTEGER NOT NULL,
    created_at          INTEGER NOT NULL,
    updated_at          INTEGER NOT NULL,
    terminated_at       INTEGER,
    failing_since       INTEGER
);
-- Every list is of one workspace, newest first: each index begins with the one and ends with the id. The
-- small partial twins serve the common question, "which of those that live now".
CREATE INDEX idx_agent_instances_all ON agent_instances (workspace_id, id);
CREATE INDEX idx_agent_instances_state ON agent_instances (workspace_id, state, id);
CREATE INDEX idx_agent_instances_owner ON agent_instances (workspace_id, owner_id, id);
CREATE INDEX idx_agent_instances_definition ON agent_instances (workspace_id, definition_id, id);
CREATE INDEX idx_agent_instances_health ON agent_instances (workspace_id, health_state, id);
CREATE INDEX idx_agent_instances_name ON agent_instances (workspace_id, name_key, id);
CREATE INDEX idx_agent_instances_active ON agent_instances (workspace_id, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_active_owner ON agent_instances (workspace_id, owner_id, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_active_definition
    ON agent_instances (workspace_id, definition_id, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_active_health
    ON agent_instances (workspace_id, health_state, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_active_name ON agent_instances (workspace_id, name_key, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_ended ON agent_instances (terminated_at, id) WHERE terminated_at IS NOT NULL;

CREATE TABLE agent_instance_tags (
    instance_id     BLOB NOT NULL REFERENCES agent_instances (id) ON DELETE CASCADE,
    tag             TEXT NOT NULL,
    workspace_id    BLOB NOT NULL,
    active          INTEGER NOT NULL,
    PRIMARY KEY (instance_id, tag)
) WITHOUT ROWID;
CREATE INDEX idx_instance_tags_tag ON agent_instance_tags (workspace_id, tag, instance_id);
CREATE INDEX idx_instance_tags_active ON agent_instance_tags (workspace_id, tag, instance_id) WHERE active = 1;

-- No foreign key: events outlive the records they tell of.
CREATE TABLE agent_instance_events (
    sequence        INTEGER PRIMARY KEY,
    id              BLOB NOT NULL UNIQUE,
    workspace_id    BLOB,
    instance_id     BLOB,
    task_id         BLOB,
    event_type      TEXT NOT NULL,
    event_data_json TEXT NOT NULL,
    occurred_at     INTEGER NOT NULL,
    correlation_id  TEXT
);
CREATE INDEX idx_instance_events_instance ON agent_instance_events (instance_id, sequence);
CREATE INDEX idx_instance_events_workspace ON agent_instance_events (workspace_id, sequence);
CREATE INDEX idx_instance_events_correlation
    ON agent_instance_events (correlation_id) WHERE correlation_id IS NOT NULL;

CREATE TABLE tasks (
    id                  BLOB PRIMARY KEY,
    task                TEXT NOT NULL,
    state               TEXT NOT NULL,
    created_at          INTEGER NOT NULL,
    updated_at          INTEGER NOT NULL,
    generated_code      TEXT,
    submission_summary  TEXT,
    changed_files_json  TEXT NOT NULL,
    error               TEXT,
    definition_id       BLOB,
    attempt             INTEGER NOT NULL,
    spawn_count         INTEGER NOT NULL,
    retry_count         INTEGER NOT NULL,
    priority            TEXT NOT NULL,
    dependencies_json   TEXT NOT NULL,
    workspace           TEXT,
    branch              TEXT,
    tags_json           TEXT NOT NULL,
    workspace_id        BLOB NOT NULL,
    owner_id            BLOB,
    version             INTEGER NOT NULL
);
CREATE INDEX idx_tasks_all ON tasks (workspace_id, id);
CREATE INDEX idx_tasks_state ON tasks (workspace_id, state, id);
CREATE INDEX idx_tasks_definition ON tasks (workspace_id, definition_id, id);
CREATE INDEX idx_tasks_created ON tasks (workspace_id, created_at, id);
CREATE INDEX idx_tasks_ended ON tasks (updated_at, id) WHERE state IN ('accepted', 'rejected');

CREATE TABLE task_tags (
    task_id         BLOB NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    tag             TEXT NOT NULL,
    workspace_id    BLOB NOT NULL,
    PRIMARY KEY (task_id, tag)
) WITHOUT ROWID;
CREATE INDEX idx_task_tags_tag ON task_tags (workspace_id, tag, task_id);

-- What a task needs, to be asked from the other end: is this one still needed?
CREATE TABLE task_dependencies (
    task_id         BLOB NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    depends_on      BLOB NOT NULL,
    PRIMARY KEY (task_id, depends_on)
) WITHOUT ROWID;
CREATE INDEX idx_task_dependencies_needed ON task_dependencies (depends_on);

-- An intent is a row without an identity; recovery finishes or undoes every open one.
CREATE TABLE attempts (
    instance_id     BLOB NOT NULL,
    number          INTEGER NOT NULL,
    task_id         BLOB,
    intended_at     INTEGER NOT NULL,
    identity_json   TEXT,
    started_at      INTEGER,
    ended_at        INTEGER,
    outcome         TEXT,
    detail          TEXT,
    PRIMARY KEY (instance_id, number)
) WITHOUT ROWID;
CREATE INDEX idx_attempts_open ON attempts (instance_id, number) WHERE ended_at IS NULL;

CREATE TABLE waits (
    id              BLOB PRIMARY KEY,
    workspace_id    BLOB NOT NULL,
    kind            TEXT NOT NULL,
    instance_id     BLOB,
    task_id         BLOB,
    reason          TEXT,
    created_at      INTEGER NOT NULL,
    due_at          INTEGER,
    detail_json     TEXT,
    ended_at        INTEGER,
    outcome         TEXT
);
CREATE INDEX idx_waits_due ON waits (due_at, id) WHERE ended_at IS NULL;
CREATE INDEX idx_waits_ended ON waits (ended_at, id) WHERE ended_at IS NOT NULL;
CREATE INDEX idx_waits_instance ON waits (instance_id, due_at, id) WHERE ended_at IS NULL AND instance_id IS NOT NULL;
CREATE INDEX idx_waits_task ON waits (task_id) WHERE task_id IS NOT NULL;

-- No foreign key, and the primary key is the chain.
CREATE TABLE audit (
    workspace_id    BLOB NOT NULL,
    number          INTEGER NOT NULL,
    occurred_at     INTEGER NOT NULL,
    actor           TEXT NOT NULL,
    action          TEXT NOT NULL,
    subject         TEXT NOT NULL,
    outcome         TEXT NOT NULL,
    detail          TEXT,
    correlation_id  TEXT,
    sequence        INTEGER NOT NULL,
    previous_hash   TEXT NOT NULL,
    hash            TEXT NOT NULL,
    PRIMARY KEY (workspace_id, number)
) WITHOUT ROWID;

CREATE TABLE idempotency_keys (
    workspace_id    BLOB NOT NULL,
    key             TEXT NOT NULL,
    fingerprint     TEXT NOT NULL,
    result_json     TEXT NOT NULL,
    created_at      INTEGER NOT NULL,
    PRIMARY KEY (workspace_id, key)
) WITHOUT ROWID;
CREATE INDEX idx_idempotency_keys_created ON idempotency_keys (created_at);

CREATE TABLE leases (
    name            TEXT PRIMARY KEY,
    owner           TEXT NOT NULL,
    epoch           INTEGER NOT NULL,
    acquired_at     INTEGER NOT NULL,
    expires_at      INTEGER NOT NULL
);

CREATE TABLE principals (
    id                  BLOB PRIMARY KEY,
    name                TEXT NOT NULL,
    workspace_id        BLOB NOT NULL,
    roles_json          TEXT NOT NULL,
    permissions_json    TEXT NOT NULL,
    created_at          INTEGER NOT NULL,
    disabled_at         INTEGER
);

CREATE TABLE tokens (
    id              BLOB PRIMARY KEY,
    principal_id    BLOB NOT NULL REFERENCES principals (id),
    token_hash      TEXT NOT NULL UNIQUE,  -- SHA-256; the token itself is never kept
    name            TEXT NOT NULL,
    created_at      INTEGER NOT NULL,
    expires_at      INTEGER,
    revoked_at      INTEGER
);
