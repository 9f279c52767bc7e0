"""`make demo`: ends by itself, in time, and leaves neither a file nor a process."""

from __future__ import annotations

import os
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
    "initializing → ready",
    "the core plan admits 2 active agents and 2 are active",
    "is initializing and cannot become processing",
    "max_memory_mb must be 64 to 8192, was 16",
    "acknowledged and missing: 0",
    "illegal moves: 0; gaps in the numbers: 0; audit faults: 0",
    "daemon-1 was only asleep, and writes: refused: epoch 1 has ended, 2 owns this store",
    "entry 3 was edited",
    "no restart: 3 of 3 restarts",
    "make bench",
)


def started(folder: Path, *arguments: str | Path) -> tuple[subprocess.Popen[str], str]:
    """The demo in an environment of its own, with a mark that all of its children inherit."""
    mark = f"OSTLER_DEMO_MARK={uuid4()}"
    temporary, home = folder / "tmp", folder / "home"
    for path in (temporary, home):
        path.mkdir()
    name, _, value = mark.partition("=")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temporary), name: value}
    command = [sys.executable, DEMO, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, cwd=folder, text=True, **pipes), mark  # type: ignore[call-overload]


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


def left_behind(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()]


def test_demo_tells_its_story_and_leaves_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    demo, mark = started(tmp_path)
    assert marked(mark), "the search for processes finds none at all"
    output, errors = demo.communicate(timeout=30)
    assert demo.returncode == 0, errors
    assert not errors
    for sentence in SHOWN:
        assert sentence in output
    assert time.monotonic() - began < 30
    assert not marked(mark)
    assert not list((tmp_path / "tmp").iterdir())
    assert not left_behind(tmp_path)


def test_demo_keeps_its_home_when_asked(tmp_path: Path) -> None:
    demo, _ = started(tmp_path, "--keep", tmp_path / "kept")
    output, errors = demo.communicate(timeout=30)
    assert demo.returncode == 0, errors
    assert f"events -n 20 --home {tmp_path / 'kept'}" in output
    assert left_behind(tmp_path) == ["kept/ostler.db"]
    program = Path(sys.executable).parent / "ostler"
    done = subprocess.run(
        [program, "audit", "verify", "--home", tmp_path / "kept"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "entry 3 was edited" in done.stdout) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("act", ["3.", "4."])
def test_demo_cleans_up_when_it_is_interrupted(tmp_path: Path, number: signal.Signals, act: str) -> None:
    demo, mark = started(tmp_path)
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith(act):
            break
    end = time.monotonic() + 15
    while act == "4." and len(marked(mark)) < 2:  # until the writer that it starts and kills is alive
        assert time.monotonic() < end, "the writer of act 4 was never seen"
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=15)
    assert demo.returncode == 130, errors
    assert "Traceback" not in errors
    assert not marked(mark)
    assert not left_behind(tmp_path)
