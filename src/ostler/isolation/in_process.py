"""What the two levels inside our own program share: calls as tasks of a loop, and how they are ended.

Two loops appear here. *Home* is the manager's; all state of a cell is touched only on it. *Place* is where the agent
lives: the same loop at level none, one of its own at level thread. `_post` goes from home to place, `_tell` back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from uuid import UUID, uuid4

from ostler.agents import AgentRunner
from ostler.agents.failures import execution_error
from ostler.aio import first_of, wait_ignoring_cancel
from ostler.clock import Clock, Timer
from ostler.errors import AgentGoneError, InvalidOperationError
from ostler.isolation.base import Cell, Exit, LastOutput, Listener, StartPlan, StopReport, Verb
from ostler.isolation.calls import CANCELLED, Call, Outcome, exit_by, wake
from ostler.isolation.mailbox import Mailbox, context_of
from ostler.isolation.process.logs import LogFile
from ostler.model.states import Enforcement, IsolationLevel
from ostler.model.text import last_line

_log = logging.getLogger("ostler.isolation")
_LAST_CHARACTERS = 400
_STATM = Path("/proc/self/statm")
_MEMORY_KEPT_SECONDS = 0.5

LIMITS: Mapping[str, Enforcement] = MappingProxyType(
    {
        "execution_timeout": Enforcement.APPROXIMATED,  # cancelling asks; blocking code hears it when it returns
        "max_concurrent_tasks": Enforcement.ENFORCED,
        "max_worker_threads": Enforcement.ADVISORY,
        "max_memory_mb": Enforcement.ADVISORY,
        "max_cpu_percent": Enforcement.ADVISORY,
        "max_tokens_per_minute": Enforcement.APPROXIMATED,
    }
)


@dataclass(eq=False, slots=True)
class TaskCall(Call):
    """A call that runs as a task of the loop on which the agent lives."""

    payload: Any = None
    task: asyncio.Task[Outcome] | None = None

    def cancel(self) -> None:
        """On the loop on which the agent lives."""
        if self.task is not None:
            self.task.cancel()


class InProcessCell(Cell):
    """A cell inside our own program. What is left to the levels is how to reach the place, and how to end it.

    Unless a level says otherwise, the agent lives at home.
    """

    level: ClassVar[IsolationLevel]
    #: How long a cancelled call may go on before it is given up.
    GIVE_UP: ClassVar[timedelta] = timedelta(seconds=5)
    #: Forcing takes at most this long, in so many pushes.
    FORCE: ClassVar[timedelta] = timedelta(seconds=1)
    PUSHES: ClassVar[int] = 10
    LEFT_BEHIND: ClassVar[str]

    def __init__(self, clock: Clock, plan: StartPlan, listener: Listener, workers: Executor | None = None) -> None:
        self._clock = clock
        self._home = asyncio.get_running_loop()
        self._place: asyncio.AbstractEventLoop = self._home
        self._mailbox = Mailbox(self._home, listener, plan.attempt)
        self._last_write: tuple[datetime, str] | None = None
        write_log = None if plan.log is None else partial(self._write_log, LogFile(plan.log))
        self._context = context_of(plan, clock, self._mailbox, write_log)
        self._runner = AgentRunner(plan.maker, self._context, workers=workers)
        #: Every call whose work has not stopped, also those whose caller was cancelled.
        self._running: set[TaskCall] = set()
        #: It was told to end, or has ended: no new calls, and its end is not told.
        self._closing = False
        self._exit: Exit | None = None
        self._stopping: asyncio.Task[StopReport] | None = None
        self._grace_over: asyncio.Future[None] | None = None
        self._graces: tuple[Timer, ...] = ()
        #: Done when it was told to end, or has ended, and nothing of it runs any more.
        self._gone: asyncio.Future[None] = self._home.create_future()

    # --- what a level adds ---------------------------------------------------------------------------

    def _post(self, action: Callable[..., object], *args: Any) -> None:
        """From home: do something where the agent lives."""
        action(*args)

    def _tell(self, action: Callable[..., object], *args: Any) -> None:
        """From where the agent lives: do something at home."""
        action(*args)

    @abstractmethod
    def _wind_up(self) -> None:
        """Ask everything in it to end, and wake `_gone` when it has. Called once."""

    @abstractmethod
    def _push(self) -> None:
        """Make it end by force; called a few times."""

    # --- the contract --------------------------------------------------------------------------------

    @property
    def handle(self) -> Mapping[str, Any]:
        who = self._context
        return {"level": self.level.value, "instance_id": str(who.instance_id), "attempt": who.attempt}

    @property
    def is_stuck(self) -> bool:
        return any(call.given_up for call in self._running)

    @property
    def ended(self) -> Exit | None:
        return self._exit

    @property
    def last_output(self) -> LastOutput | None:
        last = self._last_write
        return None if last is None else LastOutput(at=last[0], line=last_line(last[1]))

    def _write_log(self, log: LogFile, text: str) -> None:
        """From any thread."""
        self._last_write = self._clock.wall(), text[-_LAST_CHARACTERS:]
        log.write(text)

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        if self._closing:
            raise AgentGoneError
        call = TaskCall(call_id or uuid4(), verb, self._home.create_future(), payload=payload)
        self._running.add(call)
        self._post(self._begin, call)
        try:
            await call.done
        except asyncio.CancelledError:
            await self._withdraw(call)
            raise
        # What it said before it answered is heard before the answer.
        self._mailbox.catch_up()
        return call.result(is_closing=self._closing)

    async def freeze(self) -> None:
        raise InvalidOperationError(f"level {self.level} cannot freeze an agent; use process or container")

    async def thaw(self) -> None:
        raise InvalidOperationError(f"level {self.level} cannot freeze an agent, so there is nothing to thaw")

    async def stop(self, grace: timedelta) -> StopReport:
        if self._stopping is None:
            self._grace_over = self._home.create_future()
            self._stopping = self._home.create_task(self._stop(self._grace_over))
        if not self._stopping.done() and self._grace_over is not None:
            # A later caller may have less patience than the first.
            seconds = grace.total_seconds()
            if seconds <= 0 or self.is_stuck:
                wake(self._grace_over)
            else:
                self._graces += (self._clock.call_later(seconds, partial(wake, self._grace_over)),)
        return await asyncio.shield(self._stopping)

    async def destroy(self) -> None:
        with contextlib.suppress(Exception):
            await self.stop(timedelta(0))

    # --- one call ------------------------------------------------------------------------------------

    def _make(self) -> Outcome:
        """Where the agent lives."""
        try:
            self._runner.make()
        except Exception as error:  # noqa: BLE001 - it is raised where the start is awaited
            return Outcome(error=error)
        except BaseException as error:  # noqa: BLE001 - an agent that wants to exit must not take the program along
            return Outcome(error=execution_error(error, ours=__file__))
        return Outcome()

    def _begin(self, call: TaskCall) -> None:
        call.task = self._place.create_task(self._work(call))
        call.task.add_done_callback(partial(self._finished, call))

    async def _work(self, call: TaskCall) -> Outcome:
        try:
            return Outcome(answer=await self._runner.run(call.verb.value, call.payload, call_id=call.call_id))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:  # noqa: BLE001 - it is raised where the call is awaited
            return Outcome(error=error)
        except BaseException as error:  # noqa: BLE001 - let out of a task it would end the whole loop
            return Outcome(crash=exit_by(error))

    def _finished(self, call: TaskCall, task: asyncio.Task[Outcome]) -> None:
        # One that ends with an error of its own had its code closed under it.
        ended = task.cancelled() or task.exception() is not None
        self._tell(self._settle, call, CANCELLED if ended else task.result())

    def _settle(self, call: TaskCall, outcome: Outcome) -> None:
        self._running.discard(call)
        call.finish(outcome)
        if outcome.crash is not None:
            self._crashed(outcome.crash)

    async def _withdraw(self, call: TaskCall) -> None:
        """Stop the work of a cancelled caller, and wait for that. More cancelling does not shorten the wait."""
        if call not in self._running or call.outcome is not None:
            return
        stopped = call.done = self._home.create_future()
        self._post(call.cancel)
        timer = self._clock.call_later(self.GIVE_UP.total_seconds(), partial(wake, stopped))
        try:
            await wait_ignoring_cancel(stopped)
        finally:
            timer.cancel()
        call.given_up = call in self._running

    # --- the end -------------------------------------------------------------------------------------

    def _crashed(self, how: Exit) -> None:
        """It ended, and that was not asked for."""
        if self._closing:
            return
        self._closing, self._exit = True, how
        self._context.mark_stopping()
        self._mailbox.tell_exit(how)
        self._release_callers(Outcome(crash=how))
        self._wind_up()

    def _release_callers(self, outcome: Outcome) -> None:
        """No caller waits for it any longer."""
        for call in self._running:
            call.finish(outcome)

    async def _stop(self, grace_over: asyncio.Future[None]) -> StopReport:
        if not self._closing:
            self._closing = True
            self._context.mark_stopping()
            self._wind_up()
        await first_of(self._gone, grace_over)
        graceful = self._gone.done()
        if not graceful:
            await self._force()
        for timer in self._graces:
            timer.cancel()
        self._mailbox.flush()
        self._mailbox.close()
        self._release_callers(CANCELLED)
        return StopReport(graceful=graceful, left_behind=None if self._gone.done() else self.LEFT_BEHIND)

    async def _force(self) -> None:
        for _ in range(self.PUSHES):
            self._push()
            await first_of(self._gone, self._clock.sleep(self.FORCE.total_seconds() / self.PUSHES))
            if self._gone.done():
                return
        _log.warning("an agent could not be ended: %s", self.LEFT_BEHIND)


def drop_task(task: asyncio.Task[Any]) -> None:
    """Close the code of a task that does not heed its cancellation, where it waits, and have nothing logged of it."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public way
    coroutine = task.get_coro()
    if isinstance(coroutine, Coroutine):
        with contextlib.suppress(Exception):
            coroutine.close()


def program_memory() -> int:
    """Bytes of real memory that the whole program holds: read once in a while, not once for each cell."""
    return _read_memory(int(time.monotonic() / _MEMORY_KEPT_SECONDS))


@lru_cache(maxsize=1)
def _read_memory(_period: int) -> int:
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0  # the machine does not say
