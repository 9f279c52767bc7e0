"""`AgentLifecycleLoop`: drive one task through fresh instances, from breakpoint to breakpoint, until it is proven."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ostler.aio import first_of
from ostler.clock import Deadline
from ostler.definitions import load_settings, register_files
from ostler.errors import AgentNotFoundError, LeaseHeldError, OstlerError, StoreError
from ostler.home import SOCKET_FILE, default_home, project_of
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.open import open_manager
from ostler.loop.collaborators import (
    BranchManager,
    CiProvider,
    LoopCollaborators,
    Plan,
    TerminalManager,
    WorkspaceManager,
)
from ostler.loop.follow import DaemonLoop, LoopEnd, end_of
from ostler.loop.service import Loops
from ostler.model.events import Event, TaskEvent
from ostler.model.loop import LoopResult, LoopResultType
from ostler.model.query import GetInstancesFilter
from ostler.model.task import Task, TaskState
from ostler.model.wait import Wait
from ostler.store import loops as loop_store
from ostler.store import tasks as task_store
from ostler.tasks.attempt import LOOP_STOPPED, AttemptRules
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.queue import end_due_waits

_log = logging.getLogger("ostler.loop")
_LOOK_SECONDS = 30.0
_START_SECONDS = 0.05
_R = LoopResultType


class _NoDaemonError(Exception):
    """Nothing answers on the socket of the home."""


class AgentLifecycleLoop:
    """Without a manager it opens the home for the call, or lets the daemon drive that manages the home. Whatever
    collaborator is left out is Ostler's own.
    """

    def __init__(  # noqa: PLR0913 - the collaborators and settings of a loop, each by its name
        self,
        manager: AgentLifecycleManager | TaskOrchestrator | None = None,
        *,
        repo_dir: str | os.PathLike[str] | None = None,
        plan: Plan | None = None,
        ci_provider: CiProvider | None = None,
        terminal_manager: TerminalManager | None = None,
        branch_manager: BranchManager | None = None,
        workspace_manager: WorkspaceManager | None = None,
        comm_file_path: str | os.PathLike[str] | None = None,
        max_retries: int | None = None,
        retry_interval: float | str | None = None,
        breakpoint_check_interval: float | str | None = None,
        pr_merge_timeout: float | str | None = None,
    ) -> None:
        """Settings that are left out are those of `[loop]` in ostler.toml: 100, 30 s, 1 s and 3600 s."""
        self._manager = manager
        self._repo = None if repo_dir is None else Path(repo_dir)
        self._collaborators = {
            "plan": plan,
            "ci": ci_provider,
            "terminals": terminal_manager,
            "branches": branch_manager,
            "workspaces": workspace_manager,
        }
        self._settings: dict[str, Any] = {
            "max_retries": max_retries,
            "retry_interval": retry_interval,
            "breakpoint_check_interval": breakpoint_check_interval,
            "pr_merge_timeout": pr_merge_timeout,
            "comm_file": None if comm_file_path is None else os.path.abspath(comm_file_path),  # noqa: PTH100 - as it is
        }
        self._stopping = asyncio.Event()

    def shutdown(self) -> None:
        """End the present agent; the task goes back to the queue, and a later call goes on with it."""
        self._stopping.set()

    async def run_agent_loop(self, agent: Any, task: Task | str, *, wait: bool = True) -> LoopResult:
        """`agent` is a definition by name, or anything that can be registered; `task` a key, a task, or what to do.

        It drives through waits to the end. With `wait=False` it returns at the first, which stays open.
        """
        if self._manager is None and (default_home() / SOCKET_FILE).exists():
            with contextlib.suppress(_NoDaemonError):
                return await self._run_by_daemon(agent, task, wait=wait)
        async with self._opened() as loops:
            try:
                begun = await self._enlist(loops, agent, task)
            except OstlerError as error:
                key = task.key if isinstance(task, Task) else str(task)[:100]
                return LoopResult(result_type=_R.ERROR, task_id=key, summary=str(error))
            return await _Drive(loops, begun, self._stopping, wait_through=wait).run()

    async def _run_by_daemon(self, agent: Any, task: Task | str, *, wait: bool) -> LoopResult:
        from ostler import Client  # noqa: PLC0415 - a layer above, and only where a daemon answers

        async with Client() as client:
            try:
                await client.call("health")
            except StoreError as error:  # the socket of a daemon that is gone
                raise _NoDaemonError from error
            own = [name for name, part in self._collaborators.items() if part is not None]
            if own:
                raise LeaseHeldError(
                    f"a daemon manages the home {default_home()}, and drives loops by its own collaborators, not by "
                    f"yours ({', '.join(own)}); stop it with `ostler down`"
                )
            settings = {name: value for name, value in self._settings.items() if value is not None}
            near = None if self._repo is None else str(self._repo.absolute())
            return await DaemonLoop(client, self._stopping, wait_through=wait).run(agent, task, settings, near)

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Loops]:
        async with contextlib.AsyncExitStack() as stack:
            manager = self._manager
            if manager is None:
                manager = await stack.enter_async_context(open_manager())
                register_files(manager.registry, project_of(manager.require_home()), user=Path.home(), replace=True)
            orchestrator = manager if isinstance(manager, TaskOrchestrator) else TaskOrchestrator(manager)
            if orchestrator is not manager:
                stack.push_async_callback(orchestrator.close)
            parts = LoopCollaborators.of(orchestrator.tasks, **self._collaborators)
            settings = load_settings(project_of(orchestrator.manager.require_home())).loop
            yield Loops(orchestrator, settings, parts)

    async def _enlist(self, loops: Loops, agent: Any, task: Task | str) -> Task:
        orchestrator = loops.orchestrator
        name = _definition(orchestrator.manager, agent)
        space = orchestrator.manager.principal.workspace_id
        key = task.key if isinstance(task, Task) else task
        record = await orchestrator.manager.store.read(task_store.find_task, space, key)
        if record is None:
            if " " not in key.strip() or isinstance(task, Task):
                await orchestrator.get(key)  # says that there is none, and what to do
            record = await orchestrator.submit(key, agent=name, near=self._repo, hold=True)
        if record.is_finished:
            return record
        settings = {field: value for field, value in self._settings.items() if value is not None}
        changes: dict[str, Any] = {"is_held": False} if record.is_held else {}
        if self._repo is not None and record.near is None and record.workdir is None:
            changes["near"] = str(self._repo.absolute())
        if changes:
            record = await orchestrator.tasks.change(record, changes)
        return await loops.put_in_loop(record, name, **loops.checked_settings(settings))


class _Drive:
    """One call of `run_agent_loop`."""

    def __init__(self, loops: Loops, task: Task, stopping: asyncio.Event, *, wait_through: bool) -> None:
        self._loops = loops
        self._orchestrator = loops.orchestrator
        self._manager = loops.orchestrator.manager
        self._store = self._manager.store
        self._task = task
        self._stopping = stopping
        self._waits_through = wait_through
        self._wake = asyncio.Event()

    async def run(self) -> LoopResult:
        listening = asyncio.ensure_future(self._listen())
        try:
            while True:
                result = await self._step()
                if result is not None:
                    return result
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _listen(self) -> None:
        async for event in self._manager.observe():
            if isinstance(event, TaskEvent) or not isinstance(event, Event):
                self._wake.set()

    async def _step(self) -> LoopResult | None:
        self._wake.clear()
        await self._loops.settle()
        due = await end_due_waits(self._orchestrator)
        task = self._task = await self._orchestrator.tasks.reload(self._task)
        if self._stopping.is_set():
            return await self._result(LoopEnd(_R.SHUTDOWN, "it was told to stop; the task is queued"))
        waits = await self._store.read(task_store.task_waits, task.task_id)
        missing = await self._orchestrator.unmet(task)
        end = end_of(task, waits, missing, self._manager.now(), waits_through=self._waits_through)
        if end is not None:
            return await self._result(end)
        if task.state is TaskState.RUNNING and task.key not in self._orchestrator.tasks.running:
            await self._work(task)
            return None
        if task.state is TaskState.QUEUED and not waits and await self._manager.has_room():
            claimed = await self._store.run(task_store.claim_task, task, by=self._manager.actor)
            if claimed is not None:
                await self._work(claimed)
                return None
        await self._sleep(min(due, _LOOK_SECONDS, *self._seconds_until_due(waits)))
        return None

    def _seconds_until_due(self, waits: list[Wait]) -> list[float]:
        now = self._manager.now()
        return [max((wait.due_at - now).total_seconds(), 0.0) for wait in waits if wait.due_at is not None]

    async def _work(self, task: Task) -> None:
        rules: AttemptRules | None = self._loops.rules(task)
        work = asyncio.ensure_future(self._orchestrator.work(task, rules))
        await first_of(work, self._stopping.wait())
        while not work.done():
            for instance in await self._manager.get_active_instances(GetInstancesFilter(task_id=task.task_id)):
                await self._loops.parts.terminals.stop(instance, LOOP_STOPPED)  # its agent, or a check
            await asyncio.wait((work,), timeout=_START_SECONDS)  # it may be about to be started
        await work

    async def _sleep(self, seconds: float) -> None:
        """Until something happened to a task, the time is over, or the loop is told to stop."""
        with contextlib.suppress(TimeoutError):
            async with Deadline(self._manager.clock, seconds):
                await first_of(self._wake.wait(), self._stopping.wait())

    async def _result(self, end: LoopEnd) -> LoopResult:
        task = self._task
        pull = await self._store.read(loop_store.pull_request_of, task)
        iterations = await self._store.read(loop_store.list_iterations, task.task_id)
        return end.result(task.key, None if pull is None else pull.url, len(iterations))


def _definition(manager: AgentLifecycleManager, agent: Any) -> str:
    if isinstance(agent, str):
        return manager.registry.find(agent).name
    try:
        return manager.registry.find(getattr(agent, "__name__", "")).name
    except AgentNotFoundError:
        return manager.registry.register(agent).name
