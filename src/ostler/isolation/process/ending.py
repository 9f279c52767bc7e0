"""How a cell at the keeper comes to its end: asked, waited for, forced; or found dead. The same for both kinds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from ostler.clock import Clock, Timer
from ostler.errors import AgentGoneError, AgentInitializationError, InvalidOperationError
from ostler.isolation.base import LAST_CALL, Cell, Exit, Listener, StartPlan, StopReport, Usage
from ostler.isolation.calls import wake
from ostler.isolation.process.home import KeeperHome
from ostler.isolation.process.link import KeeperError
from ostler.model.states import Enforcement

_log = logging.getLogger("ostler.isolation")
#: The keeper's words for limits, and the fields of `ResourceLimits` that they hold. How many processes and threads a
#: box has room for cannot be chosen, so that has no field; how well it is held is recorded all the same.
_HELD_BY: Mapping[str, str] = MappingProxyType(
    {"memory": "max_memory_mb", "cpu": "max_cpu_percent", "pids": "processes"}
)
_HELD_ANYWAY: Mapping[str, Enforcement] = MappingProxyType(
    {
        "execution_timeout": Enforcement.ENFORCED,  # what does not heed its cancellation can be killed
        "max_concurrent_tasks": Enforcement.ENFORCED,
        "max_tokens_per_minute": Enforcement.APPROXIMATED,
        "max_worker_threads": Enforcement.APPROXIMATED,  # the pool is bounded; threads of its own only by its box
    }
)


def enforcement_of(said: Mapping[str, str]) -> dict[str, Enforcement]:
    """What a keeper holds, by field of `ResourceLimits`, and under `processes` the size of the tree."""
    held = {field: Enforcement(said.get(word, Enforcement.ADVISORY)) for word, field in _HELD_BY.items()}
    return {**_HELD_ANYWAY, **held}


def box_of(plan: StartPlan) -> str:
    return f"{plan.instance_id.hex}.{plan.attempt}"


def require_workdir(plan: StartPlan) -> None:
    """A directory that the spawn has given must be there: it is not made here."""
    if plan.workdir is not None and not plan.owns_workdir and not plan.workdir.is_dir():
        raise AgentInitializationError(f"the workdir {plan.workdir} of {plan.name} is not a directory; make it first")


class KeptCell(Cell):
    """A box at the keeper. What is left to the two kinds is how they are spoken to."""

    GIVE_UP: ClassVar[timedelta] = timedelta(seconds=5)

    def __init__(self, clock: Clock, home: KeeperHome, plan: StartPlan, listener: Listener) -> None:
        self._clock = clock
        self._home = home
        self._plan = plan
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.box = box_of(plan)
        self._enforcement: Mapping[str, Enforcement] | None = None
        self._frozen = False
        #: It was told to end, or has ended: no new calls.
        self._closing = False
        self._how: Exit | None = None
        #: Its end is not told to the listener: `start` or `recover` is under way, or it was asked for.
        self._quiet = True
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._stopping: asyncio.Task[StopReport] | None = None
        #: Words have had their time; then signals have.
        self._words_over: asyncio.Future[None] = self._loop.create_future()
        self._grace_over: asyncio.Future[None] = self._loop.create_future()
        self._graces: list[Timer] = []
        self._detached = False
        self._destroying: asyncio.Task[None] | None = None

    # --- what a kind adds ----------------------------------------------------------------------------

    @abstractmethod
    async def _wind_up(self, over: asyncio.Future[None]) -> tuple[bool, list[str]]:
        """Ask it to end and wait for that until `over`; then by force. Whether it went by itself, and what is left."""

    @abstractmethod
    def _release(self, how: Exit | None) -> None:
        """No caller waits for anything of it any longer; `how` when it ended by itself."""

    @abstractmethod
    def _close(self) -> None:
        """Sockets, files, its place with the keeper's home."""

    # --- the contract --------------------------------------------------------------------------------

    @property
    def enforcement(self) -> Mapping[str, Enforcement] | None:
        return self._enforcement

    @property
    def ended(self) -> Exit | None:
        return self._how

    @property
    def is_gone(self) -> bool:
        """Nothing of it lives any more; or it is none of ours."""
        return self._gone.done()

    async def freeze(self) -> None:
        # Set before it is asked for: a cancelled caller leaves it frozen, and then it must be thawed.
        before, self._frozen = self._frozen, True
        try:
            await self._ask("freeze", box=self.box)
        except InvalidOperationError:
            self._frozen = before
            raise

    async def thaw(self) -> None:
        await self._ask("thaw", box=self.box)
        self._frozen = False

    async def usage(self) -> Usage:
        used = await self._ask("usage", box=self.box)
        return Usage(
            cpu_seconds=float(used.get("cpu_seconds", 0.0)),
            memory_bytes=int(used.get("memory_bytes", 0)),
            thread_count=int(used.get("threads", 0)),
        )

    async def stop(self, grace: timedelta) -> StopReport:
        if self._stopping is None or _left_something(self._stopping):  # what could not be ended then may end now
            self._words_over, self._grace_over = self._loop.create_future(), self._loop.create_future()
            self._stopping = self._loop.create_task(self._stop(), name="ostler-stop")
        if not self._stopping.done():
            self._give(grace.total_seconds())  # a later caller may have less patience than the first
        return await asyncio.shield(self._stopping)

    def _give(self, seconds: float) -> None:
        """So much time until force; the end of it is for signals."""
        if seconds <= 0:
            wake(self._grace_over)
            return
        signals = min(LAST_CALL.total_seconds(), seconds)
        words = seconds - signals if self._takes_words else 0.0
        for ends, at in ((self._words_over, words), (self._grace_over, words + signals)):
            self._graces.append(self._clock.call_later(at, partial(wake, ends)))

    @property
    def _takes_words(self) -> bool:
        """Whether it may still heed what it is told; else only signals are left."""
        return not self.is_stuck

    async def destroy(self) -> None:
        if self._detached:
            return
        if self._destroying is None:
            self._destroying = self._home.run(self._destroy())
        if not await self._home.is_answered(self._destroying):
            _log.warning("the keeper does not answer, so box %s is ended when it does", self.box)
            self._close()

    async def _destroy(self) -> None:
        with contextlib.suppress(Exception):
            await self.stop(timedelta(0))
        if not self._detached:  # else another manager has taken it meanwhile
            self._close()
            await self._home.forget_box(self.box)

    def detach(self) -> None:
        self._quiet = self._detached = True
        self._shut()
        self._close()
        self._release(None)
        wake(self._gone)
        if self._stopping is None:
            self._stopping = self._loop.create_task(_left_alone(), name="ostler-stop")

    def was_taken(self) -> None:
        self.detach()

    # --- the end -------------------------------------------------------------------------------------

    def _shut(self) -> None:
        """No new calls from here on."""
        self._closing = True

    async def _stop(self) -> StopReport:
        self._quiet = True
        self._shut()
        if self._frozen and not self._grace_over.done():
            with contextlib.suppress(InvalidOperationError, AgentGoneError):
                await self.thaw()
        graceful, left = await self._wind_up(self._grace_over)
        for timer in self._graces:
            timer.cancel()
        self._release(None)
        if left:
            _log.warning("an agent could not be ended: %s", "; ".join(left))
        return StopReport(graceful=graceful, left_behind="; ".join(left) or None)

    async def _force(self, grace_seconds: float = 0.0, leaf: str | None = None, *, again: bool = True) -> list[str]:
        """Through the keeper, which proves that nothing is left. Answers what is."""
        try:
            return await self._home.strike(self.box, leaf, grace_seconds)
        except KeeperError as error:
            if error.kind == "unknown":
                return []
            if error.kind != "lost":
                return [str(error)]
            await self._home.settled()  # by now it was told that it is gone; or the keeper had only hung up on us
            if self._gone.done():
                return []
            if not again:
                return [f"{error}, and what it left is not known"]
            return await self._force(grace_seconds, leaf, again=False)

    async def _signal(self, over: asyncio.Future[None], patience_seconds: float) -> list[str] | None:
        """TERM, and CONT so that it is heard, to its group; waits until it is gone. What is left; None if time is up.

        The keeper has a patience of its own, for the case that this manager dies before the time is up.
        """
        asking = self._home.run(self._force(patience_seconds))
        await asyncio.wait((asking, over), return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None

    def _die(self, how: Exit) -> None:
        """It has ended, and all of it is proven gone. Told once, and only if it was not asked for."""
        wake(self._gone)
        if self._how is not None or self._stopping is not None:
            return
        self._how = how
        self._shut()
        try:
            self._release(how)
        except Exception:  # noqa: BLE001 - logged; its death counts more
            _log.exception("what waited for an agent could not be told that it ended")
        if self._quiet:
            return
        self._quiet = True
        try:
            self._listener.exited(self._plan.attempt, how)
        except Exception:  # noqa: BLE001 - logged; the agent has ended all the same
            _log.exception("the manager failed to take note that an agent ended")

    async def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        if self._how is not None:
            raise AgentGoneError
        try:
            return await self._home.request(op, **fields)
        except KeeperError as error:
            if error.kind == "lost":
                await self._home.settled()  # by now it is known how it ended, which the caller asks next
            if error.kind in {"lost", "unknown"}:
                raise AgentGoneError from error
            raise InvalidOperationError(f"the keeper cannot {op} it: {error}") from error


def _left_something(stopping: asyncio.Task[StopReport]) -> bool:
    if not stopping.done() or stopping.cancelled() or stopping.exception() is not None:
        return False
    return stopping.result().left_behind is not None


async def _left_alone() -> StopReport:
    """To this manager it is as gone as can be."""
    return StopReport(graceful=True)
