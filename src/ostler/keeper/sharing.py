"""A share of a busy machine where no controller of the kernel deals it out: by the nice value, at least in order.

Many kernels weigh whole sessions against each other (`autogroup`), and the nice value only counts within one. As
every agent has a session of its own, its session gets the same value.
"""

from __future__ import annotations

import errno
import math
import os
from collections import deque

from ostler.keeper.boxes import ENFORCED, Box
from ostler.keeper.loop import Loop
from ostler.keeper.units import LIVING, Room, Unit

#: Whoever has this share or more keeps the nice value it was born with: without rights it can only be raised.
_FULL_WEIGHT = 1600
#: And whoever has so little comes after everybody else. To keep the proportions of the shares it would take twice as
#: much, and then an ordinary agent would starve beside any other program of the machine.
_LEAST_WEIGHT = 25
_NICEST = 10
#: A kernel lets those without rights set ten sessions a second.
_AGAIN_SECONDS = 0.12


def nice_for(weight: int) -> int:
    """1,600: 0, 400: 3, 100: 7, 25: 10. One has about half the share of the next."""
    return min(_NICEST, max(0, round(_NICEST * math.log(_FULL_WEIGHT / weight, _FULL_WEIGHT / _LEAST_WEIGHT))))


def nice_in(room: Room) -> int:
    """For whoever begins in it; 0 where the kernel deals out the shares."""
    return 0 if _deals_out(room.box) else nice_for(room.limits.weight)


def _deals_out(box: Box) -> bool:
    return box.enforcement.get("cpu") == ENFORCED


class Sessions:
    """Gives the sessions of units their nice value, as soon as the kernel lets us."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[Unit] = deque()

    def weigh(self, unit: Unit) -> None:
        if nice_in(unit.room):
            self._waiting.append(unit)
            if len(self._waiting) == 1:
                self._work()

    def _work(self) -> None:
        while self._waiting:
            # Our own child, and it lives: nobody else can have its pid.
            if self._waiting[0].state == LIVING and not _set(self._waiting[0]):
                self._loop.later(_AGAIN_SECONDS, self._work)
                return
            self._waiting.popleft()


def _set(unit: Unit) -> bool:
    """False: not now. A kernel that does not weigh sessions has no such file, and needs none."""
    try:
        descriptor = os.open(f"/proc/{unit.pid}/autogroup", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        os.write(descriptor, str(nice_in(unit.room)).encode())
    except OSError as error:
        return error.errno != errno.EAGAIN
    finally:
        os.close(descriptor)
    return True
