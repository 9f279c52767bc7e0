"""Tasks: queued, claimed by exactly one attempt, moved by the table of legal moves, told to the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from ostler.errors import (
    ConflictError,
    InvalidOperationError,
    TaskNotFoundError,
    ValidationError,
    VersionConflictError,
)
from ostler.model.access import SYSTEM, Actor
from ostler.model.events import TaskStateChangedEvent, TaskWaitEndedEvent, TaskWaitOpenedEvent
from ostler.model.states import AgentPriority
from ostler.model.task import FINISHED_STATES, TASK_TRANSITIONS, Task, TaskFilter, TaskState, TaskStatistics
from ostler.model.text import clipped
from ostler.model.types import from_micros
from ostler.model.validation import Fault, fault
from ostler.model.wait import Wait, WaitKind
from ostler.store.idempotency import IdempotencyKey, find_answer, keep_answer
from ostler.store.loops import end_iteration
from ostler.store.queries import like_pattern
from ostler.store.record_table import RecordTable
from ostler.store.totals import (
    NANODOLLARS,
    TASK,
    TASK_COST,
    TASK_TIMED,
    TASK_TOOK,
    TASK_TURNED_DOWN,
    count_task,
)
from ostler.store.transaction import PAGE, Reader, Transaction
from ostler.store.waits import WAITS

TASKS = RecordTable(Task, "tasks", renamed={"task_id": "id"})
_RANK = {priority: rank for rank, priority in enumerate(AgentPriority)}
_MAX_REASON = 2000
_FINISHED = "('accepted', 'rejected')"


# --- looking -----------------------------------------------------------------------------------------


def get_task(reader: Reader, task_id: UUID) -> Task | None:
    return TASKS.read_one(reader.fetch_one(f"{TASKS.select} WHERE id = :id", id=task_id))


def find_task(reader: Reader, workspace_id: UUID, key: str) -> Task | None:
    """By its key, in any case."""
    row = reader.fetch_one(
        f"{TASKS.select} WHERE workspace_id = :space AND key IN (:key, :upper)",
        space=workspace_id,
        key=key,
        upper=key.upper(),
    )
    return TASKS.read_one(row)


def require_task(reader: Reader, workspace_id: UUID, key: str) -> Task:
    task = find_task(reader, workspace_id, key)
    if task is None:
        raise TaskNotFoundError(f"there is no task {key!a}; `ostler task list -a` lists all")
    return task


def list_tasks(reader: Reader, workspace_id: UUID, criteria: TaskFilter) -> list[Task]:
    """Newest first."""
    where = ["workspace_id = :workspace_id"]
    values: dict[str, Any] = {"workspace_id": workspace_id}
    equal: dict[str, Any] = {"state": criteria.state, "agent": criteria.agent}
    for name, value in equal.items():
        if value is not None:
            where.append(f"{name} = :{name}")
            values[name] = value
    if criteria.state is None and not criteria.include_finished:
        where.append(f"state NOT IN {_FINISHED}")
    if criteria.tag is not None:
        where.append("tags_json LIKE :tag ESCAPE '\\'")
        values["tag"] = f'%"{like_pattern(criteria.tag.lower())}"%'
    if criteria.text is not None:
        where.append("lower(task) LIKE :text ESCAPE '\\'")
        values["text"] = f"%{like_pattern(criteria.text)}%"
    if criteria.created_from is not None:
        where.append("created_at >= :created_from")
        values["created_from"] = criteria.created_from
    if criteria.created_until is not None:
        where.append("created_at < :created_until")
        values["created_until"] = criteria.created_until
    sql = f"{TASKS.select} WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT :limit OFFSET :offset"
    return TASKS.read(reader.fetch(sql, limit=criteria.limit, offset=criteria.offset, **values))


def tasks_in(reader: Reader, states: Collection[TaskState]) -> list[Task]:
    """Of all workspaces, oldest first."""
    names = ", ".join(f"'{state}'" for state in sorted(states))
    return TASKS.read(reader.fetch(f"{TASKS.select} WHERE state IN ({names}) ORDER BY id"))


def unfinished_task_ids(reader: Reader) -> set[UUID]:
    """Of all workspaces."""
    rows = reader.fetch(f"SELECT id FROM tasks WHERE state NOT IN {_FINISHED}")
    return {row_id if isinstance(row_id, UUID) else UUID(bytes=row_id) for (row_id,) in rows}


def tasks_to_recover(reader: Reader) -> list[Task]:
    """Those that run or have a workdir, of all workspaces, oldest first."""
    return TASKS.read(reader.fetch(f"{TASKS.select} WHERE state = 'running' OR workdir_json IS NOT NULL ORDER BY id"))


def finished_until(reader: Reader, moment: datetime) -> list[Task]:
    """Those that were accepted or rejected until then, of all workspaces, oldest first."""
    sql = f"{TASKS.select} WHERE state IN {_FINISHED} AND ended_at <= :moment ORDER BY id"
    return TASKS.read(reader.fetch(sql, moment=moment))


def task_places(reader: Reader) -> list[tuple[UUID, str, str | None]]:
    """Workspace and key of every task, and the key of its workdir. Without the rest of the rows, which is long."""
    rows = reader.fetch("SELECT workspace_id, key, workdir_json FROM tasks")
    return [
        (
            space if isinstance(space, UUID) else UUID(bytes=space),
            key,
            None if workdir is None else str(json.loads(workdir)["key"]),
        )
        for space, key, workdir in rows
    ]


class Reviewable(NamedTuple):
    """What a list of completed tasks needs of each."""

    task_id: UUID
    key: str
    title: str
    completed_at: datetime


def completed_tasks(reader: Reader, workspace_id: UUID, limit: int = PAGE) -> list[Reviewable]:
    """The oldest first, without what makes the records of tasks large."""
    rows = reader.fetch(
        """SELECT id, key, substr(task, 1, 1000), coalesce(completed_at, updated_at) FROM tasks
           WHERE workspace_id = :space AND state = 'completed' ORDER BY id LIMIT :limit""",
        space=workspace_id,
        limit=limit,
    )
    return [
        Reviewable(
            row_id if isinstance(row_id, UUID) else UUID(bytes=row_id),
            key,
            (text.strip().splitlines() or [""])[0][:200],
            from_micros(completed_at),
        )
        for row_id, key, text, completed_at in rows
    ]


def claimable_tasks(
    reader: Reader, workspace_id: UUID, limit: int = 100, *, selects: Callable[[Task], bool] = lambda _: True
) -> list[Task]:
    """Queued, not held, with no open wait, and all that they depend on accepted; the most urgent first."""
    rows = reader.fetch(
        f"""{TASKS.select} WHERE workspace_id = :space AND state = 'queued' AND is_held = 0
            AND NOT EXISTS (SELECT 1 FROM waits WHERE waits.task_id = tasks.id AND waits.ended_at IS NULL)
            ORDER BY rank DESC, id""",
        space=workspace_id,
    )
    tasks: list[Task] = []
    for task in TASKS.read(rows):
        if len(tasks) >= limit:
            break
        if selects(task) and not unmet(reader, task):
            tasks.append(task)
    return tasks


def unmet(reader: Reader, task: Task) -> dict[str, TaskState]:
    """The keys that it depends on and that are not accepted, with their states."""
    missing = {}
    for key in task.depends_on:
        row = reader.fetch_one(
            "SELECT state FROM tasks WHERE workspace_id = :space AND key = :key", space=task.workspace_id, key=key
        )
        # One that was purged had been accepted: a task that an unfinished one needs is not purged while it is rejected.
        if row is not None and row[0] != TaskState.ACCEPTED:
            missing[key] = TaskState(row[0])
    return missing


def dependents(reader: Reader, task: Task) -> list[Task]:
    """Unfinished tasks that need this one."""
    rows = reader.fetch(
        f"""{TASKS.select} WHERE workspace_id = :space AND state NOT IN {_FINISHED}
            AND depends_on_json LIKE :key ESCAPE '\\'""",
        space=task.workspace_id,
        key='%"' + task.key.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + '"%',
    )
    return [dependent for dependent in TASKS.read(rows) if task.key in dependent.depends_on]


def statistics(reader: Reader, workspace_id: UUID) -> TaskStatistics:
    """Of the open tasks from their rows, of the finished ones from the totals."""
    counters = reader.fetch("SELECT name, value FROM counters WHERE workspace_id = :space", space=workspace_id)
    totals: dict[str, int] = dict(counters)
    counts = {state: int(totals.get(f"{TASK}{state}", 0)) for state in TaskState}
    cost = totals.get(TASK_COST, 0) / NANODOLLARS
    timed, took = totals.get(TASK_TIMED, 0), totals.get(TASK_TOOK, 0)
    for state, count, spent, completed, lasted in reader.fetch(
        f"""SELECT state, count(*), sum(cost_usd), count(completed_at - started_at), sum(completed_at - started_at)
            FROM tasks WHERE workspace_id = :space AND state NOT IN {_FINISHED}
            GROUP BY {reader.filter_clause("state", first=False)}""",
        space=workspace_id,
    ):
        counts[TaskState(state)] += count
        cost += float(spent or 0.0)
        timed, took = timed + completed, took + int(lasted or 0)
    parked = reader.fetch_one(
        """SELECT count(*) FROM tasks WHERE workspace_id = :space AND state = 'queued' AND EXISTS (SELECT 1 FROM waits
           WHERE waits.task_id = tasks.id AND waits.ended_at IS NULL AND waits.kind = 'human')""",
        space=workspace_id,
    )
    reviewed = counts[TaskState.ACCEPTED] + totals.get(TASK_TURNED_DOWN, 0)
    return TaskStatistics(
        by_state=counts,
        parked=0 if parked is None else int(parked[0]),
        success_rate=counts[TaskState.ACCEPTED] / reviewed if reviewed else None,
        average_duration=timedelta(microseconds=took // timed) if timed else None,
        cost_usd=cost,
    )


# --- changing ----------------------------------------------------------------------------------------


def add_task(tx: Transaction, task: Task, *, by: Actor, key: IdempotencyKey | None = None) -> Task:
    """Queue it. An empty key gets the next number; the same idempotency key gets the task that it made."""
    tx.audit_refusal(task.workspace_id, by, "task.add", f"task:{task.key or 'new'}")
    earlier_key = find_answer(tx, task.workspace_id, key, "task.add")
    if earlier_key is not None:
        return require_task(tx, task.workspace_id, earlier_key)
    named = task if task.key else task.evolve(key=_next_key(tx, task.workspace_id))
    if tx.fetch_one(
        "SELECT 1 FROM tasks WHERE workspace_id = :space AND key = :key", space=task.workspace_id, key=named.key
    ):
        raise ConflictError(f"there is a task {named.key} already; choose another key, or leave it out")
    if named.parent is not None:
        require_task(tx, task.workspace_id, named.parent)
    needed = _require_dependencies(tx, named, named.depends_on)
    added = named.evolve(depends_on=needed, created_at=tx.now, updated_at=tx.now, created_by=by.name).checked()
    TASKS.insert(tx, added, rank=_RANK[added.priority])
    count_task(tx, None, added)
    _emit(tx, added, None, None, by)
    tx.audit(added.workspace_id, by, "task.add", f"task:{added.key}", detail=added.title)
    keep_answer(tx, added.workspace_id, key, "task.add", added.key)
    return added


def add_tasks(
    tx: Transaction, tasks: Sequence[Task], keys: Sequence[IdempotencyKey | None], *, by: Actor
) -> list[Task]:
    """Queue all of them or none, in this order: one may depend on another that stands before it."""
    added = []
    for number, (task, key) in enumerate(zip(tasks, keys, strict=True)):
        try:
            added.append(add_task(tx, task, by=by, key=key))
        except ValidationError as error:
            faults = [fault for fault in error.faults if isinstance(fault, Fault)]
            raise ValidationError([fault.under(f"tasks.{number}") for fault in faults]) from error
        except ConflictError as error:
            raise ValidationError([Fault(field=f"tasks.{number}.key", bound=f"cannot be used: {error}")]) from error
    return added


def _next_key(tx: Transaction, workspace_id: UUID) -> str:
    while True:
        rows = tx.fetch(
            """INSERT INTO task_numbers (workspace_id, last) VALUES (:space, 1)
               ON CONFLICT (workspace_id) DO UPDATE SET last = task_numbers.last + 1 RETURNING last""",
            space=workspace_id,
        )
        key = f"T{int(rows[0][0]):03d}"
        if not tx.fetch_one(
            "SELECT 1 FROM tasks WHERE workspace_id = :space AND key = :key", space=workspace_id, key=key
        ):
            return key


def _require_dependencies(tx: Transaction, task: Task, keys: Iterable[str]) -> tuple[str, ...]:
    """The keys as they are in the records, each once."""
    needed: dict[str, None] = {}
    for key in keys:
        dependency = find_task(tx, task.workspace_id, key)
        if dependency is None:
            raise fault("depends_on", "must be keys of tasks that exist; add those first", key)
        if dependency.state is TaskState.REJECTED:
            raise fault("depends_on", f"must not be a rejected task: {key} will never be accepted", key)
        _require_no_cycle(tx, task, dependency)
        needed[dependency.key] = None
    return tuple(needed)


def _require_no_cycle(tx: Transaction, task: Task, first: Task) -> None:
    seen: set[str] = set()
    waiting = [first]
    while waiting:
        dependency = waiting.pop()
        if dependency.key == task.key:
            raise fault("depends_on", f"must not lead back to {task.key}", first.key)
        if dependency.key not in seen:
            seen.add(dependency.key)
            following = (find_task(tx, task.workspace_id, key) for key in dependency.depends_on)
            waiting += [other for other in following if other is not None]


def lease_port(tx: Transaction, old: Task, candidates: Collection[int]) -> Task:
    """Give it the first of these ports that no other unfinished task has; it keeps its own where that is the one."""
    rows = tx.fetch(
        f"SELECT port FROM tasks WHERE port IS NOT NULL AND id <> :id AND state NOT IN {_FINISHED}", id=old.task_id
    )
    leased = {int(port) for (port,) in rows}
    port = next((port for port in candidates if port not in leased), None)
    if port is None:
        raise InvalidOperationError(f"there is no free port for {old.key}; finish tasks, or end what listens")
    return old if port == old.port else change_task(tx, old, {"port": port})


def claim_task(  # noqa: PLR0913 - a member of a crew, or a person, begins it
    tx: Transaction,
    old: Task,
    *,
    by: Actor = SYSTEM,
    crew: str | None = None,
    member: str | None = None,
    agent: str | None = None,
    over_backoff: bool = False,
) -> Task | None:
    """Begin its next attempt; None where it cannot be begun now, or another one was faster.

    A crew gives it to a member, whose definition is the agent from then on. A person may begin it before its backoff
    is over.
    """
    row = get_task(tx, old.task_id)
    if row is None or row.state is not TaskState.QUEUED or row.is_held:
        return None
    passed_over = {WaitKind.BACKOFF} if over_backoff else set()
    if unmet(tx, row) or any(wait.kind not in passed_over for wait in task_waits(tx, row.task_id)):
        return None
    changes = {
        "attempt": row.attempt + 1,
        "instance_id": None,
        "error": None,
        "started_at": row.started_at or tx.now,
        "crew": crew,
        "member": member,
        "agent": agent or row.agent,
    }
    return change_task(tx, row, changes, to=TaskState.RUNNING, by=by)


def change_task(  # noqa: PLR0913 - what is written with a change is one commit
    tx: Transaction,
    old: Task,
    changes: Mapping[str, Any] | None = None,
    *,
    to: TaskState | None = None,
    by: Actor = SYSTEM,
    reason: str | None = None,
    act: str | None = None,
) -> Task:
    """Compare the version, check the move, write it once with its event and, for an act, its audit entry."""
    if act is not None:
        tx.audit_refusal(old.workspace_id, by, act, f"task:{old.key}")
    moved: dict[str, Any] = {**(changes or {})}
    if to is not None and to is not old.state:
        if to not in TASK_TRANSITIONS[old.state]:
            raise InvalidOperationError(
                f"{old.key} is {old.state} and cannot become {to}", current=old.state, wanted=to
            )
        moved |= {"state": to, **_times(tx.now, to)}
    new = old.evolve(**moved, version=old.version + 1, updated_at=tx.now).checked()
    values = TASKS.encode(new)
    written = {name: value for name, value in values.items() if name not in {"id", "workspace_id", "key", "created_at"}}
    assignments = ", ".join(f"{name} = :{name}" for name in written)
    changed = tx.execute(
        f"UPDATE tasks SET {assignments}, rank = :rank WHERE id = :id AND version = :old_version",
        id=old.task_id,
        old_version=old.version,
        rank=_RANK[new.priority],
        **written,
    )
    if not changed:
        raise VersionConflictError(f"{old.key} was changed meanwhile; read it again and decide anew")
    count_task(tx, old, new)
    if new.state is not old.state or (old.is_held and not new.is_held):  # who works the queue has to be told of both
        _emit(tx, new, old.state, reason, by)
    if new.state is not old.state:
        end_task_waits(tx, new, f"task {new.state}")
        if old.state is TaskState.RUNNING:  # where its loop did not end the iteration, a person ended the work
            end_iteration(tx, new, "stopped", summary=reason)
    if act is not None:
        tx.audit(old.workspace_id, by, act, f"task:{old.key}", detail=reason)
    return new


def _times(now: datetime, to: TaskState) -> dict[str, Any]:
    if to in FINISHED_STATES:
        return {"ended_at": now}
    return {"ended_at": None, "completed_at": now if to is TaskState.COMPLETED else None}


def set_dependencies(tx: Transaction, old: Task, keys: tuple[str, ...], *, by: Actor) -> Task:
    return change_task(tx, old, {"depends_on": _require_dependencies(tx, old, keys)}, by=by)


def delete_task(tx: Transaction, task: Task, *, by: Actor) -> None:
    if not task.is_finished:
        raise InvalidOperationError(f"{task.key} is {task.state}; only an accepted or a rejected task can be deleted")
    if tx.execute("DELETE FROM tasks WHERE id = :id AND version = :version", id=task.task_id, version=task.version):
        count_task(tx, task, None)
    tx.execute("DELETE FROM waits WHERE task_id = :id", id=task.task_id)
    tx.audit(task.workspace_id, by, "task.purge", f"task:{task.key}")


def _emit(tx: Transaction, task: Task, before: TaskState | None, reason: str | None, by: Actor) -> None:
    event = TaskStateChangedEvent(
        workspace_id=task.workspace_id,
        version=task.version,
        task_id=task.task_id,
        key=task.key,
        previous_state=before,
        new_state=task.state,
        reason=None if reason is None else clipped(reason, _MAX_REASON),
        attempt=task.attempt,
        agent=task.agent,
        is_failure=_has_failed(task, before),
        instance_id=task.instance_id,
        crew=task.crew,
        member=task.member,
    )
    tx.emit(event, by)


def _has_failed(task: Task, before: TaskState | None) -> bool:
    """A claim clears the error, so one that is there was written by this attempt."""
    ends = before is TaskState.RUNNING and task.state is TaskState.QUEUED
    return ends and task.error is not None and not task.is_held and not task.lost


# --- waits -------------------------------------------------------------------------------------------


def open_task_wait(tx: Transaction, task: Task, wait: Wait, *, by: Actor = SYSTEM) -> Wait:
    """A queued task with an open wait is not claimed."""
    WAITS.insert(tx, wait)
    event = TaskWaitOpenedEvent(
        workspace_id=task.workspace_id,
        task_id=task.task_id,
        key=task.key,
        wait_id=wait.wait_id,
        kind=wait.kind,
        reason=wait.reason,
        due_at=wait.due_at,
        cause=(wait.detail or {}).get("cause"),
    )
    tx.emit(event, by)
    return wait


def task_waits(reader: Reader, task_id: UUID) -> list[Wait]:
    return WAITS.read(reader.fetch(f"{WAITS.select} WHERE task_id = :id AND ended_at IS NULL ORDER BY id", id=task_id))


def task_with_waits(reader: Reader, workspace_id: UUID, key: str) -> tuple[Task, list[Wait]]:
    """Read again where the task was changed in between, for its moves open and end waits."""
    task = require_task(reader, workspace_id, key)
    while True:
        waits, now = task_waits(reader, task.task_id), require_task(reader, workspace_id, key)
        if now.version == task.version:
            return now, waits
        task = now


def end_task_wait(
    tx: Transaction, wait: Wait, outcome: str, answer: Mapping[str, Any] | None = None, *, by: Actor = SYSTEM
) -> Wait:
    """Of two that end it one counts; the other gets `InvalidOperationError`."""
    changed = tx.execute(
        """UPDATE waits SET ended_at = :now, outcome = :outcome, answer_json = :answer
           WHERE id = :id AND ended_at IS NULL""",
        id=wait.wait_id,
        now=tx.now,
        outcome=outcome,
        answer=WAITS.dump("answer", answer),
    )
    if not changed:
        raise InvalidOperationError(f"the wait {wait.wait_id} has ended already; list the open ones")
    task = None if wait.task_id is None else get_task(tx, wait.task_id)
    if task is not None:
        event = TaskWaitEndedEvent(
            workspace_id=task.workspace_id,
            task_id=task.task_id,
            key=task.key,
            wait_id=wait.wait_id,
            kind=wait.kind,
            outcome=outcome,
        )
        tx.emit(event, by)
    return wait.evolve(ended_at=tx.now, outcome=outcome, answer=answer)


def release_task(tx: Transaction, task: Task, *, by: Actor) -> Task:
    """A queued task is kept back by nothing but what it depends on: neither held, nor parked, nor waiting."""
    for wait in task_waits(tx, task.task_id):
        end_task_wait(tx, wait, "released", by=by)
    return change_task(tx, task, {"is_held": False, "failures": 0, "lost": 0}, by=by, act="task.requeue")


def end_task_waits(tx: Transaction, task: Task, outcome: str) -> None:
    for wait in task_waits(tx, task.task_id):
        end_task_wait(tx, wait, outcome)
