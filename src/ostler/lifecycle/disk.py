"""Measures what a home takes on the disk: in a thread, one measurement at a time, the last one kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ostler.clock import Clock
from ostler.home import DAEMON_LOG, DATABASE_FILE, HOMES, LOGS
from ostler.model.disk import DiskUsage, TaskDisk, limit_bytes
from ostler.model.task import Task

_BLOCK = 512
#: Which of the figures the entries of a home count for. A crew and an instance without a workdir of its own use `work`.
_KINDS = {
    "tasks": "workdirs",
    "work": "workdirs",
    "proof": "workdirs",
    "vault": "vault",
    LOGS: "logs",
    HOMES: "homes",
    "repos": "repositories",
}
#: How many seconds a measurement counts as one of now.
DISK_AGE = 10.0
#: After so many directories the thread lets others go on.
_DIRECTORIES_AT_ONCE = 50
_PAUSE_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes by the first two names of a path in the home; the second is empty for files right below the home."""

    usage: DiskUsage
    entries: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def size(self, folder: str, name: str) -> int:
        return self.entries.get((folder, name), 0)


class DiskMeter:
    """The measurements of one home. Callers at the same time share one."""

    def __init__(self, home: Path | None, clock: Clock, megabytes: int | None) -> None:
        self._home = home
        self._clock = clock
        self._limit = limit_bytes(megabytes)
        self._running: asyncio.Task[Measured] | None = None
        self._measured_mono = 0.0
        #: How long the last measurement took.
        self.seconds = 0.0
        self.last: Measured | None = None
        #: Since when it has been near its limit or above it.
        self.high_since: datetime | None = None

    @property
    def has_limit(self) -> bool:
        return self._limit is not None and self._home is not None

    async def measure(self, max_age: float = 0.0) -> Measured:
        """The last measurement where it is not older than so many seconds, else a new one."""
        if self.last is not None and self._clock.mono() - self._measured_mono < max_age:
            return self.last
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._measure(), name="ostler-disk")
        return await asyncio.shield(self._running)

    async def _measure(self) -> Measured:
        began = time.perf_counter()
        entries, free = await asyncio.to_thread(_measure_home, self._home)
        self.seconds = time.perf_counter() - began
        figures: dict[str, int] = {}
        for (folder, name), size in entries.items():
            kind = _kind_of(folder, name)
            figures[kind] = figures.get(kind, 0) + size
        usage = DiskUsage(measured_at=self._clock.wall(), free=free, limit=self._limit).evolve(**figures)
        self.high_since = (self.high_since or usage.measured_at) if usage.is_high else None
        self.last, self._measured_mono = Measured(usage, entries), self._clock.mono()
        return self.last


def _kind_of(folder: str, name: str) -> str:
    if folder in _KINDS:
        return _KINDS[folder]
    if name:
        return "other"
    return "store" if folder.startswith(DATABASE_FILE) else "logs" if folder.startswith(DAEMON_LOG) else "other"


def _measure_home(home: Path | None) -> tuple[dict[tuple[str, str], int], int]:
    """In a thread. What vanishes meanwhile, or may not be looked at, counts nothing."""
    if home is None:
        return {}, 0
    entries: dict[tuple[str, str], int] = {}
    counted: set[tuple[int, int]] = set()
    for top in _scan(home):
        if not top.is_dir(follow_symlinks=False):
            entries[top.name, ""] = _size(top, counted)
            continue
        for entry in _scan(top.path):
            entries[top.name, entry.name] = _tree_size(entry, counted)
    return entries, shutil.disk_usage(home).free


def _tree_size(top: os.DirEntry[str], counted: set[tuple[int, int]]) -> int:
    size, folders, seen = _size(top, counted), [top.path] if top.is_dir(follow_symlinks=False) else [], 0
    while folders:
        seen += 1
        if seen % _DIRECTORIES_AT_ONCE == 0:
            time.sleep(_PAUSE_SECONDS)
        for entry in _scan(folders.pop()):
            size += _size(entry, counted)
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
    return size


def _scan(folder: str | Path) -> Iterable[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _size(entry: os.DirEntry[str], counted: set[tuple[int, int]]) -> int:
    """Once for all names of a file."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return 0
    if status.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
        if (status.st_dev, status.st_ino) in counted:
            return 0
        counted.add((status.st_dev, status.st_ino))
    return status.st_blocks * _BLOCK


# --- by task -----------------------------------------------------------------------------------------


def usage_by_task(
    measured: Measured, home: Path, tasks: Iterable[Task], instances: Mapping[str, str]
) -> tuple[TaskDisk, ...]:
    """The largest first. `instances` gives the id of the task of each instance that worked on one."""
    by_id = {str(task.task_id): task for task in tasks}
    rows: dict[str, dict[str, int]] = {task.key: {"workdir": 0, "vault": 0, "logs": 0} for task in by_id.values()}
    for task in by_id.values():
        place = Path(str((task.workdir or {}).get("path", "")))
        if place.parent.parent == home:
            rows[task.key]["workdir"] += measured.size(place.parent.name, place.name)
    for (folder, name), size in measured.entries.items():
        if folder == "vault" and not name.startswith("."):
            rows.setdefault(name.rpartition("-")[0], {"workdir": 0, "vault": 0, "logs": 0})["vault"] += size
        elif folder in {LOGS, HOMES} and (owner := by_id.get(instances.get(name, name))) is not None:
            rows[owner.key]["logs"] += size
    states = {task.key: str(task.state) for task in by_id.values()}
    usages = [TaskDisk(key=key, state=states.get(key, "purged"), **sizes) for key, sizes in rows.items()]
    return tuple(sorted((usage for usage in usages if usage.total), key=lambda usage: (-usage.total, usage.key)))
