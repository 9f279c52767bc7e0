"""Level thread: each agent has a thread and a loop of its own, so that one that blocks blocks only itself.

It shares memory and fate with the program: nothing here can hold its memory, or end code that does not return.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from ostler.agent_process.agent_loop import AgentLoop
from ostler.agent_process.workers import Census, Workers
from ostler.aio import wake
from ostler.clock import Clock
from ostler.errors import AgentGoneError, AgentInitializationError
from ostler.isolation.base import Capabilities, Cell, Exit, Isolation, Listener, Site, StartPlan, Usage
from ostler.isolation.calls import CANCELLED, MemoryGauge, Outcome, exit_by
from ostler.isolation.in_process import InProcessCell
from ostler.model.attempt import AttemptOutcome
from ostler.model.states import Enforcement, IsolationLevel

_LIMITS: Mapping[str, Enforcement] = MappingProxyType(
    {
        "execution_timeout": Enforcement.APPROXIMATED,  # cancelling asks; blocking code hears it when it returns
        "max_concurrent_tasks": Enforcement.ENFORCED,
        "max_worker_threads": Enforcement.APPROXIMATED,  # an agent can still start threads by itself
        "max_memory_mb": Enforcement.ADVISORY,
        "max_cpu_percent": Enforcement.ADVISORY,
        "max_tokens_per_minute": Enforcement.APPROXIMATED,
    }
)
_CAPABILITIES = Capabilities(limits=_LIMITS)
#: Of an id made from the time only the tail tells neighbours apart.
_SHORT = 8
_JOIN_SECONDS = 1.0


class ThreadIsolation(Isolation):
    level: ClassVar[IsolationLevel] = IsolationLevel.THREAD

    def __init__(self, clock: Clock, site: Site | None = None) -> None:
        super().__init__(clock, site)
        self._gauge = MemoryGauge(clock)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        name = f"ostler-agent-{plan.instance_id.hex[-_SHORT:]}"
        try:
            cell = ThreadCell(self._clock, plan, listener, name)
            cell.gauge = self._gauge
        except OSError as error:
            raise AgentInitializationError(f"no loop could be made for the agent: {error}") from error
        try:
            await cell.open()
        except BaseException:
            await cell.destroy()
            raise
        return cell


class ThreadCell(InProcessCell):
    level = IsolationLevel.THREAD
    LEFT_BEHIND = "its thread does not end; it is cut off and ends with the program"

    def __init__(self, clock: Clock, plan: StartPlan, listener: Listener, name: str) -> None:
        self._name = name
        self._census = Census(self._emptied)
        self._workers = Workers(plan.limits.max_worker_threads, name, self._census)
        super().__init__(clock, plan, listener, self._workers)
        self._place = AgentLoop(self._workers)
        self._thread: threading.Thread | None = None
        #: Every thread of it has ended.
        self._over = False
        self._pong: asyncio.Future[None] | None = None

    async def open(self) -> None:
        made: asyncio.Future[Outcome] = self._home.create_future()
        self._place.call_soon(self._make_and_tell, made)
        try:
            self._thread = self._census.start(self._name, self._live)
        except RuntimeError as error:
            self._place.close()
            self._over = True
            raise AgentInitializationError(f"no thread could be started for the agent: {error}") from error
        self._check_made(await made)

    async def ping(self) -> None:
        if not self._closing:
            # Many may ask; one question is under way at a time, so that a blocked loop does not gather them.
            if self._pong is None or self._pong.done():
                self._pong = self._home.create_future()
                self._post(self._tell, wake, self._pong)
            await asyncio.wait((self._pong,))
        if self._closing:
            raise AgentGoneError

    async def usage(self) -> Usage:
        return Usage(
            cpu_seconds=self._census.cpu_seconds(),
            memory_bytes=self.gauge.read(),
            memory_is_shared=True,
            thread_count=len(self._census),
        )

    async def destroy(self) -> None:
        await super().destroy()
        if self._over and self._thread is not None:
            # It has said that it is leaving; this waits for its last few steps.
            self._thread.join(_JOIN_SECONDS)

    # --- at home -------------------------------------------------------------------------------------

    def _post(self, action: Callable[..., object], *args: Any) -> None:
        # A closed loop means that its thread has ended, which arrives here by itself.
        with contextlib.suppress(RuntimeError):
            self._place.call_soon_threadsafe(action, *args)

    @property
    def _is_gone(self) -> bool:
        return self._over

    def _wind_up(self) -> None:
        self._post(self._place.stop)

    def _push(self) -> None:
        self._census.interrupt()
        self._post(_nothing)  # a thread that waits for events must wake up to be interrupted

    def _release_callers(self, outcome: Outcome) -> None:
        super()._release_callers(outcome)
        if self._pong is not None:
            wake(self._pong)

    def _ended(self) -> None:
        self._over = True
        self._crashed(Exit(outcome=AttemptOutcome.ERROR, detail="the thread of the agent ended"))
        self._release_callers(CANCELLED)
        self._running.clear()
        self._look()

    # --- in its own thread ---------------------------------------------------------------------------

    def _tell(self, action: Callable[..., object], *args: Any) -> None:
        # The manager's loop may have closed long ago: then there is no manager to tell.
        with contextlib.suppress(RuntimeError):
            self._home.call_soon_threadsafe(action, *args)

    def _create_task(self, work: Coroutine[Any, Any, Outcome]) -> asyncio.Task[Outcome]:
        return self._place.create_task(work)

    def _make_and_tell(self, made: asyncio.Future[Outcome]) -> None:
        self._tell(_resolve, made, self._make())

    def _emptied(self) -> None:
        self._tell(self._ended)

    def _live(self) -> None:
        asyncio.set_event_loop(self._place)
        _, death = self._census.exposed(self._place.run_forever)
        # Unless it was asked for, that was the end: a task of the agent's own wanted to end the program.
        why = "the agent stopped the loop on which it lives"
        self._tell(self._crashed, exit_by(death) if death else Exit(outcome=AttemptOutcome.ERROR, detail=why))
        del death
        for step in (self._end_tasks, self._drop_tasks):
            self._place.leave()
            self._census.exposed(step)
        self._workers.shutdown()
        self._place.leave()
        self._place.close()
        asyncio.set_event_loop(None)

    def _end_tasks(self) -> None:
        while tasks := asyncio.all_tasks(self._place):
            for task in tasks:
                task.cancel()
            # One that wants to end the program instead is done with that; the others have their turn again.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._place.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._place.run_until_complete(self._place.shutdown_asyncgens())

    def _drop_tasks(self) -> None:
        for task in asyncio.all_tasks(self._place):
            _drop(task)


def _drop(task: asyncio.Task[Any]) -> None:
    """A task that would not end, on a loop that will not turn again: close its code, and say nothing about it."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public way
    coroutine = task.get_coro()
    if isinstance(coroutine, Coroutine):
        with contextlib.suppress(Exception):
            coroutine.close()


def _resolve(made: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not made.done():
        made.set_result(outcome)


def _nothing() -> None:
    pass
