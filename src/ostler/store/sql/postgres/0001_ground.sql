-- 0001: the ground. One record per agent, a numbered log, a chained audit, and the rows they lean on.
-- PostgreSQL: native uuid and timestamptz; text compares by code point, as in SQLite.

CREATE TABLE store_head (
    id              INTEGER PRIMARY KEY CHECK (id = 1),
    commit_number   BIGINT NOT NULL,
    sequence        BIGINT NOT NULL,  -- the newest event; locked by whoever writes, so it follows commit order
    horizon         BIGINT NOT NULL,  -- events up to here are no longer kept
    epoch           BIGINT NOT NULL   -- the owner that may write
);
INSERT INTO store_head (id, commit_number, sequence, horizon, epoch) VALUES (1, 0, 0, 0, 0);

CREATE TABLE workspaces (
    id              UUID PRIMARY KEY,
    name            TEXT COLLATE "C" NOT NULL,
    tier            TEXT COLLATE "C" NOT NULL,
    created_at      TIMESTAMPTZ NOT NULL
);

-- The running totals of a workspace: quota, statistics, the end of its audit chain.
CREATE TABLE workspace_ledgers (
    workspace_id        UUID PRIMARY KEY REFERENCES workspaces (id),
    active              BIGINT NOT NULL CHECK (active >= 0),
    state_initializing  BIGINT NOT NULL,
    state_ready         BIGINT NOT NULL,
    state_processing    BIGINT NOT NULL,
    state_waiting       BIGINT NOT NULL,
    state_suspended     BIGINT NOT NULL,
    state_terminating   BIGINT NOT NULL,
    state_terminated    BIGINT NOT NULL,
    state_failed        BIGINT NOT NULL,
    health_unknown      BIGINT NOT NULL,
    health_healthy      BIGINT NOT NULL,
    health_degraded     BIGINT NOT NULL,
    health_unhealthy    BIGINT NOT NULL,
    spawned             BIGINT NOT NULL,
    terminated          BIGINT NOT NULL,
    restarts            BIGINT NOT NULL,
    running             BIGINT NOT NULL,
    running_created_ms  BIGINT NOT NULL,
    ended               BIGINT NOT NULL,
    ended_uptime_ms     BIGINT NOT NULL,
    audit_number        BIGINT NOT NULL,
    audit_hash          TEXT COLLATE "C" NOT NULL,
    anchor_number       BIGINT NOT NULL,
    anchor_hash         TEXT COLLATE "C" NOT NULL
);

INSERT INTO workspaces (id, name, tier, created_at)
VALUES ('00000000-0000-7000-8000-000000000001', 'home', 'enterprise', '1970-01-01 00:00:00+00');

CREATE TABLE definitions (
    id              UUID PRIMARY KEY,
    name            TEXT COLLATE "C" NOT NULL,
    kind            TEXT COLLATE "C" NOT NULL,
    manifest_json   TEXT COLLATE "C" NOT NULL,
    source          TEXT COLLATE "C",
    created_at      TIMESTAMPTZ NOT NULL,
    updated_at      TIMESTAMPTZ NOT NULL,
    version         BIGINT NOT NULL
);

CREATE TABLE agent_instances (
    id                  UUID PRIMARY KEY,
    definition_id       UUID NOT NULL,
    state               TEXT COLLATE "C" NOT NULL,
    health_state        TEXT COLLATE "C" NOT NULL,
    name                TEXT COLLATE "C",
    name_key            TEXT COLLATE "C",            -- the name with its case folded, for patterns
    owner_id            UUID,
    workspace_id        UUID NOT NULL,
    active              BOOLEAN NOT NULL,   -- holds a place in the quota
    spawn_options_json  TEXT COLLATE "C",
    health_json         TEXT COLLATE "C" NOT NULL,
    metrics_json        TEXT COLLATE "C",
    tags_json           TEXT COLLATE "C" NOT NULL,
    context_json        TEXT COLLATE "C",
    enforcement_json    TEXT COLLATE "C",
    final_state_json    TEXT COLLATE "C",
    error_message       TEXT COLLATE "C",
    restart_count       BIGINT NOT NULL DEFAULT 0,
    lifetime_restarts   BIGINT NOT NULL DEFAULT 0,
    attempt             BIGINT NOT NULL,
    version             BIGINT NOT NULL,
    created_at          TIMESTAMPTZ NOT NULL,
    updated_at          TIMESTAMPTZ NOT NULL,
    terminated_at       TIMESTAMPTZ,
    failing_since       TIMESTAMPTZ
);
-- Every list is of one workspace, newest first: each index begins with the one and ends with the id. The
-- small partial twins serve the common question, "which of those that live now".
CREATE INDEX idx_agent_instances_all ON agent_instances (workspace_id, id);
CREATE INDEX idx_agent_instances_state ON agent_instances (workspace_id, state, id);
CREATE INDEX idx_agent_instances_owner ON agent_instances (workspace_id, owner_id, id);
CREATE INDEX idx_agent_instances_definition ON agent_instances (workspace_id, definition_id, id);
CREATE INDEX idx_agent_instances_health ON agent_instances (workspace_id, health_state, id);
CREATE INDEX idx_agent_instances_name ON agent_instances (workspace_id, name_key, id);
CREATE INDEX idx_agent_instances_active ON agent_instances (workspace_id, id) WHERE active = TRUE;
CREATE INDEX idx_agent_instances_active_owner ON agent_instances (workspace_id, owner_id, id) WHERE active = TRUE;
CREATE INDEX idx_agent_instances_active_definition
    ON agent_instances (workspace_id, definition_id, id) WHERE active = TRUE;
CREATE INDEX idx_agent_instances_active_health
    ON agent_instances (workspace_id, health_state, id) WHERE active = TRUE;
CREATE INDEX idx_agent_instances_active_name ON agent_instances (workspace_id, name_key, id) WHERE active = TRUE;
CREATE INDEX idx_agent_instances_ended ON agent_instances (terminated_at, id) WHERE terminated_at IS NOT NULL;

CREATE TABLE agent_instance_tags (
    instance_id     UUID NOT NULL REFERENCES agent_instances (id) ON DELETE CASCADE,
    tag             TEXT COLLATE "C" NOT NULL,
    workspace_id    UUID NOT NULL,
    active          BOOLEAN NOT NULL,
    PRIMARY KEY (instance_id, tag)
);
CREATE INDEX idx_instance_tags_tag ON agent_instance_tags (workspace_id, tag, instance_id);
CREATE INDEX idx_instance_tags_active ON agent_instance_tags (workspace_id, tag, instance_id) WHERE active = TRUE;

-- No foreign key: events outlive the records they tell of.
CREATE TABLE agent_instance_events (
    sequence        BIGINT PRIMARY KEY,
    id              UUID NOT NULL UNIQUE,
    workspace_id    UUID,
    instance_id     UUID,
    task_id         UUID,
    event_type      TEXT COLLATE "C" NOT NULL,
    event_data_json TEXT COLLATE "C" NOT NULL,
    occurred_at     TIMESTAMPTZ NOT NULL,
    correlation_id  TEXT COLLATE "C"
);
CREATE INDEX idx_instance_events_instance ON agent_instance_events (instance_id, sequence);
CREATE INDEX idx_instance_events_workspace ON agent_instance_events (workspace_id, sequence);
CREATE INDEX idx_instance_events_correlation
    ON agent_instance_events (correlation_id) WHERE correlation_id IS NOT NULL;

CREATE TABLE tasks (
    id                  UUID PRIMARY KEY,
    task                TEXT COLLATE "C" NOT NULL,
    state               TEXT COLLATE "C" NOT NULL,
    created_at          TIMESTAMPTZ NOT NULL,
    updated_at          TIMESTAMPTZ NOT NULL,
    generated_code      TEXT COLLATE "C",
    submission_summary  TEXT COLLATE "C",
    changed_files_json  TEXT COLLATE "C" NOT NULL,
    error               TEXT COLLATE "C",
    definition_id       UUID,
    attempt             BIGINT NOT NULL,
    spawn_count         BIGINT NOT NULL,
    retry_count         BIGINT NOT NULL,
    priority            TEXT COLLATE "C" NOT NULL,
    dependencies_json   TEXT COLLATE "C" NOT NULL,
    workspace           TEXT COLLATE "C",
    branch              TEXT COLLATE "C",
    tags_json           TEXT COLLATE "C" NOT NULL,
    workspace_id        UUID NOT NULL,
    owner_id            UUID,
    version             BIGINT NOT NULL
);
CREATE INDEX idx_tasks_all ON tasks (workspace_id, id);
CREATE INDEX idx_tasks_state ON tasks (workspace_id, state, id);
CREATE INDEX idx_tasks_definition ON tasks (workspace_id, definition_id, id);
CREATE INDEX idx_tasks_created ON tasks (workspace_id, created_at, id);
CREATE INDEX idx_tasks_ended ON tasks (updated_at, id) WHERE state IN ('accepted', 'rejected');

CREATE TABLE task_tags (
    task_id         UUID NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    tag             TEXT COLLATE "C" NOT NULL,
    workspace_id    UUID NOT NULL,
    PRIMARY KEY (task_id, tag)
);
CREATE INDEX idx_task_tags_tag ON task_tags (workspace_id, tag, task_id);

-- What a task needs, to be asked from the other end: is this one still needed?
CREATE TABLE task_dependencies (
    task_id         UUID NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    depends_on      UUID NOT NULL,
    PRIMARY KEY (task_id, depends_on)
);
CREATE INDEX idx_task_dependencies_needed ON task_dependencies (depends_on);

-- An intent is a row without an identity; recovery finishes or undoes every open one.
CREATE TABLE attempts (
    instance_id     UUID NOT NULL,
    number          BIGINT NOT NULL,
    task_id         UUID,
    intended_at     TIMESTAMPTZ NOT NULL,
    identity_json   TEXT COLLATE "C",
    started_at      TIMESTAMPTZ,
    ended_at        TIMESTAMPTZ,
    outcome         TEXT COLLATE "C",
    detail          TEXT COLLATE "C",
    PRIMARY KEY (instance_id, number)
);
CREATE INDEX idx_attempts_open ON attempts (instance_id, number) WHERE ended_at IS NULL;

CREATE TABLE waits (
    id              UUID PRIMARY KEY,
    workspace_id    UUID NOT NULL,
    kind            TEXT COLLATE "C" NOT NULL,
    instance_id     UUID,
    task_id         UUID,
    reason          TEXT COLLATE "C",
    created_at      TIMESTAMPTZ NOT NULL,
    due_at          TIMESTAMPTZ,
    detail_json     TEXT COLLATE "C",
    ended_at        TIMESTAMPTZ,
    outcome         TEXT COLLATE "C"
);
CREATE INDEX idx_waits_due ON waits (due_at, id) WHERE ended_at IS NULL;
CREATE INDEX idx_waits_ended ON waits (ended_at, id) WHERE ended_at IS NOT NULL;
CREATE INDEX idx_waits_instance ON waits (instance_id, due_at, id) WHERE ended_at IS NULL AND instance_id IS NOT NULL;
CREATE INDEX idx_waits_task ON waits (task_id) WHERE task_id IS NOT NULL;

-- No foreign key, and the primary key is the chain.
CREATE TABLE audit (
    workspace_id    UUID NOT NULL,
    number          BIGINT NOT NULL,
    occurred_at     TIMESTAMPTZ NOT NULL,
    actor           TEXT COLLATE "C" NOT NULL,
    action          TEXT COLLATE "C" NOT NULL,
    subject         TEXT COLLATE "C" NOT NULL,
    outcome         TEXT COLLATE "C" NOT NULL,
    detail          TEXT COLLATE "C",
    correlation_id  TEXT COLLATE "C",
    sequence        BIGINT NOT NULL,
    previous_hash   TEXT COLLATE "C" NOT NULL,
    hash            TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (workspace_id, number)
);

CREATE TABLE idempotency_keys (
    workspace_id    UUID NOT NULL,
    key             TEXT COLLATE "C" NOT NULL,
    fingerprint     TEXT COLLATE "C" NOT NULL,
    result_json     TEXT COLLATE "C" NOT NULL,
    created_at      TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (workspace_id, key)
);
CREATE INDEX idx_idempotency_keys_created ON idempotency_keys (created_at);

CREATE TABLE leases (
    name            TEXT COLLATE "C" PRIMARY KEY,
    owner           TEXT COLLATE "C" NOT NULL,
    epoch           BIGINT NOT NULL,
    acquired_at     TIMESTAMPTZ NOT NULL,
    expires_at      TIMESTAMPTZ NOT NULL
);

CREATE TABLE principals (
    id                  UUID PRIMARY KEY,
    name                TEXT COLLATE "C" NOT NULL,
    workspace_id        UUID NOT NULL,
    roles_json          TEXT COLLATE "C" NOT NULL,
    permissions_json    TEXT COLLATE "C" NOT NULL,
    created_at          TIMESTAMPTZ NOT NULL,
    disabled_at         TIMESTAMPTZ
);

CREATE TABLE tokens (
    id              UUID PRIMARY KEY,
    principal_id    UUID NOT NULL REFERENCES principals (id),
    token_hash      TEXT COLLATE "C" NOT NULL UNIQUE,  -- SHA-256; the token itself is never kept
    name            TEXT COLLATE "C" NOT NULL,
    created_at      TIMESTAMPTZ NOT NULL,
    expires_at      TIMESTAMPTZ,
    revoked_at      TIMESTAMPTZ
);
