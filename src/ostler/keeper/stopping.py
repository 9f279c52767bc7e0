"""The stop ladder: ask, wait, strike everything, prove it empty. Many at once, and none of them blocks the loop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from ostler.keeper.children import Children
from ostler.keeper.emptying import PROOF_SECONDS, described
from ostler.keeper.loop import Loop, Timer
from ostler.keeper.remains import strike
from ostler.keeper.tree import Process
from ostler.keeper.units import ENDING, STARTING, House, Room, Unit

Answer = Callable[[Mapping[str, Any]], None]
#: The same for those who have outlived such a proof already: the blow has fallen, and it only has to be seen.
_SECOND_PROOF_SECONDS = 0.5


class _Stop:
    __slots__ = ("answers", "deadline", "forced", "leaf", "over", "pause", "room", "timer")

    def __init__(self, room: Room, leaf: str | None) -> None:
        self.room = room
        self.leaf = leaf
        self.answers: list[Answer] = []
        self.deadline = float("inf")
        #: When force began, if it has.
        self.forced: float | None = None
        self.over = False
        self.pause = 0.0005
        self.timer: Timer | None = None


class Stops:
    """`cancel` takes back a start that has not become a process yet; `abandon` gives up one that never will."""

    def __init__(
        self,
        loop: Loop,
        house: House,
        children: Children,
        *,
        cancel: Callable[[Unit], None],
        abandon: Callable[[Unit], None],
    ) -> None:
        self._loop = loop
        self._house = house
        self._children = children
        self._cancel = cancel
        self._abandon = abandon
        self._stops: dict[tuple[str, str | None], _Stop] = {}

    def __len__(self) -> int:
        return len(self._stops)

    def stop(self, room: Room, leaf: str | None, grace: float, by: str, answer: Answer) -> None:
        """A second one for the same place joins the first and can only hasten it."""
        stop = self._stops.get((room.name, leaf))
        fresh = stop is None
        if stop is None:
            stop = self._stops[room.name, leaf] = _Stop(room, leaf)
            if leaf is None:
                room.closing = True
        stop.answers.append(answer)
        for unit in self._house.within(room, leaf):
            unit.blame(by)
            if unit.state == STARTING:
                self._cancel(unit)
        self._check(stop)
        if stop.over or stop.forced is not None:
            return
        if grace <= 0 or (leaf is not None and room.frozen):
            # What is frozen cannot heed a signal, and the others in its box are not thawed for it.
            self._force(stop)
            return
        if fresh:
            self._ask(stop)
        if time.monotonic() + grace < stop.deadline:
            stop.deadline = time.monotonic() + grace
            if stop.timer is not None:
                stop.timer.cancel()
            stop.timer = self._loop.later(grace, lambda: self._force(stop))

    def _ask(self, stop: _Stop) -> None:
        """TERM, and CONT for one that stands still and could not hear it."""
        if stop.room.frozen:
            with contextlib.suppress(OSError):
                stop.room.box.thaw()
                stop.room.frozen = False
        for unit in self._house.within(stop.room, stop.leaf):
            self._signal(unit, signal.SIGTERM)
            self._signal(unit, signal.SIGCONT)

    def _signal(self, unit: Unit, number: int) -> None:
        if unit.pid:
            self._children.kill(unit.pid, number, unit, group=True)

    def started(self, unit: Unit) -> None:
        """A start that could not be taken back has become a process in a place that is being stopped."""
        for stop in self._of(unit):
            if stop.forced is None:
                self._signal(unit, signal.SIGTERM)

    def ended(self, unit: Unit) -> None:
        """A unit is buried, or its start has failed."""
        for stop in self._of(unit):
            self._check(stop)

    def _of(self, unit: Unit) -> list[_Stop]:
        found = (self._stops.get((unit.room.name, leaf)) for leaf in {None, unit.leaf})
        return [stop for stop in found if stop is not None]

    def _check(self, stop: _Stop) -> None:
        if stop.over or stop.forced is not None or self._house.within(stop.room, stop.leaf):
            return
        if stop.room.box.pids(stop.leaf) or self._remains(stop):
            self._force(stop)
        else:
            self._finish(stop, [])

    def _force(self, stop: _Stop) -> None:
        if stop.timer is not None:
            stop.timer.cancel()
        stop.forced = time.monotonic()
        self._strike(stop)

    def _strike(self, stop: _Stop) -> None:
        """Again and again: between two blows one of them may have had a child."""
        units = self._house.within(stop.room, stop.leaf)
        # The newborn may not have entered its box yet, so the blow to the box could miss it.
        for unit in units:
            if unit.pid:
                self._children.kill(unit.pid, signal.SIGKILL, unit)
        box = stop.room.box
        left = box.pids(stop.leaf)
        if left:
            box.kill(stop.leaf)
            left = box.pids(stop.leaf)
        remains = self._remains(stop)
        strike(remains)
        known = {process.pid for process in remains}
        left |= known
        if not left and not units:
            self._finish(stop, [])
            return
        spent = time.monotonic() - (stop.forced or 0.0)
        proof = _SECOND_PROOF_SECONDS if not units and left == known else PROOF_SECONDS
        # Who is being buried began to be a moment after the blow, and what that comes to is known a moment later.
        if spent > proof and (spent > 2 * proof or all(unit.state != ENDING for unit in units)):
            self._give_up(stop, units, left)
            return
        stop.pause = min(0.05, stop.pause * 2)
        stop.timer = self._loop.later(stop.pause, lambda: self._strike(stop))

    def _give_up(self, stop: _Stop, units: list[Unit], left: set[int]) -> None:
        for unit in units:
            if unit.state == STARTING:
                self._abandon(unit)
            elif self._children.is_of(unit.pid, unit):
                left.add(unit.pid)  # also one that is not in its box any more
        self._finish(stop, [described(pid) for pid in sorted(left)])

    def strike_remains(self, box: str, answer: Answer, until: float | None = None) -> None:
        """In a box of an earlier keeper, of which only these are known."""
        left = self._house.remains(box)
        strike(left)
        end = time.monotonic() + _SECOND_PROOF_SECONDS if until is None else until
        if left and time.monotonic() < end:
            self._loop.later(0.01, lambda: self.strike_remains(box, answer, end))
        else:
            answer({"graceful": not left, "left": [described(process.pid) for process in left]})

    def _remains(self, stop: _Stop) -> set[Process]:
        return self._house.remains(stop.room.name, stop.leaf)

    def _finish(self, stop: _Stop, left: list[str]) -> None:
        stop.over = True
        del self._stops[stop.room.name, stop.leaf]
        if stop.timer is not None:
            stop.timer.cancel()
        if stop.leaf is None:
            stop.room.closing = False
            if stop.room.frozen and not left:
                with contextlib.suppress(OSError):
                    stop.room.box.thaw()
                    stop.room.frozen = False
        graceful = stop.forced is None
        for answer in stop.answers:
            answer({"graceful": graceful, "left": left})
