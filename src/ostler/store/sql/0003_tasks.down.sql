DROP TABLE task_numbers;
DROP TABLE tasks;
