"""One instance: the manager, and one task that owns each live instance.

Reading order: `manager` (the verbs), `instance` (the task), `table` (what every message does in every phase), then the
file of a verb: `start`, `calls`, `waits`, `pause`, `leave`, `recover`.
"""
