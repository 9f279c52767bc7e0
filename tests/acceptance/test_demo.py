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
    "step 1\nstep 2\nstep 3\n",
    "nightly: it works on 1 request.",
    "nightly is suspended (frozen where it is)",
    "nightly is processing.",
    "(found 1 agent alive)",
    "ostler answer clerk yes",
    "clerk goes on with 'yes'.",
    "INFO clerk: the answer is yes",
    "nightly terminated gracefully",
    "sh failed with exit code 3",
    "sound: ",
    "The daemon has ended.",
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


def nobody_is_at_work(mark: str) -> None:
    end = time.monotonic() + 30
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.01)
    assert not marked(mark)


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
    demo, mark = started(tmp_path, *make, PYTHONPATH=str(checkout / "src"))
    assert marked(mark), "the search for processes finds none at all"
    output, errors = demo.communicate(timeout=90)
    assert demo.returncode == 0, errors
    assert not errors
    for sentence in SHOWN:
        assert sentence in output
    nobody_is_at_work(mark)
    assert not list((tmp_path / "tmp").iterdir())
    assert left_behind(tmp_path) == before, "the demo wrote outside its own home"


@pytest.mark.parametrize(
    ("line", "number"),
    [("$ ostler run --", signal.SIGINT), ("nightly", signal.SIGTERM), ("$ kill -9", signal.SIGINT)],
    ids=["first", "background", "killed"],
)
def test_demo_cleans_up_when_it_is_interrupted(tmp_path: Path, line: str, number: signal.Signals) -> None:
    demo, mark = started(tmp_path, sys.executable, "-B", DEMO)
    assert demo.stdout is not None
    for said in demo.stdout:
        if said.startswith(line):
            break
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130, errors
    assert "Traceback" not in errors
    nobody_is_at_work(mark)
    assert not left_behind(tmp_path)
