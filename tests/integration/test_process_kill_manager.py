"""A manager that is killed at any moment costs no answer and no message, and nothing is done twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from command_ground import CALL, plan_for
from isolation.ground import RecordingListener
from machine_ground import assert_nothing_left, end_keeper, everyone, swept
from seam_victim import AGENTS

from ostler.clock import SystemClock
from ostler.errors import AgentGoneError
from ostler.isolation import Cell, Site, Verb
from ostler.isolation.process.level import ProcessIsolation

VICTIM = Path(__file__).parent / "seam_victim.py"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    for agent in AGENTS:
        (tmp_path / agent).mkdir()
    with swept(tmp_path / "home") as home:
        yield home


def lived(home: Path, journal: Path, epoch: int, seconds: float) -> None:
    """One manager, killed after a while."""
    words = [sys.executable, str(VICTIM), str(home), str(epoch), str(journal)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "up\n"
        if epoch == 1:  # until all are started
            end = time.monotonic() + 60
            while journal.read_text().count("started") < len(AGENTS):
                assert time.monotonic() < end, "they do not start"
                time.sleep(0.01)
        time.sleep(seconds)
        os.kill(victim.pid, signal.SIGKILL)


FREEZES = """
import asyncio, sys
from datetime import timedelta
from pathlib import Path
from command_ground import CALL, plan_for
from dataclasses import replace
from uuid import UUID
from ostler.isolation import Site, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.clock import SystemClock
from isolation.ground import RecordingListener

async def main():
    home, number = Path(sys.argv[1]), int(sys.argv[2])
    level = ProcessIsolation(SystemClock(), Site(directory=home, outlive=timedelta(seconds=30), epoch=2 * number + 1))
    plan = replace(plan_for(home.parent / "tool", "sleep", "1000"), instance_id=UUID(int=number + 1))
    await level.prepare(plan)
    cell = await level.start(plan, RecordingListener())
    print("up", flush=True)
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    while True:
        await asyncio.sleep(0)
        await cell.freeze()
        await cell.thaw()

asyncio.run(main())
"""


async def next_manager(home: Path, number: int) -> None:
    level = ProcessIsolation(SystemClock(), Site(directory=home, outlive=timedelta(seconds=30), epoch=2 * number + 2))
    plan = replace(plan_for(home.parent / "tool", "sleep", "1000"), instance_id=UUID(int=number + 1))
    listener = RecordingListener()
    cell = await level.adopt(None, plan, listener)
    assert isinstance(cell, Cell)
    calls, _ = await listener.report()
    call = None
    if calls:
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
        await asyncio.sleep(0)
    if number % 2:
        await cell.thaw()
    report = await cell.stop(timedelta(seconds=(number % 3) * 2))
    assert report.left_behind is None
    if call is not None:
        with pytest.raises(AgentGoneError):
            await call
    await cell.destroy()
    assert await level.sweep(()) == 0
    await level.close()
    assert not everyone(home, f"{plan.instance_id.hex}.")


def test_a_manager_that_is_killed_in_the_midst_of_a_start_and_a_freeze_leaves_nothing_out_of_reach(
    home: Path,
) -> None:
    chance = random.Random(5)
    for number in range(16):
        words = [sys.executable, "-c", FREEZES, str(home), str(number)]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "up\n"
            time.sleep(chance.random() * 0.02)
            os.kill(victim.pid, signal.SIGKILL)
        asyncio.run(next_manager(home, number))
    end_keeper(home)
    assert_nothing_left(home)


def entries(journal: Path) -> list[dict[str, Any]]:
    lines = journal.read_bytes().rpartition(b"\n")[0].splitlines()
    return [json.loads(line) for line in lines]


def test_every_answer_and_message_is_committed_once_and_in_order(home: Path, tmp_path: Path) -> None:
    journal, chance = tmp_path / "journal", random.Random(11)
    for epoch in range(1, 16):
        lived(home, journal, epoch, chance.random() * 0.25)
    told = entries(journal)
    assert [one for one in told if {"differs", "lost", "exited"} & one.keys()] == []
    for agent in AGENTS:
        answers = [(one["answer"][1], one["value"]) for one in told if one.get("answer", [""])[0] == agent]
        assert [index for index, _ in answers] == list(range(len(answers))), "each once, none left out"
        assert len(answers) > 20
        if agent == "tool":
            assert all(value == str(index) for index, value in answers)
            continue
        assert all(value == [index, index + 1] for index, value in answers), "nothing was done twice"
        said = [one for one in told if one.get("said", [""])[0] == agent]
        assert [one["said"][1] for one in said] == list(range(1, len(said) + 1)), "each once, none left out"
        for index, _ in answers:  # what was said before an answer was heard before it
            about = next(place for place, one in enumerate(told) if _is_about(one, agent, index))
            assert about < told.index({"answer": [agent, index], "value": [index, index + 1]})
    assert any("found" in one for one in told), "some managers were killed in the midst of a call"
    runs = (tmp_path / "tool" / "ran").read_text().split()
    assert len(runs) - len(set(runs)) <= 15, "a run may begin again only if its manager died while it began it"
    assert len(list((tmp_path / "tool").glob(".ostler-prompt-*"))) <= 1, "the last run may live on"
    end_keeper(home)
    assert_nothing_left(home)


def _is_about(entry: dict[str, Any], agent: str, index: int) -> bool:
    return entry.get("said", [""])[0] == agent and (entry.get("about") or {}).get("index") == index
