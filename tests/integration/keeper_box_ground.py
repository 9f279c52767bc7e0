"""What the tests of boxes stand on: real processes put into a box, and the proof that none of them is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ostler.keeper.boxes import Box, Boxes, BoxLimits

from ostler.keeper import cgroupfs, probing, tree

_PR_SET_CHILD_SUBREAPER = 36
_NONE = BoxLimits()
_ENTER = """
import mmap, os, signal, subprocess, sys, threading, time
END = time.monotonic() + 60
def enter():
    for path in sys.argv[1:]:
        door = os.open(path, os.O_WRONLY)
        os.write(door, b"0")
        os.close(door)
def up(*words):
    print(*words, flush=True)
"""


def _kinds() -> tuple[list[str], list[str]]:
    """Which kinds of boxes the kernel of this machine knows, and which of them hold limits by themselves."""
    own = cgroupfs.own_groups(cgroupfs.read("/proc/self/mountinfo"), cgroupfs.read("/proc/self/cgroup"))
    unified, first = own.get(cgroupfs.UNIFIED), ["cgroup1", "hybrid"] if "freezer" in own else []
    second = [] if unified is None else ["cgroup2"]
    if unified is not None and "memory" in cgroupfs.read(f"{unified}/cgroup.controllers"):
        return [*first, *second], [*first, *second]
    return [*first, *second], first


_CGROUPS, ENFORCING = _kinds()
KINDS = [*_CGROUPS, "signals"]
#: Those whose limits are held by looking.
LOOKING = [kind for kind in KINDS if kind not in ENFORCING]


class Ground:
    """One kind of boxes with a token of its own."""

    def __init__(self, kind: str, token: str) -> None:
        self.kind = kind
        self.token = token
        #: Whether a box is told in which room a process is; else it must find out.
        self.says_leaf = True
        self.boxes: Boxes = probing.open_boxes(token, force=kind)
        self._processes: list[subprocess.Popen[str]] = []
        self._before = set(tree.children(os.getpid()))

    def box(self, name: str = "box.1", limits: BoxLimits = _NONE) -> Box:
        return self.boxes.make(name, limits)

    def start(self, box: Box, code: str, *, leaf: str | None = None, enter: bool = True) -> subprocess.Popen[str]:
        """Returns when the program has said its first line, which stands in `said`."""
        unit = box.name if leaf is None else f"{box.name}.{leaf}"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _ENTER + ("enter()\n" if enter else "") + code, *box.entrances(leaf)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={"OSTLER_MARK": f"{self.token}:{unit}"},
            start_new_session=True,
        )
        self._processes.append(process)
        box.took_in(process.pid, leaf if self.says_leaf else None)
        return process

    def reap(self) -> None:
        """What became ours because its parents died."""
        mine = {process.pid for process in self._processes}
        for process in self._processes:
            process.poll()
        for pid in set(tree.children(os.getpid())) - self._before - mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def kill_until_empty(self, box: Box, leaf: str | None = None) -> None:
        def is_empty() -> bool:
            box.kill(leaf)
            self.reap()
            return not box.pids(leaf)

        eventually(is_empty)

    def marked(self, unit: str = "") -> list[int]:
        self.reap()
        return tree.marked(f"{self.token}:{unit}")

    def groups(self) -> list[Path]:
        return groups_of(self.token)

    def close(self) -> None:
        self.boxes.sweep()
        for process in self._processes:
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()
        eventually(lambda: not self.marked())
        self.reap()


def groups_of(token: str) -> list[Path]:
    own = cgroupfs.own_groups(cgroupfs.read("/proc/self/mountinfo"), cgroupfs.read("/proc/self/cgroup"))
    places = [Path(path) / f"ostler-{token}" for path in own.values()]
    return [place for place in places if place.exists()]


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def eventually(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.002)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """As the keeper is one."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def cpu_of(pids: Sequence[int]) -> float:
    return sum(map(tree.cpu_seconds, pids))
