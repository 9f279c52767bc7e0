"""What people expect who know other programs: --version, help, ids alone, one agent's events, following."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from cli_ground import PROGRAM, ostler, populate

from ostler import ReserveInstance, SpawnRequest, __version__, open_store

NOBODY = "00000000-0000-7000-8000-00000000dead"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    asyncio.run(populate(tmp_path / "home"))
    return tmp_path / "home"


def test_version_and_help_in_the_usual_ways() -> None:
    assert ostler("--version").stdout == f"ostler {__version__}\n"
    module = subprocess.run([sys.executable, "-m", "ostler", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == f"ostler {__version__}\n"
    assert ostler("help").stdout == ostler("--help").stdout
    assert ostler("help", "sim", "run").stdout == ostler("sim", "run", "--help").stdout
    done = ostler("help", "evnts")
    assert (done.returncode, "Did you mean events?" in done.stderr) == (2, True)
    assert ostler("help", "ps", "x").returncode == 2


def test_completion_knows_the_commands() -> None:
    done = ostler(_OSTLER_COMPLETE="bash_complete", COMP_WORDS="ostler ev", COMP_CWORD="1")
    assert done.stdout == "plain,events\n"


def test_ps_can_print_ids_alone(home: Path) -> None:
    ids = ostler("ps", "-q", home=home).stdout.splitlines()
    assert ids == [line.split()[0] for line in ostler("ps", home=home).stdout.splitlines()[1:]]
    assert all(UUID(one) for one in ids)
    assert ostler("ps", "-q", "-o", "json", home=home).returncode == 2


def test_events_of_one_agent(home: Path) -> None:
    cy = ostler("ps", "-a", "-q", home=home).stdout.splitlines()[0]
    found = json.loads(ostler("events", "--instance", cy, "-o", "json", home=home).stdout)
    assert {event["instance_id"] for event in found} == {cy}
    assert [event["sequence"] for event in found] == [3, 4, 5, 6, 7]
    newest = json.loads(ostler("events", "--instance", cy, "-n", "2", "-o", "json", home=home).stdout)
    assert newest == found[3:]
    later = json.loads(ostler("events", "--instance", cy, "--after", "3", "-n", "1", "-o", "json", home=home).stdout)
    assert later == found[1:2]
    assert ostler("events", "--instance", NOBODY, home=home).returncode == 4


def test_there_are_more_only_of_those_that_were_asked_for(home: Path) -> None:
    for agent in ostler("ps", "-a", "-q", home=home).stdout.splitlines():
        asked = ("events", "--instance", agent, "--after", "0", "-o", "json")
        done = ostler(*asked, home=home)
        assert done.stderr == ""
        numbers = [event["sequence"] for event in json.loads(done.stdout)]
        assert ostler(*asked, "-n", str(len(numbers)), home=home).stderr == ""
        if len(numbers) > 1:
            fewer = ostler(*asked, "-n", str(len(numbers) - 1), home=home)
            assert f"there are more; go on with --after {numbers[-2]}" in fewer.stderr


async def one_more(home: Path) -> None:
    async with open_store(home) as store:
        await store.commit(ReserveInstance(request=SpawnRequest(agent_definition_id=UUID(int=8))))


def test_events_are_followed_until_ctrl_c(home: Path) -> None:
    command: list[str | Path] = [PROGRAM, "events", "-f", "-n", "1", "-o", "jsonl", "--home", home]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert json.loads(program.stdout.readline())["sequence"] == 7
            asyncio.run(one_more(home))
            assert json.loads(program.stdout.readline())["sequence"] == 8
            program.send_signal(signal.SIGINT)
            _, said = program.communicate(timeout=30)
        finally:
            program.kill()
    assert (program.returncode, said.strip()) == (130, "")
    assert ostler("events", "-f", "-o", "json", home=home).returncode == 2
