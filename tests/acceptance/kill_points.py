"""Runs the scenario and kills it: at a named fault point, or at the nth system call of a kind.

`strace` counts the calls of each kind per thread and delivers SIGKILL at the nth; see its manual under "inject". The
program is started through the real interpreter, not through a version manager's wrapper.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Calls that change what is on the disk, the ones that make it durable, and the one that tells of it: `write` is how
#: the scenario acknowledges.
KINDS = ("pwrite64", "write", "fdatasync", "fsync", "ftruncate", "mknodat", "rename", "unlink")
SCENARIO = Path(__file__).with_name("kill_scenario.py")
_INTERPRETER = os.path.realpath(sys.executable)
_TRACER = ("strace", "-f")
_KILLED = {-9, 137}


@dataclass(frozen=True)
class Ending:
    """What one run left behind: the acknowledgements it gave, and how it ended."""

    where: str
    markers: Path
    acknowledged: list[dict[str, Any]] = field(default_factory=list)
    returncode: int = 0

    @property
    def was_killed(self) -> bool:
        return self.returncode in _KILLED


def environment(**more: str) -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONDONTWRITEBYTECODE="1", **more)


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# --- at named points ---------------------------------------------------------------------------------


class Victims:
    """Plays lives in processes that are forked from one that has imported everything."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._number = 0

    def play(self, where: str, *, fault: str = "", flags: tuple[str, ...] = ()) -> Ending:
        self._number += 1
        markers = self._folder / f"life-{self._number}"
        markers.mkdir()
        output = markers / "acknowledged"
        told = {"where": where, "markers": str(markers), "output": str(output), "fault": fault, "flags": flags}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(told) + "\n")
        self._server.stdin.flush()
        returncode = int(self._server.stdout.readline())
        assert returncode in {0, *_KILLED}, "the scenario went wrong by itself"
        return Ending(where, markers, _lines(output.read_text()), returncode)


@contextmanager
def victims(folder: Path) -> Iterator[Victims]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(SCENARIO), "--serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as server:
        yield Victims(server, folder)
        assert server.stdin is not None
        server.stdin.close()


# --- at system calls ---------------------------------------------------------------------------------


def strace_missing() -> str:
    """Why calls cannot be traced here, or nothing."""
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace)"
    probe = subprocess.run(["strace", "-f", "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"strace may not trace here: {probe.stderr.strip()[-200:]}"


def run(folder: Path, *before: str, flags: tuple[str, ...] = ()) -> Ending:
    home = folder / "store"
    home.mkdir(parents=True, exist_ok=True)
    command = [*before, _INTERPRETER, str(SCENARIO), str(home), str(folder), *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=50)
    if done.returncode not in {0, *_KILLED} or "Traceback" in done.stderr:
        raise AssertionError(f"the scenario went wrong by itself: {done.stderr[-2000:]}")
    return Ending(str(home), folder, _lines(done.stdout), done.returncode)


def count_writes(folder: Path) -> Counter[tuple[str, int]]:
    """How often one thread makes each kind of call at most, on a run that is not disturbed."""
    folder.mkdir(parents=True)
    log = folder / "trace"
    run(folder, *_TRACER, "-e", f"trace={','.join(KINDS)}", "-o", str(log))
    per_thread: Counter[tuple[str, str]] = Counter()
    for line in log.read_text().splitlines():
        found = re.match(r"(\d+) +(\w+)\(", line)
        if found and found[2] in KINDS:
            per_thread[found[1], found[2]] += 1
    most: Counter[str] = Counter()
    for (_, kind), times in per_thread.items():
        most[kind] = max(most[kind], times)
    return Counter({(kind, nth): 1 for kind, times in most.items() for nth in range(1, times + 1)})


def killed_at(folder: Path, kind: str, nth: int, *, mutant: bool = False, again: str = "") -> Ending:
    """One run that dies at the nth call of a kind; `again` opens what an earlier one left and dies in that."""
    call, when = again.split(":") if again else (kind, str(nth))
    flags = ("--mutant",) if mutant else ("--reopen",) if again else ()
    inject = f"inject={call}:signal=SIGKILL:when={when}"
    tracer = (*_TRACER, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
    return run(folder / f"{kind}-{nth}", *tracer, flags=flags)
