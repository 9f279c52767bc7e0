"""A box without control groups: a tree that is known by descent, by what was seen of it before, by its tag and mark.

The keeper is a subreaper, so who loses his parent becomes the keeper's child and is known there by his tag, or by his
mark. Limits are held by looking ten times a second. Nobody is signalled who was not seen as a descendant and carries
neither.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ostler.keeper import tree
from ostler.keeper.boxes import Box, BoxLimits, BoxUsage
from ostler.keeper.orphans import QUIET_SECONDS, Orphans
from ostler.keeper.policing import Duty, MemoryKills, Watch, usage_of
from ostler.keeper.tag import tag_of
from ostler.keeper.tree import Process, Stat

FREEZE_SECONDS = 1.0
#: How long one blow follows those who fork and leave.
_CHASE_SECONDS = 0.05


class Lookout(Protocol):
    """What a box needs of all of them together; `PlainBoxes` is the one."""

    memory_kills: MemoryKills

    def enforcement(self) -> Mapping[str, str]: ...
    def tag(self, unit: str) -> int | None: ...
    def took_in(self, process: Process, box: PlainBox) -> None: ...
    def let_go(self, box: PlainBox) -> None: ...
    def look_again(self) -> None: ...
    def everyone(self, *, fresh: bool) -> tuple[dict[int, Stat], dict[int, list[Process]]]: ...
    def orphans(self) -> tuple[list[Process], list[Stat]]: ...
    def is_session_known(self, session: int) -> bool: ...
    def known_pids(self) -> set[int]: ...
    def adopt_marked(self, box: PlainBox) -> None: ...
    def adopt_one(self, process: Process) -> bool: ...


class PlainBox(Box):
    def __init__(self, boxes: Lookout, name: str, limits: BoxLimits, kills: int | None) -> None:
        self.name = name
        self._boxes = boxes
        #: Who was seen in it and lived when last looked at, and in which room.
        self._known: dict[Process, str | None] = {}
        #: By tag: the rooms that were made ready in it.
        self._rooms: dict[int | None, str | None] = {boxes.tag(name): None}
        #: Those whose room is not said; their tag or mark says it, once their program has begun.
        self._unplaced: set[Process] = set()
        #: The sessions they were seen in.
        self._sessions: set[int] = set()
        #: Those that stand still because of us.
        self._held: set[Process] = set()
        self._is_frozen = False
        self._is_dying = False
        self._watch = Watch(limits, {"memory", "pids"})
        self._duty = Duty(limits.cpu_percent)
        self._cpu_seconds = 0.0
        self._kills = kills

    @property
    def enforcement(self) -> Mapping[str, str]:
        return self._boxes.enforcement()

    def entrances(self, leaf: str | None = None) -> Sequence[str]:
        self._make_ready(leaf)
        return []

    def _make_ready(self, leaf: str | None) -> None:
        if leaf is not None:
            self._rooms[self._boxes.tag(f"{self.name}.{leaf}")] = leaf

    def took_in(self, pid: int, leaf: str | None = None) -> None:
        self._make_ready(leaf)
        self._sessions.add(pid)  # it leads one of its own
        self.move_in([pid], leaf)
        self._unplaced.update(one for one in self._known if one.pid == pid and leaf is None)

    def move_in(self, pids: Iterable[int], leaf: str | None = None) -> None:
        for pid in pids:
            process = tree.living(pid)
            if process is not None:
                self._boxes.took_in(process, self)
                self._known[process] = leaf

    def drop(self, process: Process) -> None:
        """Another box has it now."""
        self._known.pop(process, None)
        self._held.discard(process)

    @property
    def known(self) -> Collection[Process]:
        return self._known.keys()

    @property
    def sessions(self) -> Collection[int]:
        return self._sessions

    def knows(self, process: Process) -> bool:
        return process in self._known

    def adopt_tagged(self, process: Process, tag: int) -> bool:
        """One that carries a tag: whether it is of this box."""
        if tag not in self._rooms:
            return False
        self._known.setdefault(process, self._rooms[tag])
        return True

    def adopt(self, process: Process, unit: str) -> bool:
        """One that carries a mark: whether it is of this box. The name of a unit goes on after that of its box."""
        if unit != self.name and not unit.startswith(f"{self.name}."):
            return False
        self._known.setdefault(process, self._room_of(unit))
        return True

    def _room_of(self, unit: str) -> str | None:
        return unit[len(self.name) + 1 :] or None

    def _place(self) -> None:
        for process in list(self._unplaced):
            tag = tag_of(process.pid)
            if tag is not None and tag in self._rooms and process in self._known:
                self._known[process] = self._rooms[tag]
                self._unplaced.discard(process)
                continue
            _, _, unit = (tree.mark_of(process.pid) or "").partition(":")
            if process not in self._known or not tree.is_alive(process):
                self._unplaced.discard(process)
            elif unit == self.name or unit.startswith(f"{self.name}."):
                self._known[process] = self._room_of(unit)
                self._unplaced.discard(process)

    def _look(self, *, fresh: bool = False) -> dict[Process, Stat]:
        """All that live in it, found from those who were known before."""
        everyone, offspring = self._boxes.everyone(fresh=fresh)
        self._place()
        found: dict[Process, Stat] = {}
        rooms: dict[Process, str | None] = {}
        waiting = [(process, leaf) for process, leaf in self._known.items()]
        while waiting:
            process, leaf = waiting.pop()
            seen = everyone.get(process.pid)
            if seen is None or seen.process != process or process in found:
                continue
            found[process] = seen
            self._sessions.add(seen.session)
            rooms[process] = self._known.get(process, leaf)
            waiting += [(child, rooms[process]) for child in offspring.get(process.pid, ())]
        self._known = rooms
        return found

    def _members(self, leaf: str | None, *, fresh: bool = True) -> dict[Process, Stat]:
        if self._is_dying:
            self._boxes.adopt_marked(self)
        found = self._look(fresh=fresh)
        return {one: found[one] for one in self._in_room(found, leaf)}

    def pids(self, leaf: str | None = None) -> set[int]:
        found = {one.pid for one in self._members(leaf)}
        if found:
            return found
        newborn, passed = self._boxes.orphans()
        found = {one.pid for one in self._in_room(newborn, leaf) if self.knows(one)}
        found |= {one.process.pid for one in passed if self.may_have_been(one)}
        return found | {one.pid for one in self._in_room(self._known, leaf) if tree.is_alive(one)}

    def kill(self, leaf: str | None = None) -> None:
        self._is_dying = True
        self._strike(self._members(leaf))
        self._boxes.look_again()
        orphans = Orphans(self._boxes.known_pids(), self._boxes.adopt_one)
        now = quiet_since = time.monotonic()
        end = now + _CHASE_SECONDS
        while now < end and now - quiet_since < QUIET_SECONDS:
            newborn, passed = orphans.look()
            now = time.monotonic()
            mine = [one for one in self._in_room(newborn, leaf) if self.knows(one)]
            if self._strike(mine) or any(map(self.may_have_been, passed)):
                quiet_since = now

    def _in_room(self, whom: Iterable[Process], leaf: str | None) -> list[Process]:
        return [one for one in whom if leaf is None or self._known.get(one) == leaf]

    def may_have_been(self, passed: Stat) -> bool:
        """Whether one that is dead already may have been of this box: by its session, if that says anything."""
        return passed.session in self._sessions or not self._boxes.is_session_known(passed.session)

    def _strike(self, whom: Iterable[Process]) -> bool:
        return sum(tree.signal_pid(one.pid, one.start_time, signal.SIGKILL) for one in whom) > 0

    def freeze(self) -> None:
        self._is_frozen = True
        end = time.monotonic() + FREEZE_SECONDS
        while self.hold_moving():
            if time.monotonic() > end:
                self.thaw()
                raise TimeoutError(f"box {self.name} did not stand still within {FREEZE_SECONDS:g} s")

    def hold_moving(self) -> bool:
        """Whether there was anybody to hold; call it again until there is nobody."""
        moving = [one for one, seen in self._members(None).items() if not seen.is_stopped]
        self._hold(moving)
        return bool(moving)

    def _hold(self, whom: Iterable[Process]) -> None:
        self._held.update(one for one in whom if tree.signal_pid(one.pid, one.start_time, signal.SIGSTOP))

    def thaw(self) -> None:
        self._is_frozen = False
        for one in self._held:
            tree.signal_pid(one.pid, one.start_time, signal.SIGCONT)
        self._held.clear()

    def held(self) -> list[tuple[int, int]]:
        return [(one.pid, one.start_time) for one in self._held]

    def resume(self, held: Iterable[Sequence[int]] | None, *, frozen: bool) -> None:
        self._is_frozen = frozen
        if held is None:  # an older keeper did not say whom it had stopped; whoever stands still may be one
            self._held = {one for one, seen in self._members(None).items() if seen.is_stopped}
        else:
            self._held = {Process(int(pid), int(started)) for pid, started in held}

    def oom_kills(self) -> int | None:
        if self._watch.memory_kills:
            return self._watch.memory_kills
        return 0 if self._boxes.memory_kills.none_since(self._kills) else None

    def usage(self) -> BoxUsage:
        counted = usage_of(self._members(None, fresh=False).values())
        # What an orphan used is not told to anybody when it ends; at least the count never falls.
        self._cpu_seconds = max(self._cpu_seconds, counted.cpu_seconds)
        return BoxUsage(cpu_seconds=self._cpu_seconds, memory_bytes=counted.memory_bytes, threads=counted.threads)

    def police(self) -> str | None:
        found = self._members(None, fresh=False)
        if not self._is_frozen and not self._is_dying and self._duty.is_needed:
            if self._duty.must_rest(found.values(), time.monotonic()):
                self._hold(one for one, seen in found.items() if not seen.is_stopped)
            elif self._held:
                self.thaw()
        return None if self._is_dying else self._watch.look(found.values())

    def remove(self, leaf: str | None = None) -> None:
        if leaf is None:
            self._boxes.let_go(self)
