"""A bound on how long a block may take, by the clock that is passed in."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import TracebackType
from typing import Self

from ostler.seams.clock import Clock, Timer


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
        # Cancelled by us alone: a time-out. Cancelled by somebody else as well: theirs goes first.
        if self._task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def _expire(self) -> None:
        if self._task is not None:
            self.expired = True
            self._task.cancel()
