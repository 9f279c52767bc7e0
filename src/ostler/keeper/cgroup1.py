"""Boxes of control groups, version 1: one small group per need, in the hierarchy of each controller.

The freezer's hierarchy says who is in a box; it freezes, and makes the kill certain: who is frozen cannot fork.
One enters by `tasks`, not by `cgroup.procs`: the latter takes a lock of the whole machine, about ten milliseconds
when it was quiet. A version 2 hierarchy beside these has only that slow door, so it serves where there is no freezer.
"""

# ruff: noqa: PTH120, PTH208 - pathlib is not worth its import and its time here

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Mapping, Sequence

from ostler.keeper import cgroupfs
from ostler.keeper.boxes import Box, Boxes, BoxLimits, BoxUsage, held_by, making
from ostler.keeper.cgroup2 import Cgroup2Boxes
from ostler.keeper.policing import MemoryKills, Watch, stats_of, usage_of
from ostler.keeper.tree import Process, end_marked, is_alive, living, thread_count

#: The hierarchies that are of use here.
HIERARCHIES = ("freezer", "pids", "memory", "cpu")
_PERIOD = 100_000
_FREEZE_SECONDS = 1.0
#: How long a kill waits for the freezer; then it strikes at who moves, and is called again.
_STILL_SECONDS = 0.02
_SWEEP_SECONDS = 5.0


class Cgroup1Box(Box):
    def __init__(self, boxes: Cgroup1Boxes, name: str, limits: BoxLimits, kills: int | None) -> None:
        self.name = name
        self._boxes = boxes
        self._limits = limits
        #: By hierarchy: the group of this box.
        self._groups = {one: f"{boxes.roots[one]}/{name}" for one in boxes.needed(limits)}
        self._beside = boxes.beside.find(name, limits) if boxes.beside is not None else None
        self._watch = Watch(limits, {"memory", "pids"} - boxes.roots.keys())
        self._kills = kills
        #: Killed while frozen, and taken out so that they can die.
        self._leaving: dict[str | None, set[Process]] = {}

    @property
    def enforcement(self) -> Mapping[str, str]:
        return self._boxes.enforcement()

    def make(self) -> None:
        try:
            for group in self._groups.values():
                cgroupfs.make(group)
            if self._boxes.beside is not None:
                self._beside = self._boxes.beside.make(self.name, BoxLimits())
            self._set_limits()
        except OSError:
            self.remove()
            raise

    def _set_limits(self) -> None:
        limits, groups = self._limits, self._groups
        if "memory" in groups:
            cgroupfs.write(f"{groups['memory']}/memory.limit_in_bytes", str(limits.memory_bytes))
            # Not on every kernel; where it is, it keeps the rest from going to the swap.
            cgroupfs.try_write(f"{groups['memory']}/memory.memsw.limit_in_bytes", str(limits.memory_bytes))
        if "cpu" in groups:
            self._set_cpu(groups["cpu"])
        if "pids" in groups and limits.pids is not None:
            cgroupfs.write(f"{groups['pids']}/pids.max", str(limits.pids))

    def _set_cpu(self, group: str) -> None:
        if self._limits.cpu_percent is not None:
            try:
                cgroupfs.write(f"{group}/cpu.cfs_quota_us", str(self._limits.cpu_percent * _PERIOD // 100))
            except OSError as error:
                # More than the group above has. That one holds it then, and more tightly.
                if error.errno != errno.EINVAL or self._limits.cpu_percent < 1:
                    raise
        if self._limits.weight != 100:
            cgroupfs.write(f"{group}/cpu.shares", str(max(2, self._limits.weight * 1024 // 100)))

    def _room(self, leaf: str | None) -> str:
        """Where the list of members is kept when it is not kept beside."""
        path = self._groups["freezer"]
        return path if leaf is None else f"{path}/{leaf}"

    def entrances(self, leaf: str | None = None) -> Sequence[str]:
        doors = [f"{path}/tasks" for path in self._groups.values()]
        if self._beside is not None:
            return [*doors, *self._beside.entrances(leaf)]
        if leaf is not None:
            cgroupfs.ensure(self._room(leaf))
            doors[doors.index(f"{self._room(None)}/tasks")] = f"{self._room(leaf)}/tasks"
        return doors

    def took_in(self, pid: int, leaf: str | None = None) -> None:
        # Through `tasks` goes one thread. A process that had more when it entered is fetched in as a whole.
        if thread_count(pid) < 2:
            return
        room = self._room(leaf) if self._beside is None else next(iter(self._groups.values()), "")
        with contextlib.suppress(OSError):
            before, inside = _threads(pid), cgroupfs.members(room, "tasks")
            # Of those who were there all the while: threads begin and end as one looks.
            if not before & _threads(pid) <= inside:
                for door in self.entrances(leaf):
                    cgroupfs.write(f"{os.path.dirname(door)}/{cgroupfs.PROCS}", str(pid))

    def move_in(self, pids: Iterable[int], leaf: str | None = None) -> None:
        cgroupfs.move(pids, self.entrances(leaf))

    def pids(self, leaf: str | None = None) -> set[int]:
        if self._beside is not None:
            return self._beside.pids(leaf)
        leaving = [one for key, some in self._leaving.items() if leaf in {None, key} for one in some]
        return cgroupfs.members(self._room(leaf)) | {one.pid for one in leaving if is_alive(one)}

    def kill(self, leaf: str | None = None) -> None:
        if leaf is None and "pids" in self._groups:
            cgroupfs.try_write(f"{self._groups['pids']}/pids.max", "0")  # none is born any more
        if self._beside is not None:
            self._beside.kill(leaf)
            return
        room = self._room(leaf)
        if leaf is not None and cgroupfs.number(f"{room}/freezer.parent_freezing") == 1:
            self._strike_frozen(leaf)
        else:
            self._strike_still(room)

    def _strike_still(self, room: str) -> None:
        """Who stands still cannot fork away; the blow falls when they are let go."""
        if not cgroupfs.members(room):
            return
        cgroupfs.wait_for(lambda: _freeze(room), _STILL_SECONDS)
        cgroupfs.strike(lambda: cgroupfs.members(room))
        cgroupfs.try_write(f"{room}/freezer.state", "THAWED")

    def _strike_frozen(self, leaf: str) -> None:
        """One room of a frozen box, of which the rest stays frozen: they are carried out to die."""
        room = self._room(leaf)
        for pid in cgroupfs.strike(lambda: cgroupfs.members(room)):
            process = living(pid)
            if process is not None:
                self._leaving.setdefault(leaf, set()).add(process)
                cgroupfs.try_write(f"{self._boxes.roots['freezer']}/{cgroupfs.PROCS}", str(pid))

    def freeze(self) -> None:
        if self._beside is not None:
            self._beside.freeze()
            return
        if not cgroupfs.wait_for(lambda: _freeze(self._room(None)), _FREEZE_SECONDS):
            self.thaw()
            raise TimeoutError(f"box {self.name} did not stand still within {_FREEZE_SECONDS:g} s")

    def thaw(self) -> None:
        if self._beside is not None:
            self._beside.thaw()
        else:
            cgroupfs.write(f"{self._room(None)}/freezer.state", "THAWED")

    def oom_kills(self) -> int | None:
        if "memory" in self._groups:
            return cgroupfs.number(f"{self._groups['memory']}/memory.oom_control", "oom_kill")
        if self._watch.memory_kills:
            return self._watch.memory_kills
        return 0 if self._boxes.memory_kills.none_since(self._kills) else None

    def usage(self) -> BoxUsage:
        counted = self._beside.usage() if self._beside is not None else usage_of(stats_of(self.pids()))
        memory = (
            cgroupfs.number(f"{self._groups['memory']}/memory.usage_in_bytes") if "memory" in self._groups else None
        )
        threads = cgroupfs.number(f"{self._groups['pids']}/pids.current") if "pids" in self._groups else None
        # On most machines the clock is mounted together with the quota; here and there it is not.
        nanos = cgroupfs.number(f"{self._groups['cpu']}/cpuacct.usage") if "cpu" in self._groups else None
        return BoxUsage(
            cpu_seconds=counted.cpu_seconds if nanos is None else nanos / 1e9,
            memory_bytes=counted.memory_bytes if memory is None else memory,
            threads=counted.threads if threads is None else threads,
        )

    def police(self) -> str | None:
        return self._watch.look(stats_of(self.pids())) if self._watch.is_needed else None

    def remove(self, leaf: str | None = None) -> None:
        if self._beside is not None:
            self._beside.remove(leaf)
        if leaf is not None:
            self._leaving.pop(leaf, None)
            if self._beside is None:
                cgroupfs.remove(self._room(leaf))
            return
        for group in self._groups.values():
            cgroupfs.remove(group)


def _threads(pid: int) -> set[int]:
    return set(map(int, os.listdir(f"/proc/{pid}/task")))


def _freeze(room: str) -> bool:
    """Said again each time: one who was just forking may have been overlooked."""
    cgroupfs.write(f"{room}/freezer.state", "FROZEN")
    return cgroupfs.read(f"{room}/freezer.state").strip() == "FROZEN"


class Cgroup1Boxes(Boxes):
    def __init__(self, own: Mapping[str, str], token: str, beside: Cgroup2Boxes | None = None) -> None:
        """`own`: by hierarchy our own group. `beside`: a v2 hierarchy that keeps the list, freezes and kills."""
        self.roots = {one: f"{own[one]}/ostler-{token}" for one in HIERARCHIES if one in own}
        if beside is not None:
            self.roots.pop("freezer", None)
        elif "freezer" not in self.roots:
            raise OSError(errno.ENOSYS, "no freezer of cgroup v1 is here")
        self.beside = beside
        self.title = "cgroup v1" if beside is None else "cgroup v1 with v2 freezer and kill"
        self.polices = not {"memory", "pids"} <= self.roots.keys()
        self.memory_kills = MemoryKills()
        self._token = token

    def open(self) -> None:
        """Raises `OSError` where it cannot be had."""
        for root in self.roots.values():
            cgroupfs.ensure(root)
        if self.beside is not None:
            self.beside.open()

    def needed(self, limits: BoxLimits) -> list[str]:
        unneeded = set()
        if limits.memory_bytes is None:
            unneeded.add("memory")
        if limits.cpu_percent is None and limits.weight == 100:
            unneeded.add("cpu")
        return [one for one in self.roots if one not in unneeded]

    def make(self, name: str, limits: BoxLimits) -> Box:
        box = Cgroup1Box(self, name, limits, self.memory_kills.last_seen)
        with making(name):
            box.make()
        return box

    def find(self, name: str, limits: BoxLimits) -> Box:
        return Cgroup1Box(self, name, limits, None)

    def enforcement(self) -> Mapping[str, str]:
        return held_by(self.roots)

    def sweep(self) -> list[int]:
        # One who cannot die is in all of them, and is waited for once.
        until = time.monotonic() + _SWEEP_SECONDS
        killed = {pid for name, root in self.roots.items() for pid in sweep_group(name, root, until)}
        if self.beside is not None:
            killed.update(self.beside.sweep_groups())
        return sorted(killed.union(end_marked(f"{self._token}:", until=until)))


def sweep_group(hierarchy: str, root: str, until: float | None = None) -> set[int]:
    """`until`: the time on the monotonic clock when it is given up."""
    killed: set[int] = set()

    def is_empty() -> bool:
        if hierarchy == "pids":
            cgroupfs.try_write(f"{root}/pids.max", "0")
        struck = cgroupfs.strike(lambda: cgroupfs.members(root))
        killed.update(struck)
        for group in (root, *cgroupfs.subgroups(root)) if hierarchy == "freezer" else ():
            cgroupfs.try_write(f"{group}/freezer.state", "THAWED")
        return not struck

    cgroupfs.wait_for(is_empty, _SWEEP_SECONDS if until is None else until - time.monotonic())
    cgroupfs.remove(root)
    if hierarchy == "pids":  # it stays where somebody cannot be killed, and others are to be born in it
        cgroupfs.try_write(f"{root}/pids.max", "max")
    return killed
