"""Bounds how many starts run at a time and begin per second: by priority, and in their order within one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ostler.clock import Clock, Timer
from ostler.model.states import AgentPriority

#: After this number of turns that passed over the start that waits longest, that start has its turn.
PATIENCE = 64
_SECOND = 1.0


@dataclass(eq=False, slots=True)
class _Waiter:
    number: int
    turn: asyncio.Future[None]


class StartGate:
    def __init__(self, clock: Clock, *, at_once: int, per_second: int | None = None) -> None:
        self._clock = clock
        self._at_once = at_once
        self._inside = 0
        self._queues: dict[AgentPriority, deque[_Waiter]] = {priority: deque() for priority in reversed(AgentPriority)}
        self._numbers = 0
        self._passed = 0
        #: When the latest turns began; the oldest of them says when there is room again.
        self._entered: deque[float] = deque(maxlen=per_second)
        self._timer: Timer | None = None
        self._open = False

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def turn(self, priority: AgentPriority, at_most: float | None = None) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn. It lasts as long as the block, until `at_most` seconds have passed, or until the function
        that it gives is called: others do not wait for a start that takes its time.
        """
        await self._enter(priority)
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._leave()

        timer = None if at_most is None else self._clock.call_later(at_most, leave)
        try:
            yield leave
        finally:
            if timer is not None:
                timer.cancel()
            leave()

    def open(self) -> None:
        """Let every start through from now on: the manager closes, and each will find that out."""
        self._open = True
        if self._timer is not None:
            self._timer.cancel()
        self._admit()

    async def _enter(self, priority: AgentPriority) -> None:
        if not self.waiting and (self._open or self._has_room()):
            self._let_in()
            return
        self._numbers += 1
        waiter = _Waiter(self._numbers, asyncio.get_running_loop().create_future())
        queue = self._queues[priority]
        queue.append(waiter)
        self._admit()
        try:
            await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self._leave()  # the turn came in the moment of giving up
            elif waiter in queue:
                queue.remove(waiter)
            raise

    def _leave(self) -> None:
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self.waiting and (self._open or self._has_room()):
            waiter = self._next()
            if waiter.turn.done():
                continue  # it has given up
            self._let_in()
            waiter.turn.set_result(None)

    def _let_in(self) -> None:
        self._inside += 1
        if self._entered.maxlen is not None:
            self._entered.append(self._clock.mono())

    def _has_room(self) -> bool:
        if self._inside >= self._at_once:
            return False
        if self._entered.maxlen is None or len(self._entered) < self._entered.maxlen:
            return True
        left = self._entered[0] + _SECOND - self._clock.mono()
        if left > 0 and self._timer is None:
            self._timer = self._clock.call_later(left, self._wake_next)
        return left <= 0

    def _wake_next(self) -> None:
        self._timer = None
        self._admit()

    def _next(self) -> _Waiter:
        """The first of the highest priority; every now and then the start that waits longest."""
        heads = [queue for queue in self._queues.values() if queue]
        oldest = min(heads, key=lambda queue: queue[0].number)
        chosen = oldest if self._passed >= PATIENCE else heads[0]
        self._passed = 0 if chosen is oldest else self._passed + 1
        return chosen.popleft()
