"""Time, as it is passed in: monotonic for durations, boot for leases, wall for display."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol


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
