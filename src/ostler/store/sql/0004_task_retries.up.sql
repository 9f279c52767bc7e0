-- How long a task waits after a failed attempt, and how many attempts in a row were lost with their machine.
ALTER TABLE tasks ADD COLUMN backoff_us BIGINT NOT NULL DEFAULT 30000000;
ALTER TABLE tasks ADD COLUMN lost BIGINT NOT NULL DEFAULT 0;
