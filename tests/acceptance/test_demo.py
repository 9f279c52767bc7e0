"""`make demo`: ends by itself, in time, and leaves neither a file nor a process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from coding_ground import CACHE, require_program
from shell import Started

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.py"
#: What the story must show, act by act.
SHOWN = (
    "step 1\nstep 2\nstep 3\n",
    "nightly: it works on 1 request.",
    "nightly is suspended (frozen where it is).",
    "started it (found 1 agent alive)",
    "clerk goes on with 'yes'.",
    "Two coders get a task each: ada is a shell program, bo is a shell program.",
    "-Hello\n+Hallo\n",
    "check: test -s hello.txt  passed in",
    "T001 accepted: merged into main as ",
    "T002 does not merge into main: conflicts in hello.txt.",
    "T002 goes back to the queue with your comment (attempt 2).",
    "T002 accepted: merged into main as ",
    "T002 is in the vault",
    "The workdir of T002 is back",
    "on-error requeue) is up",
    "waits for T003",
    "CI failed on pull request #1",
    "#1 is merged; T005 is accepted.",
    "nightly terminated gracefully",
    "sound: ",
)


@contextmanager
def started(folder: Path, *command: str | Path, **more: str) -> Iterator[tuple[Started, str]]:
    """A program in an environment of its own, with a mark that all of its children inherit."""
    mark = f"OSTLER_DEMO_MARK={uuid4()}"
    temporary, home = folder / "tmp", folder / "home"
    for path in (temporary, home):
        path.mkdir()
    name, _, value = mark.partition("=")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temporary), name: value}
    with Started(
        command, env=environment | more, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        yield program, mark


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
    end = time.monotonic() + 60
    while at_work_in(folder) and time.monotonic() < end:
        time.sleep(0.01)
    assert not at_work_in(folder)


def left_behind(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.timeout(300)
def test_demo_tells_its_story_and_leaves_nothing(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for part in ("examples", "src"):
        shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", checkout)
    before = left_behind(tmp_path)
    venv = Path(sys.executable).parent.parent
    # -o: this environment is ready, whatever the times of the copied files say.
    make = ("make", "-C", checkout, "-o", venv / ".ready", f"VENV={venv}", "demo")
    source = str(checkout / "src")
    with started(tmp_path, *make, PYTHONPATH=source, OSTLER_AGENTS_DIR="/nowhere") as (demo, mark):
        assert marked(mark), "the search for processes finds none at all"
        output, errors = demo.communicate(timeout=290)
    assert demo.returncode == 0, errors
    assert not errors
    for sentence in SHOWN:
        assert sentence in output, output
    assert not marked(mark)
    nobody_is_at_work_in(tmp_path)
    assert not list((tmp_path / "tmp").iterdir())
    assert left_behind(tmp_path) == before, "the demo wrote outside its own home"


@pytest.mark.torture  # a minute; test_tasks_real has each of them at work
@pytest.mark.timeout(300)
def test_demo_uses_real_coding_agents_where_they_are_installed(tmp_path: Path) -> None:
    for name in ("claude", "codex"):
        require_program(name)
    with started(tmp_path, sys.executable, DEMO, OSTLER_AGENTS_DIR=str(CACHE.parent)) as (demo, mark):
        output, errors = demo.communicate(timeout=290)
    assert demo.returncode == 0, errors
    assert "ada is the real Claude Code, bo is the real Codex." in output
    assert "T002 accepted: merged into main as " in output
    assert not marked(mark)


@pytest.mark.parametrize(
    ("act", "number"),
    [
        ("# In the background", signal.SIGINT),
        ("$ kill -9", signal.SIGINT),
        ("# The other one changed", signal.SIGTERM),
    ],
)
def test_demo_cleans_up_when_it_is_interrupted(tmp_path: Path, number: signal.Signals, act: str) -> None:
    with started(tmp_path, sys.executable, DEMO, OSTLER_AGENTS_DIR="/nowhere") as (demo, mark):
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith(act):
                break
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=100)
    assert demo.returncode == 130, errors
    assert "Traceback" not in errors
    assert not marked(mark)
    nobody_is_at_work_in(tmp_path)
    assert not left_behind(tmp_path)
