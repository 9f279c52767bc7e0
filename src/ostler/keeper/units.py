"""What the keeper keeps: boxes in use, the units in them, and the records of those that ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ostler.keeper.asking import RefusedError
from ostler.keeper.boxes import Box, Boxes, BoxLimits
from ostler.keeper.children import Ended
from ostler.keeper.output import Output
from ostler.keeper.records import Journal, Record
from ostler.keeper.remains import remains
from ostler.keeper.tree import Process

STARTING, LIVING, ENDING, ENDED = "starting", "living", "ending", "ended"
#: Never came to life; it goes without a record as soon as nothing of it is left.
FAILED = "failed"
_UNSEEN = frozenset({STARTING, FAILED})


class Room:
    """One box in use."""

    __slots__ = ("box", "closing", "frozen", "limits", "name", "units")

    def __init__(self, name: str, box: Box, limits: BoxLimits) -> None:
        self.name = name
        self.box = box
        self.limits = limits
        self.units: dict[str, Unit] = {}
        self.frozen = False
        #: All of it is being stopped; nothing new may begin in it.
        self.closing = False

    @property
    def has_starting(self) -> bool:
        return any(unit.state == STARTING for unit in self.units.values())

    @property
    def has_living(self) -> bool:
        return any(unit.state == LIVING for unit in self.units.values())


class Unit:
    """One process with all that it starts. `channel` is our copy of the manager's end, -1 where there is none."""

    __slots__ = (
        "by",
        "channel",
        "ended",
        "exit",
        "grown_from",
        "leaf",
        "name",
        "oom_before",
        "oom_seen",
        "output",
        "pid",
        "room",
        "start_time",
        "state",
        "why",
    )

    def __init__(self, name: str, room: Room, leaf: str | None) -> None:
        self.name = name
        self.room = room
        self.leaf = leaf
        self.state = STARTING
        self.pid = 0
        self.start_time: int | None = None
        #: The box of the template that has become it, if one has: what that had started is its own.
        self.grown_from: str | None = None
        self.channel = -1
        self.output: Output | None = None
        #: Who ended it, where that was not itself, and in which words.
        self.by: str | None = None
        self.why: str | None = None
        #: Memory kills in its box that were not its own end; and those that perhaps were.
        self.oom_before = room.box.oom_kills()
        self.oom_seen: int | None = None
        self.ended: Ended | None = None
        self.exit: Record | None = None

    @property
    def names(self) -> list[str]:
        """Under which its processes are known."""
        return [self.name] if self.grown_from is None else [self.name, self.grown_from]

    def blame(self, by: str, why: str | None = None) -> None:
        """The first who wanted its end is the one who is named; one that has ended was nobody's doing."""
        if self.by is None and self.state in {STARTING, LIVING}:
            self.by, self.why = by, why

    def saw_kills(self, count: int | None) -> None:
        """So many memory kills are counted in its box now; `survived_kills` follows if it lives on."""
        self.oom_seen = count

    def survived_kills(self) -> None:
        self.oom_before, self.oom_seen = self.oom_seen, None

    def let_go(self) -> None:
        """Our copies of its descriptors."""
        if self.channel >= 0:
            os.close(self.channel)
            self.channel = -1
        if self.output is not None:
            self.output.finish()


class House:
    def __init__(self, boxes: Boxes, journal: Journal, *, token: str, boot_id: str) -> None:
        self.boxes = boxes
        self.journal = journal
        self.token = token
        self.boot_id = boot_id
        self.rooms: dict[str, Room] = {}
        self.units: dict[str, Unit] = {}

    def open_room(self, name: str, limits: BoxLimits) -> Room:
        room = self.rooms.get(name)
        if room is None:
            try:
                room = Room(name, self.boxes.make(name, limits), limits)
            except OSError as error:
                raise RefusedError("start", f"no box could be made for it: {error}") from error
            self.rooms[name] = room
        return room

    def add(self, unit: Unit) -> None:
        self.units[unit.name] = unit
        unit.room.units[unit.name] = unit

    def drop(self, unit: Unit) -> None:
        unit.let_go()
        self.units.pop(unit.name, None)
        unit.room.units.pop(unit.name, None)

    def leave_room(self, room: Room) -> None:
        """After a start that failed: a box that nobody else uses goes again."""
        if not room.units:
            room.box.remove()
            self.rooms.pop(room.name, None)

    def room(self, name: str) -> Room:
        try:
            return self.rooms[name]
        except KeyError:
            raise RefusedError("unknown", f"there is no box {name}") from None

    def is_taken(self, name: str) -> bool:
        return name in self.units or name in self.journal.known

    def within(self, room: Room, leaf: str | None) -> list[Unit]:
        """Who has not ended yet in a box, or in one leaf of it."""
        return [unit for unit in room.units.values() if unit.state != ENDED and (leaf is None or unit.leaf == leaf)]

    def remains(self, box: str, leaf: str | None = None) -> set[Process]:
        """Who lives on though the unit to which it belonged has ended, and all that it left was struck."""
        ends = self.journal.outlived(box)
        return remains((one for unit, one in ends.items() if leaf in {None, unit.rpartition(".")[2]}), self.boot_id)

    def survivors(self) -> list[Unit]:
        """Those who live on though somebody in their box was killed for memory."""
        return [
            unit
            for unit in self.units.values()
            if unit.oom_seen is not None and unit.state == LIVING and not unit.room.frozen
        ]

    def unended(self) -> list[Unit]:
        return [unit for unit in self.units.values() if unit.state != ENDED]

    def statuses(self) -> Iterator[Mapping[str, Any]]:
        for unit in self.units.values():
            if unit.state not in _UNSEEN:
                yield self.status(unit)
        for name, record in self.journal.known.items():
            if name not in self.units:
                yield _past(record)

    def status_of(self, name: str) -> Mapping[str, Any]:
        unit = self.units.get(name)
        if unit is not None and unit.state not in _UNSEEN:
            return self.status(unit)
        if unit is None and name in self.journal.known:
            return _past(self.journal.known[name])
        raise RefusedError("unknown", f"there is no unit {name}")

    def status(self, unit: Unit) -> Mapping[str, Any]:
        return {
            "unit": unit.name,
            "box": unit.room.name,
            "pid": unit.pid,
            "start_time": unit.start_time,
            "boot_id": self.boot_id,
            "enforcement": dict(unit.room.box.enforcement),
            "frozen": unit.room.frozen,
            "exit": unit.exit,
        }

    def forget(self, name: str) -> None:
        room = self.rooms.get(name)
        living = room is not None and (self.within(room, None) or room.box.pids())
        if living or self.remains(name):
            raise RefusedError("busy", f"box {name} is not empty")
        if room is not None:
            for unit in list(room.units.values()):
                self.drop(unit)
            with contextlib.suppress(OSError):
                if room.frozen:
                    room.box.thaw()
            room.box.remove()
            del self.rooms[name]
        self.journal.forget(name)

    def forget_unit(self, name: str) -> None:
        """One run in a box where others go on."""
        unit, record = self.units.get(name), self.journal.known.get(name)
        if unit is not None and unit.state != ENDED:
            raise RefusedError("busy", f"unit {name} has not ended")
        if record is not None and remains([record], self.boot_id):
            raise RefusedError("busy", f"unit {name} has ended, and something of it lives")
        if unit is not None:
            self.drop(unit)
        self.journal.forget_unit(name)


def _past(record: Record) -> Mapping[str, Any]:
    """What an earlier keeper saw the end of."""
    same = {key: record.get(key) for key in ("unit", "box", "pid", "start_time", "boot_id")}
    return {**same, "enforcement": {}, "frozen": False, "exit": record}
