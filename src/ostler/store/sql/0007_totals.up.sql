-- Totals of what has ended, so that statistics and lists do not grow with the record; see store/totals.py.
CREATE INDEX idx_tasks_open ON tasks (workspace_id, id) WHERE state NOT IN ('accepted', 'rejected');

INSERT INTO counters (workspace_id, name, value)
    SELECT workspace_id, 'ended.' || state || '.' || health_state, count(*) FROM agent_instances
    WHERE active = 0 GROUP BY workspace_id, state, health_state;
INSERT INTO counters (workspace_id, name, value)
    SELECT workspace_id, 'ended_us', sum(CASE WHEN terminated_at - created_at > downtime_us
                                              THEN terminated_at - created_at - downtime_us ELSE 0 END)
    FROM agent_instances WHERE active = 0 GROUP BY workspace_id;

INSERT INTO counters (workspace_id, name, value)
    SELECT workspace_id, 'task.' || state, count(*) FROM tasks
    WHERE state IN ('accepted', 'rejected') GROUP BY workspace_id, state;
INSERT INTO counters (workspace_id, name, value)
    SELECT workspace_id, 'task_nanodollars', sum(CAST(round(coalesce(cost_usd, 0) * 1000000000) AS BIGINT)) FROM tasks
    WHERE state IN ('accepted', 'rejected') GROUP BY workspace_id;
INSERT INTO counters (workspace_id, name, value)
    SELECT workspace_id, 'task_turned_down', count(*) FROM tasks
    WHERE state = 'rejected' AND completed_at IS NOT NULL GROUP BY workspace_id;
INSERT INTO counters (workspace_id, name, value)
    SELECT workspace_id, 'task_timed', count(*) FROM tasks
    WHERE state IN ('accepted', 'rejected') AND completed_at IS NOT NULL AND started_at IS NOT NULL
    GROUP BY workspace_id;
INSERT INTO counters (workspace_id, name, value)
    SELECT workspace_id, 'task_us', sum(completed_at - started_at) FROM tasks
    WHERE state IN ('accepted', 'rejected') AND completed_at IS NOT NULL AND started_at IS NOT NULL
    GROUP BY workspace_id;
