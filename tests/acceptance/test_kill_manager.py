"""`kill -9` of a manager costs nothing: its agents go on, the next one finds them, and nothing is done twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from process_clerk import Clerk, notes

import ostler
from ostler.keeper.protocol import connect

VICTIM = Path(__file__).with_name("process_victim.py")
PATIENCE = 60.0


@dataclass(kw_only=True)
class Found:
    """What a manager found when it opened, and how long that took."""

    seconds: float
    #: By instance: state, attempt, process.
    agents: dict[str, tuple[str, int, int]]


@contextmanager
def manager(home: Path, count: int) -> Iterator[tuple[subprocess.Popen[str], Found]]:
    command = [sys.executable, str(VICTIM), str(home), str(count), str(home.parent / "ledger")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        line = victim.stdout.readline()
        assert line, "the manager ended before it was ready"
        told: dict[str, Any] = json.loads(line)
        agents = {name: (one[0], one[1], one[2]) for name, one in told["agents"].items()}
        try:
            yield victim, Found(seconds=told["seconds"], agents=agents)
        finally:
            victim.kill()


def ledger(home: Path) -> list[list[str]]:
    return [line.split() for line in (home.parent / "ledger").read_text().splitlines()]


def done(home: Path, agents: dict[str, Any]) -> Counter[str]:
    """How often each request was really carried out."""
    lines = (line for name in agents for line in notes(home, name))
    return Counter(line.split()[1] for line in lines if line.startswith("did "))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def marked(home: Path) -> list[int]:
    """Every process on this machine that was started for this home."""
    token = (home / "keeper" / "token").read_text().strip().encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if b"OSTLER_MARK=" + token in environment and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def until(holds: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def end_all(home: Path) -> None:
    """The keeper stops everything when it is told that nobody will come back."""
    with suppress(FileNotFoundError, ConnectionRefusedError):  # one that has nothing to keep ends by itself
        keeper = keeper_pid(home)
        os.kill(keeper, signal.SIGTERM)
        until(lambda: not alive(keeper), "the keeper does not end")
    until(lambda: not marked(home), "something is left behind")


def keeper_pid(home: Path) -> int:
    with connect(str(home / "keeper")) as line:
        return int(struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def rounds(home: Path, count: int, number: int, seconds: float) -> None:
    """Kill managers at random moments; each next one has to find all that lived."""
    chance = random.Random(number)
    before: dict[str, tuple[str, int, int]] = {}
    slowest = 0.0
    try:
        for _ in range(number):
            with manager(home, count) as (victim, found):
                assert len(found.agents) == count
                for name, (_, attempt, pid) in before.items():
                    assert found.agents[name][1:] == (attempt, pid), "one that lived was started again"
                    assert alive(pid)
                if before:
                    slowest = max(slowest, found.seconds)
                before = found.agents
                time.sleep(chance.uniform(0, 0.5))
                victim.send_signal(signal.SIGKILL)
                victim.wait()
        asked = {line[1] for line in ledger(home) if line[0] == "asked"}
        with manager(home, count):
            until(lambda: asked <= answered(home), "a call of a dead manager was never answered")
        assert slowest < seconds
        check(home, before)
    finally:
        end_all(home)


def answered(home: Path) -> set[str]:
    return {line[1] for line in ledger(home) if line[0] == "answered"}


def check(home: Path, agents: dict[str, tuple[str, int, int]]) -> None:
    lines = ledger(home)
    answers = Counter(line[1] for line in lines if line[0] == "answered")
    assert set(answers.values()) <= {1}, "a call was answered twice"
    assert {line[2] for line in lines if line[0] == "answered"} == {"right"}
    assert set(done(home, agents).values()) == {1}, "a call was carried out twice"
    for name, (_, attempt, pid) in agents.items():
        starts = [line for line in notes(home, name) if line.startswith("start ")]
        assert starts == [f"start {attempt} {pid}"], "it was started twice"


@pytest.mark.timeout(300)
def test_twenty_killed_managers_lose_none_of_fifty_agents(tmp_path: Path) -> None:
    rounds(tmp_path / "home", count=50, number=20, seconds=2.0)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_killed_managers_lose_none_of_a_thousand_agents(tmp_path: Path) -> None:
    rounds(tmp_path / "home", count=1000, number=5, seconds=5.0)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_managers_that_are_killed_in_mid_deed_leave_no_box_that_nobody_owns(tmp_path: Path) -> None:
    """While they open, adopt, spawn and terminate: whenever the kill comes, boxes and open starts are the same."""
    home, chance = tmp_path / "home", random.Random(8)
    command = [sys.executable, str(VICTIM), str(home), "10", str(tmp_path / "ledger"), "churn"]
    try:
        for _ in range(60):
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as victim:
                time.sleep(chance.uniform(0.1, 2.5))
                victim.kill()
        boxes, starts = asyncio.run(_boxes_and_starts(home))
        assert boxes == starts
        assert boxes, "nobody lives, so nothing was shown"
    finally:
        end_all(home)


async def _boxes_and_starts(home: Path) -> tuple[set[str], set[str]]:
    """What the keeper has that lives, and what the store says was started and has not ended; once all has settled."""
    registry = ostler.AgentRegistry()
    registry.register(Clerk, name="clerk")
    settings = ostler.LifecycleSettings(outlive=timedelta(hours=1))
    async with ostler.open(home, settings=settings, registry=registry) as opened:
        level: Any = opened._house.levels.get(ostler.IsolationLevel.PROCESS)  # noqa: SLF001 - tests may look inside
        end = time.monotonic() + PATIENCE
        while True:
            units = (await level._home.request("list"))["units"]  # noqa: SLF001 - as above
            attempts = await opened.store.open_attempts()
            boxes = {one["box"] for one in units if one.get("exit") is None}
            starts = {f"{one.instance_id.hex}.{one.number}" for one in attempts}
            if boxes == starts or time.monotonic() > end:  # some may be on their way back
                return boxes, starts
            await asyncio.sleep(0.05)


def test_what_ended_while_nobody_looked_is_known_by_its_true_exit_code(tmp_path: Path) -> None:
    home = tmp_path / "home"
    try:
        with manager(home, 3) as (victim, found):
            victim.kill()
            victim.wait()
        codes = dict(zip(found.agents, (0, 7, -signal.SIGKILL), strict=True))
        for name, code in codes.items():
            pid = found.agents[name][2]
            if code < 0:
                os.kill(pid, -code)
            else:
                (home / "work" / name / "exit").write_text(str(code))
                os.kill(pid, signal.SIGUSR1)
        until(lambda: not any(alive(one[2]) for one in found.agents.values()), "they do not end")
        outcomes = asyncio.run(_first_outcomes(home, list(codes)))
        assert outcomes == ["clean", "exit_code", "signal"]
    finally:
        end_all(home)


async def _first_outcomes(home: Path, names: list[str]) -> list[str]:
    """How the first start of each ended, as the next manager has written it down."""
    registry = ostler.AgentRegistry()
    registry.register(Clerk, name="clerk")
    settings = ostler.LifecycleSettings(outlive=timedelta(hours=1))
    async with ostler.open(home, settings=settings, registry=registry) as opened:
        attempts = [await opened.store.list_attempts(UUID(name)) for name in names]
    return [one[0].outcome.value if one[0].outcome else "none" for one in attempts]


def test_a_manager_whose_own_agents_end_with_it_still_finds_those_that_go_on(tmp_path: Path) -> None:
    home = tmp_path / "home"
    try:
        with manager(home, 3) as (victim, found):
            victim.kill()
            victim.wait()
        answers = asyncio.run(_asked_once_more(home, list(found.agents)))
        assert answers == [one[2] for one in found.agents.values()]
        until(lambda: not marked(home), "they did not end with the manager that took them over")
    finally:
        until(lambda: not marked(home), "something is left behind")


async def _asked_once_more(home: Path, names: list[str]) -> list[int]:
    registry = ostler.AgentRegistry()
    registry.register(Clerk, name="clerk")
    async with ostler.open(home, registry=registry) as opened:
        return [(await opened.process(UUID(name), {"id": "last"}))["pid"] for name in names]
