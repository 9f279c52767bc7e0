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
    loop_json           $TEXT,
    crew                $TEXT,
    member              $TEXT,
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

-- Loops: one row for each fresh start.
CREATE TABLE iterations (
    task_id             $ID NOT NULL,
    number              BIGINT NOT NULL,
    instance_id         $ID,
    snapshot_json       $TEXT NOT NULL,
    prompt              $TEXT NOT NULL,
    ended_by            $TEXT,
    breakpoint_json     $TEXT,
    summary             $TEXT,
    changed_files       BIGINT,
    tokens              BIGINT NOT NULL,
    cost_usd            DOUBLE PRECISION,
    started_at          BIGINT NOT NULL,
    ended_at            BIGINT,
    PRIMARY KEY (task_id, number)
);

-- Reviews of branches, kept by Ostler itself; and what CI said of a commit, whoever asked first.
CREATE TABLE pull_requests (
    workspace_id        $ID NOT NULL,
    number              BIGINT NOT NULL,
    task_id             $ID NOT NULL,
    task_key            $TEXT NOT NULL,
    url                 $TEXT NOT NULL,
    title               $TEXT NOT NULL,
    branch              $TEXT,
    commit_id           $TEXT,
    state               $TEXT NOT NULL,
    ci                  $TEXT,
    comments_json       $TEXT NOT NULL,
    approved_by_json    $TEXT NOT NULL,
    created_at          BIGINT NOT NULL,
    updated_at          BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, number)
);
CREATE TABLE ci_results (
    workspace_id        $ID NOT NULL,
    commit_id           $TEXT NOT NULL,
    passed              INTEGER NOT NULL,
    output              $TEXT NOT NULL,
    reported_at         BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, commit_id)
);

-- Crews: whether each is up, and how many members were asked for by hand.
CREATE TABLE crews (
    workspace_id        $ID NOT NULL,
    name                $TEXT NOT NULL,
    is_up               INTEGER NOT NULL,
    count               BIGINT,
    reason              $TEXT,
    updated_at          BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, name)
);

-- Members of crews: how often each was begun afresh.
CREATE TABLE crew_members (
    workspace_id        $ID NOT NULL,
    crew                $TEXT NOT NULL,
    member              $TEXT NOT NULL,
    generation          BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, crew, member)
);

-- Keys are never given out twice, also when their task was purged.
CREATE TABLE task_numbers (
    workspace_id    $ID PRIMARY KEY,
    last            BIGINT NOT NULL
);
