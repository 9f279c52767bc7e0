DELETE FROM counters WHERE name LIKE 'ended.%' OR name LIKE 'task.%'
    OR name IN ('ended_us', 'task_nanodollars', 'task_turned_down', 'task_timed', 'task_us');
DROP INDEX idx_tasks_open;
