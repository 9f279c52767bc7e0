"""How many requests one agent works on at a time, and how many may wait for their turn."""

from __future__ import annotations

import asyncio
from collections import deque

from ostler.errors import AgentBusyError


class Slots:
    """A bounded queue before a bounded number of places. First come, first served."""

    __slots__ = ("_limit", "_queue_limit", "_taken", "_waiters")

    def __init__(self, limit: int, queue_limit: int) -> None:
        self._limit = limit
        self._queue_limit = queue_limit
        self._taken = 0
        #: Made when first needed: most agents never have a queue.
        self._waiters: deque[asyncio.Future[None]] | None = None

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def queued(self) -> int:
        return len(self._waiters or ())

    async def acquire(self, *, wait: bool = True) -> None:
        if self._taken < self._limit and not self._waiters:
            self._taken += 1
            return
        if not wait or self.queued >= self._queue_limit:
            raise AgentBusyError(
                f"{self._taken} requests are being processed and {self.queued} wait, which is all it accepts; "
                "try again when some are done, or raise max_concurrent_tasks"
            )
        if self._waiters is None:
            self._waiters = deque()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release()  # the place was given in the very moment of giving up
            elif turn in self._waiters:
                self._waiters.remove(turn)
            raise

    def occupy(self) -> None:
        """A place is taken already, by work that was found again."""
        self._taken += 1

    def release(self) -> None:
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)  # the place passes on without becoming free in between
                return
        self._taken -= 1

    def turn_away(self, error: Exception) -> None:
        """Nobody will be served any more: tell those who wait."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_exception(error)
