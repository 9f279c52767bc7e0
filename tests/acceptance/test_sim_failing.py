"""`ostler sim` when things go wrong: what is said, in which order, with which exit code."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from sim_scene import PROGRAM, Scene, until

STANDS = "ostler: stopped; it stands at turn 5; go on with: "


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "scene")


def edit(scene: Scene, old: str, new: str) -> None:
    code = scene.folder / "market.py"
    assert old in code.read_text()
    code.write_text(code.read_text().replace(old, new, 1))


def by_hand(command: str, scene: Scene) -> subprocess.CompletedProcess[str]:
    """A hint, typed as it stands."""
    program, *arguments = shlex.split(command)
    assert program == "ostler"
    environment = scene.environment()
    del environment["OSTLER_HOME"]
    return subprocess.run([PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_a_population_that_failed_does_not_look_like_a_success(scene: Scene) -> None:
    scene.file.write_text(scene.file.read_text().replace("failure_pause_turns = 2\n", ""))
    edit(scene, "what = view", "print('thinking'); raise KeyError(view.name)\n        what = view")
    done = scene.sim("run", scene.file, "-o", "json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["failed"], told["paused"], told["ended"]) == (6, 6, "nobody is active")
    talk = done.stderr.splitlines()
    assert "thinking" in talk, "what a brain prints is no result"
    assert "ostler: 6 failures; first: trader in turn 1, paused: KeyError: 'trader' (market.py:23)" in talk, talk
    assert sum(line.startswith("ostler: then: trader_") for line in talk) == 4
    assert talk[-1] == f"ostler: see them all with: ostler sim replay {told['run_id']}"
    text = scene.sim("replay", "last").stdout
    assert "turn 1: 6 agents, 0 decided, 6 paused, 6 failed\n  trader failed, paused: KeyError: 'trader'" in text


def test_a_turn_that_fails_is_told_before_how_to_go_on(scene: Scene) -> None:
    home = scene.folder / "a home's"
    edit(scene, 'step("updating", state.turn)', "assert state.turn != 5")
    scene.sim("run", scene.file, "--turns", "2", "--home", home)
    done = scene.sim("resume", "last", "--turns", "8", "--home", home, OSTLER_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "assert state.turn != 5" in done.stderr
    cause, hint = done.stderr.splitlines()[-2:]
    assert "AssertionError" in cause
    assert "it stands at turn 4; go on with: ostler sim resume " in hint
    assert hint.endswith(f" --turns 8 --home {shlex.quote(str(home))}")
    edit(scene, "assert state.turn != 5", "pass")
    again = by_hand(hint.split("go on with: ")[1], scene)
    assert (again.returncode, "turn 8, all turns were played" in again.stdout) == (0, True), again.stderr


def test_several_faults_have_a_line_each(scene: Scene) -> None:
    scene.file.write_text(scene.file.read_text().replace("turns = 12", "turns = 0").replace("seed = 7", "sead = 7"))
    lines = scene.sim("run", scene.file).stderr.splitlines()
    assert [line.removeprefix(f"ostler: {scene.file}:").split(" ")[:2] for line in lines] == [
        ["2:", "turns"],
        ["3:", "sead"],
    ]


def test_a_run_that_would_wait_for_somebody_is_refused(scene: Scene) -> None:
    done = scene.sim("run", scene.file, "--set", "settings.on_idle=wait")
    assert (done.returncode, "nobody can join a run from outside" in done.stderr) == (2, True)
    assert not scene.home.exists()


def stopped(scene: Scene, plan: str, *signals: int, at_terminal: bool = False) -> tuple[int, str]:
    """Send signals to a program that waits in mid-turn; its exit code, and what it said."""
    marks = scene.folder / "marks"
    marks.mkdir()
    ours, theirs = pty.openpty() if at_terminal else os.pipe()
    program = subprocess.Popen(
        [PROGRAM, "sim", "run", scene.file],
        env=scene.environment(SIM_MARK=str(marks), SIM_PLAN=plan, TERM="xterm"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        until(marks / "waiting", program)
        for number in signals:
            program.send_signal(number)
            while STANDS.encode() not in said:
                said += os.read(ours, 4096)
        try:
            while chunk := os.read(ours, 4096):
                said += chunk
        except OSError:
            pass  # how Linux says that the other side of a terminal has closed
        return program.wait(30), said.decode()
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def test_sigterm_says_how_to_go_on_gives_the_cursor_back_and_143(scene: Scene) -> None:
    code, said = stopped(scene, "wait:deciding:6", signal.SIGTERM, at_terminal=True)
    assert code == 143
    assert f"{STANDS}ostler sim resume {scene.runs()[0].run_id}" in said
    assert said.rstrip().endswith("\x1b[?25h")
    assert "Traceback" not in said


@pytest.mark.parametrize("at_terminal", [False, True])
def test_a_second_ctrl_c_ends_at_once_what_cannot_be_called_off(scene: Scene, at_terminal: bool) -> None:
    code, said = stopped(scene, "wait:updating:6", signal.SIGINT, signal.SIGINT, at_terminal=at_terminal)
    assert code == 130
    assert f"{STANDS}ostler sim resume {scene.runs()[0].run_id}" in said
    assert not at_terminal or said.rstrip().endswith("\x1b[?25h")
    assert "Traceback" not in said
    assert scene.told("resume", "last")["turn"] == 12
