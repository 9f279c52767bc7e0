"""Daemon and keeper are killed together, as a power cut does it, while commands, Python agents and tasks work.

Every run appends a line with its instance and attempt to a witness file. None may run twice under one attempt, and a
second attempt needs a restart in the record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from machine_ground import keeper_of, swept
from shell import until
from test_tasks_killed import Home

from ostler.client.blocking import DaemonError
from ostler.home import LOCK_FILE

RUN = 'echo "$OSTLER_INSTANCE $OSTLER_ATTEMPT" >> {witness}; sleep {seconds}'
AGENT = """---
lifecycle:
  driver:
    command: [sh, -ec, '{run}']
---
"""
PYTHON = """
import asyncio
from ostler import Agent


class Clerk(Agent):
    async def initialize(self, context):
        self.context = context

    async def process(self, request):
        with open(request["witness"], "a") as file:
            file.write(f"{self.context.instance_id} {self.context.attempt}\\n")
        await asyncio.sleep(request["seconds"])
        return {}
"""
CLERK = "---\nlifecycle:\n  driver: python:clerk:Clerk\n  isolation: process\n---\n"
#: Work ends within this time, or is cut off.
SECONDS = 0.4
LONGEST_LIFE = 0.5
RESTART = {"type": "immediate", "max_retries": 10, "burst_limit": 100}


class PoweredHome(Home):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.witness = folder / "witness"
        run = RUN.format(witness=self.witness, seconds=SECONDS)
        agents = self.home / "agents"
        (agents / "worker.md").write_text(AGENT.format(run=run))
        (agents / "clerk.md").write_text(CLERK)
        (self.repository / "clerk.py").write_text(PYTHON)

    def begin_work(self, chance: random.Random, number: int) -> None:
        """Commands, Python agents and a task; what a daemon that is being killed does not take is left out."""
        seconds = chance.uniform(0, SECONDS)
        command = {
            "command": ["sh", "-c", RUN.format(witness=self.witness, seconds=seconds)],
            "cwd": str(self.repository),
            "job": {"request": ""},
        }
        clerk = {
            "definition": "clerk",
            "cwd": str(self.repository),
            "job": {"request": {"witness": str(self.witness), "seconds": seconds}},
        }
        # A process of Python takes a second to start after each cut, so it is there in every other round.
        spawns = [command, clerk] if number % 2 else [command]
        chance.shuffle(spawns)
        try:
            for spawn in spawns:
                policy = {"options": {"restart_policy": RESTART}} if chance.random() < 0.5 else {}
                self.client.call("spawn", spawn=spawn | policy, within=20)
            task = {"task": "Write one line.", "agent": "worker", "near": str(self.repository)}
            self.client.call("add_task", key=f"round-{number}", new_task=task, within=20)
        except DaemonError as error:
            if error.code != "unreachable":
                raise

    def power_off(self) -> None:
        with contextlib.suppress(OSError):
            if keeper := keeper_of(self.home):
                os.kill(keeper, signal.SIGKILL)
        self.end()
        # A child that the daemon had just forked holds its lock until it has executed its program.
        until(self._is_unlocked, "a child of the killed daemon holds its lock")

    def _is_unlocked(self) -> bool:
        with (self.home / LOCK_FILE).open("rb") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


@pytest.fixture
def home(tmp_path: Path) -> Iterator[PoweredHome]:
    home = PoweredHome(tmp_path)
    with swept(home.home):
        yield home
        home.close()


def cut_often(home: PoweredHome, cuts: int, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(cuts):
        home.start()
        home.begin_work(chance, number)
        time.sleep(chance.uniform(0, LONGEST_LIFE))  # the moment of the cut; nothing waits for it
        home.power_off()
    home.start()
    until(lambda: not at_work(home), "something is still at work")


def at_work(home: PoweredHome) -> list[str]:
    instances = home.client.call("instances", limit=1000, within=30)
    return [one["name"] for one in instances if one["state"] not in {"failed", "terminated"}]


def check_runs(home: PoweredHome, seed: int) -> None:
    runs = Counter((UUID(line.split()[0]), int(line.split()[1])) for line in home.witness.read_text().splitlines())
    twice = {run: count for run, count in runs.items() if count > 1}
    assert not twice, (seed, "ran twice under one attempt", twice)
    assert runs, seed
    with contextlib.closing(sqlite3.connect(home.home / "ostler.db")) as database:
        rows = database.execute("SELECT instance_id, number, outcome FROM attempts")
        outcomes = {(UUID(bytes=instance), number): outcome for instance, number, outcome in rows}
        rows = database.execute("SELECT id, spawn_options_json FROM agent_instances")
        restarts = {UUID(bytes=instance) for instance, options in rows if '"restart_policy":null' not in options}
    for instance, number in runs:
        assert (instance, number) in outcomes, (seed, instance, number, "no such attempt in the record")
        assert number == 1 or instance in restarts, (seed, instance, "no restart policy")
    assert "lost" in outcomes.values(), (seed, "nothing was cut off in the middle")


@pytest.mark.timeout(180)
def test_nothing_runs_twice_when_daemon_and_keeper_are_killed_together(home: PoweredHome) -> None:
    seed = random.randrange(2**32)
    cut_often(home, 20, seed)
    check_runs(home, seed)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(2))
def test_so_it_is_after_two_hundred_cuts(home: PoweredHome, seed: int) -> None:
    cut_often(home, 100, seed)
    check_runs(home, seed)
