"""`kill -9` of managers and of agents, at random and at chosen points: nothing acknowledged is lost or done again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from machine_ground import end_keeper, everyone, swept, until
from process_clerk import lines
from process_victim import LASTING, SETTINGS, levels_in

import ostler
from ostler import (
    HOME_WORKSPACE_ID,
    AgentLifecycleManager,
    AgentSignalEvent,
    AgentState,
    GetInstancesFilter,
    LeaseHeldError,
)
from ostler.keeper import tree
from ostler.store.attempts import open_attempts
from ostler.store.audit import verify
from ostler.store.events import read_events

VICTIM = Path(__file__).with_name("process_victim.py")
PATIENCE = 60.0
#: A request is answered by its agent and not committed; committed and not acknowledged; acknowledged and not confirmed.
POINTS = (
    "store.commit.before",
    "store.commit.after",
    "store.ack.before",
    "store.ack.after",
    "spawn.start.after",
    "spawn.ready.after",
    "stop.kill.after",
    "stop.final.before",
)


class Trial:
    """Managers of one place are killed one after the other."""

    def __init__(self, where: str, folder: Path, seed: int) -> None:
        self.where = where
        self.folder = folder
        self.home = folder / "home"
        self.chance = random.Random(seed)
        #: Agents that were killed by the test, by the name that they have for good.
        self.harmed: set[str] = set()

    def kill_somewhere(self) -> None:
        """From outside, at a random moment; some of the agents before it."""
        before = len(lines(self.folder / "ledger"))
        with self._victim("") as victim:
            self._wait(lambda: len(lines(self.folder / "ledger")) > before or victim.poll() is not None)
            time.sleep(self.chance.uniform(0, 0.6))
            if self.chance.random() < 0.4:
                self._kill_an_agent()
                time.sleep(self.chance.uniform(0, 0.1))
            victim.kill()
        assert victim.returncode == -signal.SIGKILL

    def kill_at(self, point: str) -> None:
        """By itself, at the nth visit of a fault point."""
        first = 8 if point.startswith("store.") else 1
        with self._victim(f"{point}:{self.chance.randint(first, first + 40 * (first > 1))}:kill") as victim:
            try:
                victim.wait(PATIENCE)
            finally:
                victim.kill()
        assert victim.returncode == -signal.SIGKILL

    def _victim(self, fault: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(VICTIM), self.where, str(self.folder), fault])

    def _kill_an_agent(self) -> None:
        living = [line for line in lines(self.folder / "notes") if line[0] == "did"]
        pids = [pid for pid in everyone(self.home) if tree.living(pid) and _is_agent(pid)]
        if pids and living:
            self.harmed.update(LASTING)  # which one it was is not known
            try:
                os.kill(self.chance.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                return

    def _wait(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, "it does not begin"
            time.sleep(0.01)


def _is_agent(pid: int) -> bool:
    """A fork of a template has the name of its unit in its mark."""
    mark = tree.mark_of(pid) or ""
    return "." in mark.rpartition(":")[2]


async def opened_again(trial: Trial) -> tuple[Any, AgentLifecycleManager]:
    end = time.monotonic() + PATIENCE
    while True:
        opening = ostler.open(trial.where, settings=SETTINGS, levels=levels_in(trial.folder))
        try:
            return opening, await opening.__aenter__()
        except LeaseHeldError:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)


async def check(trial: Trial) -> None:
    """What the last manager finds; and then nothing is left."""
    ledger = lines(trial.folder / "ledger")
    answered = {line[1]: (line[2], float(line[3])) for line in ledger if line[0] == "answered"}
    assert len(answered) > 20, "the managers did too little"
    opening, manager = await opened_again(trial)
    try:
        await _check_records(manager, ledger)
        await _check_requests(trial, manager, ledger, answered)
        await _check_signals(trial, manager, answered)
    finally:
        await opening.__aexit__(None, None, None)
    await until(lambda: not everyone(trial.home), "processes are left")


async def _check_records(manager: AgentLifecycleManager, ledger: list[list[str]]) -> None:
    for line in ledger:
        if line[0] in {"spawned", "terminated"}:
            found = await manager.get_instance(UUID(line[2]))
            assert found is not None, "a spawn that was acknowledged is lost"
            assert found.name == line[1]
            assert line[0] == "spawned" or found.state is AgentState.TERMINATED
    end = time.monotonic() + PATIENCE
    while True:
        active = await manager.get_active_instances(GetInstancesFilter(limit=1000))
        opened = {(one.instance_id, one.number) for one in await manager.store.read(open_attempts)}
        settled = {(one.instance_id, one.attempt) for one in active if one.state is not AgentState.INITIALIZING}
        if opened == settled == {(one.instance_id, one.attempt) for one in active}:
            break
        assert time.monotonic() < end, f"{opened ^ settled} do not settle"
        await asyncio.sleep(0.05)
    assert (await manager.get_statistics()).active_instances == len(active)
    report = await manager.store.read(verify, HOME_WORKSPACE_ID)
    assert report.is_sound, report.faults


async def _check_requests(
    trial: Trial, manager: AgentLifecycleManager, ledger: list[list[str]], answered: dict[str, tuple[str, float]]
) -> None:
    names = {line[1]: line[2] for line in ledger if line[0] == "asked"}
    before = Counter(line[1] for line in lines(trial.folder / "notes"))
    for request, (value, _) in answered.items():
        assert value == request, "it was answered with the answer of another request"
        name = names[request]
        body: Any = {"id": request} if name.startswith("clerk") else request
        again = await manager.process(name, body, request_id=request)
        told = again["id"] if name.startswith("clerk") else again["output"].strip()
        assert told == value
    after = Counter(line[1] for line in lines(trial.folder / "notes"))
    assert {request: after[request] for request in answered} == {request: before[request] for request in answered}
    for line in lines(trial.folder / "notes"):
        if line[1] in answered:
            assert float(line[4]) < answered[line[1]][1], "a request that was answered was done again"
    if not trial.harmed:
        twice = {request: count for request, count in after.items() if count > 1}
        assert twice == {}, "a killed manager costs no work, so nothing is begun twice"
    for request in names.keys() - answered.keys():
        name = names[request]
        body = {"id": request} if name.startswith("clerk") else request
        await manager.process(name, body, request_id=request, retries=3)


async def _check_signals(trial: Trial, manager: AgentLifecycleManager, answered: dict[str, tuple[str, float]]) -> None:
    heard: Counter[str] = Counter()
    cursor = 0
    while True:
        page = await manager.store.read(read_events, cursor, workspace_id=HOME_WORKSPACE_ID)
        for event in page.events:
            if isinstance(event, AgentSignalEvent):
                heard[str((event.payload or {})["id"])] += 1
        if page.cursor == cursor or not page.events:
            break
        cursor = page.cursor
    notes = lines(trial.folder / "notes")
    clerks = {line[1] for line in lines(trial.folder / "ledger") if line[0] == "asked" and line[2].startswith("clerk")}
    done = Counter(line[1] for line in notes)
    for request in answered.keys() & clerks:
        assert 1 <= heard[request] <= done[request], "a signal that was said before an answer is lost, or heard twice"


def run(trial: Trial, *, random_kills: int, points: tuple[str, ...]) -> None:
    kills: list[Callable[[], None]] = [trial.kill_somewhere] * random_kills
    kills += [lambda point=point: trial.kill_at(point) for point in points]  # type: ignore[misc]  # bound now
    trial.chance.shuffle(kills)
    with swept(trial.home):
        trial.kill_somewhere()
        for kill in kills:
            kill()
        asyncio.run(check(trial))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "home").mkdir()
    yield tmp_path
    if (tmp_path / "home" / "keeper").exists():
        end_keeper(tmp_path / "home")


@pytest.mark.timeout(300)
def test_killed_managers_lose_nothing_on_sqlite(folder: Path) -> None:
    trial = Trial(str(folder / "home"), folder, seed=1)
    run(trial, random_kills=6, points=POINTS)


@pytest.mark.timeout(300)
def test_killed_managers_lose_nothing_on_postgres(folder: Path, postgres_address: str) -> None:
    trial = Trial(postgres_address, folder, seed=2)
    run(trial, random_kills=5, points=POINTS[:4])


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 20))
def test_many_killed_managers_lose_nothing_on_sqlite(folder: Path, seed: int) -> None:
    trial = Trial(str(folder / "home"), folder, seed=seed)
    run(trial, random_kills=20, points=POINTS * 3)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20, 25))
def test_many_killed_managers_lose_nothing_on_postgres(folder: Path, postgres_address: str, seed: int) -> None:
    trial = Trial(postgres_address, folder, seed=seed)
    run(trial, random_kills=20, points=POINTS * 3)
