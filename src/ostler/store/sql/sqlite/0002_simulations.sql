-- 0002: simulations. One row per run, and one per turn that it has completed.

CREATE TABLE simulation_runs (
    id              BLOB PRIMARY KEY,
    workspace_id    BLOB NOT NULL,
    name            TEXT NOT NULL,
    seed            INTEGER NOT NULL,
    state           TEXT NOT NULL,
    turn            INTEGER NOT NULL,  -- the last that is complete; its row is in simulation_turns
    parent_id       BLOB,
    forked_at       INTEGER,
    outcome         TEXT,
    digest          TEXT NOT NULL,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    version         INTEGER NOT NULL,
    settings_json   TEXT NOT NULL,
    scenario_json   TEXT
);
CREATE INDEX idx_simulation_runs_all ON simulation_runs (workspace_id, id);

-- Written once. The body is the last column, so that what stands before it is read without it.
CREATE TABLE simulation_turns (
    run_id          BLOB NOT NULL REFERENCES simulation_runs (id),
    turn            INTEGER NOT NULL,
    whole           INTEGER NOT NULL,  -- the body holds the complete state, not only what changed
    digest          TEXT NOT NULL,
    occurred_at     INTEGER NOT NULL,
    body            TEXT NOT NULL,
    PRIMARY KEY (run_id, turn)
);
CREATE INDEX idx_simulation_turns_whole ON simulation_turns (run_id, turn) WHERE whole = 1;
