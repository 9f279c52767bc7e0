"""How a call of `run_agent_loop` ends; and such a call where a daemon owns the home: it drives, and this follows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from ostler.errors import InvalidOperationError, NotFoundError, OstlerError
from ostler.loop.rules import HOPELESS
from ostler.model.events import Event, TaskEvent
from ostler.model.loop import Iteration, LoopResult, LoopResultType, PullRequest
from ostler.model.task import Task, TaskState
from ostler.model.wait import Wait, WaitKind
from ostler.tasks.queue import END_BY_THEMSELVES

_log = logging.getLogger("ostler.loop")
_R = LoopResultType
#: Causes of waits for a person who has to say that more may be spent.
_PARKED = frozenset({"max_retries", "max_iterations", "max_tokens", "max_cost_usd", "max_failures", "lost"})
#: Looked at again without an event: the stream may begin after what it should have told.
_LOOK_SECONDS = 1.0


class LoopEnd(NamedTuple):
    kind: LoopResultType
    summary: str | None = None
    blocked_on: tuple[str, ...] = ()

    def result(self, key: str, pr_url: str | None, iterations: int) -> LoopResult:
        return LoopResult(
            result_type=self.kind,
            task_id=key,
            blocked_on=self.blocked_on,
            pr_url=pr_url,
            summary=self.summary,
            iterations=iterations,
        )


def end_of(
    task: Task, waits: Sequence[Wait], unmet: Sequence[str], now: datetime, *, waits_through: bool
) -> LoopEnd | None:
    """Whether a call ends here; None while the task is worked on, or is to be waited for."""
    match task.state:
        case TaskState.ACCEPTED:
            return LoopEnd(_R.TASK_COMPLETE, task.summary)
        case TaskState.REJECTED:
            return LoopEnd(_R.ERROR, task.error)
        case TaskState.COMPLETED:
            return _end_of_completed(task, waits, now, waits_through=waits_through)
        case TaskState.QUEUED if task.is_held:
            return LoopEnd(_R.SHUTDOWN, task.error or "it is held back")
        case TaskState.QUEUED:
            return _end_of_queued(waits, unmet, now, waits_through=waits_through)
        case TaskState.RUNNING:
            return None


def _end_of_completed(task: Task, waits: Sequence[Wait], now: datetime, *, waits_through: bool) -> LoopEnd | None:
    pull = next((wait for wait in waits if wait.kind is WaitKind.PULL_REQUEST), None)
    if pull is None:
        return LoopEnd(_R.TASK_COMPLETE, task.summary)
    is_over = pull.due_at is not None and pull.due_at <= now
    return LoopEnd(_R.PR_CREATED, task.summary) if is_over or not waits_through else None


def _end_of_queued(
    waits: Sequence[Wait], unmet: Sequence[str], now: datetime, *, waits_through: bool
) -> LoopEnd | None:
    for wait in waits:
        cause = (wait.detail or {}).get("cause")
        if cause in _PARKED or cause == HOPELESS:
            return LoopEnd(_R.ERROR if cause == HOPELESS else _R.MAX_RETRIES, wait.reason)
    blocked = [wait for wait in waits if wait.kind is not WaitKind.BACKOFF]
    limits = [wait.due_at for wait in blocked if wait.kind not in END_BY_THEMSELVES]
    is_over = any(due is not None and due <= now for due in limits)
    if not (blocked or unmet) or not (is_over or not waits_through):
        return None
    names = (*unmet, *(_name(wait) for wait in blocked))
    return LoopEnd(_R.BLOCKED, blocked[0].reason if blocked else None, names)


def _name(wait: Wait) -> str:
    return (wait.wake_key or "").partition(":")[2] if wait.kind is WaitKind.DEPENDENCY else str(wait.kind)


# --- through a daemon --------------------------------------------------------------------------------


class LoopClient(Protocol):
    """The verbs of `ostler.Client` that a loop needs."""

    async def call(self, verb: str, /, *, key: str | None = None, **parameters: Any) -> Any: ...
    async def task(self, key: str) -> Task: ...
    async def task_waits(self, key: str) -> list[Wait]: ...
    async def add_task(self, task: str, *, key: str | None = None, **more: Any) -> Task: ...
    async def put_in_loop(self, key: str, agent: str | None = None, **settings: Any) -> Task: ...
    async def requeue_task(self, key: str) -> Task: ...
    async def hold_task(self, key: str) -> Task: ...
    async def iterations(self, key: str) -> list[Iteration]: ...
    async def pull_requests(self, *, include_ended: bool = False) -> list[PullRequest]: ...
    def events(self, instance: Any = None, *, after: int | None = None) -> AsyncIterator[Event]: ...


class DaemonLoop:
    """One call of `run_agent_loop` through the daemon of the home."""

    def __init__(self, client: LoopClient, stopping: asyncio.Event, *, wait_through: bool) -> None:
        self._client = client
        self._stopping = stopping
        self._waits_through = wait_through
        self._wake = asyncio.Event()

    async def run(self, agent: Any, task: Task | str, settings: dict[str, Any], near: str | None) -> LoopResult:
        key = task.key if isinstance(task, Task) else task
        try:
            key = (await self._enlist(agent, task, settings, near)).key
        except OstlerError as error:
            return LoopEnd(_R.ERROR, str(error)).result(key[:100], None, 0)
        listening = asyncio.ensure_future(self._listen())
        try:
            return await self._follow(key)
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError, OstlerError):
                await listening

    async def _enlist(self, agent: Any, task: Task | str, settings: dict[str, Any], near: str | None) -> Task:
        if not isinstance(agent, str):
            raise InvalidOperationError(
                "a daemon manages this home, so the agent must be the name of a definition that it knows; write it "
                "into a file, or stop the daemon with `ostler down`"
            )
        name = str((await self._client.call("definition", name=agent))["name"])
        key = task.key if isinstance(task, Task) else task
        try:
            record = await self._client.task(key)
        except NotFoundError:
            if isinstance(task, Task) or " " not in key.strip():
                raise
            return await self._client.add_task(key, agent=name, near=near, loop=settings)
        if record.is_finished:
            return record
        record = await self._client.put_in_loop(record.key, name, **settings)
        return await self._client.requeue_task(record.key) if record.is_held else record

    async def _follow(self, key: str) -> LoopResult:
        while True:
            self._wake.clear()
            task = await self._client.task(key)
            if self._stopping.is_set() and not task.is_finished:
                await self._client.hold_task(key)
                return await self._result(key, LoopEnd(_R.SHUTDOWN, "it was told to stop; the task is held back"))
            waits, unmet = await self._client.task_waits(key), await self._unmet(task)
            end = end_of(task, waits, unmet, datetime.now(UTC), waits_through=self._waits_through)
            if end is not None:
                return await self._result(key, end)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._wake.wait()

    async def _unmet(self, task: Task) -> list[str]:
        unmet = []
        for key in task.depends_on if task.state is TaskState.QUEUED else ():
            with contextlib.suppress(NotFoundError):  # purged, so it had been accepted
                if (await self._client.task(key)).state is not TaskState.ACCEPTED:
                    unmet.append(key)
        return unmet

    async def _listen(self) -> None:
        async for event in self._client.events():
            if isinstance(event, TaskEvent):
                self._wake.set()

    async def _result(self, key: str, end: LoopEnd) -> LoopResult:
        pulls = [pull for pull in await self._client.pull_requests(include_ended=True) if pull.task_key == key]
        return end.result(key, pulls[0].url if pulls else None, len(await self._client.iterations(key)))
