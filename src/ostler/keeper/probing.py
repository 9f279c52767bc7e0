"""Which boxes this machine allows: found out by making one, putting a process in, freezing and killing it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ostler.keeper import cgroupfs, tree
from ostler.keeper.boxes import Box, Boxes, BoxLimits
from ostler.keeper.cgroup1 import HIERARCHIES, Cgroup1Boxes, sweep_group
from ostler.keeper.cgroup2 import Cgroup2Boxes, base_of, hand_down
from ostler.keeper.plainboxes import PlainBoxes

_MEBIBYTE = 1 << 20
_LIMITS = BoxLimits(memory_bytes=256 * _MEBIBYTE, cpu_percent=50, pids=64, weight=50)
#: What each hierarchy of v1 is tried with.
_TRIALS = {
    "freezer": ("freezer.state", "THAWED"),
    "pids": ("pids.max", "64"),
    "memory": ("memory.limit_in_bytes", str(256 * _MEBIBYTE)),
    "cpu": ("cpu.cfs_quota_us", "10000"),
}
_GONE_SECONDS = 2.0
_SWEEP_SECONDS = 5.0
_IN = "inside"


def open_boxes(token: str, *, force: str | None = None) -> Boxes:
    """The best that works here. `force` is "cgroup2", "cgroup1", "hybrid" or "signals": that one or `OSError`.

    Call it with one thread alive: it forks.
    """
    ways: dict[str, Callable[[], Boxes]] = {
        "cgroup2": lambda: _cgroup2(token, even_bare=force is not None),
        "cgroup1": lambda: _cgroup1(token),
        "hybrid": lambda: _hybrid(token),
    }
    if force is not None and force not in {*ways, "signals"}:
        raise ValueError(f"unknown kind of box: {force}")
    for name, way in ways.items():
        if force not in {None, name}:
            continue
        try:
            boxes = way()
            _prove(boxes)
        except OSError:
            if force is not None:
                raise
        else:
            return boxes
        finally:
            _leave_no_trace(token)
    return PlainBoxes(token)


def sweep(token: str) -> list[int]:
    """Kill and remove what a dead keeper of this home left, whichever boxes it had. Forks nothing."""
    own = _own()
    killed: set[int] = set()
    until = time.monotonic() + _SWEEP_SECONDS  # for all of them together: who cannot be killed is in each
    if cgroupfs.UNIFIED in own:
        killed.update(Cgroup2Boxes(base_of(own[cgroupfs.UNIFIED]), token).sweep_groups())
    for hierarchy in HIERARCHIES:
        if hierarchy in own:
            killed.update(sweep_group(hierarchy, f"{own[hierarchy]}/ostler-{token}", until))
    return sorted(killed.union(PlainBoxes(token).sweep()))


def _own() -> dict[str, str]:
    try:
        return cgroupfs.own_groups(cgroupfs.read("/proc/self/mountinfo"), cgroupfs.read("/proc/self/cgroup"))
    except (OSError, ValueError):
        return {}


def _leave_no_trace(token: str) -> None:
    """Our empty groups, among them those of a way that failed; a first box makes anew what it needs."""
    for controller, own in _own().items():
        with contextlib.suppress(OSError):
            os.rmdir(f"{own if controller else base_of(own)}/ostler-{token}")  # noqa: PTH106 - no pathlib here


def _cgroup2(token: str, *, even_bare: bool) -> Boxes:
    own = _own().get(cgroupfs.UNIFIED)
    if own is None:
        raise OSError(errno.ENOSYS, "no cgroup v2 is mounted here")
    base, controllers = hand_down(own)
    if not controllers and not even_bare and set(HIERARCHIES) & _own().keys():
        raise OSError(errno.ENOSYS, "cgroup v2 has no controllers here, v1 has them")
    boxes = Cgroup2Boxes(base, token, controllers)
    boxes.open()
    return boxes


def _cgroup1(token: str) -> Boxes:
    boxes = Cgroup1Boxes(_working(token), token)
    boxes.open()
    return boxes


def _hybrid(token: str) -> Boxes:
    own = _own().get(cgroupfs.UNIFIED)
    if own is None:
        raise OSError(errno.ENOSYS, "no cgroup v2 is mounted here")
    working = _working(token)
    if not working:
        raise OSError(errno.ENOSYS, "no cgroup v1 is here that holds a limit")
    boxes = Cgroup1Boxes(working, token, Cgroup2Boxes(base_of(own), token))
    boxes.open()
    return boxes


def _working(token: str) -> dict[str, str]:
    """The hierarchies of v1 in which we may make a group and set something."""
    own = _own()
    working = {}
    for hierarchy, (file, text) in _TRIALS.items():
        if hierarchy not in own:
            continue
        trial = f"{own[hierarchy]}/ostler-{token}/trial-{os.getpid()}"
        with contextlib.suppress(OSError):
            cgroupfs.make(trial)
            try:
                cgroupfs.write(f"{trial}/{file}", text)
                working[hierarchy] = own[hierarchy]
            finally:
                cgroupfs.remove(trial)
    return working


def _prove(boxes: Boxes) -> None:
    """Raises `OSError` when something of it does not work. Leaves nothing."""
    box = boxes.make(f"trial-{os.getpid()}", _LIMITS)
    ours, theirs = socket.socketpair()
    pid = 0
    try:
        pid = os.fork()
        if pid == 0:
            _stay_inside(box.entrances(), theirs, ours)
        theirs.close()
        said = ours.recv(4096).decode()
        if said != _IN or box.pids() != {pid}:
            raise OSError(errno.EPERM, f"{boxes.title}: the trial process is not inside: {said}")
        box.freeze()
        box.kill()
        if not cgroupfs.wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, _GONE_SECONDS):
            raise TimeoutError(f"{boxes.title}: the trial process does not die")
        pid = 0
    finally:
        ours.close()
        theirs.close()
        if pid:
            _end(box, pid)
        box.remove()


def _stay_inside(entrances: Sequence[str], theirs: socket.socket, ours: socket.socket) -> NoReturn:
    """The trial process. It ends when its parent does."""
    try:
        ours.close()
        for entrance in entrances:
            cgroupfs.write(entrance, "0")
        theirs.send(_IN.encode())
        theirs.recv(1)
    except OSError as error:
        theirs.send(str(error).encode())
    finally:
        os._exit(0)


def _end(box: Box, pid: int) -> None:
    """Our own child, not waited for yet: nobody else can have its pid."""
    with contextlib.suppress(OSError):
        box.thaw()
    tree.signal_pid(pid, tree.start_time(pid) or 0, signal.SIGKILL)
    cgroupfs.wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, _GONE_SECONDS)
