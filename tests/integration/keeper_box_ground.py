"""What the tests of groups stand on: real processes put into a group, and the proof that none of them is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ostler.keeper import cgroup_files, group_probe, tree
from ostler.keeper.groups import Group, Groups, Limits, usage_of
from ostler.keeper.process_tree import marked
from ostler.keeper.rlimit_tag import tag_for

_PR_SET_CHILD_SUBREAPER = 36
_NONE = Limits()
_ENTER = """
import mmap, os, resource, signal, subprocess, sys, threading, time
TAG = int(sys.argv.pop(1))
if TAG:
    resource.setrlimit(10, (TAG, TAG))
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
    """Which kinds of groups the kernel of this machine knows, and which of them hold limits by themselves."""
    own = cgroup_files.own_groups()
    unified, first = own.get(cgroup_files.UNIFIED), ["cgroup1"] if "freezer" in own else []
    second = [] if unified is None else ["cgroup2"]
    if unified is not None and "memory" in cgroup_files.read(f"{unified}/cgroup.controllers"):
        return [*first, *second], [*first, *second]
    return [*first, *second], first


_CGROUPS, ENFORCING = _kinds()
KINDS = [*_CGROUPS, "trees"]
#: Those whose limits are polled.
POLLED = [kind for kind in KINDS if kind not in ENFORCING]


class Ground:
    """One kind of groups with a token of its own."""

    def __init__(self, kind: str, token: str) -> None:
        self.kind = kind
        self.token = token
        self.groups: Groups = group_probe.open_groups(token, force=kind)
        self._processes: list[subprocess.Popen[str]] = []
        self._before = set(tree.children(os.getpid()))

    def group(self, name: str = "cell.1", limits: Limits = _NONE) -> Group:
        return self.groups.make(name, limits)

    def start(self, group: Group, code: str, *, run: str = "", enter: bool = True) -> subprocess.Popen[str]:
        """A Python program in a unit of the cell; the test reads what it prints."""
        unit = f"{group.name}.{run}" if run else group.name
        files = group.add(unit)
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _ENTER + ("enter()\n" if enter else "") + code),
                *(str(tag_for(self.token, unit) or 0), *files),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={"OSTLER_MARK": f"{self.token}:{unit}"},
            start_new_session=True,
        )
        self._processes.append(process)
        group.started(unit, process.pid)
        return process

    def reap(self) -> None:
        """What became ours because its parents died."""
        mine = {process.pid for process in self._processes}
        for process in self._processes:
            process.poll()
        for pid in set(tree.children(os.getpid())) - self._before - mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def pids(self, group: Group, unit: str | None = None) -> set[int]:
        self.groups.turn()
        return group.pids(unit)

    def freeze(self, group: Group) -> None:
        eventually(lambda: self._stands_still(group))

    def _stands_still(self, group: Group) -> bool:
        self.groups.turn()
        return group.freeze()

    def kill_until_empty(self, group: Group, unit: str | None = None) -> None:
        def is_empty() -> bool:
            self.groups.turn()
            group.kill(unit)
            self.reap()
            return not self.pids(group, unit)

        eventually(is_empty)

    def marked(self, unit: str = "") -> list[int]:
        self.reap()
        return marked(f"{self.token}:{unit}")

    def close(self) -> None:
        group_probe.sweep(self.token)
        for process in self._processes:
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()
        eventually(lambda: not self.marked())
        self.reap()


def groups_of(token: str) -> list[Path]:
    places = [Path(path) / f"ostler-{token}" for path in cgroup_files.own_groups().values()]
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
    return usage_of(pids).cpu_seconds
