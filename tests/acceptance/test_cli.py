"""The console script as a user meets it: a real process, its two streams, its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest
from cli_ground import PROGRAM, ostler, populate, tamper

from ostler import AgentInstance, ReserveInstance, SpawnRequest, StoreError, __version__, view_store

NO_WORKSPACE = "00000000-0000-7000-8000-00000000dead"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    asyncio.run(populate(tmp_path / "home"))
    return tmp_path / "home"


def test_version() -> None:
    assert ostler("version").stdout.startswith(f"ostler {__version__} ")
    assert json.loads(ostler("version", "-o", "json").stdout)["ostler"] == __version__


def test_help_lists_commands_and_exit_codes() -> None:
    done = ostler("--help")
    assert done.returncode == 0
    assert not done.stderr
    for word in ("audit", "events", "ps", "stats", "version", "Exit codes"):
        assert word in done.stdout


def test_usage_errors_exit_2(home: Path) -> None:
    for arguments in (["nonsense"], ["ps", "--state", "asleep"], ["ps", "--tag", "a_b"], ["events", "-n", "0"]):
        done = ostler(*arguments, home=home)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert done.stderr


def test_ps_lists_those_that_live(home: Path) -> None:
    lines = ostler("ps", home=home).stdout.splitlines()
    assert lines[0].split() == ["ID", "NAME", "STATE", "HEALTH", "RESTARTS", "UPTIME", "TAGS"]
    assert [line.split()[1] for line in lines[1:]] == ["bo", "ada"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["-a"], ["cy", "bo", "ada"]),
        (["-a", "-n", "1"], ["cy"]),
        (["-a", "--tag", "RED"], ["cy", "ada"]),
        (["--name", "A*"], ["ada"]),
        (["--state", "terminated"], ["cy"]),
        (["--state", "ready"], []),
    ],
)
def test_ps_filters(home: Path, arguments: list[str], names: list[str]) -> None:
    done = ostler("ps", "-o", "json", *arguments, home=home)
    assert [one["name"] for one in json.loads(done.stdout)] == names
    assert AgentInstance.from_json(json.dumps(json.loads(done.stdout)[0])) if names else True


def test_ps_says_on_stderr_that_there_are_more(home: Path) -> None:
    assert "-n" in ostler("ps", "-n", "1", home=home).stderr
    assert not ostler("ps", "-n", "2", home=home).stderr


def test_ps_says_that_nobody_manages_the_home_any_more(home: Path) -> None:
    tamper(
        home,
        "INSERT INTO leases "
        "SELECT 'owner', 'gone', 1, created_at, created_at + 3660000000 FROM agent_instances LIMIT 1",
    )
    assert not ostler("ps", home=home).stderr, "its owner may live"
    tamper(home, "UPDATE leases SET acquired_at = acquired_at - 7200000000, expires_at = expires_at - 7200000000")
    tamper(home, "UPDATE agent_instances SET created_at = created_at - 10800000000")
    done = ostler("ps", home=home)
    assert "nobody manages this home since 20" in done.stderr
    assert all(" 2h " in line for line in done.stdout.splitlines()[1:]), "what nobody saw is not counted"
    assert not ostler("ps", "--state", "terminated", home=home).stderr


def test_stats(home: Path) -> None:
    found = json.loads(ostler("stats", "-o", "json", home=home).stdout)
    assert (found["active_instances"], found["total_spawned"], found["total_terminated"]) == (2, 3, 1)
    assert "2 of unlimited" in ostler("stats", home=home).stdout


def test_events_follow_a_cursor(home: Path) -> None:
    first = [
        json.loads(line)
        for line in ostler("events", "--after", "0", "-n", "3", "-o", "jsonl", home=home).stdout.splitlines()
    ]
    assert [event["sequence"] for event in first] == [1, 2, 3]
    done = ostler("events", "--after", "3", "-n", "2", "-o", "json", home=home)
    assert [event["sequence"] for event in json.loads(done.stdout)] == [4, 5]
    assert "--after 5" in done.stderr
    newest = ostler("events", "-n", "1", "-o", "json", home=home)
    assert [event["event_type"] for event in json.loads(newest.stdout)] == ["agent_terminated"]


def test_events_that_are_no_longer_kept_are_told_as_an_option(home: Path) -> None:
    tamper(home, "DELETE FROM agent_instance_events WHERE sequence <= 3")
    tamper(home, "UPDATE store_head SET horizon = 3")
    done = ostler("events", "--after", "0", home=home)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ostler: events up to 3 are no longer kept; go on with --after 3\n"
    assert ostler("events", "--after", "3", home=home).returncode == 0


@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
def test_control_characters_leave_as_escapes(home: Path, output: str) -> None:
    raw = ostler("events", "-o", output, home=home).stdout
    assert "\x1b" not in raw
    assert "\u202e" not in raw
    assert ("\\x1b[2J" if output == "table" else "\\u001b[2J") in raw


def test_audit_verify(home: Path) -> None:
    done = ostler("audit", "verify", home=home)
    assert done.returncode == 0
    assert "sound, 6 entries" in done.stdout
    tamper(home, "UPDATE audit SET actor = 'nobody' WHERE number = 2")
    tamper(home, "DELETE FROM audit WHERE number = 4")
    done = ostler("audit", "verify", home=home)
    assert done.returncode == 1
    faults = done.stdout.splitlines()[1:]
    assert faults[0] == "  entry 2 was edited: its content does not match its hash"
    assert faults[1] == "  entry 4 is missing"
    found = json.loads(ostler("audit", "verify", "-o", "json", home=home).stdout)
    assert found["is_sound"] is False
    assert len(found["workspaces"][0]["faults"]) == len(faults)


def test_audit_verify_against_a_head_kept_elsewhere(home: Path) -> None:
    kept = ostler("audit", "verify", home=home).stdout.split("head ")[1].strip()
    assert ostler("audit", "verify", "--kept-head", kept, home=home).returncode == 0
    done = ostler("audit", "verify", "--kept-head", f"6:{'0' * 64}", home=home)
    assert (done.returncode, "the chain was rewritten" in done.stdout) == (1, True)
    assert ostler("audit", "verify", "--kept-head", "6", home=home).returncode == 2


@pytest.mark.parametrize("command", [["ps"], ["stats"], ["events"], ["audit", "verify"]])
def test_no_such_workspace_exits_4(home: Path, command: list[str]) -> None:
    done = ostler(*command, "--workspace", NO_WORKSPACE, home=home)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == f"ostler: there is no workspace {NO_WORKSPACE} in this home; check the id\n"


@pytest.mark.parametrize("command", [["ps"], ["stats"], ["events"], ["audit", "verify"]])
def test_a_home_is_never_made_by_looking(tmp_path: Path, command: list[str]) -> None:
    done = ostler(*command, "--home", tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"there is no Ostler home at {tmp_path / 'nowhere'}" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_home_that_cannot_be_looked_at_is_a_sentence(tmp_path: Path) -> None:
    for home, why in (
        ("x" * 300, "cannot be looked at (File name too long)"),
        ("~no-such-user/x", "this user has none"),
    ):
        done = ostler("ps", "--home", tmp_path / home if home[0] == "x" else home)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr
        assert "Errno" not in done.stderr


def test_the_default_home(home: Path) -> None:
    (home.parent / ".ostler").symlink_to(home)
    assert ostler("ps", HOME=str(home.parent)).returncode == 0
    assert "~/.ostler" in ostler("--help").stdout


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "ostler.db")
    database.execute("CREATE TABLE theirs (x)")
    database.close()
    before = (tmp_path / "ostler.db").read_bytes()
    assert "a database of another program" in ostler("ps", "--home", tmp_path).stderr
    assert (tmp_path / "ostler.db").read_bytes() == before
    for text in (b"", b"hello"):
        (tmp_path / "ostler.db").write_bytes(text)
        done = ostler("ps", "--home", tmp_path)
        assert (done.returncode, "is not a database" in done.stderr) == (1, True)
        assert (tmp_path / "ostler.db").read_bytes() == text


def test_a_newer_home_is_refused_in_a_sentence(home: Path) -> None:
    tamper(home, "PRAGMA user_version = 999")
    done = ostler("ps", home=home)
    assert done.returncode == 1
    assert "newer Ostler" in done.stderr
    assert "Traceback" not in done.stderr


def test_looking_writes_nothing(home: Path) -> None:
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    for command in (["ps"], ["stats"], ["events"], ["audit", "verify"]):
        assert ostler(*command, home=home).returncode == 0
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before


def test_a_viewed_store_refuses_to_write(home: Path) -> None:
    async def write() -> None:
        async with view_store(home) as store:
            with pytest.raises(StoreError):
                await store.commit(ReserveInstance(request=SpawnRequest(agent_definition_id=uuid4())))

    asyncio.run(write())


def test_a_closed_pipe_is_no_traceback(home: Path) -> None:
    command = f"{PROGRAM} events -o jsonl | head -n 1 | wc -l"
    environment = {"PATH": os.environ["PATH"], "OSTLER_HOME": str(home)}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_one_sentence(home: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "OSTLER_HOME": str(home)}
    done = subprocess.run(
        ["sh", "-c", f"{PROGRAM} ps > /dev/full"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr


def test_a_mistyped_command_is_guessed() -> None:
    assert "Did you mean events?" in ostler("event").stderr
