"""Level process: each agent is a process tree of its own, held by a keeper that outlives the manager."""
