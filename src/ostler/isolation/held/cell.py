"""What both kinds of cells over a holder share: freeze, usage, the stop ladder, an end that was not asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import Coroutine, Iterable, Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from ostler.clock import Clock, Timer
from ostler.errors import AgentGoneError, AgentInitializationError, InvalidOperationError
from ostler.isolation.base import LAST_CALL, Cell, Exit, LastOutput, Listener, StartPlan, StopReport, Usage
from ostler.isolation.calls import wake
from ostler.isolation.holder import Holder, HolderError
from ostler.model.states import Enforcement

_log = logging.getLogger("ostler.isolation")
_LIMIT_FIELDS: Mapping[str, str] = MappingProxyType(
    {"memory": "max_memory_mb", "cpu": "max_cpu_percent", "pids": "processes"}
)
_ALWAYS: Mapping[str, Enforcement] = MappingProxyType(
    {
        "execution_timeout": Enforcement.ENFORCED,  # what ignores its cancellation can be killed
        "max_concurrent_tasks": Enforcement.ENFORCED,
        "max_tokens_per_minute": Enforcement.APPROXIMATED,
        "max_worker_threads": Enforcement.APPROXIMATED,  # the pool is bounded, the agent's own threads are not
    }
)


def enforcement_of(words: Mapping[str, str]) -> dict[str, Enforcement]:
    """From a holder's memory, cpu, pids to the fields of `ResourceLimits`."""
    by_field = {name: Enforcement(words.get(word, Enforcement.ADVISORY)) for word, name in _LIMIT_FIELDS.items()}
    return {**_ALWAYS, **by_field}


def cell_name(plan: StartPlan) -> str:
    return f"{plan.instance_id.hex}.{plan.attempt}"


def require_workdir(plan: StartPlan) -> None:
    if plan.workdir is not None and not plan.owns_workdir and not plan.workdir.is_dir():
        raise AgentInitializationError(f"the workdir {plan.workdir} of {plan.name} is not a directory; make it first")


class Tasks:
    """Tasks that outlive their caller, held until they are done."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)


class HeldCell(Cell):
    GIVE_UP: ClassVar[timedelta] = timedelta(seconds=5)
    #: After TERM, should this manager die before the grace is over.
    TERM_SECONDS: ClassVar[float] = 60.0

    def __init__(self, clock: Clock, holder: Holder, tasks: Tasks, plan: StartPlan, listener: Listener) -> None:
        self._clock = clock
        self._holder = holder
        self._tasks = tasks
        self._plan = plan
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.name = cell_name(plan)
        self._enforcement: Mapping[str, Enforcement] | None = None
        self._frozen = False
        self._closing = False  #: no new calls
        self._ended: Exit | None = None
        self._quiet = True  #: the end is not reported: start or adopt is under way, or it was asked for
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._left = False  #: it has ended, and something of it may live on
        self._stopping: asyncio.Task[StopReport] | None = None
        self._words_over: asyncio.Future[None] = self._loop.create_future()
        self._grace_over: asyncio.Future[None] = self._loop.create_future()
        self._timers: list[Timer] = []
        self._detached = False
        self.is_unanswered = False  #: the holder did not answer when it was last asked to kill it
        self._destroying: asyncio.Task[None] | None = None

    # --- left to the two kinds ---

    @abstractmethod
    async def _end(self, over: asyncio.Future[None]) -> tuple[bool, list[str]]:
        """Ask it to end, wait until `over`, then kill. Whether it ended by itself, and what is left."""

    @abstractmethod
    def _release(self, how: Exit | None) -> None:
        """Release all that wait for it; `how` when it ended by itself."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close sockets and files; the units themselves stay with the holder."""

    def _units(self) -> Iterable[str]:
        """Names of the units that are not forgotten."""
        return (self.name,)

    # --- the contract ---

    @property
    def enforcement(self) -> Mapping[str, Enforcement] | None:
        return self._enforcement

    @property
    def ended(self) -> Exit | None:
        return self._ended

    @property
    def last_output(self) -> LastOutput | None:
        outputs = (self._holder.last_output(unit) for unit in self._units())
        return max((output for output in outputs if output is not None), key=lambda output: output.at, default=None)

    @property
    def is_released(self) -> bool:
        """The manager is done with it, so that the holder need not keep anything of it."""
        return self._detached or self._destroying is not None

    async def freeze(self) -> None:
        # Before it is asked for: a cancelled caller may leave it frozen, and then it must be thawed.
        before, self._frozen = self._frozen, True
        try:
            await self._freeze_units(was_frozen=before)
        except InvalidOperationError:
            self._frozen = before
            raise

    async def _freeze_units(self, *, was_frozen: bool) -> None:
        try:
            await self._ask(self._holder.freeze(self.name))
        except InvalidOperationError as error:
            if not was_frozen and isinstance(error.__cause__, HolderError) and error.__cause__.kind == "late":
                # It may still be carried out. Requests keep their order, so this one undoes it.
                self._tasks.run(self._thaw_late())
            raise

    async def _thaw_late(self) -> None:
        with contextlib.suppress(HolderError):
            await self._holder.thaw(self.name)

    async def thaw(self) -> None:
        if self._frozen:
            await self._ask(self._holder.thaw(self.name))
            self._frozen = False

    async def usage(self) -> Usage:
        return await self._ask(self._holder.usage(self.name))  # type: ignore[no-any-return]

    async def stop(self, grace: timedelta) -> StopReport:
        if self._stopping is None or _left_something(self._stopping):
            self._words_over, self._grace_over = self._loop.create_future(), self._loop.create_future()
            self._stopping = self._tasks.run(self._stop())
        if not self._stopping.done():
            self._allow(grace.total_seconds())
        return await asyncio.shield(self._stopping)

    def _allow(self, seconds: float) -> None:
        """So long until it is killed; in the last part it gets signals. A later caller can only shorten it."""
        if seconds <= 0:
            wake(self._grace_over)
            return
        signals = min(LAST_CALL.total_seconds(), seconds)
        words = seconds - signals if not self.is_stuck else 0.0
        for future, delay in ((self._words_over, words), (self._grace_over, words + signals)):
            self._timers.append(self._clock.call_later(delay, partial(wake, future)))

    async def destroy(self) -> None:
        if not self._detached:
            if self._destroying is None:
                self._destroying = self._tasks.run(self._destroy())
            await asyncio.wait((self._destroying,))

    async def _destroy(self) -> None:
        with contextlib.suppress(Exception):
            await self.stop(timedelta(0))
        if not self._detached:
            self._disconnect()
            try:
                await self._holder.forget(self.name)
            except HolderError as error:
                if error.kind == "late":
                    _log.warning("the keeper does not answer; cell %s is ended when it does", self.name)
                    self._tasks.run(self._erase(self.name))

    async def _erase(self, name: str) -> None:
        """End and forget a cell or a unit of which the holder did not answer; as soon as it does."""
        while True:
            await self._holder.answers()
            try:
                await self._holder.stop(name, 0.0)
                await self._holder.forget(name)
            except HolderError as error:
                if error.kind == "late":
                    continue
            return

    def detach(self) -> None:
        self._quiet = self._detached = self._closing = True
        self._disconnect()
        self._release(None)
        wake(self._gone)
        if self._stopping is None:
            self._stopping = self._tasks.run(_nothing_to_stop())

    # --- the end ---

    async def _stop(self) -> StopReport:
        self._quiet = self._closing = True
        if self._frozen and not self._grace_over.done():
            with contextlib.suppress(InvalidOperationError, AgentGoneError):
                await self.thaw()
        graceful, left = await self._end(self._grace_over)
        for timer in self._timers:
            timer.cancel()
        self._release(None)
        if left:
            _log.warning("an agent could not be ended: %s", "; ".join(left))
        return StopReport(graceful=graceful, left_behind="; ".join(left) or None)

    async def _kill(self, grace: float = 0.0, name: str | None = None) -> list[str]:
        try:
            return await self._holder.stop(name or self.name, grace)
        except HolderError as error:
            self.is_unanswered = error.kind == "late"
            return [] if error.kind in {"unknown", "lost"} or self._gone.done() else [str(error)]

    async def kill_left(self) -> list[str]:
        """What it left when it ended, perhaps under an earlier holder; what lives on."""
        try:
            if not self._left or not await self._holder.open(start=False):
                return []
            left = await self._holder.stop(self.name, 0.0)
        except (HolderError, InvalidOperationError) as error:
            return [str(error)]
        self._left = bool(left)
        return left

    async def _end_processes(self, over: asyncio.Future[None], *, is_running: bool) -> tuple[bool, list[str]]:
        """As `_end`, after words."""
        if not is_running:
            survivors = await self.kill_left()
            return not survivors, survivors
        if not over.done() and (left := await self._terminate(over)) is not None:
            return True, left
        return False, await self._kill()

    async def _terminate(self, over: asyncio.Future[None]) -> list[str] | None:
        """TERM by the holder; None when `over` came first."""
        stopping = self._tasks.run(self._kill(self.TERM_SECONDS))
        await asyncio.wait((stopping, over), return_when=asyncio.FIRST_COMPLETED)
        return stopping.result() if stopping.done() else None

    def _end_unasked(self, how: Exit) -> None:
        """It ended, and all of it is proven gone. Reported once, and only if it was not asked for."""
        wake(self._gone)
        if self._ended is not None or self._stopping is not None:
            return
        self._ended, self._closing = how, True
        self._release(how)
        self._report_end(how)

    def _report_end(self, how: Exit) -> None:
        if not self._quiet:
            self._quiet = True
            try:
                self._listener.on_exit(self._plan.attempt, how)
            except Exception:  # noqa: BLE001 - the listener's own; see `Listener`
                _log.exception("the listener failed to take the exit of an agent")

    async def _ask(self, request: Coroutine[Any, Any, Any]) -> Any:
        if self._ended is not None:
            request.close()
            raise AgentGoneError
        try:
            return await request
        except HolderError as error:
            if error.kind in {"lost", "unknown"}:
                raise AgentGoneError from error
            raise InvalidOperationError(f"the keeper refuses: {error}") from error


def _left_something(stopping: asyncio.Task[StopReport]) -> bool:
    if not stopping.done() or stopping.cancelled() or stopping.exception() is not None:
        return False
    return stopping.result().left_behind is not None


async def _nothing_to_stop() -> StopReport:
    return StopReport(graceful=True)
