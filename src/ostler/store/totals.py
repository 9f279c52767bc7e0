"""Totals of what has ended, kept in the table `counters`: statistics look at the open rows and add these.

Each command that ends, revives or removes a row changes the totals in its own commit. Names have their parts between
dots: `ended.failed.healthy` counts instances, `task.accepted` counts tasks.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.model.task import Task, TaskState
from ostler.store.transaction import Transaction

#: Before the state and the health of ended instances.
ENDED = "ended."
#: Microseconds that they have lived.
ENDED_LIVED = "ended_us"
#: Before the state of finished tasks.
TASK = "task."
#: What they have cost, in billionths of a dollar: a sum of fractions would drift.
TASK_COST = "task_nanodollars"
NANODOLLARS = 1_000_000_000
#: Of those with a start and a completion, how many there are and how many microseconds they took.
TASK_TIMED, TASK_TOOK = "task_timed", "task_us"
#: Rejected after their completion, which a person did.
TASK_TURNED_DOWN = "task_turned_down"
_MICROSECOND = timedelta(microseconds=1)


def count_ended(tx: Transaction, key: Any, sign: int) -> None:
    """Add an ended instance as its row is now (1), or take it out before the row changes (-1)."""
    row = tx.fetch_one(
        """SELECT workspace_id, state, health_state, terminated_at - created_at - downtime_us FROM agent_instances
           WHERE id = :id AND active = 0""",
        id=key,
    )
    if row is not None:
        workspace_id, state, health, lived = row
        space = workspace_id if isinstance(workspace_id, UUID) else UUID(bytes=workspace_id)
        tx.count(space, {f"{ENDED}{state}.{health}": sign, ENDED_LIVED: sign * max(lived, 0)})


def count_task(tx: Transaction, before: Task | None, after: Task | None) -> None:
    """A task that was added, changed or deleted; one that is not finished counts nothing."""
    change = _totals(after)
    change.subtract(_totals(before))
    workspace_id = (before or after).workspace_id  # type: ignore[union-attr]  # one of them is a task
    tx.count(workspace_id, {name: value for name, value in change.items() if value})


def _totals(task: Task | None) -> Counter[str]:
    if task is None or not task.is_finished:
        return Counter()
    totals = Counter({f"{TASK}{task.state}": 1, TASK_COST: round((task.cost_usd or 0.0) * NANODOLLARS)})
    if task.completed_at is not None:
        totals[TASK_TURNED_DOWN] = int(task.state is TaskState.REJECTED)
        if task.started_at is not None:
            totals[TASK_TIMED] = 1
            totals[TASK_TOOK] = (task.completed_at - task.started_at) // _MICROSECOND
    return totals
