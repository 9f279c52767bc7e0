"""Time, as it is passed in: monotonic for durations, boot for leases, wall for display; and deadlines by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Protocol, Self


class Timer(Protocol):
    """Something that will happen, unless it is called off."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The only source of time inside Ostler. Tests and the simulation pass one that they drive."""

    def mono(self) -> float:
        """Seconds that never go back and stand still while the machine sleeps."""
        ...

    def boot(self) -> float:
        """Seconds since boot that go on while the machine sleeps; what an owner watches its own lease by.

        The lease in the store itself is by the wall clock, because owners on several machines share it.
        """
        ...

    def wall(self) -> datetime:
        """The aware UTC time of day, for records and display; it may jump."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait so long by this clock."""
        ...

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Do something on the running loop after so long by this clock."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def mono(self) -> float:
        return time.monotonic()

    def boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, action)


class Deadline:
    """`async with Deadline(clock, limit):` cancels the block when its time is over and raises `TimeoutError`.

    What `asyncio.timeout` does, but by the injected clock. None means no limit.
    """

    def __init__(self, clock: Clock, limit: timedelta | float | None) -> None:
        self._clock = clock
        self._seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        self._task: asyncio.Task[object] | None = None
        self._timer: Timer | None = None
        self._cancelling = 0
        self.expired = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task to cancel")
        self._task, self._cancelling = task, task.cancelling()
        if self._seconds is not None:
            self._timer = self._clock.call_later(self._seconds, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.expired or self._task is None:
            return
        # Cancelled by this deadline alone: a time-out. A cancellation of another caller goes first.
        if self._task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def _expire(self) -> None:
        if self._task is not None:
            self.expired = True
            self._task.cancel()
