"""`TaskOrchestrator`: the verbs on tasks, and the same tasks as agents with one record each.

There `AgentLifecycle` is a view of a task, and `agent_id` its key.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from ostler.errors import InvalidOperationError, OstlerError, VersionConflictError
from ostler.model.access import OWNER, Permission
from ostler.model.query import GetInstancesFilter
from ostler.model.task import FINISHED_STATES, Task, TaskState
from ostler.model.validation import fault
from ostler.model.wait import WORKDIR_GONE, Wait, WaitKind
from ostler.store import tasks as task_store
from ostler.store.transaction import Transaction
from ostler.tasks import attempt, retire
from ostler.tasks.context import BY, exists, source_directory_of, workdir_key, workdir_of
from ostler.tasks.retry import new_wait
from ostler.tasks.verbs import TaskVerbs
from ostler.workdirs.records import Workdir

_log = logging.getLogger("ostler.tasks")


@dataclass
class AgentLifecycle:
    """One record per agent: its task, its state, what it handed in. Times are seconds since 1970 UTC."""

    agent_id: str
    state: TaskState
    task: str
    created_at: float
    updated_at: float
    generated_code: str | None = None
    submission_summary: str | None = None
    changed_files: list[str] | None = None
    error: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**{**values, "state": TaskState(values["state"])})


def view_of(task: Task) -> AgentLifecycle:
    files = task.claimed_files if task.claimed_files is not None else task.changed_files
    return AgentLifecycle(
        agent_id=task.key,
        state=task.state,
        task=task.task,
        created_at=task.created_at.timestamp(),
        updated_at=task.updated_at.timestamp(),
        generated_code=task.generated_code,
        submission_summary=task.summary,
        changed_files=None if files is None else list(files),
        error=task.error,
    )


class TaskOrchestrator(TaskVerbs):
    """The verbs of `TaskVerbs`, and those of one record per agent. Use it with `async with`, or call `initialize` and
    `close`.
    """

    @property
    def active_agents(self) -> dict[str, Workdir]:
        """Key to workdir of every task that is not cleaned up: a cache, lost and rebuilt."""
        return self.tasks.active

    async def initialize(self) -> None:
        """Recover, and go on with the attempts that were under way. Those of a loop are left to its next call."""
        for task in await self.recover_agents():
            if task.loop is None:
                self.tasks.spawn(self._work_quietly(task), f"ostler-recovered-{task.key}")

    async def _work_quietly(self, task: Task) -> None:
        try:
            await self.work(task)
        except OstlerError as error:
            _log.warning("%s: %s", task.key, error)

    async def close(self) -> None:
        await self.tasks.close()

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the record ------------------------------------------------------------------------------

    async def create_lifecycle(self, agent_id: str, task: str) -> AgentLifecycle:
        """A new record, queued and kept. It names no agent, so it waits until a caller claims it."""
        return view_of(await self.submit(task, key=agent_id))

    async def get_lifecycle(self, agent_id: str) -> AgentLifecycle | None:
        await self.manager.require(Permission.TASKS_READ)
        task = await self._find(agent_id)
        return None if task is None else view_of(task)

    async def update_lifecycle(self, lifecycle: AgentLifecycle) -> None:
        """One write. Refuses an illegal move, and a copy that is older than the record."""
        await self.manager.require(Permission.TASKS_WRITE)
        task = await self.manager.store.read(task_store.require_task, self._space, lifecycle.agent_id)
        if lifecycle.updated_at != task.updated_at.timestamp():
            raise VersionConflictError(f"{task.key} was changed meanwhile; read it again and decide anew")
        if lifecycle.created_at != task.created_at.timestamp():
            raise fault("created_at", "cannot be changed", lifecycle.created_at)
        files = lifecycle.changed_files
        changes: dict[str, Any] = {
            "task": lifecycle.task,
            "generated_code": lifecycle.generated_code,
            "summary": lifecycle.submission_summary,
            "claimed_files": None if files is None else tuple(files),
            "error": lifecycle.error,
        }
        to = TaskState(lifecycle.state)
        if to is not task.state:
            await self._require_by_hand(task, to)
        if to is TaskState.RUNNING and task.state is TaskState.QUEUED:
            changes |= {"attempt": task.attempt + 1, "started_at": task.started_at or self.manager.now()}
        new = await self.tasks.change(task, changes, to=to, by=self.manager.actor)
        lifecycle.updated_at = new.updated_at.timestamp()

    async def _require_by_hand(self, task: Task, to: TaskState) -> None:
        """Moves that are more than a word in the record have verbs of their own."""
        if TaskState.COMPLETED in {task.state, to} or to in FINISHED_STATES:
            await self.manager.require(Permission.TASKS_REVIEW)
        if task.state is TaskState.RUNNING and task.instance_id is not None:
            raise InvalidOperationError(f"an agent works on {task.key}; requeue or cancel it instead")
        if to is TaskState.COMPLETED and task.state is TaskState.RUNNING and task.checks:
            raise InvalidOperationError(f"{task.key} has checks; hand it in with submit_result, which runs them")
        if task.state is TaskState.ACCEPTED and task.accepted is not None:
            raise InvalidOperationError(f"{task.key} was merged; take it back with undo")
        if to is TaskState.ACCEPTED and task.snapshot is not None:
            raise InvalidOperationError(f"{task.key} has work to be merged; use accept_agentlet")

    async def delete_lifecycle(self, agent_id: str) -> None:
        """Purge a finished task; its workdir and its record go to the vault first. Unknown: nothing happens."""
        await self.manager.require(Permission.TASKS_WRITE)
        task = await self._find(agent_id)
        if task is None:
            return
        if not task.is_finished:
            raise InvalidOperationError(f"{task.key} is {task.state}; only an accepted or a rejected one is deleted")
        await retire.purge(self.tasks, task)

    # --- the work --------------------------------------------------------------------------------

    async def spawn_agentlet(self, task: str, **more: Any) -> str:
        """The record first; then its workdir, and its agent when it names one. Returns the id."""
        made = await self.submit(task, **more)
        if made.agent is not None and not made.is_held:
            self.tasks.spawn(self._run_quietly(made.key), f"ostler-agentlet-{made.key}")
        else:
            await self._with_workdir(made)
        return made.key

    async def _with_workdir(self, task: Task) -> tuple[Task, Workdir]:
        """For who works on it without an instance of ours."""
        workdir = workdir_of(task)
        if workdir is None:
            workdir = await self.tasks.workdirs.plan(
                workdir_key(task.workspace_id, task.key), near=source_directory_of(task)
            )
            task = await self.tasks.change(task, {"workdir": workdir.to_dict()})
        await self.tasks.workdirs.prepare(workdir)
        self.tasks.active[task.key] = workdir
        return task, workdir

    async def _run_quietly(self, key: str) -> None:
        try:
            await self.run(key)
        except OstlerError as error:
            _log.info("%s: %s", key, error)

    async def run_agentlet(self, agent_id: str) -> AgentLifecycle:
        """Work on it to the end of the attempt."""
        return view_of(await self.run(agent_id))

    async def submit_result(
        self, agent_id: str, summary: str, changed_files: Sequence[str] = (), *, generated_code: str | None = None
    ) -> AgentLifecycle:
        """For who works on a task without an instance of ours. Its words are claims; the checks are run by us."""
        await self.manager.require(Permission.TASKS_WRITE)
        task = await self.manager.store.read(task_store.require_task, self._space, agent_id)
        if task.state is not TaskState.RUNNING:
            raise InvalidOperationError(f"{task.key} is {task.state}; only a running task can be submitted")
        task, workdir = await self._with_workdir(task)
        answer = {"summary": summary, "changed_files": list(changed_files), "generated_code": generated_code}
        return view_of(await attempt.finish(attempt.AttemptRules(self.tasks), task, workdir, answer))

    async def accept_agentlet(self, agent_id: str) -> AgentLifecycle:
        return view_of(await self.accept(agent_id))

    async def reject_agentlet(self, agent_id: str, reason: str = "rejected") -> AgentLifecycle:
        return view_of(await self.reject(agent_id, reason=reason))

    async def cleanup_agent(self, agent_id: str) -> None:
        """End its agent, forget its handle, put its workdir into the vault; the record stays. Again is harmless."""
        await self.manager.require(Permission.TASKS_REVIEW)
        task = await self._find(agent_id)
        if task is None:
            return
        if task.state is TaskState.RUNNING:
            task = await self._hold(task.key, "cleaned up")  # else it would be begun again at once
        else:
            await attempt.stop_agent(self.tasks, task, "cleaned up")
        task = await self.tasks.reload(task)
        self.tasks.active.pop(task.key, None)
        await retire.retire(self.tasks, task, by=self.manager.actor)

    # --- recovery and retention ------------------------------------------------------------------

    async def recover_agents(self) -> list[Task]:
        """Rebuild the cache from the records. What was running goes on; whose workdir is gone is rejected. An accept
        that was cut off after its branch had moved is finished in the user's checkout.

        Returns the attempts that have to be taken up: the caller works on them (`work`). Each record has its own
        guard, and calling it twice changes nothing.
        """
        for trouble in await self.tasks.workdirs.recover():
            _log.warning("a checkout could not follow its branch: %s", trouble)
        await self._end_leftovers()
        taken_up = []
        for task in await self.manager.store.read(task_store.tasks_to_recover):
            try:
                taken_up += await self._recover(task)
            except (OstlerError, OSError) as error:
                _log.warning("%s could not be recovered: %s", task.key, error)
        return taken_up

    async def _end_leftovers(self) -> None:
        """Agents of tasks that were cancelled, held or requeued by a program that was killed before it ended them."""
        everything = GetInstancesFilter(limit=1000)
        for instance in await self.manager.acting_as(OWNER).get_active_instances(everything):
            if instance.task_id is None:
                continue
            task = await self.manager.store.read(task_store.get_task, instance.task_id)
            if task is not None and task.state is not TaskState.RUNNING:
                await attempt.stop_agent(self.tasks, task, f"its task is {task.state}")

    async def _recover(self, task: Task) -> list[Task]:
        workdir = workdir_of(task)
        if task.key in self.tasks.running:
            return []
        if workdir is None:
            return [task] if task.state is TaskState.RUNNING and task.agent is not None else []
        there = exists(workdir)
        if there:
            self.tasks.active[task.key] = workdir
        if not there and task.state in {TaskState.COMPLETED, *FINISHED_STATES}:
            # Cut off, or the workdir was deleted by hand: the entry of the vault says which.
            await retire.retire(self.tasks, task)
        if task.state is not TaskState.RUNNING:
            return []
        if not there and (task.instance_id is not None or task.agent is None):
            error = f"its workdir {workdir.path} is gone; it was {task.state}"
            # Rejected by no person: so one is told.
            wait = new_wait(self.tasks, task, WaitKind.HUMAN, error, detail={"cause": WORKDIR_GONE})
            await self.tasks.store.run(_reject, task, error, wait)
            return []
        return [task] if task.agent is not None else []

    async def gc_loop(self) -> None:
        """For ever: the one place where tasks are purged, 24 hours after they were accepted or rejected."""
        await retire.collect_for_ever(self.tasks)

    async def _find(self, key: str) -> Task | None:
        return await self.manager.store.read(task_store.find_task, self._space, key)


def _reject(tx: Transaction, task: Task, error: str, wait: Wait) -> None:
    rejected = task_store.change_task(tx, task, {"error": error}, to=TaskState.REJECTED, by=BY, reason=error)
    task_store.open_task_wait(tx, rejected, wait, by=BY)
