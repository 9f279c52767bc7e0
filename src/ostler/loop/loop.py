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
from ostler.errors import AgentNotFoundError, OstlerError
from ostler.home import project_of
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.open import open_manager
from ostler.loop.loops import Loops
from ostler.loop.parts import BranchManager, CiProvider, LoopParts, Plan, TerminalManager, WorkspaceManager
from ostler.loop.rules import HOPELESS
from ostler.model.events import Event, TaskEvent
from ostler.model.loop import LoopResult, LoopResultType
from ostler.model.query import GetInstancesFilter
from ostler.model.task import Task, TaskState
from ostler.model.wait import Wait, WaitKind
from ostler.store import loops as rows
from ostler.store import tasks as task_rows
from ostler.tasks.attempt import LOOP_STOPPED, AttemptRules
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.queue import END_BY_THEMSELVES, end_due_waits

_log = logging.getLogger("ostler.loop")
_LOOK_SECONDS = 30.0
_START_SECONDS = 0.05
_R = LoopResultType
_PARKED = frozenset({"max_retries", "max_iterations", "max_tokens", "max_cost_usd"})


class AgentLifecycleLoop:
    """Without a manager it opens the home for the call. Whatever collaborator is left out is Ostler's own."""

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
        self._given_parts = {
            "plan": plan,
            "ci": ci_provider,
            "terminals": terminal_manager,
            "branches": branch_manager,
            "workspaces": workspace_manager,
        }
        self._given: dict[str, Any] = {
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
        async with self._opened() as loops:
            try:
                begun = await self._enlist(loops, agent, task)
            except OstlerError as error:
                key = task.key if isinstance(task, Task) else str(task)[:100]
                return LoopResult(result_type=_R.ERROR, task_id=key, summary=str(error))
            return await _Drive(loops, begun, self._stopping, wait_through=wait).run()

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
            parts = LoopParts.of(orchestrator.tasks, **self._given_parts)
            settings = load_settings(project_of(orchestrator.manager.require_home())).loop
            yield Loops(orchestrator, settings, parts)

    async def _enlist(self, loops: Loops, agent: Any, task: Task | str) -> Task:
        orchestrator = loops.orchestrator
        name = _definition(orchestrator.manager, agent)
        space = orchestrator.manager.principal.workspace_id
        key = task.key if isinstance(task, Task) else task
        found = await orchestrator.manager.store.read(task_rows.find_task, space, key)
        if found is None:
            if " " not in key.strip() or isinstance(task, Task):
                await orchestrator.get(key)  # says that there is none, and what to do
            found = await orchestrator.submit(key, agent=name, near=self._repo, hold=True)
        if found.is_finished:
            return found
        given = {field: value for field, value in self._given.items() if value is not None}
        changes: dict[str, Any] = {"is_held": False} if found.is_held else {}
        if self._repo is not None and found.near is None and found.workdir is None:
            changes["near"] = str(self._repo.absolute())
        if changes:
            found = await orchestrator.tasks.change(found, changes)
        return await loops.put_in_loop(found, name, **loops.given(given))


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
            return await self._result(_R.SHUTDOWN, summary="it was told to stop; the task is queued")
        waits = await self._store.read(task_rows.task_waits, task.task_id)
        if (result := await self._ended(task, waits)) is not None:
            return result
        if task.state is TaskState.RUNNING and task.key not in self._orchestrator.tasks.running:
            await self._work(task)
            return None
        if task.state is TaskState.QUEUED and not waits:
            claimed = await self._store.run(task_rows.claim_task, task, by=self._manager.actor)
            if claimed is not None:
                await self._work(claimed)
                return None
        await self._sleep(min(due, _LOOK_SECONDS, *self._seconds_until_due(waits)))
        return None

    def _seconds_until_due(self, waits: list[Wait]) -> list[float]:
        now = self._manager.now()
        return [max((wait.due_at - now).total_seconds(), 0.0) for wait in waits if wait.due_at is not None]

    async def _ended(self, task: Task, waits: list[Wait]) -> LoopResult | None:
        match task.state:
            case TaskState.ACCEPTED:
                return await self._result(_R.TASK_COMPLETE, summary=task.summary)
            case TaskState.REJECTED:
                return await self._result(_R.ERROR, summary=task.error)
            case TaskState.COMPLETED:
                return await self._completed(task, waits)
            case TaskState.QUEUED if task.is_held:
                return await self._result(_R.SHUTDOWN, summary=task.error or "it is held back")
            case TaskState.QUEUED:
                return await self._waiting(task, waits)
        return None

    async def _completed(self, task: Task, waits: list[Wait]) -> LoopResult | None:
        pull = next((wait for wait in waits if wait.kind is WaitKind.PULL_REQUEST), None)
        if pull is None:
            return await self._result(_R.TASK_COMPLETE, summary=task.summary)
        over = pull.due_at is not None and pull.due_at <= self._manager.now()
        if over or not self._waits_through:
            return await self._result(_R.PR_CREATED, summary=task.summary)
        return None

    async def _waiting(self, task: Task, waits: list[Wait]) -> LoopResult | None:
        parked = next((wait for wait in waits if (wait.detail or {}).get("cause") in _PARKED), None)
        if parked is not None:
            return await self._result(_R.MAX_RETRIES, summary=parked.reason)
        hopeless = next((wait for wait in waits if (wait.detail or {}).get("cause") == HOPELESS), None)
        if hopeless is not None:
            return await self._result(_R.ERROR, summary=hopeless.reason)
        blocked = [wait for wait in waits if wait.kind is not WaitKind.BACKOFF]
        missing = await self._orchestrator.unmet(task)
        limited = [wait.due_at for wait in blocked if wait.kind not in END_BY_THEMSELVES]
        is_over = any(due is not None and due <= self._manager.now() for due in limited)
        if (blocked or missing) and (is_over or not self._waits_through):
            names = (*missing, *(_name(wait) for wait in blocked))
            return await self._result(_R.BLOCKED, blocked_on=names, summary=blocked[0].reason if blocked else None)
        return None

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

    async def _result(
        self, kind: LoopResultType, *, summary: str | None = None, blocked_on: tuple[str, ...] = ()
    ) -> LoopResult:
        task = self._task
        pull = await self._store.read(rows.pull_request_of, task)
        return LoopResult(
            result_type=kind,
            task_id=task.key,
            blocked_on=blocked_on,
            pr_url=None if pull is None else pull.url,
            summary=summary,
            iterations=len(await self._store.read(rows.list_iterations, task.task_id)),
        )


def _name(wait: Wait) -> str:
    return (wait.wake_key or "").partition(":")[2] if wait.kind is WaitKind.DEPENDENCY else str(wait.kind)


def _definition(manager: AgentLifecycleManager, agent: Any) -> str:
    if isinstance(agent, str):
        return manager.registry.find(agent).name
    try:
        return manager.registry.find(getattr(agent, "__name__", "")).name
    except AgentNotFoundError:
        return manager.registry.register(agent).name
