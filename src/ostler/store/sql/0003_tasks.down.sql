DROP TABLE crew_members;
DROP TABLE crews;
DROP TABLE ci_results;
DROP TABLE pull_requests;
DROP TABLE iterations;
DROP TABLE task_numbers;
DROP TABLE tasks;
