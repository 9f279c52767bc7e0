"""`make demo`: ends by itself, in time, and leaves neither a file nor a process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.py"
#: What the story must show, act by act.
SHOWN = (
    "ada  level thread  wrote one.md in work/",
    "bo   level none    wrote one.md in work/",
    "advisory: max_memory_mb, max_cpu_percent",
    "bo is asked to end, runs its clean-up and ends: was_graceful True",
    "who asked is told: the agent ended before it answered: SystemExit: 3",
    "agent_restarting     restart 1 of 3 in ",
    "start 2 of the same instance, in the same directory: one.md, two.md",
    "no restart: 3 of 3 restarts",
    "why is cy failed? it failed and stays down",
    "is suspended and takes no request; resume it first",
    "why is ada suspended? it is held",
    "resumed, still start 2: one.md, three.md, two.md",
    "why is dot waiting? it waits for what it asked for",
    "answered: Ada's book: approved",
    "agent_signal         began",
    "success True, was_graceful False",
    "5 spawned, 2 terminated, 4 restarts",
    "the core plan admits 2 active agents and 2 are active",
    "max_memory_mb must be 64 to 8192, was 16",
    "8 agents in 8 processes, ready after",
    "who asked is told: the agent ended before it answered: it used more memory than its limit of 64 MB",
    "its neighbours: all the same processes",
    "thawed: it goes on where it was, and ends at 1,000",
    "the manager is dead; of its 8 agents 8 go on",
    "finds 8; 8 are the same processes",
    "is answered to the next: 1,000; it was not done twice",
    "acknowledged and missing: 0",
    "illegal moves: 0; gaps in the numbers: 0; audit faults: 0",
    "the next manager finds 16 open starts, and writes down: the program it lived in has ended",
    "a second manager: refused: process",
    "server-1 was only asleep, and writes: refused: server-2 owns this store",
    "entry 3 was edited",
    "traders; SIGKILL after turn",
    "the same 60 turns without a crash: the same history",
    "make bench",
)


def started(folder: Path, *command: str | Path, **more: str) -> tuple[subprocess.Popen[str], str]:
    """A program in an environment of its own, with a mark that all of its children inherit."""
    mark = f"OSTLER_DEMO_MARK={uuid4()}"
    temporary, home = folder / "tmp", folder / "home"
    for path in (temporary, home):
        path.mkdir()
    name, _, value = mark.partition("=")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temporary), name: value}
    program = subprocess.Popen(
        command, env=environment | more, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    return program, mark


def marked(mark: str) -> list[int]:
    """Processes that carry the mark; those of other users cannot be ours."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            carries = mark.encode() in entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if carries:
            found.append(int(entry.parent.name))
    return found


def at_work_in(folder: Path) -> list[int]:
    """Processes that were started with this folder among their words, such as a keeper."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(int(entry.parent.name))
    return found


def nobody_is_at_work_in(folder: Path) -> None:
    end = time.monotonic() + 10
    while at_work_in(folder) and time.monotonic() < end:
        time.sleep(0.01)
    assert not at_work_in(folder)


def left_behind(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_demo_tells_its_story_and_leaves_nothing(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for part in ("examples", "src"):
        shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", checkout)
    before = left_behind(tmp_path)
    venv = Path(sys.executable).parent.parent
    # -o: this environment is ready, whatever the times of the copied files say.
    make = ("make", "-C", checkout, "-o", venv / ".ready", f"VENV={venv}", "demo")
    began = time.monotonic()
    demo, mark = started(tmp_path, *make, PYTHONPATH=str(checkout / "src"))
    assert marked(mark), "the search for processes finds none at all"
    output, errors = demo.communicate(timeout=30)
    assert demo.returncode == 0, errors
    assert not errors
    for sentence in SHOWN:
        assert sentence in output
    assert time.monotonic() - began < 30
    assert not marked(mark)
    nobody_is_at_work_in(tmp_path)
    assert not list((tmp_path / "tmp").iterdir())
    assert left_behind(tmp_path) == before, "the demo wrote outside its own home"


def test_demo_keeps_its_home_when_asked(tmp_path: Path) -> None:
    demo, _ = started(tmp_path, sys.executable, DEMO, "--keep", tmp_path / "kept")
    output, errors = demo.communicate(timeout=30)
    assert demo.returncode == 0, errors
    assert f"events -n 20 --home {tmp_path / 'kept'}" in output
    kept = left_behind(tmp_path)
    assert any(name.startswith("kept/fleet/logs/") for name in kept)
    kept = [name for name in kept if not name.startswith(("kept/fleet/", "kept/economy/"))]
    assert {"kept/ostler.db", "kept/manager.lock"} == {name for name in kept if not name.startswith("kept/work/")}
    wrote = sorted(Path(name).name for name in kept if name.startswith("kept/work/"))
    # bo's and ada's: both ended in order, so both closed their books.
    assert wrote == ["THE-END.md", "THE-END.md", "THE-END.md", "THE-END.md", "one.md", "one.md", "three.md", "two.md"]
    program = Path(sys.executable).parent / "ostler"
    done = subprocess.run(
        [program, "audit", "verify", "--home", tmp_path / "kept"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "entry 3 was edited" in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("act", "number"),
    [
        ("1.", signal.SIGINT),
        ("6.", signal.SIGTERM),
        ("9.", signal.SIGINT),
        ("11.", signal.SIGTERM),
        ("12.", signal.SIGINT),
        ("12.", signal.SIGTERM),
    ],
)
def test_demo_cleans_up_when_it_is_interrupted(tmp_path: Path, number: signal.Signals, act: str) -> None:
    demo, mark = started(tmp_path, sys.executable, DEMO)
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith(act):
            break
    end = time.monotonic() + 15
    while act == "12." and len(marked(mark)) < 2:  # until the writer that it starts and kills is alive
        assert time.monotonic() < end, "the writer of act 12 was never seen"
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=15)
    assert demo.returncode == 130, errors
    assert "Traceback" not in errors
    assert not marked(mark)
    nobody_is_at_work_in(tmp_path)
    assert not left_behind(tmp_path)
