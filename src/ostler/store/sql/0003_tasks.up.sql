-- Tasks: a piece of work with a review outcome.
CREATE TABLE tasks (
    id                  $ID PRIMARY KEY,
    workspace_id        $ID NOT NULL,
    key                 $TEXT NOT NULL,
    state               $TEXT NOT NULL,
    task                $TEXT NOT NULL,
    agent               $TEXT,
    model               $TEXT,
    priority            $TEXT NOT NULL,
    tags_json           $TEXT NOT NULL,
    depends_on_json     $TEXT NOT NULL,
    checks_json         $TEXT NOT NULL,
    is_held             INTEGER NOT NULL,
    attempt             BIGINT NOT NULL,
    failures            BIGINT NOT NULL,
    max_failures        BIGINT NOT NULL,
    timeout_us          BIGINT,
    near                $TEXT,
    workdir_json        $TEXT,
    instance_id         $ID,
    session             $TEXT,
    session_usage_json  $TEXT,
    comments_json       $TEXT NOT NULL,
    summary             $TEXT,
    claimed_files_json  $TEXT,
    changed_files_json  $TEXT,
    generated_code      $TEXT,
    error               $TEXT,
    snapshot_json       $TEXT,
    receipts_json       $TEXT NOT NULL,
    accepted_json       $TEXT,
    vault_json          $TEXT,
    tokens              BIGINT NOT NULL,
    cost_usd            DOUBLE PRECISION,
    created_by          $TEXT NOT NULL,
    created_at          BIGINT NOT NULL,
    updated_at          BIGINT NOT NULL,
    started_at          BIGINT,
    completed_at        BIGINT,
    ended_at            BIGINT,
    version             BIGINT NOT NULL,
    rank                INTEGER NOT NULL    -- of its priority; the highest first
);
CREATE UNIQUE INDEX idx_tasks_key ON tasks (workspace_id, key);
CREATE INDEX idx_tasks_list ON tasks (workspace_id, id);
CREATE INDEX idx_tasks_state ON tasks (workspace_id, state, id);
CREATE INDEX idx_tasks_queue ON tasks (workspace_id, rank DESC, id) WHERE state = 'queued';

-- Keys are never given out twice, also when their task was purged.
CREATE TABLE task_numbers (
    workspace_id    $ID PRIMARY KEY,
    last            BIGINT NOT NULL
);
