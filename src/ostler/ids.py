"""Identifiers that sort by creation: UUID version 7, with a counter that keeps order within a millisecond."""

from __future__ import annotations

import os
import random
import threading
from typing import Protocol
from uuid import UUID

from ostler.clock import Clock

_COUNTER_BITS = 12
_TAIL_BITS = 62
_LAST_COUNTER = 2**_COUNTER_BITS - 1
_LAST_TAIL = 2**_TAIL_BITS - 1
_LAST_MILLISECOND = 2**48 - 1
#: Version 7 and the variant of RFC 9562.
_MARKS = 0x7 << 76 | 0b10 << 62


class IdSource(Protocol):
    def new(self) -> UUID: ...


def uuid7(milliseconds: int, counter: int, tail: int) -> UUID:
    """Lay out RFC 9562 version 7: 48 bits of time, 12 of counter, 62 of chance."""
    return _laid_out(milliseconds & _LAST_MILLISECOND, counter & _LAST_COUNTER, tail & _LAST_TAIL)


def _laid_out(milliseconds: int, counter: int, tail: int) -> UUID:
    """The same for parts that are known to fit."""
    return UUID(int=milliseconds << 80 | counter << 64 | tail | _MARKS)


class Uuid7Source:
    """Rising ids from a clock and a random source; safe to share between threads.

    When the clock goes back, or more than 4096 ids fall into one millisecond, the time part runs ahead of the
    clock instead of repeating itself: order by creation is the promise, the embedded time is only a hint.
    """

    def __init__(self, clock: Clock, chance: random.Random | None = None) -> None:
        self._clock = clock
        # Ids must not repeat; they need not be secret, so one draw of entropy per source is enough.
        self._chance = chance or random.Random(os.urandom(32))  # noqa: S311 - an id need not be secret
        self._lock = threading.Lock()
        self._last = 0
        self._counter = 0

    def new(self) -> UUID:
        now = int(self._clock.wall().timestamp() * 1000)
        with self._lock:
            if now > self._last:
                self._last, self._counter = now, 0
            elif self._counter < _LAST_COUNTER:
                self._counter += 1
            else:
                self._last, self._counter = self._last + 1, 0
            return _laid_out(self._last, self._counter, self._chance.getrandbits(_TAIL_BITS))
