"""`ostler sim` with what people mistype, and on terminals that can do little."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from ostler.cli.progress import fitted
from sim_scene import PROGRAM, Scene


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("slips"))
    scene.told("run", scene.file, "--turns", "5")
    return scene


def test_no_later_turn_is_told_with_what_was_said(played: Scene) -> None:
    done = played.sim("resume", "last", "--turns", "2")
    told = "the run stands at turn 5 already, and --turns 2 is no later one; say how far with --turns, as --turns 6"
    assert (done.returncode, told in done.stderr) == (2, True)


@pytest.mark.parametrize("command", [["show"], ["resume"], ["replay"], ["fork", "--at", "1"]])
def test_an_empty_name_means_no_run(played: Scene, command: list[str]) -> None:
    done = played.sim(*command, "")
    assert (done.returncode, "RUN is empty; `ostler sim show` lists those there are" in done.stderr) == (4, True)


def test_a_scenario_that_is_not_there_says_what_to_do(played: Scene) -> None:
    done = played.sim("run", "")
    assert (done.returncode, "SCENARIO is empty; name a TOML or a YAML file" in done.stderr) == (2, True)
    done = played.sim("run", "/nowhere.toml")
    assert done.returncode == 2
    assert "/nowhere.toml: cannot be read: No such file or directory; check the path" in done.stderr


def on_terminal(scene: Scene, columns: int, term: str) -> str:
    """What a run writes to its standard error there."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command: list[str | Path] = [PROGRAM, "sim", "run", scene.file, "--turns", "5"]
    with subprocess.Popen(command, env=scene.environment(TERM=term), stdout=subprocess.DEVNULL, stderr=its) as program:
        os.close(its)
        said = b""
        while True:
            try:
                said += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert program.returncode == 0
    return said.decode()


def test_the_bar_keeps_within_a_narrow_terminal_and_away_from_a_dumb_one(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    said = on_terminal(scene, 40, "xterm")
    drawn = [re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", part) for part in re.split(r"[\r\n]", said) if "turns" in part]
    assert drawn
    assert all(len(line) < 40 for line in drawn), drawn
    assert "5/5" in drawn[-1]
    plain = on_terminal(scene, 40, "dumb")
    assert "\x1b" not in plain
    assert "turns  [" not in plain


def test_the_bar_gives_way_before_the_count() -> None:
    assert fitted(80, 12, timed=True) == {"show_eta": True, "width": 30}
    assert fitted(40, 12, timed=True) == {"show_eta": True, "width": 13}
    assert fitted(30, 12, timed=True) == {"show_eta": False, "width": 13}
    assert fitted(10, 12, timed=True)["bar_template"] == "%(info)s"
