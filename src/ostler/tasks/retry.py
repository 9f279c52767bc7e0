"""What becomes of a task whose attempt did not work: it waits and is tried again, or it is parked for a person."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ostler.home import LOGS
from ostler.model.query import GetInstancesFilter
from ostler.model.spawn import RestartPolicy
from ostler.model.states import RestartPolicyType
from ostler.model.task import Task, TaskState
from ostler.model.text import MAX_REASON, clipped
from ostler.model.wait import Wait, WaitKind
from ostler.policy.restart import backoff
from ostler.store import attempts as attempt_store
from ostler.store import tasks as task_store
from ostler.store.queries import list_instances
from ostler.store.transaction import Reader, Transaction
from ostler.tasks.context import BY, MAX_LOST, TaskContext

MAX_BACKOFF = timedelta(minutes=10)
_MAX_TEXT = 20_000
_MAX_COMMENTS = 20
#: Instances that the evidence names.
_MAX_EVIDENCE = 20


async def fail_attempt(tasks: TaskContext, task: Task, error: str, *, is_last: bool = False) -> Task:
    """Back to the queue with what went wrong, and tried again after its backoff; parked by the last failure."""
    if task.state is not TaskState.RUNNING:
        return task
    failures = task.failures + 1
    if is_last or failures >= task.max_failures:
        times = "once" if failures == 1 else f"{failures} times"
        reason = f"failed {times}, at last: {first_line(error)}"
        return await park(tasks, task.evolve(failures=failures), reason, error, cause="max_failures")
    # The next attempt begins afresh; only one that waits goes on in its session.
    changes = {
        "failures": failures,
        "error": clipped(error, _MAX_TEXT),
        "session": None,
        "comments": (*task.comments, clipped(error, _MAX_TEXT))[-_MAX_COMMENTS:],
    }
    delay = retry_delay(task.backoff, failures, tasks.chance)
    waits = []
    if delay:
        reason = f"attempt {task.attempt} failed ({failures} of {task.max_failures}): {first_line(error)}"
        waits = [new_wait(tasks, task, WaitKind.BACKOFF, reason, due_at=tasks.manager.now() + delay)]
    return await queue_with_waits(tasks, task, changes, waits, error)


def retry_delay(first: timedelta, failures: int, chance: random.Random) -> timedelta:
    """Before the next attempt: doubled with each failure after the first, with jitter."""
    policy = RestartPolicy(
        type=RestartPolicyType.EXPONENTIAL, initial_delay=first, max_delay=MAX_BACKOFF, backoff_multiplier=2.0
    )
    return backoff(policy, failures, chance)


async def lose_attempt(tasks: TaskContext, task: Task, error: str) -> Task:
    """Its agent ended with the machine: back to the queue without a failure, and parked when that repeats."""
    if task.state is not TaskState.RUNNING:
        return task
    lost = task.lost + 1
    if lost > MAX_LOST:
        return await park(tasks, task, f"lost {lost} times in a row, at last: {first_line(error)}", error, cause="lost")
    changes = {"lost": lost, "error": clipped(error, _MAX_TEXT), "session": None}
    return await queue_with_waits(tasks, task, changes, [], f"attempt {task.attempt} was lost: {first_line(error)}")


async def park(tasks: TaskContext, task: Task, reason: str, error: str, *, cause: str) -> Task:
    """Back to the queue with a wait for a person, who finds the evidence in it and releases or rejects the task."""
    text = clipped(error, _MAX_TEXT)
    # A person who releases it gives it all its failures again.
    changes = {
        "failures": 0,
        "lost": 0,
        "error": text,
        "session": None,
        "comments": (*task.comments, text)[-_MAX_COMMENTS:],
    }
    evidence = await tasks.store.read(_evidence, tasks.home, task)
    detail = {"cause": cause, "error": text, "failures": task.failures, "attempts": evidence}
    reason = f"{reason}; go on: ostler task requeue {task.key}"
    wait = new_wait(tasks, task, WaitKind.HUMAN, reason, detail=detail)
    return await queue_with_waits(tasks, task, changes, [wait], f"parked: {reason}")


def _evidence(reader: Reader, home: Path, task: Task) -> list[dict[str, Any]]:
    """Of each instance that worked on it, the oldest first: its name, how it ended, where its log is."""
    entries = []
    newest = GetInstancesFilter(task_id=task.task_id, include_terminated=True, limit=_MAX_EVIDENCE)
    for instance in reversed(list_instances(reader, newest, task.workspace_id)):
        last = attempt_store.get_attempt(reader, instance.instance_id, instance.attempt)
        entry = {
            "name": instance.name,
            "member": instance.agent_id,
            "generation": instance.generation or None,
            "outcome": None if last is None or last.outcome is None else str(last.outcome),
            "error": clipped((last.detail if last is not None else None) or instance.error_message or "", 2000) or None,
            "log": str(home / LOGS / str(instance.instance_id)),
        }
        entries.append({name: value for name, value in entry.items() if value is not None})
    return entries


async def requeue(tasks: TaskContext, task: Task, changes: dict[str, Any], reason: str) -> Task:
    return await queue_with_waits(tasks, task, changes, [], reason)


async def queue_with_waits(
    tasks: TaskContext, task: Task, changes: dict[str, Any], waits: Sequence[Wait | None], reason: str
) -> Task:
    """Back to the queue; it is not claimed while one of these waits is open. One commit."""
    if task.state is not TaskState.RUNNING:
        return task
    changes = {"lost": 0, **changes}  # only attempts that are lost in a row count
    return await tasks.store.run(_queue_with_waits, task, changes, tuple(wait for wait in waits if wait), reason)


def _queue_with_waits(tx: Transaction, task: Task, changes: dict[str, Any], waits: Sequence[Wait], reason: str) -> Task:
    changed = task_store.change_task(tx, task, changes, to=TaskState.QUEUED, by=BY, reason=reason)
    for wait in waits:
        task_store.open_task_wait(tx, changed, wait)
    return changed


def new_wait(tasks: TaskContext, task: Task, kind: WaitKind, reason: str, **more: Any) -> Wait:
    return Wait(
        wait_id=tasks.manager.new_id(),
        workspace_id=task.workspace_id,
        kind=kind,
        task_id=task.task_id,
        reason=clipped(reason, MAX_REASON),
        created_at=tasks.manager.now(),
        **more,
    )


def first_line(error: str) -> str:
    lines = error.strip().splitlines() or ["no reason was given"]
    return lines[0].removesuffix("; its last lines:").removesuffix(":")
