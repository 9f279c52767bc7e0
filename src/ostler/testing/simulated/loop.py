"""An event loop in virtual time: when no callback is ready, the clock moves to the next timer at once.

One thread and no waiting. The same program does the same things in the same order, and an hour takes milliseconds.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from ostler.clock import Timer

T = TypeVar("T")

_SHORTEST_SECONDS = 1e-6
_START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class DeadlockError(Exception):
    """No callback is ready and no timer is set, but the main coroutine has not ended."""


class VirtualClock:
    """Moved by the loop, or by hand."""

    def __init__(self, start: datetime = _START) -> None:
        self._seconds = 0.0
        self._start = start
        self._asleep = 0.0
        self._jumped = timedelta(0)

    def mono(self) -> float:
        return self._seconds

    def boot(self) -> float:
        return self._seconds + self._asleep

    def wall(self) -> datetime:
        return self._start + self._jumped + timedelta(seconds=self.boot())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(_at_least(seconds))

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(_at_least(seconds), action)

    def advance(self, seconds: float) -> None:
        self._seconds += seconds

    def jump(self, by: timedelta) -> None:
        """Set the wall clock, as an operator does."""
        self._jumped += by

    def suspend_machine(self, seconds: float) -> None:
        """As a laptop that sleeps: the monotonic clock stands still, the other two go on."""
        self._asleep += seconds


def _at_least(seconds: float) -> float:
    """Less than this is lost in the rounding of the clock, and a task that waits for the rest would wait for ever."""
    return max(seconds, _SHORTEST_SECONDS) if seconds > 0 else 0.0


class _VirtualSelector(selectors.SelectSelector):
    """Where a real loop waits, the clock moves."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("no callback is ready and no timer is set, but the main coroutine has not ended")
        if timeout > 0:
            self._clock.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_VirtualSelector(clock))
        self.clock = clock

    def time(self) -> float:
        return self.clock.mono()

    def _write_to_self(self) -> None:
        """There is no other thread, so the selector need not be woken."""


def run_virtual(clock: VirtualClock, main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time."""
    loop = VirtualLoop(clock)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
