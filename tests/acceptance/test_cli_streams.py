"""The console script with streams that are closed, as a daemon or a careless shell leaves them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from cli_ground import PROGRAM, populate
from sim_scene import Scene


def shell(scene: Scene, command: str) -> subprocess.CompletedProcess[str]:
    line = f"{PROGRAM} {command}"
    return subprocess.run(
        ["sh", "-c", line], env=scene.environment(), capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "scene")


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_a_run_is_played_to_its_end_with_streams_closed(scene: Scene, closed: str) -> None:
    done = shell(scene, f"sim run {scene.file} --turns 3 {closed}")
    assert done.returncode == 0, done.stderr
    assert [(run.turn, run.state.value) for run in scene.runs()] == [(3, "ended")]


def test_every_other_command_ends_as_ever_with_streams_closed(scene: Scene) -> None:
    asyncio.run(populate(scene.home))
    for command in ("ps", "events -o jsonl", "audit verify", "sim show"):
        done = shell(scene, f"{command} >&- 2>&-")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), command
    done = shell(scene, "ps --workspace 00000000-0000-7000-8000-00000000dead >&-")
    assert (done.returncode, "there is no workspace" in done.stderr) == (4, True)
    assert shell(scene, "nonsense 2>&-").returncode == 2
    assert shell(scene, "--help >&-").returncode == 0


def test_what_stands_in_for_a_closed_stream_is_handed_on_to_programs(tmp_path: Path) -> None:
    child = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(str([bool(os.fstat(n)) for n in (0, 1, 2)]))"
    parent = (
        "import subprocess, sys; from ostler.cli.streams import prepare; prepare(); "
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    subprocess.run(["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, parent], check=True)
    assert (tmp_path / "seen").read_text() == "[True, True, True]"
