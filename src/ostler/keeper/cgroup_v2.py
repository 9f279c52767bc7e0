"""Groups by cgroup version 2: a directory per cell below a group of the keeper's own, with a subgroup per unit.

A process is started in its group (`directory`, for clone3), because entering through `cgroup.procs` takes a lock of
the whole machine (about 10 ms). `memory.high` is never set: it makes an agent stall for minutes instead of dying.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping

from ostler.keeper import cgroup_files as files
from ostler.keeper.groups import (
    Group,
    Groups,
    GroupUsage,
    Limits,
    Poll,
    enforcement_of,
    usage_of,
)

CONTROLLERS = ("memory", "cpu", "pids")
#: Where the processes of the keeper's own group go: a group that passes controllers on may hold no processes.
OWN_SUBGROUP = "keeper"
_PERIOD = 100_000
_MOVES = 10
_SWEEP_SECONDS = 5.0


class CgroupV2(Group):
    def __init__(self, groups: CgroupV2Groups, name: str, limits: Limits) -> None:
        self.name = name
        self._limits = limits
        self._controllers = groups.controllers
        self._path = f"{groups.root}/{name}"
        memory = None if "memory" in self._controllers else limits.memory_bytes
        self._poll = Poll(memory, None if "pids" in self._controllers else limits.pids)
        self._frozen = False

    def make(self) -> None:
        files.make(self._path)
        try:
            for file, text in self._settings():
                files.write(f"{self._path}/{file}", text)
            if "memory" in self._controllers and self._limits.memory_bytes is not None:
                files.try_write(f"{self._path}/memory.swap.max", "0")  # a kernel without swap has no such file
                files.try_write(f"{self._path}/memory.oom.group", "1")
        except OSError:
            self.remove()
            raise

    def _settings(self) -> list[tuple[str, str]]:
        limits, settings = self._limits, []
        if "memory" in self._controllers and limits.memory_bytes is not None:
            settings.append(("memory.max", str(limits.memory_bytes)))
        if "cpu" in self._controllers and limits.cpu_percent is not None:
            settings.append(("cpu.max", f"{limits.cpu_percent * _PERIOD // 100} {_PERIOD}"))
        if "cpu" in self._controllers and limits.weight != 100:
            settings.append(("cpu.weight", str(limits.weight)))
        if "pids" in self._controllers and limits.pids is not None:
            settings.append(("pids.max", str(limits.pids)))
        return settings

    def _members(self, unit: str | None) -> str:
        return self._path if unit is None else f"{self._path}/unit-{unit.rpartition('.')[2]}"

    def add(self, unit: str) -> list[str]:
        files.ensure(self._members(unit))
        return [f"{self._members(unit)}/{files.PROCS}"]

    def directory(self, unit: str) -> str:
        return self._members(unit)

    def pids(self, unit: str | None = None) -> set[int]:
        return files.members(self._members(unit))

    def kill(self, unit: str | None = None) -> None:
        path = self._members(unit)
        if not files.try_write(f"{path}/cgroup.kill", "1"):  # older than Linux 5.14
            files.try_write(f"{path}/cgroup.freeze", "1")  # a frozen process cannot fork, and can be killed
            files.kill(lambda: files.members(path))
            files.try_write(f"{path}/cgroup.freeze", "0")

    def freeze(self) -> bool:
        if not self._frozen:
            files.write(f"{self._path}/cgroup.freeze", "1")
            self._frozen = True
        return files.read_number(f"{self._path}/cgroup.events", "frozen") == 1

    def thaw(self) -> None:
        files.write(f"{self._path}/cgroup.freeze", "0")
        self._frozen = False

    def oom_kills(self) -> int | None:
        kills = files.read_number(f"{self._path}/memory.events", "oom_kill")
        return self._poll.oom_kills() if kills is None else kills

    def usage(self) -> GroupUsage:
        microseconds = files.read_number(f"{self._path}/cpu.stat", "usage_usec")
        memory = files.read_number(f"{self._path}/memory.current")
        threads = files.read_number(f"{self._path}/pids.current")
        counted = usage_of(self.pids()) if None in {microseconds, memory, threads} else GroupUsage()
        return counted.replaced(None if microseconds is None else microseconds / 1e6, memory, threads)

    def broken_limit(self) -> tuple[str, str] | None:
        return self._poll.broken_limit(self.pids())

    def remove(self, unit: str | None = None) -> None:
        files.remove(self._members(unit))


class CgroupV2Groups(Groups):
    title = "cgroup v2"

    def __init__(self, base: str, token: str, controllers: Collection[str] = ()) -> None:
        """`base`: a group in which the keeper may make others; `controllers`: those that it passes on."""
        self.root = f"{base}/ostler-{token}"
        self.controllers = frozenset(controllers)
        self.polls = not {"memory", "pids"} <= self.controllers

    def open(self) -> None:
        """Raises `OSError`."""
        files.ensure(self.root)
        for controller in sorted(self.controllers):
            files.write(f"{self.root}/cgroup.subtree_control", f"+{controller}")

    def make(self, name: str, limits: Limits) -> Group:
        if not os.path.isdir(self.root):
            self.open()  # the last sweep removed it
        group = CgroupV2(self, name, limits)
        group.make()
        return group

    def enforcement(self) -> Mapping[str, str]:
        return enforcement_of(self.controllers)

    def sweep(self) -> list[int]:
        return sorted(sweep_group(self.root, time.monotonic() + _SWEEP_SECONDS))


def sweep_group(root: str, until: float) -> set[int]:
    """Kill all in it and remove it, until the given time of the monotonic clock."""
    if not os.path.isdir(root):
        return set()
    killed: set[int] = set()

    def is_empty() -> bool:
        pids = files.members(root) - {os.getpid()}
        killed.update(pids)
        # The caller may have been started from inside an agent; then its group is killed one by one.
        if os.getpid() in files.members(root) or not files.try_write(f"{root}/cgroup.kill", "1"):
            files.kill(lambda: files.members(root))
        return not pids

    files.wait_for(is_empty, max(0.0, until - time.monotonic()))
    files.remove(root)
    return killed


def base_of(own: str) -> str:
    """The group to work in: the keeper's own, or the one above when a keeper has moved down before."""
    return os.path.dirname(own) if os.path.basename(own) == OWN_SUBGROUP else own


def pass_controllers_on(own: str) -> tuple[str, frozenset[str]]:
    """Make our group pass its controllers on to subgroups: the group, and which ones it passes on. Raises `OSError`."""
    base = base_of(own)
    wanted = set(files.read(f"{base}/cgroup.controllers").split()) & set(CONTROLLERS)
    if not wanted <= _passed_on(base):
        # Only the topmost group of a machine, which has no type, may pass on and hold processes.
        moved = _move_down(base) if os.path.exists(f"{base}/cgroup.type") else set()
        for controller in sorted(wanted):
            files.try_write(f"{base}/cgroup.subtree_control", f"+{controller}")
        if not wanted & _passed_on(base):
            _move_up(base, moved)
    return base, frozenset(wanted & _passed_on(base))


def _passed_on(base: str) -> set[str]:
    return set(files.read(f"{base}/cgroup.subtree_control").split())


def _move_down(base: str) -> set[int]:
    files.ensure(f"{base}/{OWN_SUBGROUP}")
    moved: set[int] = set()
    for _ in range(_MOVES):  # a process may fork meanwhile
        pids = set(map(int, files.read(f"{base}/{files.PROCS}").split()))
        if not pids:
            break
        moved |= {pid for pid in pids if files.try_write(f"{base}/{OWN_SUBGROUP}/{files.PROCS}", str(pid))}
    return moved


def _move_up(base: str, moved: set[int]) -> None:
    for pid in moved:
        files.try_write(f"{base}/{files.PROCS}", str(pid))
    with contextlib.suppress(OSError):
        os.rmdir(f"{base}/{OWN_SUBGROUP}")
