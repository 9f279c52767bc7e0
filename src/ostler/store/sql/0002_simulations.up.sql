-- Turn-based populations: a row per run and a row per complete turn. The tokens are those of 0001.

CREATE TABLE simulation_runs (
    id              $ID PRIMARY KEY,
    workspace_id    $ID NOT NULL,
    name            $TEXT NOT NULL,
    state           $TEXT NOT NULL,     -- open, ended, removing
    outcome         $TEXT,
    turn            BIGINT NOT NULL,    -- the last complete one
    digest          $TEXT NOT NULL,     -- SHA-256 of the history up to that turn
    settings_json   $TEXT NOT NULL,
    scenario_json   $TEXT,
    parent_id       $ID,
    forked_at       BIGINT,
    created_at      BIGINT NOT NULL,
    updated_at      BIGINT NOT NULL
);
CREATE INDEX idx_simulation_runs_all ON simulation_runs (workspace_id, id);
CREATE INDEX idx_simulation_runs_parent ON simulation_runs (parent_id) WHERE parent_id IS NOT NULL;

-- Written once. Rows are large, so SQLite keeps them in an ordinary table.
CREATE TABLE simulation_turns (
    run_id          $ID NOT NULL,
    turn            BIGINT NOT NULL,
    core            $TEXT NOT NULL,     -- what equal histories agree in
    notes           $TEXT,              -- words of errors
    digest          $TEXT NOT NULL,     -- of the digest before and of the core
    PRIMARY KEY (run_id, turn)
);

-- The whole state at the first turn of a run and every so many turns.
CREATE TABLE simulation_wholes (
    run_id          $ID NOT NULL,
    turn            BIGINT NOT NULL,
    digest          $TEXT NOT NULL,     -- that of the turn
    body            $TEXT NOT NULL,
    seal            $TEXT NOT NULL,     -- SHA-256 of turn, digest and body
    PRIMARY KEY (run_id, turn)
);
