"""Whether lanes get on slowly without computing, so that more of them would help."""

from __future__ import annotations

from collections.abc import Iterable

from ostler.simulation.lanes import Lane

#: Seconds per question from which on a lane is slow.
_SLOW = 0.0005
#: Lanes that compute for more than this share of the time would only take the interpreter from each other.
_BUSY = 0.5


class Pace:
    """How fast the lanes get on, from look to look."""

    def __init__(self, end: int) -> None:
        self._looked = 0.0
        self._taken = 0
        self._end = end
        self._cpu: dict[Lane, float] = {}

    @property
    def left(self) -> int:
        return self._end - self._taken

    def begin(self, now: float, lanes: Iterable[Lane]) -> None:
        """Until now nobody looked."""
        self._looked = now
        self._cpu = {lane: lane.cpu_seconds() for lane in lanes}

    def begin_again(self, start: int, end: int) -> None:
        self._taken, self._end = start, end

    def enter(self, lane: Lane) -> None:
        self._cpu[lane] = lane.cpu_seconds()

    def is_slow(self, now: float, running: dict[Lane, tuple[int, float]]) -> bool:
        """Whether more lanes would help."""
        passed, self._looked = now - self._looked, now
        places = [lane.at for lane in running]
        taken = max(places) + 1
        asked, self._taken = taken - self._taken, max(taken, self._taken)
        cpu = {lane: lane.cpu_seconds() for lane in running}
        spent = sum(seconds - self._cpu[lane] for lane, seconds in cpu.items())
        self._cpu = cpu
        if min(places) < 0:
            return False  # one has not even begun
        return asked * _SLOW < passed * len(running) and spent < passed * _BUSY
