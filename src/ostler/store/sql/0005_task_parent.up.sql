-- The key of the task whose agent added it.
ALTER TABLE tasks ADD COLUMN parent $TEXT;
