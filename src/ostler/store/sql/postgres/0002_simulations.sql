-- 0002: simulations. One row per run, and one per turn that it has completed.

CREATE TABLE simulation_runs (
    id              UUID PRIMARY KEY,
    workspace_id    UUID NOT NULL,
    name            TEXT COLLATE "C" NOT NULL,
    seed            BIGINT NOT NULL,
    state           TEXT COLLATE "C" NOT NULL,
    turn            BIGINT NOT NULL,  -- the last that is complete; its row is in simulation_turns
    parent_id       UUID,
    forked_at       BIGINT,
    outcome         TEXT COLLATE "C",
    digest          TEXT COLLATE "C" NOT NULL,
    created_at      TIMESTAMPTZ NOT NULL,
    updated_at      TIMESTAMPTZ NOT NULL,
    version         BIGINT NOT NULL,
    settings_json   TEXT COLLATE "C" NOT NULL,
    scenario_json   TEXT COLLATE "C"
);
CREATE INDEX idx_simulation_runs_all ON simulation_runs (workspace_id, id);

-- Written once. The body is the last column, so that what stands before it is read without it.
CREATE TABLE simulation_turns (
    run_id          UUID NOT NULL REFERENCES simulation_runs (id),
    turn            BIGINT NOT NULL,
    whole           BOOLEAN NOT NULL,  -- the body holds the complete state, not only what changed
    digest          TEXT COLLATE "C" NOT NULL,
    occurred_at     TIMESTAMPTZ NOT NULL,
    body            TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (run_id, turn)
);
CREATE INDEX idx_simulation_turns_whole ON simulation_turns (run_id, turn) WHERE whole = TRUE;
