"""Level thread: each agent has a thread and a loop of its own, so that one that blocks blocks only itself.

It shares memory and fate with the program: nothing here can hold its memory, or end code that does not return.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ostler.agent_process.agent_loop import AgentLoop, Census, Workers
from ostler.clock import Clock
from ostler.errors import AgentGoneError, AgentInitializationError
from ostler.isolation.base import Capabilities, Cell, Exit, Isolation, Listener, StartPlan, Usage
from ostler.isolation.calls import CANCELLED, Outcome, exit_by, wake
from ostler.isolation.in_process import LIMITS, InProcessCell, drop_task, program_memory
from ostler.model.attempt import AttemptOutcome
from ostler.model.states import Enforcement, IsolationLevel

#: Of an id made from the time only the tail tells neighbours apart.
_SHORT = 8
_JOIN_SECONDS = 1.0


class ThreadIsolation(Isolation):
    level = IsolationLevel.THREAD
    #: An agent can still start threads by itself.
    capabilities = Capabilities(limits={**LIMITS, "max_worker_threads": Enforcement.APPROXIMATED})

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        name = f"ostler-agent-{plan.instance_id.hex[-_SHORT:]}"
        try:
            cell = ThreadCell(self._clock, plan, listener, name)
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
        self._census = Census(lambda: self._tell(self._ended))
        self._workers = Workers(plan.limits.max_worker_threads, name, self._census)
        super().__init__(clock, plan, listener, self._workers)
        self._place: AgentLoop = AgentLoop(self._workers)
        self._thread: threading.Thread | None = None
        self._pong: asyncio.Future[None] | None = None

    async def open(self) -> None:
        made: asyncio.Future[Outcome] = self._home.create_future()
        self._place.call_soon(lambda: self._tell(_resolve, made, self._make()))
        try:
            self._thread = self._census.start(self._name, self._live)
        except RuntimeError as error:
            self._place.close()
            wake(self._gone)
            raise AgentInitializationError(f"no thread could be started for the agent: {error}") from error
        (await made).result(is_closing=False)

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
            memory_bytes=program_memory(),
            memory_is_shared=True,
            thread_count=len(self._census),
        )

    async def destroy(self) -> None:
        await super().destroy()
        if self._gone.done() and self._thread is not None:
            # It has said that it is leaving; this waits for its last few steps.
            self._thread.join(_JOIN_SECONDS)

    # --- at home -------------------------------------------------------------------------------------

    def _post(self, action: Callable[..., object], *args: Any) -> None:
        # A closed loop means that its thread has ended, which arrives here by itself.
        with contextlib.suppress(RuntimeError):
            self._place.call_soon_threadsafe(action, *args)

    def _wind_up(self) -> None:
        self._post(self._place.stop)

    def _push(self) -> None:
        self._census.interrupt()
        self._post(lambda: None)  # a thread that waits for events must wake up to be interrupted

    def _release_callers(self, outcome: Outcome) -> None:
        super()._release_callers(outcome)
        if self._pong is not None:
            wake(self._pong)

    def _ended(self) -> None:
        self._crashed(Exit(outcome=AttemptOutcome.ERROR, detail="the thread of the agent ended"))
        self._release_callers(CANCELLED)
        self._running.clear()
        wake(self._gone)

    # --- in its own thread ---------------------------------------------------------------------------

    def _tell(self, action: Callable[..., object], *args: Any) -> None:
        # The manager's loop may have closed long ago: then there is no manager to tell.
        with contextlib.suppress(RuntimeError):
            self._home.call_soon_threadsafe(action, *args)

    def _live(self) -> None:
        asyncio.set_event_loop(self._place)
        _, death = self._census.exposed(self._place.run_forever)
        # Unless it was asked for, that was the end: a task of the agent's own wanted to end the program.
        why = "the agent stopped the loop on which it lives"
        self._tell(self._crashed, exit_by(death) if death else Exit(outcome=AttemptOutcome.ERROR, detail=why))
        del death
        for step in (self._place.end_tasks, self._drop_tasks):
            self._place.leave()
            self._census.exposed(step)
        self._workers.shutdown()
        self._place.leave()
        self._place.close()
        asyncio.set_event_loop(None)

    def _drop_tasks(self) -> None:
        for task in asyncio.all_tasks(self._place):
            drop_task(task)


def _resolve(made: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not made.done():
        made.set_result(outcome)
