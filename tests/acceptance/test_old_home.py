"""A home that an older version made opens, and is as its user left it. How it was made: homes/make_home.sh."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell, until
from workdirs_ground import git

ARCHIVE = Path(__file__).parent / "homes" / "a1a14d9.tar.xz"


@pytest.fixture
def old(program: Path, tmp_path: Path) -> Iterator[Shell]:
    """At another path than where it was made: it was moved, too."""
    shell = Shell(program, tmp_path)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="tar")
    yield shell
    shell.close()


def test_a_home_of_an_older_version_opens_as_its_user_left_it(old: Shell) -> None:
    _agents_are_listed_with_how_they_ended(old)
    _tasks_are_in_their_states(old)
    _work_waits_for_review_and_is_merged(old)
    _a_task_that_ran_when_all_was_killed_is_worked_on_again(old)
    _a_workdir_comes_back_from_the_vault(old)
    _a_run_of_a_population_goes_on_and_can_be_played_again(old)
    _the_chain_of_acts_is_sound(old)


def _agents_are_listed_with_how_they_ended(old: Shell) -> None:
    agents = {agent["name"]: agent for agent in json.loads(old.ok("ps", "-a", "-n", "100", "-o", "json"))}
    assert {"ended", "failed", "running", "parked-1", "accepted-1", "accepted-1-check-1"} <= agents.keys()
    assert agents["ended"]["state"] == "terminated"
    assert agents["failed"]["state"] == "failed"
    assert [attempt["exit_code"] for attempt in json.loads(old.ok("inspect", "failed"))["attempts"]] == [3]
    assert "exit code 3" in old.ok("why", "failed")
    assert "broken" in old.ok("logs", "failed")
    assert "at work" in old.ok("logs", "running")


def _tasks_are_in_their_states(old: Shell) -> None:
    tasks = {task["key"]: task for task in json.loads(old.ok("task", "list", "-a", "-o", "json"))}
    states = {key: task["state"] for key, task in tasks.items()}
    assert (states["accepted"], states["retired"], states["rejected"]) == ("accepted", "accepted", "rejected")
    assert (states["queued"], tasks["queued"]["is_held"], states["parked"]) == ("queued", True, "queued")
    assert "exit code 3" in old.ok("waits")


def _work_waits_for_review_and_is_merged(old: Shell) -> None:
    assert "+completed" in old.ok("diff", "completed")
    assert "merged into main" in old.ok("accept", "completed")
    assert (old.project / "completed.txt").read_text() == "completed\n"
    assert git(old.project, "status", "--porcelain") == ""
    assert "is taken back" in old.ok("undo", "accepted")
    assert not (old.project / "accepted.txt").exists()


def _a_task_that_ran_when_all_was_killed_is_worked_on_again(old: Shell) -> None:
    until(lambda: json.loads(old.ok("task", "show", "running"))["state"] == "running")
    assert (old.home / "tasks" / "running" / "begun.txt").read_text() == "begun\n"
    old.ok("task", "cancel", "running")


def _a_workdir_comes_back_from_the_vault(old: Shell) -> None:
    assert "is back" in old.ok("unretire", "retired")
    assert (old.home / "tasks" / "retired" / "retired.txt").read_text() == "retired\n"


def _a_run_of_a_population_goes_on_and_can_be_played_again(old: Shell) -> None:
    run = json.loads(old.ok("sim", "list", "-o", "json"))[0]
    assert (run["name"], run["turn"]) == ("small", 3)
    assert "turn 6" in old.ok("sim", "resume", run["run_id"], "--turns", "6", "--quiet")
    old.ok("sim", "check", run["run_id"])
    states = json.loads(old.ok("sim", "show", run["run_id"], "-o", "json"))
    assert "saver_1" in json.dumps(states)


def _the_chain_of_acts_is_sound(old: Shell) -> None:
    assert old.ok("audit", "verify").startswith("sound: ")
    assert "task.accept" in old.ok("audit", "log", "-n", "100")
