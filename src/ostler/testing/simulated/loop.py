"""An event loop whose time is made up: when nothing is left to do now, it is at once the time of what comes next.

One thread, no sockets that matter, no waiting. The same seed gives the same order of everything, and an hour of an
agent's life passes in milliseconds.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from ostler.seams import Timer

T = TypeVar("T")

_START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class DeadlockError(Exception):
    """Nothing will ever happen again, and somebody still waits."""


class VirtualClock:
    """Moved by the loop. `jump` sets the wall clock alone, as an operator does."""

    def __init__(self, start: datetime = _START) -> None:
        self._seconds = 0.0
        self._start = start
        self._jumped = timedelta(0)

    def mono(self) -> float:
        return self._seconds

    def boot(self) -> float:
        return self._seconds

    def wall(self) -> datetime:
        return self._start + self._jumped + timedelta(seconds=self._seconds)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.0))

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(seconds, 0.0), action)

    def advance(self, seconds: float) -> None:
        self._seconds += seconds

    def jump(self, by: timedelta) -> None:
        self._jumped += by


class _Idle(selectors.SelectSelector):
    """Where a real loop would wait, time passes at once."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("nothing is left to happen, and not everything has ended")
        if timeout > 0:
            self._clock.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Idle(clock))
        self.clock = clock

    def time(self) -> float:
        return self.clock.mono()


def run_virtual(clock: VirtualClock, main: Coroutine[Any, Any, T]) -> T:
    """What `asyncio.run` does, in made-up time."""
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
