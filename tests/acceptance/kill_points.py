"""Enumerates the writes of a program and runs it again once per write, killed there.

`strace` counts the calls of each kind per thread and delivers SIGKILL at the nth; see its manual under
"inject". The program is started through the real interpreter, not through a version manager's wrapper.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: Calls that change what is on the disk, the ones that make it durable, and the one that tells of it: `write` is
#: how the scenario acknowledges. It makes no `fsync` and no `rename` today; when it does, they are visited too.
KINDS = ("pwrite64", "write", "fdatasync", "fsync", "ftruncate", "mknodat", "rename", "unlink")
SCENARIO = Path(__file__).with_name("kill_scenario.py")
_INTERPRETER = os.path.realpath(sys.executable)
_TRACER = ("strace", "-f")


@dataclass(frozen=True)
class Ending:
    """What one run left behind: the acknowledgements it gave, and how it ended."""

    home: Path
    acknowledged: list[dict[str, object]] = field(default_factory=list)
    returncode: int = 0


def strace_missing() -> str:
    """Why the enumeration cannot run here, or nothing."""
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace)"
    probe = subprocess.run(["strace", "-f", "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"strace may not trace here: {probe.stderr.strip()[-200:]}"


def run(home: Path, *before: str, flags: tuple[str, ...] = (), fault: str = "") -> Ending:
    store = home / "store"
    store.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONDONTWRITEBYTECODE="1")
    if fault:
        environment["OSTLER_FAULT"] = fault
    command = [*before, _INTERPRETER, str(SCENARIO), str(store), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=50)
    if done.returncode not in {0, -9, 137} or "Traceback" in done.stderr:
        raise AssertionError(f"the scenario went wrong by itself: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return Ending(home=store, acknowledged=lines, returncode=done.returncode)


def count_writes(folder: Path) -> Counter[tuple[str, int]]:
    """How often the writing thread makes each kind of call, on a run that nobody disturbs."""
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
