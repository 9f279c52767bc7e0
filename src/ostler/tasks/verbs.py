"""The verbs on tasks: queue, run, review, retire."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from ostler.errors import (
    AgentNotFoundError,
    InvalidOperationError,
    NotFoundError,
    StoreError,
    ValidationError,
)
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.access import Permission
from ostler.model.events import TaskStateChangedEvent
from ostler.model.loop import TaskLoop
from ostler.model.states import AgentPriority
from ostler.model.task import MAX_COMMENT, Task, TaskFilter, TaskSettings, TaskState, TaskStatistics, TaskWhy
from ostler.model.validation import Fault, fault
from ostler.model.wait import Wait, WaitKind
from ostler.store import tasks as task_store
from ostler.store.idempotency import IdempotencyKey
from ostler.store.transaction import Transaction
from ostler.store.waits import get_wait
from ostler.tasks import attempt, retire, review, takeover
from ostler.tasks.context import TaskContext
from ostler.tasks.make_room import brake
from ostler.tasks.retry import new_wait
from ostler.tasks.takeover import AgentSession
from ostler.tasks.why import TaskFacts, explain_task, next_step, untaken
from ostler.workdirs.records import Accepted, Undone

_P = Permission
_NO = frozenset({"no", "n"})
#: A requeued task whose agent cannot be ended in this time is begun all the same; that ends what is left of it.
_END_LIMIT = timedelta(minutes=1)
#: Fields of a new task that are not of its request: a repeated request has others.
_MADE_HERE = frozenset({"task_id", "created_at", "updated_at"})


class TaskVerbs:
    """Tasks on behalf of the principal of a manager."""

    def __init__(
        self, manager: AgentLifecycleManager, *, settings: TaskSettings | None = None, shared: TaskContext | None = None
    ) -> None:
        self.manager = manager
        self.tasks = shared or TaskContext(manager, manager.require_home(), TaskSettings.coerced(settings))

    def acting_as(self, manager: AgentLifecycleManager) -> Self:
        """The same tasks on behalf of another principal."""
        return type(self)(manager, shared=self.tasks)

    # --- looking ---------------------------------------------------------------------------------

    async def get(self, key: str) -> Task:
        await self.manager.require(_P.TASKS_READ)
        return await self._load(key)

    async def list_tasks(self, criteria: TaskFilter | None = None) -> list[Task]:
        await self.manager.require(_P.TASKS_READ)
        chosen = (criteria or TaskFilter()).checked()
        return await self.manager.store.read(task_store.list_tasks, self._space, chosen)

    async def waits(self, key: str) -> list[Wait]:
        task = await self.get(key)
        return await self.manager.store.read(task_store.task_waits, task.task_id)

    async def look(self, key: str) -> tuple[Task, list[Wait]]:
        """A task and its open waits, both of one moment."""
        await self.manager.require(_P.TASKS_READ)
        return await self.manager.store.read(task_store.task_with_waits, self._space, key)

    async def unmet(self, task: Task) -> list[str]:
        """The keys that it still waits for."""
        return list(await self.manager.store.read(task_store.unmet, task))

    async def why(self, key: str) -> TaskWhy:
        """Why it is where it is, and what would change that."""
        await self.manager.require(_P.TASKS_READ)
        return await explain_task(self.tasks, self._space, key)

    async def next_step(self, task: Task) -> str:
        """What it waits for, or what a person can do with it, in a few words."""
        store = self.manager.store
        facts = TaskFacts(
            task=task,
            now=self.manager.now(),
            waits=tuple(await store.read(task_store.task_waits, task.task_id)),
            unmet=await store.read(task_store.unmet, task),
            takers=self.tasks.takers_of(task),
            brake=brake(self.manager.disk_now),
        )
        return next_step(facts)

    def untaken(self, task: Task) -> str | None:
        """Why nothing will take a queued task up, in a sentence; None where something will."""
        if task.is_held:
            return None
        answer = untaken(task, self.tasks.takers_of(task))
        return brake(self.manager.disk_now) if answer is None else "; ".join((answer.verdict, *answer.changes))

    async def statistics(self) -> TaskStatistics:
        await self.manager.require(_P.TASKS_READ)
        return await self.manager.store.read(task_store.statistics, self._space)

    async def diff(self, key: str, *, paths: Sequence[str] = (), stat: bool = False) -> str:
        """What its work changes, against where it began."""
        task = await self.get(key)
        workdir, snapshot = await review.submitted(self.tasks, task)
        return await self.tasks.workdirs.diff(workdir, snapshot, paths=tuple(paths) or None, stat=stat)

    async def merge_state(self, key: str) -> dict[str, Any]:
        """How far its target has moved, and whether it merges cleanly."""
        task = await self.get(key)
        workdir, snapshot = await review.submitted(self.tasks, task)
        moved = await self.tasks.workdirs.changed_since_base(workdir, snapshot)
        return {"target": workdir.target, "base": snapshot.base, **moved.to_dict()}

    # --- the queue -------------------------------------------------------------------------------

    async def submit(  # noqa: PLR0913 - every option of a task is a word of its own
        self,
        task: str,
        *,
        key: str | None = None,
        agent: str | None = None,
        model: str | None = None,
        checks: Sequence[str] = (),
        setup: str | None = None,
        depends_on: Sequence[str] = (),
        priority: AgentPriority | str = AgentPriority.NORMAL,
        tags: Sequence[str] = (),
        hold: bool = False,
        timeout: str | float | timedelta | None = None,  # noqa: ASYNC109 - of an attempt, not of this call
        max_failures: int | None = None,
        backoff: str | float | timedelta | None = None,
        near: str | os.PathLike[str] | None = None,
        project: str | None = None,
        parent: str | None = None,
        loop: TaskLoop | None = None,
        idempotency_key: str | None = None,
    ) -> Task:
        """Queue a task; it is committed when this returns. `near` is a directory in the repository it is about.

        `project` is the key of the project whose definitions and settings count (`manager.projects.near`), where that
        is not the project of the home.
        """
        values = {
            "task": task,
            "key": key,
            "agent": agent,
            "model": model,
            "checks": checks,
            "setup": setup,
            "depends_on": depends_on,
            "priority": priority,
            "tags": tags,
            "hold": hold,
            "timeout": timeout,
            "max_failures": max_failures,
            "backoff": backoff,
            "near": near,
            "project": project,
            "parent": parent,
            "loop": loop,
        }
        await self.manager.require(_P.TASKS_WRITE)
        new_task = await self._new_task(values)
        idempotency = _idempotency(new_task, idempotency_key)
        return await self.manager.store.run(task_store.add_task, new_task, by=self.manager.actor, key=idempotency)

    async def submit_all(
        self, entries: Sequence[Mapping[str, Any]], *, idempotency_key: str | None = None, **shared: Any
    ) -> list[Task]:
        """Queue all of these or, where something is wrong with one of them, none. An entry holds the arguments of
        `submit`; `shared` are those of every entry. One may depend on the key of another that stands before it.

        The faults of all entries are raised at once; the field of each begins with `tasks.NUMBER`, from 0.
        """
        await self.manager.require(_P.TASKS_WRITE)
        new_tasks: list[Task] = []
        faults: list[Fault] = []
        for number, entry in enumerate(entries):
            try:
                new_tasks.append(await self._new_task({**shared, **entry}))
            except ValidationError as error:
                faults += [fault.under(f"tasks.{number}") for fault in error.faults if isinstance(fault, Fault)]
        if faults:
            raise ValidationError(faults)
        keys = [
            _idempotency(new_task, None if idempotency_key is None else f"{idempotency_key}:{number}")
            for number, new_task in enumerate(new_tasks)
        ]
        return await self.manager.store.run(task_store.add_tasks, new_tasks, keys, by=self.manager.actor)

    async def _new_task(self, values: Mapping[str, Any]) -> Task:
        """The record of a new task, checked; its key is empty where it gets the next number."""
        agent, near, project, key = (values.get(name) for name in ("agent", "near", "project", "key"))
        if agent is not None:
            self._require_agent(agent, project)
        place = None if near is None else await self._require_place(os.path.abspath(near))  # noqa: PTH100, ASYNC240 - no file is touched
        now, settings = self.manager.now(), self.tasks.settings_of(project)
        backoff = values.get("backoff")
        record = Task.from_dict(
            {
                "task_id": self.manager.new_id(),
                "workspace_id": self._space,
                "key": key or "new",
                **{name: values.get(name) for name in ("task", "agent", "model", "setup", "parent", "timeout")},
                "checks": tuple(values.get("checks") or ()),
                "depends_on": tuple(values.get("depends_on") or ()),
                "priority": values.get("priority") or AgentPriority.NORMAL,
                "tags": tuple(tag.lower() for tag in values.get("tags") or ()),
                "is_held": values.get("hold") or False,
                "max_failures": values.get("max_failures") or settings.max_failures,
                "backoff": settings.backoff if backoff is None else backoff,
                "near": place,
                "project": project,
                "created_by": self.manager.actor.name,
                "created_at": now,
                "updated_at": now,
            }
        )
        record = record.evolve(loop=values.get("loop"))
        return record if key else record.evolve(key="")

    def _require_agent(self, name: str, project: str | None) -> None:
        """Refused now, not when its turn comes at night."""
        try:
            self.manager.registry.find(name, project)
        except AgentNotFoundError as error:
            raise fault("agent", f"must be one that can be spawned: {error}") from error

    async def _require_place(self, near: str) -> str:
        """Refused now likewise: a repository in which no worktree can be made, such as one without a commit.

        What an agent adds from inside its workdir is about the checkout that this came from.
        """
        near = self.checkout_of(near)
        await self.tasks.workdirs.plan("new", near=Path(near))
        return near

    def checkout_of(self, directory: str) -> str:
        """The checkout that the workdir around a directory came from; the directory where there is none."""
        for workdir in self.tasks.active.values():
            if workdir.checkout is not None and Path(directory).is_relative_to(workdir.path):
                return workdir.checkout
        return directory

    async def run(self, key: str) -> Task:
        """Claim it and work on it now, also while it waits after a failure; to its review or back to the queue."""
        await self.manager.require(_P.TASKS_WRITE)
        task = await self._load(key)
        if task.agent is None:
            raise InvalidOperationError(f"{task.key} names no agent; it waits until it is claimed")
        if not await self.manager.has_room():
            raise InvalidOperationError(f"{task.key}: {brake(self.manager.disk_now)}; `ostler df` shows what takes it")
        claimed = await self.manager.store.run(task_store.claim_task, task, by=self.manager.actor, over_backoff=True)
        if claimed is None:
            raise InvalidOperationError(await self._why_not(await self._load(key)))
        return await self.work(claimed)

    async def work(self, claimed: Task, rules: attempt.AttemptRules | None = None) -> Task:
        """An attempt that was claimed. Its work goes on when the caller is cancelled."""
        work = attempt.run_attempt(rules or attempt.AttemptRules(self.tasks), claimed)
        under_way = self.tasks.spawn(work, f"ostler-task-{claimed.key}")
        self.tasks.running[claimed.key] = under_way
        try:
            result: Task = await asyncio.shield(under_way)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not under_way.cancelled() or (current is not None and current.cancelling()):
                raise
            if self.tasks.is_closed:
                raise InvalidOperationError("this program is closing; the next one goes on with it") from None
            return await self.tasks.reload(claimed)  # another verb ended the attempt
        finally:
            if under_way.done() and self.tasks.running.get(claimed.key) is under_way:
                del self.tasks.running[claimed.key]
        return result

    async def _why_not(self, task: Task) -> str:
        if task.state is not TaskState.QUEUED:
            return f"{task.key} is {task.state}; only a queued task can be run"
        if task.is_held:
            return f"{task.key} is held back; release it with `ostler task requeue {task.key}`"
        missing = await self.unmet(task)
        if missing:
            return f"{task.key} waits for {', '.join(missing)}"
        waits = await self.manager.store.read(task_store.task_waits, task.task_id)
        return f"{task.key} waits: {waits[0].reason}" if waits else f"{task.key} was claimed by another attempt"

    async def cancel(self, key: str, *, reason: str | None = None) -> Task:
        """End the work on it; it is rejected, and its workdir stays until it is retired."""
        await self.manager.require(_P.TASKS_WRITE)
        return await self._reject(key, reason or "cancelled", act="task.cancel")

    async def _reject(self, key: str, reason: str, *, act: str) -> Task:
        def write(tx: Transaction) -> tuple[Task, Task]:
            task = task_store.require_task(tx, self._space, key)
            if task.state is TaskState.REJECTED:
                return task, task
            by = self.manager.actor
            return task, task_store.change_task(
                tx, task, {"error": reason}, to=TaskState.REJECTED, by=by, reason=reason, act=act
            )

        return await self._write_and_end(write, reason)

    async def requeue(self, key: str) -> Task:
        """Release a task that is held or parked, or end the present attempt and let it be done again."""
        await self.manager.require(_P.TASKS_WRITE)
        by, ending = self.manager.actor, None

        def write(tx: Transaction) -> tuple[Task, Task]:
            nonlocal ending
            task = task_store.require_task(tx, self._space, key)
            if task.state is TaskState.QUEUED:
                return task, task_store.release_task(tx, task, by=by)
            if task.state is TaskState.COMPLETED:
                cure = f"send it back with comments instead (`ostler task send-back {task.key}`)"
                raise InvalidOperationError(f"{task.key} is {task.state}; {cure}")
            if task.is_finished:
                raise InvalidOperationError(f"{task.key} is {task.state}, which is final; add it as a new task")
            changes = {"failures": 0, "lost": 0}
            queued = task_store.change_task(
                tx, task, changes, to=TaskState.QUEUED, by=by, reason="requeued", act="task.requeue"
            )
            # Not begun again while its agent still works in its workdir.
            due = self.manager.now() + _END_LIMIT
            wait = new_wait(self.tasks, queued, WaitKind.BACKOFF, "its agent is being ended", due_at=due)
            ending = task_store.open_task_wait(tx, queued, wait, by=by)
            return task, queued

        task = await self._write_and_end(write, "requeued")
        if ending is not None:
            with contextlib.suppress(InvalidOperationError, StoreError):  # it ends by itself
                await self.manager.store.run(task_store.end_task_wait, ending, "its agent has ended")
        return task

    async def hold(self, key: str) -> Task:
        """End the present attempt where there is one, and keep the task back until it is requeued."""
        await self.manager.require(_P.TASKS_WRITE)
        return await self._hold(key, "held back")

    async def _hold(self, key: str, why: str) -> Task:
        def write(tx: Transaction) -> tuple[Task, Task]:
            task = task_store.require_task(tx, self._space, key)
            if task.state not in {TaskState.QUEUED, TaskState.RUNNING}:
                raise InvalidOperationError(f"{task.key} is {task.state}; only unfinished work can be held back")
            by, reason = self.manager.actor, f"it was {why}"
            changes = {"is_held": True}
            return task, task_store.change_task(
                tx, task, changes, to=TaskState.QUEUED, by=by, reason=reason, act="task.hold"
            )

        return await self._write_and_end(write, why)

    async def take_over(self, key: str) -> AgentSession:
        """Keep a task for a person, who goes on in the session of its coding agent; the agent is ended."""
        await self.manager.require(_P.TASKS_WRITE)
        session = await takeover.find_session(self.tasks, await self._load(key))

        def write(tx: Transaction) -> tuple[Task, Task]:
            return takeover.take(tx, self.tasks, session, by=self.manager.actor)

        after = await self._write_and_end(write, "taken over by hand")
        return replace(session, task=after)

    async def give_back(self, key: str, *, to_agent: bool = False) -> Task:
        """The person has left. What has changed is checked and held for review; else, and with `to_agent`, its agent
        goes on.
        """
        await self.manager.require(_P.TASKS_WRITE)
        task = await self._load(key)
        wait = await self.manager.store.read(takeover.require_taken, task)
        hands_in = not to_agent and await takeover.is_to_hand_in(self.tasks, task, wait)
        given = await self.manager.store.run(takeover.give_back, task, hands_in=hands_in, by=self.manager.actor)
        return await self.work(given, takeover.TakenRules(self.tasks)) if hands_in else given

    async def hand_in(self, key: str) -> Task:
        """Take in what a person has changed in the workdir of a completed task: it is checked and held for review
        with the rest. The task as it is where nothing has changed.
        """
        await self.manager.require(_P.TASKS_WRITE)
        task = await self._load(key)
        await self.manager.store.read(takeover.require_completed, task)
        if not await takeover.has_changed(self.tasks, task):
            return task
        begun = await self.manager.store.run(takeover.hand_in, task, by=self.manager.actor)
        return await self.work(begun, takeover.TakenRules(self.tasks))

    async def _write_and_end(self, write: Callable[[Transaction], tuple[Task, Task]], why: str) -> Task:
        """Commit, then end the agent: a store that cannot write leaves the agent at work."""
        before, after = await self.manager.store.run(write)
        if before.state is TaskState.RUNNING:
            await attempt.stop_agent(self.tasks, after, why)
        return after

    async def answer(self, wait_id: UUID, outcome: str = "done", answer: Mapping[str, Any] | None = None) -> Wait:
        """End a wait of a task; it is queued again without it. One that is parked is held back when that is a no."""
        await self.manager.require(_P.TASKS_WRITE)
        wait = await self.manager.store.read(get_wait, wait_id)
        if wait is None or wait.task_id is None or wait.workspace_id != self._space:
            raise NotFoundError(f"there is no wait {wait_id} of a task; list the open ones")
        if outcome.strip().lower() in _NO and (wait.detail or {}).get("cause") is not None:
            task = await self.manager.store.read(task_store.get_task, wait.task_id)
            if task is not None and task.state is TaskState.QUEUED:
                await self._change(task, {"is_held": True}, act="task.hold")
        return await self.manager.store.run(task_store.end_task_wait, wait, outcome, answer, by=self.manager.actor)

    def on_change(self, hook: Callable[[TaskStateChangedEvent], Any]) -> Callable[[], None]:
        """Call it, plain or async, after each change of state of a task. The function that comes back ends that."""
        return self.tasks.hooks.add(hook)

    async def set_dependencies(self, key: str, depends_on: Sequence[str]) -> Task:
        """Unknown keys and cycles are refused."""
        await self.manager.require(_P.TASKS_WRITE)
        task = await self._load(key)
        return await self.manager.store.run(task_store.set_dependencies, task, tuple(depends_on), by=self.manager.actor)

    # --- review ----------------------------------------------------------------------------------

    async def send_back(self, key: str, comment: str | None = None) -> Task:
        """Another attempt, which is told the comment; and what it conflicts with, which is comment enough."""
        await self.manager.require(_P.TASKS_REVIEW)
        task = await self._load(key)
        if task.state is not TaskState.COMPLETED:
            raise InvalidOperationError(f"{task.key} is {task.state}; only a completed task can be sent back")
        changes = await self.changes_to_send_back(task, comment)
        return await self._change(
            task, changes, to=TaskState.QUEUED, reason=changes["comments"][-1], act="task.send_back"
        )

    async def changes_to_send_back(self, task: Task, comment: str | None) -> dict[str, Any]:
        """What its record then says; its repository has the target, where that has moved on against it."""
        moved = await review.moved_target(self.tasks, task)
        comment = "\n\n".join(part for part in (comment, moved) if part)
        if len(comment) > MAX_COMMENT or not comment.strip():
            raise fault("comment", f"must be 1 to {MAX_COMMENT} characters", comment[:100])
        return {"comments": (*task.comments, comment)[-20:], "failures": 0, "is_held": False, "session": None}

    async def accept(
        self, key: str, *, paths: Sequence[str] = (), message: str | None = None, branch_only: bool = False
    ) -> Task:
        """Merge its work into its target, whole or by file; what is left of it can be accepted later. Twice is safe.

        Refused with `CheckoutBlockedError` where changes of the user stand in the way, unless `branch_only`: then the
        branch moves, and the checkout is left as it is.
        """
        await self.manager.require(_P.TASKS_REVIEW)
        task = await self._load(key)
        if task.state is TaskState.ACCEPTED:
            return task
        if task.state is not TaskState.COMPLETED:
            raise InvalidOperationError(f"{task.key} is {task.state}; only a completed task can be accepted")
        accepted = await self.merge_work(task, paths=paths, message=message, branch_only=branch_only)
        if accepted is None:
            return await self._change(task, {"accepted": None}, to=TaskState.ACCEPTED, act="task.accept")
        to = TaskState.COMPLETED if accepted.left else TaskState.ACCEPTED
        return await self._change(task, {"accepted": accepted.to_dict()}, to=to, act="task.accept")

    async def merge_work(
        self, task: Task, *, paths: Sequence[str] = (), message: str | None = None, branch_only: bool = False
    ) -> Accepted | None:
        """Merge the work of a completed task into its target, without a word in its record; None without a
        repository. Twice is safe.
        """
        await self.manager.require(_P.TASKS_REVIEW)
        return await review.merge_work(self.tasks, task, paths, message, self.manager.actor, branch_only=branch_only)

    async def reject(self, key: str, *, reason: str) -> Task:
        """Final. Its workdir stays for the time of the retention, then it goes to the vault."""
        await self.manager.require(_P.TASKS_REVIEW)
        return await self._reject(key, reason, act="task.reject")

    async def undo(self, key: str) -> Task:
        """Take an accepted task back out of its target, all parts of it; it is completed again."""
        return (await self.take_back(key))[0]

    async def take_back(self, key: str) -> tuple[Task, list[Undone]]:
        """As `undo`, with what it did: what it could not take out of a checkout is named there."""
        await self.manager.require(_P.TASKS_REVIEW)
        task = await self._load(key)
        if task.state is TaskState.COMPLETED and task.accepted is None:
            raise InvalidOperationError(
                f"{task.key} is completed and nothing of it is accepted; only an accepted task can be undone"
            )
        if task.state not in {TaskState.ACCEPTED, TaskState.COMPLETED}:
            raise InvalidOperationError(f"{task.key} is {task.state}; only an accepted task can be undone")
        undone: list[Undone] = []
        while task.accepted is not None:
            accepted = Accepted.from_dict(task.accepted)
            undone.append(await self.tasks.workdirs.undo(accepted))
            # One part at a time: where an earlier one cannot be undone, the record names what is still merged.
            task = await self._change(task, {"accepted": accepted.earlier}, to=TaskState.COMPLETED, act="task.undo")
        if task.state is TaskState.ACCEPTED:
            task = await self._change(task, to=TaskState.COMPLETED, act="task.undo")
        return task, undone

    async def retire(self, key: str) -> Task:
        """Put its workdir into the vault, whole."""
        await self.manager.require(_P.TASKS_REVIEW)
        task = await self._load(key)
        if task.state is TaskState.RUNNING:
            raise InvalidOperationError(f"{task.key} is running; cancel it first (`ostler task cancel {task.key}`)")
        return await retire.retire(self.tasks, task, by=self.manager.actor)

    async def unretire(self, key: str) -> Task:
        """Bring its workdir back from the vault; also of a task that was purged."""
        await self.manager.require(_P.TASKS_REVIEW)
        return await retire.unretire(self.tasks, self._space, key, by=self.manager.actor)

    # --- shared ----------------------------------------------------------------------------------

    @property
    def _space(self) -> UUID:
        return self.manager.principal.workspace_id

    async def _load(self, key: str) -> Task:
        return await self.manager.store.read(task_store.require_task, self._space, key)

    async def _change(self, task: Task, changes: dict[str, Any] | None = None, **how: Any) -> Task:
        return await self.tasks.change(task, changes, by=self.manager.actor, **how)


def _idempotency(new_task: Task, key: str | None) -> IdempotencyKey | None:
    if key is None:
        return None
    request = {name: value for name, value in new_task.to_dict().items() if name not in _MADE_HERE}
    return IdempotencyKey.of(key, json.dumps(request, sort_keys=True))
