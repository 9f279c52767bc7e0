-- The project that a record belongs to: its directory, or null for the project of the home.
ALTER TABLE agent_instances ADD COLUMN project $TEXT;
ALTER TABLE tasks ADD COLUMN project $TEXT;
-- The command line that prepares a worktree, whether it has run there, and the port that is leased to the task.
ALTER TABLE tasks ADD COLUMN setup $TEXT;
ALTER TABLE tasks ADD COLUMN is_set_up INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tasks ADD COLUMN port BIGINT;

-- Crews of one name in two projects are two crews; the project of the home is ''.
CREATE TABLE crews_of_projects (
    workspace_id        $ID NOT NULL,
    project             $TEXT NOT NULL,
    name                $TEXT NOT NULL,
    is_up               INTEGER NOT NULL,
    count               BIGINT,
    reason              $TEXT,
    updated_at          BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, project, name)
);
INSERT INTO crews_of_projects (workspace_id, project, name, is_up, count, reason, updated_at)
    SELECT workspace_id, '', name, is_up, count, reason, updated_at FROM crews;
DROP TABLE crews;
ALTER TABLE crews_of_projects RENAME TO crews;

CREATE TABLE members_of_projects (
    workspace_id        $ID NOT NULL,
    project             $TEXT NOT NULL,
    crew                $TEXT NOT NULL,
    member              $TEXT NOT NULL,
    generation          BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, project, crew, member)
);
INSERT INTO members_of_projects (workspace_id, project, crew, member, generation)
    SELECT workspace_id, '', crew, member, generation FROM crew_members;
DROP TABLE crew_members;
ALTER TABLE members_of_projects RENAME TO crew_members;
