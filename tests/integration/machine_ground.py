"""A look at the machine itself, past manager and level: which processes and control groups there are for a home."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ostler.keeper import cgroup_files, tree
from ostler.keeper.group_probe import sweep
from ostler.keeper.rlimit_tag import is_of_home, tag_for, tag_of

PATIENCE = 60.0


async def until(holds: Callable[[], Any], what: str = "it never came", seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


def lives(pid: int) -> bool:
    return tree.living(pid) is not None


def cpu_seconds(pid: int) -> float:
    status = tree.stat(pid)
    return 0.0 if status is None else status.cpu_seconds


def token_of(home: Path) -> str:
    file = home / "keeper" / "token"
    return file.read_text().strip() if file.exists() else "none"


def everyone(home: Path, cell: str = "") -> set[int]:
    """All living processes of a home, or of one cell of it: by their group, their tag and their mark."""
    token = token_of(home)
    return {pid for pid in tree.all_pids() if _belongs(pid, token, cell) and lives(pid)}


def _belongs(pid: int, token: str, cell: str) -> bool:
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False
    # The group first: reading the mark of a process that forks and forks takes long.
    if f"/ostler-{token}/{cell}" in groups:
        return True
    tag = tag_of(pid)
    if tag is not None and (is_of_home(tag, token) if not cell else tag == tag_for(token, cell)):
        return True
    return (tree.mark_of(pid) or "").startswith(f"{token}:{cell}")


def groups_of(home: Path) -> list[Path]:
    """The control groups that are there for a home. Others come and go while one looks, which `os.walk` bears."""
    name = f"ostler-{token_of(home)}"
    return [Path(place, name) for place, inside, _ in os.walk("/sys/fs/cgroup") if name in inside]


def keeper_of(home: Path) -> int:
    """The pid of the one who holds the lock; by the kernel's own list. 0 when nobody does."""
    inode = (home / "keeper" / "keeper.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
            return int(words[4])
    return 0


def kill_keeper_of(home: Path) -> None:
    pid = keeper_of(home)
    assert pid, "there is no keeper to kill, and 0 would be the group of the tests"
    os.kill(pid, signal.SIGKILL)


def group_number(pid: int, controller: str, *files: str) -> int | None:
    """What stands in the first of these files in the group that Ostler made for a process; None where it made none."""
    own = cgroup_files.parse_groups(cgroup_files.read("/proc/self/mountinfo"), cgroup_files.read(f"/proc/{pid}/cgroup"))
    groups = [own[name] for name in (controller, cgroup_files.UNIFIED) if "/ostler-" in own.get(name, "")]
    numbers = (cgroup_files.read_number(f"{group}/{file}") for group in groups for file in files)
    return next((number for number in numbers if number is not None), None)


def lacking(because: str) -> NoReturn:
    """This machine cannot show it. Where tests must all run that is a failure, unless its kernel has no such thing."""
    if os.environ.get("CI") and " cgroup" in cgroup_files.read("/proc/self/mountinfo"):
        pytest.fail(because)
    pytest.skip(because)


def end_keeper(home: Path) -> None:
    """Told by a signal that nobody will come back, it ends in order with all that it has."""
    keeper = keeper_of(home)
    if keeper:
        os.kill(keeper, signal.SIGTERM)
        end = time.monotonic() + PATIENCE
        while lives(keeper):
            assert time.monotonic() < end, "the keeper does not end"
            time.sleep(0.01)
    assert_nothing_left(home)


@contextmanager
def swept(home: Path) -> Iterator[Path]:
    """A home whose keepers are killed: whatever a test that fails half-way leaves of it goes."""
    try:
        yield home
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            if keeper := keeper_of(home):
                os.kill(keeper, signal.SIGKILL)
        sweep(token_of(home))


def assert_nothing_left(home: Path) -> None:
    assert everyone(home) == set()
    assert groups_of(home) == []


def slowdown() -> float:
    """How much slower than alone this machine is now: other tests run beside this one."""
    began = time.process_time(), time.monotonic()
    while time.process_time() - began[0] < 0.05:
        pass
    return max(1.0, (time.monotonic() - began[1]) / 0.05)
