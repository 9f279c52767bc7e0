"""Processes as /proc tells of them. A process is its pid and its start time together; a bare pid may be anyone's.

Everything here bears that a process vanishes while it is looked at, and takes a zombie for dead.
"""

# ruff: noqa: PTH110, PTH208 - pathlib is not worth its import and its time here

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

from ostler.keeper.protocol import MARK

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Longer than any environment that is meant honestly; what stands behind it is not looked for.
_MAX_ENVIRON = 1 << 20
_DEAD = "ZXx"
#: How long it may take to end what carries our mark.
_SWEEP_SECONDS = 5.0


# Tuples, here and elsewhere in the keeper: to make one dataclass is to load what takes as long as a fifth of our start.
class Process(NamedTuple):
    pid: int
    #: In clock ticks since the machine started.
    start_time: int


class Stat(NamedTuple):
    """One line of /proc/PID/stat, as far as it is needed."""

    process: Process
    parent: int
    #: Also told of a zombie, whose environment is gone.
    session: int
    state: str
    threads: int
    #: Its own, and that of its children that it has waited for.
    cpu_seconds: float
    rss_bytes: int

    @property
    def is_dead(self) -> bool:
        return self.state in _DEAD

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"


def boot_id() -> str:
    return (_read("/proc/sys/kernel/random/boot_id") or b"").decode().strip()


def stat(pid: int) -> Stat | None:
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None
    # The name stands in parentheses and may hold anything, also parentheses and spaces.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(
        process=Process(pid, int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0].decode(),
        threads=int(fields[17]),
        cpu_seconds=sum(map(int, fields[11:15])) / _TICKS,
        rss_bytes=int(fields[21]) * _PAGE,
    )


def living(pid: int) -> Process | None:
    """Who has this pid now; None when nobody has, or a zombie."""
    found = stat(pid)
    return None if found is None or found.is_dead else found.process


def start_time(pid: int) -> int | None:
    found = stat(pid)
    return None if found is None else found.process.start_time


def is_zombie(pid: int) -> bool:
    found = stat(pid)
    return found is not None and found.is_dead


def is_alive(process: Process) -> bool:
    return living(process.pid) == process


def rss_bytes(pid: int) -> int:
    found = stat(pid)
    return 0 if found is None else found.rss_bytes


def pss_bytes(pid: int) -> int | None:
    """Its fair share of the memory it shares with others; None where the kernel does not say."""
    for line in (_read(f"/proc/{pid}/smaps_rollup") or b"").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def cpu_seconds(pid: int) -> float:
    found = stat(pid)
    return 0.0 if found is None else found.cpu_seconds


def thread_count(pid: int) -> int:
    found = stat(pid)
    return 0 if found is None else found.threads


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def census() -> dict[int, Stat]:
    """Everyone on this machine who is not dead."""
    seen = ((pid, stat(pid)) for pid in all_pids())
    return {pid: one for pid, one in seen if one is not None and not one.is_dead}


def children(pid: int) -> list[int]:
    """Zombies among them."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        text = _read(f"/proc/{pid}/task/{thread}/children")
        if text is None and os.path.exists(f"/proc/{pid}/task/{thread}"):
            return _children_by_parent(pid)  # a kernel that keeps no such list
        found += map(int, (text or b"").split())
    return found


def _children_by_parent(pid: int) -> list[int]:
    seen = (stat(other) for other in all_pids())
    return [one.process.pid for one in seen if one is not None and one.parent == pid]


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = [child for child in children(waiting.pop()) if child not in found]
        found.update(new)
        waiting += new
    return found


def ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    seen = stat(pid)
    while seen is not None and seen.parent > 0 and seen.parent not in found:
        found.add(seen.parent)
        seen = stat(seen.parent)
    return found


def mark_of(pid: int) -> str | None:
    """What its environment held as our mark when it began; "" when that cannot be said at this moment."""
    text = _read(f"/proc/{pid}/environ", _MAX_ENVIRON)
    if not text:
        return ""  # in the midst of exec, or not ours to read
    wanted = f"{MARK}=".encode()
    for one in text.split(b"\0"):
        if one.startswith(wanted):
            return one[len(wanted) :].decode(errors="replace")
    return None


def marked(prefix: str) -> list[int]:
    return [pid for pid in all_pids() if (mark_of(pid) or "").startswith(prefix) and not is_zombie(pid)]


def signal_pid(pid: int, started: int, number: int) -> bool:
    """To this process and no other that may have its pid by now; whether it got it."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Who is seen now is the one whom the descriptor holds, or a later one with another start time.
        if living(pid) != Process(pid, started):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def end_marked(prefix: str, spare: Iterable[int] = (), until: float | None = None) -> list[int]:
    """Kill all whose mark begins so, until none is left or five seconds are over; who was killed.

    `until`: the time on the monotonic clock after which there is one blow only.

    The caller and those above it are spared: they may have been started from inside an agent.
    """
    killed: set[int] = set()
    spared = {os.getpid(), *ancestors(os.getpid()), *spare}
    end = time.monotonic() + _SWEEP_SECONDS if until is None else until
    while found := [process for pid in marked(prefix) if pid not in spared and (process := living(pid))]:
        killed.update(one.pid for one in found if signal_pid(one.pid, one.start_time, signal.SIGKILL))
        if time.monotonic() > end:
            break
        time.sleep(0.001)
    return sorted(killed)


def _read(path: str, most: int = 1 << 16) -> bytes | None:
    """Up to `most` bytes; None when it is gone or not ours to read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with contextlib.suppress(OSError):
            return os.read(descriptor, most)
        return None
    finally:
        os.close(descriptor)
