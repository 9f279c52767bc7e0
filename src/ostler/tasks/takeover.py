"""A person takes a task over: the session of its coding agent goes on in a terminal, and nothing else works on it.

While it is taken over the task is queued with an open wait, so that neither the queue nor a crew begins it. When it is
given back, what is in its workdir is checked and held for review; without changes its agent goes on. What a person
changes in the workdir of a completed task is handed in likewise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from ostler.agents.commandspec import HomeKind
from ostler.drivers import command_of, driver_of
from ostler.drivers.base import Driver, Order
from ostler.errors import InvalidOperationError
from ostler.home import HOMES
from ostler.model.access import Actor
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.task import Task, TaskState
from ostler.model.wait import Wait, WaitKind
from ostler.store import tasks as task_store
from ostler.store.queries import list_instances
from ostler.store.transaction import Reader, Transaction
from ostler.tasks.attempt import AttemptRules, finish
from ostler.tasks.context import TaskContext, environment_of, exists, workdir_of
from ostler.tasks.retry import new_wait
from ostler.workdirs.records import Workdir

_TAKEN = "taken"
_REASON = "it is taken over by hand"
#: Programs name their session in one of their first lines.
_FIRST_LINES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSession:
    """The session of a coding agent, as a person can open it."""

    task: Task
    instance_id: UUID
    session: str
    #: The workdir, in which it is to be opened.
    path: str
    argv: tuple[str, ...]
    #: Variables that it needs beside those of the person's shell.
    environment: Mapping[str, str]


class TakenRules(AttemptRules):
    """The end of an attempt that a person has worked on: there is no agent to start or to wait for."""

    async def work(self, task: Task) -> Task:
        workdir = self.tasks.active[task.key] = require_workdir(task)
        answer = {"summary": task.summary, "session": task.session, "session_usage": task.session_usage}
        return await finish(self, task, workdir, answer)


def require_workdir(task: Task) -> Workdir:
    workdir = workdir_of(task)
    if workdir is not None and exists(workdir):
        return workdir
    if task.vault is not None:
        raise InvalidOperationError(f"the worktree of {task.key} is in the vault; `ostler unretire {task.key}` first")
    where = "it has none yet" if workdir is None else f"{workdir.path} is gone"
    raise InvalidOperationError(f"{task.key} has no worktree to work in: {where}")


async def find_session(tasks: TaskContext, task: Task) -> AgentSession:
    """Raises `InvalidOperationError` where there is none that a person could open."""
    workdir, instance = require_workdir(task), await _last_agent(tasks, task)
    manifest = await tasks.manager.definition(instance.definition_id)
    driver, command = driver_of(manifest), command_of(manifest)
    other = f"`ostler shell {task.key}` opens its worktree"
    if driver is None or command is None:
        raise InvalidOperationError(f"{manifest.name}, which works on {task.key}, keeps no session; {other}")
    session = task.session or await _session_in_log(tasks, instance, driver)
    if session is None:
        raise InvalidOperationError(f"{instance.name} has not named its session yet; try again, or {other}")
    env = dict((instance.spawn_options.env if instance.spawn_options is not None else None) or {})
    env.pop("PATH", None)  # the person's own is the longer one
    private = tasks.home / HOMES / str(task.task_id) if command.home is HomeKind.PRIVATE else None
    if private is not None:
        env["HOME"] = str(private)
    order = Order(
        program=command.argv[0], model=task.model or command.model, session=session, env=env, private_home=private
    )
    return AgentSession(
        task=task,
        instance_id=instance.instance_id,
        session=session,
        path=workdir.path,
        argv=tuple(driver.session_argv(order)),
        environment={**env, **environment_of(task)},
    )


async def _last_agent(tasks: TaskContext, task: Task) -> AgentInstance:
    of_task = GetInstancesFilter(task_id=task.task_id, include_terminated=True, limit=1000)
    names = {f"{task.key}-{attempt}" for attempt in range(1, task.attempt + 1)}
    for instance in await tasks.store.read(list_instances, of_task, task.workspace_id):  # the newest first
        if instance.name in names:
            return instance
    raise InvalidOperationError(f"no agent has worked on {task.key} yet; it is {task.state}")


async def _session_in_log(tasks: TaskContext, instance: AgentInstance, driver: Driver) -> str | None:
    reader, numbers = driver.reader(), itertools.count(1)
    async for line in tasks.manager.log(instance.instance_id, raw=True):
        reader.feed(line.text)
        if reader.session is not None or next(numbers) >= _FIRST_LINES:
            break
    return reader.session


def take(tx: Transaction, tasks: TaskContext, session: AgentSession, *, by: Actor) -> tuple[Task, Task]:
    """The task before and after; what was taken over already stays so."""
    task = task_store.require_task(tx, session.task.workspace_id, session.task.key)
    if task.is_finished:
        raise InvalidOperationError(f"{task.key} is {task.state}; only unfinished work can be taken over")
    if taken_wait(tx, task) is not None:
        return task, task
    changes = {"session": session.session}
    after = task_store.change_task(
        tx, task, changes, to=TaskState.QUEUED, by=by, reason="taken over by hand", act="task.take_over"
    )
    detail = {"cause": _TAKEN, "from": task.state, "instance": str(session.instance_id)}
    task_store.open_task_wait(tx, after, new_wait(tasks, after, WaitKind.RESUME, _REASON, detail=detail), by=by)
    return task, after


def taken_wait(reader: Reader, task: Task) -> Wait | None:
    """The wait that says that a person has it; None where no person has."""
    waits = task_store.task_waits(reader, task.task_id)
    return next((wait for wait in waits if wait.kind is WaitKind.RESUME and (wait.detail or {}).get("cause")), None)


def require_taken(reader: Reader, task: Task) -> Wait:
    wait = taken_wait(reader, task)
    if wait is None:
        raise InvalidOperationError(f"{task.key} is not taken over; it is {task.state}")
    return wait


async def is_to_hand_in(tasks: TaskContext, task: Task, wait: Wait) -> bool:
    """What was completed before is proven anew; anything else where there is something to prove."""
    workdir = workdir_of(task)
    if workdir is None or not exists(workdir):
        return False
    if (wait.detail or {}).get("from") == TaskState.COMPLETED:
        return True
    return bool((await tasks.workdirs.snapshot(workdir, f"{task.key}: {task.title}")).files)


def give_back(tx: Transaction, old: Task, *, hands_in: bool, by: Actor) -> Task:
    """To the queue; or, to hand it in, as an attempt of its own, whose checks are not those of the last."""
    task = task_store.require_task(tx, old.workspace_id, old.key)
    wait = require_taken(tx, task)
    task_store.end_task_wait(tx, wait, "given back", by=by)
    if not hands_in:
        return task_store.change_task(tx, task, {"is_held": False}, by=by, act="task.give_back")
    instance = UUID(str((wait.detail or {})["instance"]))
    return _begin(tx, task, instance, by=by, reason="given back by hand", act="task.give_back")


def _begin(tx: Transaction, queued: Task, instance: UUID | None, *, by: Actor, reason: str, act: str) -> Task:
    changes = {"attempt": queued.attempt + 1, "instance_id": instance, "is_held": False, "crew": None, "member": None}
    return task_store.change_task(tx, queued, changes, to=TaskState.RUNNING, by=by, reason=reason, act=act)


# --- handed in by hand -------------------------------------------------------------------------------


def require_completed(reader: Reader, task: Task) -> None:
    """Raises `InvalidOperationError` where nothing can be handed in."""
    if task.state is TaskState.COMPLETED:
        return
    if task.state is TaskState.RUNNING:
        why = "is running; what is in its worktree is taken in when its agent ends"
    elif taken_wait(reader, task) is not None:
        why = "is taken over by hand; it is handed in when the session is left"
    else:
        why = f"is {task.state}; only a completed task is handed in"
    raise InvalidOperationError(f"{task.key} {why}")


async def has_changed(tasks: TaskContext, task: Task) -> bool:
    """Whether its workdir is not as it was handed in."""
    workdir = require_workdir(task)
    if task.crew is not None:  # the directory of a member, also of a crew that is gone
        tasks.workdirs.allow(Path(workdir.path).parent)
    snapshot = await tasks.workdirs.snapshot(workdir, f"{task.key}: {task.title}")
    return snapshot.commit != (task.snapshot or {}).get("commit")


def hand_in(tx: Transaction, old: Task, *, by: Actor) -> Task:
    """As an attempt of its own, of the agent that worked on it last."""
    task = task_store.require_task(tx, old.workspace_id, old.key)
    require_completed(tx, task)
    reason = "changed by hand"
    queued = task_store.change_task(tx, task, to=TaskState.QUEUED, by=by, reason=reason)
    return _begin(tx, queued, task.instance_id, by=by, reason=reason, act="task.hand_in")
