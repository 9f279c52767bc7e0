CREATE TABLE crews_of_home (
    workspace_id        $ID NOT NULL,
    name                $TEXT NOT NULL,
    is_up               INTEGER NOT NULL,
    count               BIGINT,
    reason              $TEXT,
    updated_at          BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, name)
);
INSERT INTO crews_of_home (workspace_id, name, is_up, count, reason, updated_at)
    SELECT workspace_id, name, is_up, count, reason, updated_at FROM crews WHERE project = '';
DROP TABLE crews;
ALTER TABLE crews_of_home RENAME TO crews;

CREATE TABLE members_of_home (
    workspace_id        $ID NOT NULL,
    crew                $TEXT NOT NULL,
    member              $TEXT NOT NULL,
    generation          BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, crew, member)
);
INSERT INTO members_of_home (workspace_id, crew, member, generation)
    SELECT workspace_id, crew, member, generation FROM crew_members WHERE project = '';
DROP TABLE crew_members;
ALTER TABLE members_of_home RENAME TO crew_members;

ALTER TABLE tasks DROP COLUMN port;
ALTER TABLE tasks DROP COLUMN is_set_up;
ALTER TABLE tasks DROP COLUMN setup;
ALTER TABLE tasks DROP COLUMN project;
ALTER TABLE agent_instances DROP COLUMN project;
