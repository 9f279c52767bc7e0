"""`ostler sim` as a person meets it: a real program, its two streams, its exit codes, a terminal once."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from sim_scene import PROGRAM, Scene, until


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A home with two runs, to be looked at only: one of twelve turns, and a fork of it."""
    scene = Scene(tmp_path_factory.mktemp("played"))
    scene.told("run", scene.file)
    scene.told("fork", "last", "--at", "5", "--set", "parameters.weight=3", "--turns", "9")
    return scene


@pytest.fixture(scope="module")
def whole(played: Scene) -> str:
    """The digest of a run that nobody disturbed."""
    return played.runs()[1].digest


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "scene")


# --- playing ------------------------------------------------------------------------------------


def test_a_run_says_its_id_and_how_it_ended(scene: Scene) -> None:
    done = scene.sim("run", scene.file)
    assert done.returncode == 0
    assert done.stdout.startswith("market: turn 12, all turns were played; ")
    first, *others = done.stderr.splitlines()
    run_id = first.removeprefix("ostler: run ")
    failed = sum(len(turn.failures) for turn in scene.turns(run_id))
    assert f" {failed} failures; digest" in done.stdout
    assert others[0].startswith(f"ostler: {failed} failures; first: ")
    assert "RuntimeError: no luck (market.py:" in others[0]
    assert others[-1] == f"ostler: see them all with: ostler sim replay {run_id}"
    assert "turns  [" not in done.stderr, "no progress bar where there is no terminal"


def test_seed_turns_and_settings_come_from_the_file_or_the_line(scene: Scene, whole: str) -> None:
    run = scene.told("run", scene.file)
    assert (run["turn"], run["played"], run["ended"]) == (12, 12, "all turns were played")
    assert run["digest"] == whole
    other = scene.told("run", scene.file, "--seed", "8", "--turns", "3")
    assert (other["turn"], other["digest"] != scene.turns(run["run_id"])[3].digest) == (3, True)
    changed = scene.told("run", scene.file, "--set", "parameters.weight=2", "--set", "settings.max_agents=70")
    assert changed["digest"] != whole
    settings = scene.runs()[0].settings
    assert (settings["parameters"], settings["max_agents"]) == ({"weight": 2}, 70)


def test_a_run_goes_on_by_its_id_its_beginning_or_as_the_last(scene: Scene, whole: str) -> None:
    run_id = scene.told("run", scene.file, "--turns", "4")["run_id"]
    done = scene.sim("resume", "last")
    assert (done.returncode, "stands at turn 4 already; say how far with --turns" in done.stderr) == (2, True)
    assert scene.told("resume", "last", "--turns", "6")["turn"] == 6
    assert scene.told("resume", run_id[:30], "--turns", "8")["played"] == 2
    assert scene.told("resume", run_id, "--turns", "12")["digest"] == whole


def test_what_a_run_goes_on_with_is_what_it_began_with(scene: Scene) -> None:
    """Its settings are its own, even where the file says something else by now."""
    whole = scene.told("run", scene.file, "--seed", "5", "--set", "parameters.weight=4")["digest"]
    scene.told("run", scene.file, "--seed", "5", "--set", "parameters.weight=4", "--turns", "4")
    scene.file.write_text("this is no scenario any more")
    assert scene.told("resume", "last", "--turns", "12")["digest"] == whole


def test_a_fork_goes_its_own_way_or_the_same(scene: Scene, played: Scene) -> None:
    shutil.copytree(played.home, scene.home)
    run = {"run_id": str(played.runs()[1].run_id), "digest": played.runs()[1].digest}
    same = scene.told("fork", run["run_id"], "--at", "5")
    other = {"run_id": str(played.runs()[0].run_id), "digest": played.runs()[0].digest}
    seeded = scene.told("fork", other["run_id"], "--at", "7", "--seed", "99", "--turns", "9")
    assert (same["digest"], same["played"]) == (run["digest"], 7)
    assert (seeded["turn"], seeded["played"]) == (9, 2)
    assert seeded["digest"] not in {run["digest"], other["digest"]}
    assert scene.runs()[0].settings["parameters"] == {"weight": 3}
    root, fork, twice = (scene.turns(one["run_id"]) for one in (run, other, seeded))
    assert root[:6] == fork[:6]
    assert fork[:8] == twice[:8]
    assert root[6] != fork[6]
    done = scene.sim("fork", run["run_id"], "--at", "12")
    assert (done.returncode, "--turns" in done.stderr) == (2, True), "there is nothing left to play"
    done = scene.sim("fork", run["run_id"], "--at", "13")
    assert (done.returncode, "from 0 to 12" in done.stderr) == (3, True)
    done = scene.sim("fork", run["run_id"], "--at", "1", "--set", "global_state.x=1")
    assert (done.returncode, "it may set settings.*, parameters.*, seed, turns, name" in done.stderr) == (2, True)


def test_a_fork_changes_what_it_is_told_and_nothing_else(scene: Scene) -> None:
    scene.told("run", scene.file, "--turns", "2", "--name", "first", "--set", "settings.retries=1")
    changes = ("--set", "settings.decision_timeout=2s", "--set", "parameters.weight=2", "--seed", "3", "--turns", "4")
    scene.told("fork", "first", "--at", "1", *changes)
    before, after = scene.runs()[1], scene.runs()[0]
    assert before.name == "first"
    differing = {key for key, value in before.settings.items() if after.settings[key] != value}
    assert differing == {"decision_timeout", "parameters", "seed"}
    assert (after.settings["retries"], after.settings["parameters"], after.seed) == (1, {"weight": 2}, 3)


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "trader"', 'kind = "wizard"', ":19: agents.0.kind must be one of the brains (trader)"),
        ("market:Trader", "market:Nobody", ":15: brains.trader"),
        ("turns = 12", "turns = 0", ":2: turns"),
        ("[settings]", "[settings", ":6"),
        ("count = 6", "count = 600", "raise settings.max_agents"),
    ],
)
def test_a_scenario_with_a_fault_gives_2_and_says_where(scene: Scene, old: str, new: str, said: str) -> None:
    scene.file.write_text(scene.file.read_text().replace(old, new, 1))
    done = scene.sim("run", scene.file)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{scene.file}" in done.stderr
    assert said in done.stderr, done.stderr
    assert not scene.home.exists(), "nothing was begun"


def test_usage_errors_give_2(scene: Scene) -> None:
    for arguments in (
        ["run", "nowhere.toml"],
        ["run", str(scene.file), "--set", "agents.-1.count=2"],
        ["fork", "last", "--at", "1", "--set", "agents.0.count=2"],
        ["run", str(scene.file), "--set", "weight"],
        ["run", str(scene.file), "--set", "parameters.nobody.knows=1", "--set", "settings.zeal=3"],
        ["run", str(scene.file), "--turns", "0"],
        ["fork", "last"],
    ):
        done = scene.sim(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), (arguments, done.stderr)
        assert done.stderr
        assert "Traceback" not in done.stderr


def test_a_turn_that_fails_leaves_a_run_that_can_go_on(scene: Scene, whole: str) -> None:
    code = scene.folder / "market.py"
    sound = code.read_text()
    broken = 'step("updating", state.turn)\n        1 / (state.turn - 5)'
    code.write_text(sound.replace('step("updating", state.turn)', broken, 1))
    done = scene.sim("run", scene.file)
    run_id = scene.runs()[0].run_id
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert f"it stands at turn 4; go on with: ostler sim resume {run_id}" in done.stderr
    code.write_text(sound)
    assert scene.told("resume", str(run_id))["digest"] == whole


# --- at a terminal ------------------------------------------------------------------------------


def test_ctrl_c_says_how_to_go_on_and_gives_130(scene: Scene, whole: str) -> None:
    marks = scene.folder / "marks"
    marks.mkdir()
    program = subprocess.Popen(
        [PROGRAM, "sim", "run", scene.file],
        env=scene.environment(SIM_MARK=str(marks), SIM_PLAN="wait:deciding:6"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(marks / "waiting", program)
        program.send_signal(signal.SIGINT)
        out, errors = program.communicate(timeout=30)
    finally:
        program.kill()
        program.communicate()
    run_id = scene.runs()[0].run_id
    assert (program.returncode, out) == (130, "")
    assert f"it stands at turn 5; go on with: ostler sim resume {run_id}" in errors
    assert "Traceback" not in errors
    assert scene.told("resume", "last")["digest"] == whole


def at_terminal(scene: Scene, *arguments: str | Path) -> tuple[bytes, bytes]:
    """What it says to somebody who sits there, and what it gives to the pipe."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.Popen(
            [PROGRAM, "sim", *arguments],
            env=scene.environment(TERM="xterm"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
        )
        os.close(theirs)
        said = b""
        try:
            while chunk := os.read(ours, 4096):
                said += chunk
        except OSError:
            pass  # how Linux says that the other side has closed
        assert done.stdout is not None
        out = done.stdout.read()
        done.stdout.close()
        assert done.wait(30) == 0
    finally:
        os.close(ours)
    return said, out


def test_a_progress_bar_is_shown_at_a_terminal(scene: Scene) -> None:
    said, out = at_terminal(scene, "run", scene.file)
    assert b"12/12" in said
    assert out.startswith(b"market: turn 12")
    said, _ = at_terminal(scene, "resume", "last", "--turns", "14")
    first = next(line for line in said.split(b"\r") if b"turns  [" in line)
    assert b"12/14" in first, "it goes on where the run stands"
    assert b"14/14" in said
    said, _ = at_terminal(scene, "resume", "last", "--turns", "15", "-q")
    assert b"15/15" not in said
