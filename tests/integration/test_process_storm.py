"""Many at once, and one that takes all it can get: the others go on, and everybody comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest
from machine_ground import group_number, lacking, slowdown, until
from promise_ground import Fleet, opened

from ostler import (
    AgentInstance,
    AgentPriority,
    AgentState,
    AttemptOutcome,
    CommandSpec,
    RestartPolicy,
    TerminationOptions,
)
from ostler.isolation.base import Cell, Listener, StartPlan
from ostler.isolation.process.level import ProcessIsolation
from ostler.isolation.process.logs import LOG_BYTES

pytestmark = pytest.mark.anyio

AT_ONCE = 4
FLOOD = 200_000_000


@pytest.fixture
async def fleet(home: Path) -> AsyncIterator[Fleet]:
    async with opened(home) as found:
        yield found


async def slowness(fleet: Fleet, one: AgentInstance, work: asyncio.Future[Any]) -> list[float]:
    """How long each of its answers took while that work went on; at least so many that they say something."""
    took: list[float] = []
    while not work.done() or len(took) < 20:
        began = time.monotonic()
        assert await fleet.do(one, "echo", value=len(took)) == len(took)
        took.append(time.monotonic() - began)
        await asyncio.sleep(0.005)
    return took


def p95(took: list[float]) -> float:
    return quantiles(took, n=20)[-1]


# --- one that takes all ----------------------------------------------------------------------------


async def test_a_fork_bomb_stays_in_its_box(fleet: Fleet) -> None:
    bomb, neighbour = await fleet.several(2)
    most = group_number(await fleet.pid(bomb), "pids", "pids.max")
    if most is None:
        lacking("nothing on this machine bounds the number of processes")
    await fleet.do(bomb, "raise_one", program="bomb")
    await until(lambda: len(fleet.tree(bomb)) > most - 50, "it does not go off")
    assert await asyncio.wait_for(fleet.do(neighbour, "echo", value=1), 60) == 1
    another = await fleet.spawn()
    assert await asyncio.wait_for(fleet.do(another, "echo", value=2), 60) == 2
    assert len(fleet.tree(bomb)) <= most
    result = await fleet.manager.terminate(bomb.instance_id, TerminationOptions(graceful_timeout=timedelta(seconds=1)))
    assert fleet.tree(bomb) == set()
    assert result.success
    assert await fleet.do(neighbour, "echo", value=3) == 3


def logged(fleet: Fleet, one: AgentInstance) -> list[Path]:
    return sorted((fleet.home / "logs" / str(one.instance_id)).iterdir())


#: A flood that gets in the way does so every time; a machine that is busy with other tests does not.
_TRIES = 3


async def test_a_flood_of_output_fills_no_disk_and_slows_no_neighbour(fleet: Fleet) -> None:
    loud, neighbour = await fleet.several(2)
    slowest, written = 1.0, 0
    for _ in range(_TRIES):
        flood = fleet.start(loud, "flood", most=FLOOD, seconds=10)
        slowest = min(slowest, p95(await slowness(fleet, neighbour, flood)))
        written += await flood
        assert written > 20 * LOG_BYTES, "it was no flood"
        if slowest < 0.1 * slowdown():
            break
    else:
        pytest.fail(f"its neighbour waits for {slowest:.2f} s")
    await fleet.manager.terminate(loud.instance_id)
    files = logged(fleet, loud)
    assert sum(file.stat().st_size for file in files) <= 2 * LOG_BYTES + 4096
    gaps = [int(gap) for file in files for gap in re.findall(rb"\[ostler: (\d+) bytes dropped\]", file.read_bytes())]
    assert sum(gaps) > written / 2


async def test_a_command_that_floods_is_answered_with_what_was_dropped(fleet: Fleet) -> None:
    spec = CommandSpec(argv=("sh", "-c", f"yes abcdefghijklmno | head -c {FLOOD}"), max_output_bytes=65536)
    loud = await fleet.spawn(fleet.manager.registry.register(spec, name="yes").id)
    neighbour = await fleet.spawn()
    slowest, runs = 1.0, 0
    for _ in range(_TRIES):
        runs += 1
        flood = asyncio.ensure_future(fleet.manager.process(loud.instance_id, "go"))
        slowest = min(slowest, p95(await slowness(fleet, neighbour, flood)))
        answer = await flood
        assert answer["exit_code"] == 0
        assert len(answer["output"]) < 2 * 65536
        assert FLOOD - 2 * 65536 < answer["dropped_bytes"] <= FLOOD + 4096
        if slowest < 0.1 * slowdown():
            break
    else:
        pytest.fail(f"its neighbour waits for {slowest:.2f} s")
    assert sum(file.stat().st_size for file in logged(fleet, loud)) <= runs * (2 * LOG_BYTES + 4096)


# --- many that die ---------------------------------------------------------------------------------


async def storm(home: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are killed at once. They come back few at a time, none is forgotten, and nobody waits for an answer."""
    policy = RestartPolicy.immediate()
    async with opened(home, restarts_at_once=AT_ONCE) as fleet:
        bystander = await fleet.spawn()
        low = await fleet.several(count // 10, restart_policy=policy, priority=AgentPriority.LOW)
        ones = [*low, *[one for _ in range(9) for one in await fleet.several(count // 10, restart_policy=policy)]]
        starts = Starts(monkeypatch)
        for pid in [await fleet.pid(one) for one in ones]:
            os.kill(pid, signal.SIGKILL)
        returns = (fleet.comes_to(one, AgentState.READY, 2, seconds=60 + count / 3) for one in ones)
        back = asyncio.ensure_future(asyncio.gather(*returns))
        took = await slowness(fleet, bystander, back)
        assert [one.attempt for one in await back] == [2] * len(ones)
        assert len(took) > 3, "it had to wait for the others"
        told = await asyncio.gather(*(fleet.do(one, "know") for one in ones))
        assert {one["attempt"] for one in told} == {2}
        assert len({one["pid"] for one in told}) == len(ones)
        assert 1 < starts.most <= AT_ONCE
        assert {(await fleet.outcome(one))[0] for one in ones} == {AttemptOutcome.SIGNAL}


class Starts:
    """How many starts of a level are under way, and the most there ever were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        real = ProcessIsolation.start

        async def start(level: ProcessIsolation, plan: StartPlan, listener: Listener) -> Cell:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await real(level, plan, listener)
            finally:
                self.now -= 1

        monkeypatch.setattr(ProcessIsolation, "start", start)


async def test_sixty_deaths_at_once_are_no_stampede(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await storm(home, 60, monkeypatch)


@pytest.mark.torture
@pytest.mark.timeout(600)
async def test_five_hundred_deaths_at_once_are_no_stampede(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await storm(home, 500, monkeypatch)
