"""How long agents go on without a manager, and the keeper without agents."""

from __future__ import annotations

from collections.abc import Callable

from ostler.keeper.loop import Loop, Timer

#: A keeper that nobody uses any more.
IDLE_SECONDS = 1.0
#: One that was just started: whoever started it is on the way.
FIRST_SECONDS = 10.0


class Lease:
    """`is_unused` says whether nothing is kept; `over` is called once when it is time to end."""

    def __init__(self, loop: Loop, is_unused: Callable[[], bool], over: Callable[[], None]) -> None:
        self._loop = loop
        self._is_unused = is_unused
        self._over = over
        self.seconds = 0.0
        self._end: Timer | None = None
        self._idle: Timer | None = loop.later(FIRST_SECONDS, self._look)

    def manager_came(self, seconds: float) -> None:
        self.seconds = seconds
        for timer in (self._end, self._idle):
            if timer is not None:
                timer.cancel()
        self._end = self._idle = None

    def manager_left(self) -> None:
        if self._end is None:
            self._end = self._loop.later(self.seconds, self._over)
            self._idle = self._loop.later(IDLE_SECONDS, self._look)

    def _look(self) -> None:
        if self._is_unused():
            self._over()
        else:
            self._idle = self._loop.later(IDLE_SECONDS, self._look)
