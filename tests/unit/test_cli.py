"""Commands in this process: what they do before they reach a daemon, and how they write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from ostler.cli import output
from ostler.cli.main import root

LOOKING = [
    *(
        "ps",
        "inspect x",
        "logs x",
        "why x",
        "stop x",
        "wait x",
        "waits",
        "inbox",
        "events",
        "stats",
        "agents",
        "audit log",
    ),
    *("task list", "task show T001", "diff T001", "crew ps", "pr list", "loop show T001", "token list"),
]


def invoke(home: Path, words: str) -> Result:
    return CliRunner().invoke(root, ["--home", str(home), *words.split()])


@pytest.mark.parametrize("words", LOOKING)
def test_looking_makes_no_home(tmp_path: Path, words: str) -> None:
    home = tmp_path / "home"
    result = invoke(home, words)
    assert result.exit_code == 4
    assert f"there is no home at {home}" in result.stderr
    assert not home.exists()


GROUPS = ("task", "loop", "signal", "pr", "crew", "sim", "agents", "token", "workspace", "audit")


@pytest.mark.parametrize("name", GROUPS)
def test_the_help_of_a_group_shows_the_options_of_its_commands(tmp_path: Path, name: str) -> None:
    result = invoke(tmp_path, f"{name} --help")
    group = root.get_command(click.Context(root), name)
    assert result.exit_code == 0
    assert isinstance(group, click.Group)
    for command in group.commands.values():
        assert f"\n  {command.name}" in result.stdout
        for parameter in command.params:
            assert isinstance(parameter, click.Argument) or max(parameter.opts, key=len) in result.stdout


def test_the_help_of_loop_explains_the_options_of_run(tmp_path: Path) -> None:
    assert "What it prints when it is done" in " ".join(invoke(tmp_path, "loop --help").stdout.split())


def test_validating_where_there_is_no_home_finds_no_files(tmp_path: Path) -> None:
    result = invoke(tmp_path / "home", "agents validate")
    assert (result.exit_code, "there are no definition files" in result.stderr) == (0, True)


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_tokyo")
@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("since 2026-11-18 02:05:10+00:00, for 7 s", "since 2026-11-18 11:05:10, for 7 s"),
        ("due=2026-11-18T23:05:10.123456Z", "due=2026-11-19 08:05:10"),
        ("try again at 2026-11-18 02:05 UTC", "try again at 2026-11-18 11:05:00"),
        ("about 02:05", "about 02:05"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
    ],
)
def test_sentences_of_the_daemon_are_shown_in_local_time(told: str, shown: str) -> None:
    assert output.sentence(told) == shown
