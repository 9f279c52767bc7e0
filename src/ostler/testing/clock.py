"""A clock that stands where it is put, for tests that would otherwise wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from operator import itemgetter

from ostler.clock import Timer

_START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class ManualClock:
    """Time passes only when it is told to. `advance` moves all three clocks; `jump` sets the wall clock alone.

    A task that sleeps on it wakes when it has been advanced far enough, in the order in which they are due.
    """

    def __init__(self, start: datetime = _START) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._wall = start
        self._sleepers: list[tuple[float, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def mono(self) -> float:
        return self._seconds

    def boot(self) -> float:
        return self._seconds

    def wall(self) -> datetime:
        return self._wall

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._sleepers.append((self._seconds + seconds, loop, woken))
        await woken

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        woken.add_done_callback(lambda done: None if done.cancelled() else action())
        with self._lock:
            self._sleepers.append((self._seconds + max(seconds, 0.0), loop, woken))
        if seconds <= 0:
            self.advance(0)
        return _Alarm(woken)

    def advance(self, seconds: float) -> None:
        """Let time pass, and wake those whose time has come."""
        if seconds < 0:
            raise ValueError("time does not go back; to set the wall clock back, use jump")
        with self._lock:
            self._seconds += seconds
            self._wall += timedelta(seconds=seconds)
            due = sorted((sleeper for sleeper in self._sleepers if sleeper[0] <= self._seconds), key=itemgetter(0))
            self._sleepers = [
                sleeper for sleeper in self._sleepers if sleeper[0] > self._seconds and not sleeper[2].done()
            ]
        for _, loop, woken in due:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, woken)

    def jump(self, by: timedelta) -> None:
        """Set the wall clock, as an operator or a time server does; durations do not notice."""
        with self._lock:
            self._wall += by


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


class _Alarm:
    def __init__(self, woken: asyncio.Future[None]) -> None:
        self._woken = woken

    def cancel(self) -> None:
        self._woken.cancel()
