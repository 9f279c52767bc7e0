"""Boxes of control groups, version 2: a delegated subtree of our own group, or one without controllers beside v1."""

# ruff: noqa: PTH106, PTH110, PTH112, PTH119, PTH120 - pathlib is not worth its import and its time here

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence

from ostler.keeper import cgroupfs
from ostler.keeper.boxes import Box, Boxes, BoxLimits, BoxUsage, held_by, making
from ostler.keeper.policing import MemoryKills, Watch, stats_of, usage_of
from ostler.keeper.tree import end_marked

#: The group into which those go that were in ours: where controllers are handed down, no process may stand.
KEEPER = "keeper"
_PERIOD = 100_000
_FREEZE_SECONDS = 1.0
_SWEEP_SECONDS = 5.0


class Cgroup2Box(Box):
    def __init__(self, boxes: Cgroup2Boxes, name: str, limits: BoxLimits, kills: int | None) -> None:
        self.name = name
        self._boxes = boxes
        self._limits = limits
        self._path = f"{boxes.root}/{name}"
        self._watch = Watch(limits, {"memory", "pids"} - boxes.controllers)
        #: The machine's count of memory kills when this box was made.
        self._kills = kills

    @property
    def enforcement(self) -> Mapping[str, str]:
        return self._boxes.enforcement()

    def make(self) -> None:
        cgroupfs.make(self._path)
        try:
            for file, text in self._settings():
                cgroupfs.write(f"{self._path}/{file}", text)
            if "memory" in self._boxes.controllers and self._limits.memory_bytes is not None:
                # Neither is everywhere: a kernel without swap has no limit of it.
                cgroupfs.try_write(f"{self._path}/memory.swap.max", "0")
                cgroupfs.try_write(f"{self._path}/memory.oom.group", "1")
        except OSError:
            self.remove()
            raise

    def _settings(self) -> list[tuple[str, str]]:
        limits, has = self._limits, self._boxes.controllers
        chosen: list[tuple[str, str]] = []
        if "memory" in has and limits.memory_bytes is not None:
            chosen.append(("memory.max", str(limits.memory_bytes)))
        if "cpu" in has and limits.cpu_percent is not None:
            chosen.append(("cpu.max", f"{limits.cpu_percent * _PERIOD // 100} {_PERIOD}"))
        if "cpu" in has and limits.weight != 100:
            chosen.append(("cpu.weight", str(limits.weight)))
        if "pids" in has and limits.pids is not None:
            chosen.append(("pids.max", str(limits.pids)))
        return chosen

    def _room(self, leaf: str | None) -> str:
        return self._path if leaf is None else f"{self._path}/{leaf}"

    def entrances(self, leaf: str | None = None) -> Sequence[str]:
        return [f"{self.birthplace(leaf)}/{cgroupfs.PROCS}"]

    def birthplace(self, leaf: str | None = None) -> str:
        if leaf is not None:
            cgroupfs.ensure(self._room(leaf))
        return self._room(leaf)

    def took_in(self, pid: int, leaf: str | None = None) -> None:
        """The kernel keeps the list."""

    def move_in(self, pids: Iterable[int], leaf: str | None = None) -> None:
        cgroupfs.move(pids, self.entrances(leaf))

    def pids(self, leaf: str | None = None) -> set[int]:
        return cgroupfs.members(self._room(leaf))

    def kill(self, leaf: str | None = None) -> None:
        room = self._room(leaf)
        if not cgroupfs.try_write(f"{room}/cgroup.kill", "1"):
            # Older than Linux 5.14. Who is frozen forks no more, and can be killed.
            cgroupfs.try_write(f"{room}/cgroup.freeze", "1")
            cgroupfs.strike(lambda: cgroupfs.members(room))
            cgroupfs.try_write(f"{room}/cgroup.freeze", "0")

    def freeze(self) -> None:
        cgroupfs.write(f"{self._path}/cgroup.freeze", "1")
        if not cgroupfs.wait_for(self._is_frozen, _FREEZE_SECONDS):
            self.thaw()
            raise TimeoutError(f"box {self.name} did not stand still within {_FREEZE_SECONDS:g} s")

    def _is_frozen(self) -> bool:
        return cgroupfs.number(f"{self._path}/cgroup.events", "frozen") == 1

    def thaw(self) -> None:
        cgroupfs.write(f"{self._path}/cgroup.freeze", "0")

    def oom_kills(self) -> int | None:
        counted = cgroupfs.number(f"{self._path}/memory.events", "oom_kill")
        if counted is not None:
            return counted
        if self._watch.memory_kills:
            return self._watch.memory_kills
        return 0 if self._boxes.memory_kills.none_since(self._kills) else None

    def usage(self) -> BoxUsage:
        micros = cgroupfs.number(f"{self._path}/cpu.stat", "usage_usec")
        memory = cgroupfs.number(f"{self._path}/memory.current")
        threads = cgroupfs.number(f"{self._path}/pids.current")
        if micros is not None and memory is not None and threads is not None:
            return BoxUsage(cpu_seconds=micros / 1e6, memory_bytes=memory, threads=threads)
        counted = usage_of(stats_of(self.pids()))
        return BoxUsage(
            cpu_seconds=counted.cpu_seconds if micros is None else micros / 1e6,
            memory_bytes=counted.memory_bytes if memory is None else memory,
            threads=counted.threads if threads is None else threads,
        )

    def police(self) -> str | None:
        return self._watch.look(stats_of(self.pids())) if self._watch.is_needed else None

    def remove(self, leaf: str | None = None) -> None:
        cgroupfs.remove(self._room(leaf))


class Cgroup2Boxes(Boxes):
    title = "cgroup v2"

    def __init__(self, base: str, token: str, controllers: Collection[str] = ()) -> None:
        """`base` is a group in which we may make others, `controllers` those it hands down."""
        self.root = f"{base}/ostler-{token}"
        self.controllers = frozenset(controllers)
        self.polices = not {"memory", "pids"} <= self.controllers
        self.memory_kills = MemoryKills()
        self._token = token

    def open(self) -> None:
        """Raises `OSError` where it cannot be had."""
        cgroupfs.ensure(self.root)
        for one in sorted(self.controllers):
            cgroupfs.write(f"{self.root}/cgroup.subtree_control", f"+{one}")

    def make(self, name: str, limits: BoxLimits) -> Box:
        box = Cgroup2Box(self, name, limits, self.memory_kills.last_seen)
        if not os.path.isdir(self.root):
            self.open()  # it was swept away
        with making(name):
            box.make()
        return box

    def find(self, name: str, limits: BoxLimits) -> Box:
        return Cgroup2Box(self, name, limits, None)

    def enforcement(self) -> Mapping[str, str]:
        return held_by(self.controllers)

    def sweep(self) -> list[int]:
        return sorted({*self.sweep_groups(), *end_marked(f"{self._token}:")})

    def sweep_groups(self) -> list[int]:
        killed: set[int] = set()

        def is_empty() -> bool:
            found = cgroupfs.members(self.root)
            killed.update(found)
            if os.getpid() in found:
                # We were started from inside one of them: all but ourselves, one by one.
                killed.discard(os.getpid())
                return not cgroupfs.strike(lambda: cgroupfs.members(self.root))
            if found and not cgroupfs.try_write(f"{self.root}/cgroup.kill", "1"):
                cgroupfs.strike(lambda: cgroupfs.members(self.root))
            return not found

        cgroupfs.wait_for(is_empty, _SWEEP_SECONDS)
        cgroupfs.remove(self.root)
        return sorted(killed)


def base_of(own: str) -> str:
    """The group that a keeper works in: its own, or the one above when it, or another, already moved down."""
    return os.path.dirname(own) if os.path.basename(own) == KEEPER else own


def hand_down(own: str) -> tuple[str, frozenset[str]]:
    """Make our group hand its controllers down: the group, and which ones it hands down now. Raises `OSError`."""
    base = base_of(own)
    wanted = set(cgroupfs.read(f"{base}/cgroup.controllers").split()) & set(cgroupfs.CONTROLLERS)
    if not wanted <= _handed_down(base):
        # Only the topmost group of a machine may do both, hold processes and hand down; it has no type.
        moved = _move_down(base) if os.path.exists(f"{base}/cgroup.type") else set()
        for one in sorted(wanted):
            cgroupfs.try_write(f"{base}/cgroup.subtree_control", f"+{one}")
        if not wanted & _handed_down(base):
            _move_up(base, moved)
    return base, frozenset(wanted & _handed_down(base))


def _handed_down(base: str) -> set[str]:
    return set(cgroupfs.read(f"{base}/cgroup.subtree_control").split())


def _move_down(base: str) -> set[int]:
    cgroupfs.ensure(f"{base}/{KEEPER}")
    moved: set[int] = set()
    for _ in range(10):  # one of them may fork meanwhile
        here = set(map(int, cgroupfs.read(f"{base}/{cgroupfs.PROCS}").split()))
        if not here:
            break
        moved |= {pid for pid in here if cgroupfs.try_write(f"{base}/{KEEPER}/{cgroupfs.PROCS}", str(pid))}
    return moved


def _move_up(base: str, moved: set[int]) -> None:
    for pid in moved:
        cgroupfs.try_write(f"{base}/{cgroupfs.PROCS}", str(pid))
    with contextlib.suppress(OSError):
        os.rmdir(f"{base}/{KEEPER}")
