"""The end of a unit: what it left behind is ended, proven gone, counted and written down; only then it is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from ostler.keeper.children import Ended
from ostler.keeper.emptying import Emptying, Place, described
from ostler.keeper.loop import Loop
from ostler.keeper.policing import MemoryKills
from ostler.keeper.remains import named
from ostler.keeper.units import ENDED, ENDING, LIVING, House, Unit

#: What a shell says for a child that was killed.
_KILLED_CODE = 128 + int(signal.SIGKILL)
#: Whoever lives on for so long after a memory kill in its box was not the one who was killed.
_MEMORY_SECONDS = 0.5


_TICKS = os.sysconf("SC_CLK_TCK")
#: What a unit is ended for when all in its box has had its part in that.
_HARMFUL = frozenset({"memory", "pids"})


class Undertaker:
    def __init__(self, loop: Loop, house: House, emptying: Emptying, tell: Callable[[Unit], None]) -> None:
        self._loop = loop
        self._house = house
        self._emptying = emptying
        self._tell = tell
        self._written: list[Unit] = []
        self._kills = MemoryKills()
        self._kills_seen = self._kills.last_seen
        loop.later(_MEMORY_SECONDS, self._look_for_kills)

    def bury(self, unit: Unit, ended: Ended) -> None:
        """Its main process has ended and is reaped."""
        unit.state = ENDING
        unit.ended = ended
        written = partial(self._write, unit, ended)
        # Who has used too much together is not asked.
        place = Place(unit.room.box, unit.leaf, unit.names, written, ask=unit.by not in _HARMFUL)
        self._emptying.begin(place)

    def _write(self, unit: Unit, ended: Ended, left: list[int]) -> None:
        if unit.output is not None:
            unit.output.finish()
        oom = self._oom(unit, ended)
        if unit.leaf is not None:
            unit.room.box.remove(unit.leaf)
        record: dict[str, Any] = {
            "unit": unit.name,
            "box": unit.room.name,
            "pid": unit.pid,
            "start_time": unit.start_time,
            "boot_id": self._house.boot_id,
            "ended": ended.at,
            "lasted": _lasted(unit, ended),
            "code": ended.code,
            "signal": ended.signal,
            "oom": oom,
            "by": unit.by,
            "why": unit.why,
            "written": unit.output.written if unit.output else 0,
            "dropped": unit.output.dropped if unit.output else 0,
            "left": [described(pid) for pid in left],
            "survivors": named(left),
        }
        self._house.journal.add(record)
        unit.exit = record
        self._written.append(unit)

    @staticmethod
    def _oom(unit: Unit, ended: Ended) -> bool | None:
        """Only one that was killed, not by us, and when somebody counted a memory kill that it did not live through."""
        if unit.by == "memory":
            return True
        if ended.signal != signal.SIGKILL and ended.code != _KILLED_CODE:
            return False
        count = unit.room.box.oom_kills()
        if count is None or unit.oom_before is None:
            return None
        if count <= unit.oom_before:
            return False
        return True if unit.by is None else None

    def _look_for_kills(self) -> None:
        """A child of an agent may be killed for memory while the agent lives on: that is not the agent's end.

        One number of the whole machine says whether there is anything to look for.
        """
        self._loop.later(_MEMORY_SECONDS, self._look_for_kills)
        for unit in self._house.survivors():
            unit.survived_kills()
        if self._kills.none_since(self._kills_seen):
            return
        self._kills_seen = self._kills.last_seen
        for unit in self._house.units.values():
            if unit.state == LIVING and unit.room.limits.memory_bytes is not None:
                unit.saw_kills(unit.room.box.oom_kills())

    def turn_end(self) -> None:
        """One write for all who ended in this turn; nobody hears of an end that is not on the disk."""
        self._emptying.turn_end()
        self._house.journal.flush()
        told, self._written = self._written, []
        for unit in told:
            unit.state = ENDED
        for unit in told:
            self._tell(unit)


def _lasted(unit: Unit, ended: Ended) -> float | None:
    """In seconds, by the machine's own clock, in whose ticks the kernel notes the start."""
    return None if unit.start_time is None else round(max(ended.uptime - unit.start_time / _TICKS, 0.0), 3)
