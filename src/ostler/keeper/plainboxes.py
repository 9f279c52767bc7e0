"""Boxes without control groups, as a whole: who is in none of them yet, and one look at /proc that serves them all."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping

from ostler.keeper import tree
from ostler.keeper.boxes import APPROXIMATED, Box, Boxes, BoxLimits
from ostler.keeper.orphans import Orphans
from ostler.keeper.plainbox import FREEZE_SECONDS, PlainBox
from ostler.keeper.policing import MemoryKills
from ostler.keeper.tag import tag_for, tag_of
from ostler.keeper.tree import Process, Stat

#: So old may a look at all processes be where it is not a matter of life and death.
_FRESH_SECONDS = 0.05


class PlainBoxes(Boxes):
    title = "signals"
    polices = True

    def __init__(self, token: str) -> None:
        self.memory_kills = MemoryKills()
        self._token = token
        self._boxes: dict[str, PlainBox] = {}
        self._everyone: dict[int, Stat] = {}
        self._offspring: dict[int, list[Process]] = {}
        self._looked_at = 0.0
        #: While one look serves many: whether it was taken, and what was seen of orphans then.
        self._sharing = False
        self._is_fresh = False
        self._orphans: tuple[list[Process], list[Stat]] | None = None
        #: Children of ours that belong to no box: templates, and whoever has no mark.
        self._strangers: set[Process] = set()

    def make(self, name: str, limits: BoxLimits) -> Box:
        return self._new(name, limits, self.memory_kills.last_seen)

    def find(self, name: str, limits: BoxLimits) -> Box:
        """It knows nobody yet: call `took_in` again for the processes that were started for it."""
        return self._new(name, limits, None)

    def _new(self, name: str, limits: BoxLimits, kills: int | None) -> PlainBox:
        self._boxes[name] = PlainBox(self, name, limits, kills)
        return self._boxes[name]

    def freeze_all(self, boxes: Iterable[Box]) -> list[str]:
        """One look for all of them: to look for each takes long where they are many."""
        moving = [self._boxes[box.name] for box in boxes]
        until = time.monotonic() + FREEZE_SECONDS
        while moving and time.monotonic() < until:
            with self.one_look():
                moving = [box for box in moving if box.hold_moving()]
        return [f"box {box.name} did not stand still within {FREEZE_SECONDS:g} s" for box in moving]

    def tag(self, unit: str) -> int | None:
        return tag_for(self._token, unit)

    def took_in(self, process: Process, box: PlainBox) -> None:
        """A process is in one box only; and a look from before does not know it."""
        self._strangers.discard(process)
        for other in self._boxes.values():
            if other is not box:
                other.drop(process)
        self.look_again()

    @contextlib.contextmanager
    def one_look(self) -> Iterator[None]:
        self.look_again()
        self._sharing = True
        try:
            yield
        finally:
            self._sharing = False
            self.look_again()

    def look_again(self) -> None:
        """Something has changed since the last look: who was seen may be dead, or in another box."""
        self._is_fresh = False
        self._orphans = None

    def let_go(self, box: PlainBox) -> None:
        if self._boxes.get(box.name) is box:
            del self._boxes[box.name]

    def enforcement(self) -> Mapping[str, str]:
        return {"memory": APPROXIMATED, "cpu": APPROXIMATED, "pids": APPROXIMATED}

    def everyone(self, *, fresh: bool) -> tuple[dict[int, Stat], dict[int, list[Process]]]:
        """All that live on this machine, and who is whose child. One look serves all boxes."""
        now = time.monotonic()
        is_enough = self._sharing and self._is_fresh if fresh else now - self._looked_at <= _FRESH_SECONDS
        if not is_enough:
            self._is_fresh = True
            self._everyone = tree.census()
            self._offspring = {}
            for seen in self._everyone.values():
                self._offspring.setdefault(seen.parent, []).append(seen.process)
            self._looked_at = now
            mine = self._offspring.get(os.getpid(), [])
            self._strangers.intersection_update(mine)
            self._adopt(mine)
        return self._everyone, self._offspring

    def orphans(self) -> tuple[list[Process], list[Stat]]:
        """Those who live, and those who have just died: who forks and leaves is too fast for a look at all."""
        if not self._sharing or self._orphans is None:
            self._orphans = Orphans(self.known_pids(), self.adopt_one).until_quiet()
        return self._orphans

    def is_session_known(self, session: int) -> bool:
        return any(session in box.sessions for box in self._boxes.values())

    def known_pids(self) -> set[int]:
        boxed = {one.pid for box in self._boxes.values() for one in box.known}
        return boxed.union(one.pid for one in self._strangers)

    def adopt_marked(self, box: PlainBox) -> None:
        """The whole machine looked through for the mark of this box."""
        for pid in tree.marked(f"{self._token}:{box.name}"):
            process = tree.living(pid)
            if process is not None and pid != os.getpid() and not box.knows(process):
                self.adopt_one(process)

    def _adopt(self, children: Iterable[Process]) -> None:
        for one in children:
            if one not in self._strangers and not any(box.knows(one) for box in self._boxes.values()):
                self.adopt_one(one)

    def adopt_one(self, process: Process) -> bool:
        """By its tag, or its mark; whether it is known now, be it as a stranger."""
        tag = tag_of(process.pid)
        if tag is not None and any(box.adopt_tagged(process, tag) for box in self._boxes.values()):
            return True
        mark = tree.mark_of(process.pid)
        if mark == "" or not tree.is_alive(process):
            return False  # not to be said at this moment
        home, _, unit = (mark or "").partition(":")
        # Who has the tag of another was forked from a template, and its mark says no more than that.
        if home != self._token or tag is not None or not any(box.adopt(process, unit) for box in self._boxes.values()):
            self._strangers.add(process)
        return True

    def sweep(self) -> list[int]:
        return tree.end_marked(f"{self._token}:")
