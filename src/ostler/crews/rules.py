"""Attempts by a member of a crew: its directory, what its instance is told, and how its end is judged."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ostler.aio import first_of
from ostler.crews.factory import MemberPlan
from ostler.crews.scope import Scope
from ostler.errors import OstlerError, VersionConflictError
from ostler.lifecycle.manager import AgentHandle
from ostler.loop.collaborators import LoopCollaborators
from ostler.loop.rules import IterationRules
from ostler.model.crew import CrewAction
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.spawn import TerminationOptions
from ostler.model.task import Task, TaskState
from ostler.model.wait import WaitKind
from ostler.store.crews import tasks_in_directory
from ostler.tasks import attempt, retire
from ostler.tasks.context import BY, TaskContext, source_directory_of, workdir_key, workdir_of
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.retry import fail_attempt
from ostler.workdirs.records import Snapshot, Workdir, WorkdirKind

_AT_ONCE = timedelta(0)
#: How long an attempt gets after it was forced.
_FORCE_SECONDS = 2.0


class CrewShared:
    """What the attempts of all members share."""

    def __init__(self, tasks: TaskContext) -> None:
        self.tasks = tasks
        #: Held while a directory changes hands: a task that one member failed may be in the directory of another.
        self.directories = asyncio.Lock()


@dataclass(frozen=True, slots=True)
class Generation:
    """One fresh start of a member."""

    plan: MemberPlan
    number: int
    scope: Scope
    #: Gets the handle of the live instance.
    began: Callable[[AgentHandle], None]


class MemberRules(attempt.AttemptRules):
    """What all attempts by a member have: its name, its model, and its end with the scope of the member."""

    generation: Generation
    #: Why the member erred; None where it did not.
    error: str | None = None

    def spawn_fields(self, task: Task) -> dict[str, Any]:  # noqa: ARG002 - as the base
        scope, plan = self.generation.scope, self.generation.plan
        if scope.is_cancelled:
            raise attempt.AttemptWaitsError(WaitKind.BACKOFF, scope.reason, None)
        return {"crew": plan.crew, "agent_id": plan.agent_id, "generation": self.generation.number}

    def environment(self, task: Task) -> dict[str, str]:
        plan = self.generation.plan
        return {**super().environment(task), "OSTLER_CREW": plan.crew, "OSTLER_MEMBER": plan.agent_id}

    def model(self, task: Task) -> str | None:
        return task.model or self.generation.plan.model

    async def watch(self, task: Task, workdir: Workdir, instance: AgentInstance) -> None:
        """Where the scope is cancelled its agent is asked to end, and then made to."""
        self.generation.began(self.tasks.manager.handle(instance.instance_id))
        ending = asyncio.ensure_future(self._end_with_scope(instance))
        try:
            await super().watch(task, workdir, instance)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_with_scope(self, instance: AgentInstance) -> None:
        scope = self.generation.scope
        await scope.cancelled.wait()
        asking = asyncio.ensure_future(self._terminate(instance, TerminationOptions(reason=scope.reason)))
        try:
            await scope.forced.wait()
            await self._terminate(instance, TerminationOptions(reason=scope.reason, graceful_timeout=_AT_ONCE))
        finally:
            asking.cancel()

    async def _terminate(self, instance: AgentInstance, options: TerminationOptions) -> None:
        with contextlib.suppress(OstlerError):  # it ended by itself meanwhile
            await self.tasks.manager.terminate(instance.instance_id, options)


class MemberLoopRules(MemberRules, IterationRules):
    """A fresh start of a loop, by a member. Its workdir is that of the task, for other members go on in it."""

    def __init__(self, parts: LoopCollaborators, generation: Generation) -> None:
        IterationRules.__init__(self, parts)
        self.generation = generation

    async def failed(self, task: Task, error: str, cause: str = "error") -> Task:
        """An end without a signal, and a check that refuses the work, are what a loop is for: no error of a member."""
        if cause not in {"exit", "check"} and task.state is TaskState.RUNNING:
            self.error = error
        return await super().failed(task, error, cause)


class CrewRules(MemberRules):
    """One generation of a member at a task without a loop."""

    def __init__(self, shared: CrewShared, generation: Generation) -> None:
        super().__init__(shared.tasks)
        self.generation = generation
        self._directories = shared.directories
        self._is_submitted = False

    # --- the workdir -----------------------------------------------------------------------------

    async def prepare(self, task: Task) -> tuple[Task, Workdir]:
        """The worktree of the task; without a repository the member's own directory, new and empty."""
        workdir = workdir_of(task)
        if task.instance_id is not None or (workdir is not None and workdir.kind is WorkdirKind.WORKTREE):
            return await attempt.prepare(self.tasks, task)
        async with self._directories:
            return await self._prepare_directory(await self.tasks.reload(task))

    async def _prepare_directory(self, task: Task) -> tuple[Task, Workdir]:
        if task.workdir is not None:
            task = await retire.retire(self.tasks, task)
        place = self.generation.plan.workdir
        planned = await self.tasks.workdirs.plan(
            workdir_key(task.workspace_id, task.key), near=source_directory_of(task), place=place
        )
        if planned.kind is WorkdirKind.DIRECTORY:
            await self._clear(place, task)
        task = await self.tasks.change(task, {"workdir": planned.to_dict(), "vault": None, "is_set_up": False})
        await self.tasks.workdirs.prepare(planned, fresh=planned.kind is WorkdirKind.DIRECTORY)
        return task, planned

    async def _clear(self, place: Path, task: Task) -> None:
        """What the last generation left goes to the vault, under the key of its task."""
        for other in await self.tasks.store.read(tasks_in_directory, task.workspace_id, str(place)):
            if other.task_id != task.task_id:
                await self._retire(other, str(place))
        if os.path.lexists(place):  # noqa: ASYNC240 - one look at a local directory
            leftover = Workdir(kind=WorkdirKind.DIRECTORY, key=self.generation.plan.agent_id, path=str(place))
            await self.tasks.workdirs.retire(leftover, record={"reason": f"found in the way of {task.key}"})

    async def _retire(self, other: Task, place: str) -> None:
        while other.workdir is not None and other.workdir["path"] == place:
            try:
                other = await retire.retire(self.tasks, other)
            except VersionConflictError:  # claimed or reviewed meanwhile
                other = await self.tasks.reload(other)

    # --- the end ---------------------------------------------------------------------------------

    async def snapshot(self, task: Task, workdir: Workdir) -> Snapshot:
        self._is_submitted = True
        return await super().snapshot(task, workdir)

    async def failed(self, task: Task, error: str, cause: str = "error") -> Task:  # noqa: ARG002 - as the base
        """A check that refuses the work is an error of the member only when the task has spent all its failures."""
        if task.state is not TaskState.RUNNING:
            return task
        is_spent = task.failures + 1 >= task.max_failures
        if is_spent or not self._is_submitted:
            self.error = error
        is_last = self.error is not None and self.generation.plan.settings.on_error is CrewAction.RESTART
        return await fail_attempt(self.tasks, task, error, is_last=is_last)


async def run_generation(orchestrator: TaskOrchestrator, task: Task, rules: MemberRules, scope: Scope) -> Task | None:
    """One attempt, which ends soon after its scope is forced. None where it was cut off, else the task as it is."""
    under_way = asyncio.ensure_future(orchestrator.work(task, rules))
    try:
        await first_of(under_way, scope.forced.wait())
        if not under_way.done():
            await asyncio.wait({under_way}, timeout=_FORCE_SECONDS)
        if not under_way.done():
            await cut_off(orchestrator, task, scope.reason)
            await asyncio.wait({under_way})
    finally:
        under_way.cancel()
    # A person who cancels or requeues a task cancels the work on it.
    return None if under_way.cancelled() else under_way.result()


async def cut_off(orchestrator: TaskOrchestrator, task: Task, reason: str) -> None:
    """End an attempt wherever it is, its checks too; the task goes back to the queue and has spent nothing."""
    manager, tasks = orchestrator.manager, orchestrator.tasks
    await attempt.stop_agent(tasks, await tasks.reload(task), reason)
    for instance in await manager.get_active_instances(GetInstancesFilter(task_id=task.task_id)):
        with contextlib.suppress(OstlerError):
            await manager.terminate(instance.instance_id, TerminationOptions.immediate())
    task = await tasks.reload(task)
    if task.state is TaskState.RUNNING:
        await tasks.change(task, to=TaskState.QUEUED, by=BY, reason=reason)
