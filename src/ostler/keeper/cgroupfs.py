"""The files of control groups, both versions: where our own is, who is in one, and the blow that misses nobody."""

# ruff: noqa: PTH102, PTH106, PTH110, PTH116, PTH120 - pathlib is not worth its import and its time here

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

PROCS = "cgroup.procs"
CONTROLLERS = ("memory", "cpu", "pids")
#: The controller name under which `own_groups` gives the group of version 2.
UNIFIED = ""
#: So many descriptors are held at once while many are killed.
_BATCH = 256


def read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while more := os.read(descriptor, 1 << 16):
            text += more
    finally:
        os.close(descriptor)
    return text.decode()


def write(path: str, text: str) -> None:
    # Not by a file object: that raises only when it is closed, where the error is easily lost.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def try_write(path: str, text: str) -> bool:
    try:
        write(path, text)
    except OSError:
        return False
    return True


def number(path: str, key: str | None = None) -> int | None:
    """What a file says, or its line `key`; None when it is not there."""
    try:
        words = read(path).split()
        return int(words[0] if key is None else words[words.index(key) + 1])
    except (OSError, ValueError, IndexError):
        return None


def make(path: str) -> None:
    """A new group; the one above it too, when it was swept away."""
    try:
        os.mkdir(path, 0o755)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o755)
        os.mkdir(path, 0o755)


def ensure(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        make(path)


def subgroups(path: str) -> list[str]:
    """All below it, the deepest first."""
    try:
        # A group counts its subgroups as links, so that most need not be read through.
        if os.stat(path).st_nlink == 2:
            return []
        with os.scandir(path) as entries:
            below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [one for group in below for one in (*subgroups(group), group)]


def members(path: str, file: str = PROCS) -> set[int]:
    """Who lives in it and in all below it. The kernel does not list zombies."""
    found: set[int] = set()
    for group in (path, *subgroups(path)):
        with contextlib.suppress(OSError):
            found.update(map(int, read(f"{group}/{file}").split()))
    found.discard(0)  # someone of a pid namespace beside ours
    return found


def strike(who: Callable[[], set[int]]) -> list[int]:
    """SIGKILL to all that are there now. Nobody who got a pid in between is hit: who is held is looked up again."""
    waiting = sorted(who() - {os.getpid()})
    struck: list[int] = []
    while waiting:
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        held = {pid: fd for pid in batch if (fd := _hold(pid)) is not None}
        try:
            still = who() if held else set()
            for pid in held.keys() & still:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(held[pid], signal.SIGKILL)
                    struck.append(pid)
        finally:
            for fd in held.values():
                os.close(fd)
    return struck


def move(pids: Iterable[int], doors: Sequence[str]) -> None:
    """Whole processes into the groups of these entrances; who is gone by now is passed over."""
    for pid in pids:
        for door in doors:
            try_write(f"{os.path.dirname(door)}/{PROCS}", str(pid))


def _hold(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def remove(path: str) -> bool:
    """It and all below it, once nobody is in it; whether it is gone."""
    for group in (*subgroups(path), path):
        for _ in range(20):
            try:
                os.rmdir(group)
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.EBUSY or members(group):
                    return False
                time.sleep(0.001)  # the last of them is just leaving
            else:
                break
    return not os.path.exists(path)


def wait_for(is_so: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.0002)
    return True


def own_groups(mountinfo: str, own: str) -> dict[str, str]:
    """By controller: the directory of the group that this process is in, from the texts of /proc/self."""
    within = {
        controller: path
        for line in own.splitlines()
        for _, names, path in [line.split(":", 2)]
        for controller in names.split(",")
    }
    found: dict[str, str] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = (after.split() + [""] * 3)[:3]
        names = [UNIFIED] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for controller in names:
            path = _below(root, within.get(controller))
            if path is not None and controller not in found:
                found[controller] = (point + path).rstrip("/")
    return found


def _below(root: str, path: str | None) -> str | None:
    """The part of a group's path that is seen through a mount; None when it is outside of it."""
    if path is None or path.startswith("/.."):
        return None
    root = root.rstrip("/")
    if path == root or path.startswith(f"{root}/"):
        return path[len(root) :]
    return None
