-- Named queries, shared by SQLite and PostgreSQL. `:name` and `?` are parameters (by place
-- where rows are written by the batch); {true} is filled per dialect.

-- name: head
-- Where the store stands.
SELECT commit_number, sequence, horizon, epoch FROM store_head WHERE id = 1;

-- name: save_head
-- Condition: nobody else has committed since it was read.
UPDATE store_head
SET commit_number = ?, sequence = ?, horizon = ?, epoch = ?
WHERE id = 1 AND commit_number = ?;

-- name: insert_event
INSERT INTO agent_instance_events
    (sequence, id, workspace_id, instance_id, task_id, event_type, event_data_json, occurred_at, correlation_id)
VALUES
    (?, ?, ?, ?, ?, ?, ?, ?,
     ?);

-- name: insert_audit
INSERT INTO audit
    (workspace_id, number, occurred_at, actor, action, subject, outcome, detail, correlation_id, sequence,
     previous_hash, hash)
VALUES
    (?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
     ?, ?);

-- name: insert_instance_tag
INSERT INTO agent_instance_tags (instance_id, tag, workspace_id, active)
VALUES (?, ?, ?, ?);

-- name: activate_instance_tags
UPDATE agent_instance_tags SET active = ? WHERE instance_id = ?;

-- name: delete_instance_tags
DELETE FROM agent_instance_tags WHERE instance_id = ?;

-- name: insert_task_tag
INSERT INTO task_tags (task_id, tag, workspace_id) VALUES (?, ?, ?);

-- name: delete_task_tags
DELETE FROM task_tags WHERE task_id = ?;

-- name: insert_task_dependency
INSERT INTO task_dependencies (task_id, depends_on) VALUES (?, ?);

-- name: delete_task_dependencies
DELETE FROM task_dependencies WHERE task_id = ?;

-- name: quota
-- The conditional write of the quota: no row changes unless there is room.
UPDATE workspace_ledgers SET active = active + ?
WHERE workspace_id = ? AND active = ? AND active + ? <= ?;

-- name: prune_events
DELETE FROM agent_instance_events WHERE sequence <= ?;

-- name: prune_audit
DELETE FROM audit WHERE number <= ? AND workspace_id = ?;

-- name: delete_turns
DELETE FROM simulation_turns WHERE run_id = ?;

-- name: prune_turns
DELETE FROM simulation_turns WHERE turn >= ? AND run_id = ?;

-- name: events_all
SELECT sequence, id, workspace_id, instance_id, task_id, event_type, event_data_json, occurred_at, correlation_id
FROM agent_instance_events
WHERE sequence > :after ORDER BY sequence LIMIT :limit;

-- name: events_of_workspace
SELECT sequence, id, workspace_id, instance_id, task_id, event_type, event_data_json, occurred_at, correlation_id
FROM agent_instance_events
WHERE workspace_id = :workspace_id AND sequence > :after ORDER BY sequence LIMIT :limit;

-- name: events_of_instance
SELECT sequence, id, workspace_id, instance_id, task_id, event_type, event_data_json, occurred_at, correlation_id
FROM agent_instance_events
WHERE instance_id = :instance_id AND sequence > :after ORDER BY sequence LIMIT :limit;

-- name: audit_entries
SELECT workspace_id, number, occurred_at, actor, action, subject, outcome, detail, correlation_id, sequence,
       previous_hash, hash
FROM audit WHERE workspace_id = :workspace_id AND number > :after ORDER BY number LIMIT :limit;

-- name: next_chain
-- The first workspace from :first on that there is any trace of; each part is one step into an index.
SELECT workspace_id FROM
    (SELECT * FROM (SELECT id AS workspace_id FROM workspaces WHERE id >= :first ORDER BY id LIMIT 1) AS spaces
     UNION ALL
     SELECT * FROM (SELECT workspace_id FROM workspace_ledgers WHERE workspace_id >= :first
                    ORDER BY workspace_id LIMIT 1) AS ledgers
     UNION ALL
     SELECT * FROM (SELECT workspace_id FROM audit WHERE workspace_id >= :first
                    ORDER BY workspace_id LIMIT 1) AS entries) AS traces
ORDER BY workspace_id LIMIT 1;

-- name: event_before
-- The last of the oldest events, at most :limit of them, before the first that is to be kept.
SELECT coalesce(
    (SELECT min(sequence) - 1 FROM
        (SELECT sequence, occurred_at FROM agent_instance_events ORDER BY sequence LIMIT :limit) AS young
     WHERE occurred_at >= :moment),
    (SELECT max(sequence) FROM
        (SELECT sequence FROM agent_instance_events ORDER BY sequence LIMIT :limit) AS old),
    0) AS last;

-- name: audit_before
SELECT coalesce(
    (SELECT min(number) - 1 FROM
        (SELECT number, occurred_at FROM audit WHERE workspace_id = :workspace_id
         ORDER BY number LIMIT :limit) AS young
     WHERE occurred_at >= :moment),
    (SELECT max(number) FROM
        (SELECT number FROM audit WHERE workspace_id = :workspace_id ORDER BY number LIMIT :limit) AS old),
    0) AS last;

-- name: attempts_of_instance
SELECT * FROM attempts WHERE instance_id = :instance_id AND number > :number ORDER BY number LIMIT :limit;

-- name: attempts_open
SELECT * FROM attempts WHERE ended_at IS NULL ORDER BY instance_id, number LIMIT :limit;

-- name: attempts_open_after
SELECT * FROM attempts WHERE ended_at IS NULL AND (instance_id, number) > (:instance_id, :number)
ORDER BY instance_id, number LIMIT :limit;

-- name: due_instances
-- What waits for a restart or a resume is not due, however long ago it failed; nor is one that was started and
-- whose end nobody has seen.
SELECT id FROM agent_instances
WHERE terminated_at IS NOT NULL AND terminated_at <= :until
  AND NOT EXISTS (SELECT 1 FROM waits WHERE waits.instance_id = agent_instances.id AND waits.ended_at IS NULL)
  AND NOT EXISTS (SELECT 1 FROM attempts WHERE attempts.instance_id = agent_instances.id
                  AND attempts.ended_at IS NULL AND attempts.identity_json IS NOT NULL)
ORDER BY terminated_at, id LIMIT :limit;

-- name: due_tasks
-- What another task still needs, or something still waits about, is not due.
SELECT id FROM tasks WHERE state IN ('accepted', 'rejected') AND updated_at <= :until
  AND NOT EXISTS (SELECT 1 FROM task_dependencies AS d JOIN tasks AS other ON other.id = d.task_id
                  WHERE d.depends_on = tasks.id AND other.state NOT IN ('accepted', 'rejected'))
  AND NOT EXISTS (SELECT 1 FROM waits WHERE waits.task_id = tasks.id AND waits.ended_at IS NULL)
ORDER BY updated_at, id LIMIT :limit;

-- name: due_waits
SELECT id FROM waits WHERE ended_at IS NOT NULL AND ended_at <= :until ORDER BY ended_at, id LIMIT :limit;

-- name: due_answers
SELECT workspace_id, key FROM idempotency_keys WHERE created_at <= :until
ORDER BY created_at, workspace_id, key LIMIT :limit;

-- name: token_by_hash
SELECT * FROM tokens WHERE token_hash = :token_hash;

-- name: totals
-- A workspace beside its ledger, which is not there before the first entry; no column has the same name in both.
SELECT * FROM workspaces LEFT JOIN workspace_ledgers ON workspace_ledgers.workspace_id = workspaces.id
WHERE workspaces.id = :workspace_id;

-- name: runs_of_workspace
SELECT * FROM simulation_runs WHERE workspace_id = :workspace_id ORDER BY id DESC LIMIT :limit;

-- name: runs_of_workspace_before
SELECT * FROM simulation_runs WHERE workspace_id = :workspace_id AND id < :before ORDER BY id DESC LIMIT :limit;

-- name: turns_of_run
SELECT * FROM simulation_turns WHERE run_id = :run_id AND turn > :after ORDER BY turn LIMIT :limit;

-- name: whole_turn
SELECT * FROM simulation_turns
WHERE run_id = :run_id AND whole = {true} AND turn <= :until ORDER BY turn DESC LIMIT 1;

-- Fragments of the filters. The builder joins those that a filter needs.

-- name: filter_active
i.active = {true}

-- name: filter_state
i.state = :state

-- name: filter_health
i.health_state = :health_state

-- name: filter_definition
i.definition_id = :definition_id

-- name: filter_owner
i.owner_id = :owner_id

-- name: filter_name
i.name_key LIKE :name_pattern ESCAPE '\'

-- name: filter_name_from
i.name_key >= :name_from

-- name: filter_name_until
i.name_key < :name_until

-- name: filter_created_from
i.created_at >= :created_from

-- name: filter_created_until
i.created_at < :created_until

-- name: filter_wait_instance
instance_id = :instance_id

-- name: filter_due_until
due_at <= :until

-- name: filter_dated_after
((due_at, id) > (:due_at, :id) OR due_at IS NULL)

-- name: filter_undated_after
(due_at IS NULL AND id > :id)
