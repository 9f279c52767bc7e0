-- The core: instances with their attempts, requests and waits; the numbered log; the audit chain.
-- One script for both databases. $ID is a 16-byte BLOB or a UUID, $SEQ an INTEGER or a BIGINT, $TEXT compares by code
-- point, $NOROWID is SQLite's WITHOUT ROWID. Times are microseconds since 1970 UTC, flags are 0 or 1.

-- One row. Writers are serialised on it, so event numbers follow the order of commits.
CREATE TABLE head (
    one         INTEGER PRIMARY KEY CHECK (one = 1),
    sequence    BIGINT NOT NULL,    -- the newest event
    horizon     BIGINT NOT NULL,    -- events up to here were removed by retention
    epoch       BIGINT NOT NULL     -- the owner that may write
);
INSERT INTO head (one, sequence, horizon, epoch) VALUES (1, 0, 0, 0);

CREATE TABLE leases (
    name        $TEXT PRIMARY KEY,
    owner       $TEXT NOT NULL,
    epoch       BIGINT NOT NULL,
    acquired_at BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL
);

CREATE TABLE workspaces (
    id                      $ID PRIMARY KEY,
    name                    $TEXT NOT NULL,
    tier                    $TEXT NOT NULL,
    created_at              BIGINT NOT NULL,
    disabled_features_json  $TEXT NOT NULL DEFAULT '[]',
    max_tokens_per_minute   BIGINT NOT NULL DEFAULT 0,
    active                  BIGINT NOT NULL DEFAULT 0 CHECK (active >= 0),  -- places taken in the plan
    audit_number            BIGINT NOT NULL DEFAULT 0,                      -- the end of the audit chain
    audit_hash              $TEXT NOT NULL DEFAULT '$GENESIS',
    anchor_number           BIGINT NOT NULL DEFAULT 0,                      -- the last entry that retention removed
    anchor_hash             $TEXT NOT NULL DEFAULT '$GENESIS'
);
INSERT INTO workspaces (id, name, tier, created_at) VALUES (:home, 'home', 'enterprise', 0);

-- Totals that outlive the rows they count: spawned, terminated, restarts.
CREATE TABLE counters (
    workspace_id    $ID NOT NULL,
    name            $TEXT NOT NULL,
    value           BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, name)
);

CREATE TABLE principals (
    id                  $ID PRIMARY KEY,
    workspace_id        $ID NOT NULL,
    name                $TEXT NOT NULL,
    roles_json          $TEXT NOT NULL,
    permissions_json    $TEXT NOT NULL,
    created_at          BIGINT NOT NULL,
    disabled_at         BIGINT
);

CREATE TABLE tokens (
    id              $ID PRIMARY KEY,
    principal_id    $ID NOT NULL REFERENCES principals (id),
    token_hash      $TEXT NOT NULL UNIQUE,  -- SHA-256; the token itself is never kept
    name            $TEXT NOT NULL,
    created_at      BIGINT NOT NULL,
    expires_at      BIGINT,
    revoked_at      BIGINT
);

-- An idempotency key belongs to one verb.
CREATE TABLE idempotency_keys (
    workspace_id    $ID NOT NULL,
    key             $TEXT NOT NULL,
    action          $TEXT NOT NULL,
    fingerprint     $TEXT NOT NULL,
    answer_json     $TEXT NOT NULL,
    created_at      BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, key)
);
CREATE INDEX idx_idempotency_keys_created ON idempotency_keys (created_at);

CREATE TABLE definitions (
    id              $ID PRIMARY KEY,
    workspace_id    $ID NOT NULL,
    name            $TEXT NOT NULL,
    kind            $TEXT NOT NULL,
    manifest_json   $TEXT NOT NULL,
    source          $TEXT,
    created_at      BIGINT NOT NULL,
    updated_at      BIGINT NOT NULL,
    version         BIGINT NOT NULL
);
CREATE INDEX idx_definitions_name ON definitions (workspace_id, name);

CREATE TABLE agent_instances (
    id                  $ID PRIMARY KEY,
    workspace_id        $ID NOT NULL,
    definition_id       $ID NOT NULL,
    owner_id            $ID,
    task_id             $ID,
    crew                $TEXT,
    agent_id            $TEXT,
    generation          BIGINT NOT NULL DEFAULT 0,
    name                $TEXT,
    name_key            $TEXT,              -- the name with its case folded, for patterns
    state               $TEXT NOT NULL,
    active              INTEGER NOT NULL,   -- takes a place in the plan
    health_state        $TEXT NOT NULL,
    attempt             BIGINT NOT NULL,
    version             BIGINT NOT NULL,
    restart_count       BIGINT NOT NULL DEFAULT 0,
    lifetime_restarts   BIGINT NOT NULL DEFAULT 0,
    failing_since       BIGINT,
    downtime_us         BIGINT NOT NULL DEFAULT 0,
    error_message       $TEXT,
    created_at          BIGINT NOT NULL,
    updated_at          BIGINT NOT NULL,
    terminated_at       BIGINT,
    spawn_options_json  $TEXT,
    health_json         $TEXT NOT NULL,
    metrics_json        $TEXT,
    tags_json           $TEXT NOT NULL,
    context_json        $TEXT,
    job_json            $TEXT,              -- the request that it works on when it is ready
    enforcement_json    $TEXT,
    final_state_json    $TEXT
);
-- Every list is of one workspace, newest first: each index begins with the workspace and ends with the id. The partial
-- twins serve the common question, which instances are active now.
CREATE INDEX idx_agent_instances_all ON agent_instances (workspace_id, id);
CREATE INDEX idx_agent_instances_state ON agent_instances (workspace_id, state, id);
CREATE INDEX idx_agent_instances_owner ON agent_instances (workspace_id, owner_id, id);
CREATE INDEX idx_agent_instances_definition ON agent_instances (workspace_id, definition_id, id);
CREATE INDEX idx_agent_instances_health ON agent_instances (workspace_id, health_state, id);
CREATE INDEX idx_agent_instances_name ON agent_instances (workspace_id, name_key, id);
CREATE INDEX idx_agent_instances_task ON agent_instances (workspace_id, task_id, id) WHERE task_id IS NOT NULL;
CREATE INDEX idx_agent_instances_crew ON agent_instances (workspace_id, crew, id) WHERE crew IS NOT NULL;
CREATE INDEX idx_agent_instances_active ON agent_instances (workspace_id, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_active_owner ON agent_instances (workspace_id, owner_id, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_active_definition ON agent_instances (workspace_id, definition_id, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_active_health ON agent_instances (workspace_id, health_state, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_active_name ON agent_instances (workspace_id, name_key, id) WHERE active = 1;
CREATE INDEX idx_agent_instances_ended ON agent_instances (terminated_at, id) WHERE terminated_at IS NOT NULL;

CREATE TABLE agent_instance_tags (
    instance_id     $ID NOT NULL REFERENCES agent_instances (id) ON DELETE CASCADE,
    tag             $TEXT NOT NULL,
    workspace_id    $ID NOT NULL,
    active          INTEGER NOT NULL,
    PRIMARY KEY (instance_id, tag)
);
CREATE INDEX idx_instance_tags_tag ON agent_instance_tags (workspace_id, tag, instance_id);
CREATE INDEX idx_instance_tags_active ON agent_instance_tags (workspace_id, tag, instance_id) WHERE active = 1;

-- A row without a handle is an open intent: recovery finishes or undoes it.
CREATE TABLE attempts (
    instance_id     $ID NOT NULL,
    number          BIGINT NOT NULL,
    task_id         $ID,
    intended_at     BIGINT NOT NULL,
    handle_json     $TEXT,
    started_at      BIGINT,
    ended_at        BIGINT,
    outcome         $TEXT,
    exit_code       BIGINT,
    exit_signal     BIGINT,
    detail          $TEXT,
    heard           BIGINT NOT NULL DEFAULT 0,  -- the last numbered message of the agent that was committed
    PRIMARY KEY (instance_id, number)
);
CREATE INDEX idx_attempts_open ON attempts (instance_id, number) WHERE ended_at IS NULL;

CREATE TABLE requests (
    instance_id     $ID NOT NULL,
    id              $TEXT NOT NULL,
    workspace_id    $ID NOT NULL,
    attempt         BIGINT NOT NULL,
    tries           BIGINT NOT NULL,
    state           $TEXT NOT NULL,     -- running, done, failed, cancelled, lost
    input_digest    $TEXT NOT NULL,
    answer_json     $TEXT,
    error           $TEXT,
    begun_at        BIGINT NOT NULL,
    ended_at        BIGINT,
    PRIMARY KEY (instance_id, id)
);
CREATE INDEX idx_requests_open ON requests (instance_id) WHERE state = 'running';
CREATE INDEX idx_requests_ended ON requests (instance_id, ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE waits (
    id              $ID PRIMARY KEY,
    workspace_id    $ID NOT NULL,
    kind            $TEXT NOT NULL,
    instance_id     $ID,
    task_id         $ID,
    wake_key        $TEXT,
    reason          $TEXT,
    detail_json     $TEXT,
    created_at      BIGINT NOT NULL,
    due_at          BIGINT,
    ended_at        BIGINT,
    outcome         $TEXT,
    answer_json     $TEXT
);
CREATE INDEX idx_waits_open ON waits (workspace_id, id) WHERE ended_at IS NULL;
CREATE INDEX idx_waits_instance ON waits (instance_id, id) WHERE ended_at IS NULL AND instance_id IS NOT NULL;
CREATE INDEX idx_waits_task ON waits (task_id, id) WHERE ended_at IS NULL AND task_id IS NOT NULL;
CREATE INDEX idx_waits_wake ON waits (wake_key) WHERE ended_at IS NULL AND wake_key IS NOT NULL;
CREATE INDEX idx_waits_ended ON waits (ended_at, id) WHERE ended_at IS NOT NULL;

-- No foreign key: events outlive the records they tell of.
CREATE TABLE agent_instance_events (
    sequence        $SEQ PRIMARY KEY,
    workspace_id    $ID,
    instance_id     $ID,
    task_id         $ID,
    event_type      $TEXT NOT NULL,
    event_data_json $TEXT NOT NULL,
    occurred_at     BIGINT NOT NULL,
    correlation_id  $TEXT
);
CREATE INDEX idx_instance_events_instance ON agent_instance_events (instance_id, sequence) WHERE instance_id IS NOT NULL;
CREATE INDEX idx_instance_events_task ON agent_instance_events (task_id, sequence) WHERE task_id IS NOT NULL;
CREATE INDEX idx_instance_events_workspace ON agent_instance_events (workspace_id, sequence);
CREATE INDEX idx_instance_events_correlation ON agent_instance_events (correlation_id) WHERE correlation_id IS NOT NULL;

CREATE TABLE audit (
    workspace_id    $ID NOT NULL,
    number          BIGINT NOT NULL,
    occurred_at     BIGINT NOT NULL,
    actor           $TEXT NOT NULL,
    action          $TEXT NOT NULL,
    subject         $TEXT NOT NULL,
    outcome         $TEXT NOT NULL,
    detail          $TEXT,
    correlation_id  $TEXT,
    sequence        BIGINT NOT NULL,
    previous_hash   $TEXT NOT NULL,
    hash            $TEXT NOT NULL,
    PRIMARY KEY (workspace_id, number)
) $NOROWID;
