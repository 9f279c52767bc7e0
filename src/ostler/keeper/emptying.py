"""Striking until nobody is left: in a box or one room of it, and of those who got out of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from ostler.keeper import tree
from ostler.keeper.boxes import Box, Boxes
from ostler.keeper.children import Children
from ostler.keeper.loop import Loop
from ostler.keeper.tag import tag_for, tag_of
from ostler.keeper.tree import Process

#: How long the proof that a box is empty may take.
PROOF_SECONDS = 5.0
#: How long what an agent leaves has to go by itself.
ASK_SECONDS = 0.5
_LONGEST_PAUSE = 0.05


class Place:
    """What shall be empty. `units` are those whose strays belong to it; `done` hears who is left when time is up."""

    __slots__ = ("asked", "box", "done", "is_template", "leaf", "left", "patience", "pause", "units", "until")

    def __init__(
        self,
        box: Box,
        leaf: str | None,
        units: Sequence[str],
        done: Callable[[list[int]], None],
        *,
        is_template: bool = False,
        ask: bool = False,
    ) -> None:
        self.box = box
        self.leaf = leaf
        self.units = units
        self.done = done
        #: The newborn agents of a template are in its box for a moment; they are not to be struck.
        self.is_template = is_template
        self.until = time.monotonic() + PROOF_SECONDS
        self.pause = 0.0005
        self.left: set[int] = set()
        #: Until then who is in it may go by himself; and who was told to.
        self.patience = time.monotonic() + ASK_SECONDS if ask else 0.0
        self.asked: set[Process] = set()


class Emptying:
    """All that are to be emptied in one turn share one look at those who may have got out."""

    def __init__(self, loop: Loop, boxes: Boxes, children: Children, token: str) -> None:
        self.loop = loop
        self._boxes = boxes
        self._children = children
        self._token = token
        self._waiting: list[Place] = []

    def begin(self, place: Place) -> None:
        """The first blow falls at the end of this turn."""
        self._waiting.append(place)

    def turn_end(self) -> None:
        while self._waiting:
            places, self._waiting = self._waiting, []
            with self._boxes.one_look():
                for place in places:
                    place.left = self._strike(place)
            self._strike_strays([place for place in places if not place.left])
            for place in places:
                self._conclude(place)

    def _strike(self, place: Place) -> set[int]:
        left = place.box.pids(place.leaf)
        if not left:
            return left
        if time.monotonic() < place.patience:
            _ask_all(place, left)
            return left
        newborn = {pid for pid in left if self._children.is_known(pid)} if place.is_template else set()
        if newborn:
            end_all(left - newborn)
        else:
            place.box.kill(place.leaf)
        return place.box.pids(place.leaf)

    def _conclude(self, place: Place) -> None:
        if place.left and time.monotonic() < place.until:
            place.pause = min(_LONGEST_PAUSE, place.pause * 2)
            self.loop.later(place.pause, lambda: self.begin(place))
        else:
            place.done(sorted(place.left))

    # --- those who got out -------------------------------------------------------------------------

    def _strike_strays(self, places: Sequence[Place]) -> None:
        """Who left its box and lost its parents is our own child, and nobody's that we know of."""
        strangers = [pid for pid in tree.children(os.getpid()) if not self._children.is_known(pid)]
        if not strangers or not places:
            return
        names = {unit: place for place in places for unit in place.units}
        tags = {tag: place for unit, place in names.items() if (tag := tag_for(self._token, unit)) is not None}
        for pid in strangers:
            process = tree.living(pid)
            place = self._owner(pid, tags, names) if process is not None else None
            if process is not None and place is not None:
                place.left |= end_all([pid, *tree.descendants(pid)])

    def _owner(self, pid: int, tags: dict[int, Place], names: dict[str, Place]) -> Place | None:
        tag = tag_of(pid)
        if tag is not None:
            return tags.get(tag)
        home, _, unit = (tree.mark_of(pid) or "").partition(":")
        place = names.get(unit) if home == self._token else None
        # The forks of a template keep its mark, and are not its own.
        return None if place is not None and place.is_template else place


def _ask_all(place: Place, pids: Iterable[int]) -> None:
    """Once each: TERM, and CONT for one that stands still and could not hear it."""
    for process in {one for pid in pids if (one := tree.living(pid)) is not None} - place.asked:
        place.asked.add(process)
        for number in (signal.SIGTERM, signal.SIGCONT):
            tree.signal_pid(process.pid, process.start_time, number)


def end_all(pids: Iterable[int]) -> set[int]:
    """One blow to each that lives; who got one."""
    found = [process for pid in pids if (process := tree.living(pid)) is not None]
    return {one.pid for one in found if _end(one)}


def _end(process: Process) -> bool:
    return tree.signal_pid(process.pid, process.start_time, signal.SIGKILL)


def described(pid: int) -> str:
    found = tree.stat(pid)
    return f"process {pid}" if found is None else f"process {pid} (state {found.state})"
