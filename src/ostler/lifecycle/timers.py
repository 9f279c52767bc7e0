"""Durable waits that end by themselves. The row in the store says when; here it is watched by the monotonic clock.

The wall clock may jump. So what is still to wait is worked out once, when the wait is opened or found again, and
can never be longer than it was meant to be in all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

from ostler.model import Wait
from ostler.seams import Clock, Timer

#: Looked at so often at least: the monotonic clock stands still while the machine sleeps, the boot clock does not.
_LOOK_SECONDS = 60.0


class Timers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: dict[UUID, tuple[float, Wait]] = {}
        self._timers: dict[UUID, Timer] = {}
        self._fire: Callable[[Wait], None] | None = None

    def start(self, fire: Callable[[Wait], None]) -> None:
        self._fire = fire
        for wait_id in self._due:
            self._arm(wait_id)

    def add(self, wait: Wait, delay: timedelta) -> None:
        """Ring after so long, once."""
        self.drop(wait.wait_id)
        self._due[wait.wait_id] = (self._clock.boot() + delay.total_seconds(), wait)
        if self._fire is not None:
            self._arm(wait.wait_id)

    def found(self, wait: Wait) -> None:
        """One that an earlier manager opened: what is left of it, by the wall clock, but never more than it all."""
        if wait.due_at is not None:
            left = min(wait.due_at - self._clock.wall(), wait.due_at - wait.created_at)
            self.add(wait, max(left, timedelta(0)))

    def remaining(self, wait_id: UUID) -> timedelta | None:
        known = self._due.get(wait_id)
        return None if known is None else timedelta(seconds=max(known[0] - self._clock.boot(), 0.0))

    def drop(self, wait_id: UUID) -> None:
        self._due.pop(wait_id, None)
        timer = self._timers.pop(wait_id, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        self._fire = None
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._due.clear()

    def __len__(self) -> int:
        return len(self._due)

    def _arm(self, wait_id: UUID) -> None:
        left = self._due[wait_id][0] - self._clock.boot()
        self._timers[wait_id] = self._clock.call_later(min(max(left, 0.0), _LOOK_SECONDS), lambda: self._ring(wait_id))

    def _ring(self, wait_id: UUID) -> None:
        known = self._due.get(wait_id)
        if known is None or self._fire is None:
            return
        if known[0] > self._clock.boot():
            self._arm(wait_id)
            return
        self.drop(wait_id)
        self._fire(known[1])
