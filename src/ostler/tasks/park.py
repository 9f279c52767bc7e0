"""A task that no attempt could do is kept for a person, with the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ostler.isolation.process.logs import LOGS
from ostler.model.query import GetInstancesFilter
from ostler.model.task import Task, TaskState
from ostler.model.text import clipped
from ostler.model.wait import WaitKind
from ostler.store import attempts as attempt_rows
from ostler.store.queries import list_instances
from ostler.store.transaction import Reader
from ostler.tasks.attempt import new_wait, queue_with_waits
from ostler.tasks.shared import Tasks

_MAX_TEXT = 20_000
#: Instances that the evidence names.
_MAX_EVIDENCE = 20


async def park(tasks: Tasks, task: Task, error: str) -> Task:
    """Back to the queue with a wait for a person, who finds the evidence in it and releases or rejects the task."""
    if task.state is not TaskState.RUNNING:
        return task
    failures = task.failures + 1
    evidence = await tasks.store.read(_evidence, tasks.home, task)
    said = error.strip().splitlines() or ["no reason was given"]
    last = said[0].removesuffix("; its last lines:")
    tries = "once" if failures == 1 else f"{failures} times"
    reason = f"failed {tries}, at last: {last}; go on: ostler task requeue {task.key}"
    detail = {"error": clipped(error, _MAX_TEXT), "attempts": evidence}
    wait = new_wait(tasks, task, WaitKind.HUMAN, reason, detail=detail)
    # Who lets it go on gives it all its failures again.
    changes = {
        "failures": 0,
        "error": clipped(error, _MAX_TEXT),
        "session": None,
        "comments": (*task.comments, clipped(error, _MAX_TEXT))[-20:],
    }
    return await queue_with_waits(tasks, task, changes, [wait], f"parked: {reason}")


def _evidence(reader: Reader, home: Path, task: Task) -> list[dict[str, Any]]:
    """Of each instance that worked on it, the oldest first: who it was, how it ended, where its log is."""
    found = []
    for instance in reversed(list_instances(reader, _all_of(task), task.workspace_id)):
        last = attempt_rows.get_attempt(reader, instance.instance_id, instance.attempt)
        entry = {
            "name": instance.name,
            "member": instance.agent_id,
            "generation": instance.generation or None,
            "outcome": None if last is None or last.outcome is None else str(last.outcome),
            "error": clipped((last.detail if last is not None else None) or instance.error_message or "", 2000) or None,
            "log": str(home / LOGS / str(instance.instance_id)),
        }
        found.append({name: value for name, value in entry.items() if value is not None})
    return found


def _all_of(task: Task) -> GetInstancesFilter:
    return GetInstancesFilter(task_id=task.task_id, include_terminated=True, limit=_MAX_EVIDENCE)
