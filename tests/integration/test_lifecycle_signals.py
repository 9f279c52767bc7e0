"""An agent that says more than can be written down: it has to wait, and nothing that it said is dropped."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from machine_ground import PATIENCE, end_keeper, lives, swept, until
from promise_ground import Fleet, opened

import ostler
from ostler import (
    AgentGoneError,
    AgentInstance,
    AgentSignalEvent,
    AgentState,
    IsolationLevel,
    RestartPolicy,
    Seams,
    SuspendDepth,
)
from ostler.agents import Signal
from ostler.lifecycle import ear
from ostler.store import writer

pytestmark = pytest.mark.anyio

MOST, SAID = 50, 600
#: More than one commit takes, and so many are enough for what is left of it, and for an end.
FLOOD, COMMITS = 3000, 18


class Counted(deque[Any]):
    """Knows how many there were at most."""

    most = 0

    def append(self, one: Any) -> None:
        super().append(one)
        Counted.most = max(Counted.most, len(self))


class SlowDisk:
    """Takes its time for each commit, once it is told to, and counts them."""

    def __init__(self) -> None:
        self.slow = False
        self.commits = 0

    def __call__(self, point: str) -> None:
        if self.slow and point == "store.commit.before":
            self.commits += 1
            time.sleep(0.02)


async def kept(fleet: Fleet, one: AgentInstance) -> list[int]:
    found = [event async for event in fleet.manager.store.replay(instance_id=one.instance_id)]
    return [event.payload["n"] for event in found if isinstance(event, AgentSignalEvent) and event.payload]


async def written(fleet: Fleet, one: AgentInstance, count: int) -> list[int]:
    end = time.monotonic() + PATIENCE
    while True:
        numbers = await kept(fleet, one)
        if len(numbers) >= count or time.monotonic() > end:
            return numbers
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("level", [IsolationLevel.NONE, IsolationLevel.THREAD, IsolationLevel.PROCESS])
async def test_every_signal_of_a_flood_is_kept_in_order(
    home: Path, level: IsolationLevel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ear, "_MAX_SIGNALS", MOST)
    monkeypatch.setattr(ear, "deque", Counted)
    monkeypatch.setattr(Counted, "most", 0)
    async with opened(home) as fleet:
        chosen = ostler.AgentSpawnOptions(isolation_level=level)
        one = await fleet.manager.spawn(ostler.SpawnRequest(agent_definition_id=fleet.definition, options=chosen))
        await fleet.do(one, "speak", count=SAID)
        assert await written(fleet, one, SAID) == list(range(SAID))
        assert (await fleet.do(one, "echo", value=1)) == 1, "it is heard again"
    assert not caplog.records
    # At level process it is exact; inside a program so many more are handed over in one turn.
    assert Counted.most <= MOST + (0 if level is IsolationLevel.PROCESS else 250)


async def test_one_that_has_to_wait_counts_as_alive(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is we who do not listen, so its heartbeat is not missed."""
    monkeypatch.setattr(ear, "_MAX_SIGNALS", MOST)
    gate = asyncio.Event()

    async def stuck(self: ear.Ear, *_: Any) -> None:
        await gate.wait()
        self._signals = None
        self._make_room()

    monkeypatch.setattr(ear.Ear, "_write_signals", stuck)
    async with opened(home) as fleet:
        one = await fleet.spawn()
        cell = fleet.manager._house.lives[one.instance_id].cell  # noqa: SLF001 - tests may look inside
        assert cell is not None
        speaking = fleet.start(one, "speak", count=SAID)
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await cell.ping()
            while cell._channel.held is None:  # type: ignore[attr-defined]  # noqa: SLF001, ASYNC110 - as above
                await asyncio.sleep(0.002)
            await cell.ping()
            assert not speaking.done()
            gate.set()
            await speaking


async def _close(_fleet: Fleet, _one: AgentInstance) -> None:
    """Leaving the manager is the end."""


async def _terminate(fleet: Fleet, one: AgentInstance) -> None:
    await fleet.manager.terminate(one.instance_id)


async def _restart(fleet: Fleet, one: AgentInstance) -> None:
    await fleet.manager.restart(one.instance_id)


async def _park(fleet: Fleet, one: AgentInstance) -> None:
    await fleet.manager.suspend(one.instance_id, SuspendDepth.PARK)
    await fleet.manager.resume(one.instance_id)


async def _crash(fleet: Fleet, one: AgentInstance) -> None:
    with pytest.raises(AgentGoneError):
        await fleet.do(one, "leave", code=3)
    await fleet.comes_to(one, AgentState.READY, attempt=2)


@pytest.mark.parametrize("end", [_close, _terminate, _restart, _park, _crash])
async def test_what_an_agent_said_is_written_before_its_end_in_few_commits(
    home: Path, end: Callable[[Fleet, AgentInstance], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """A record takes no word after its end, so a slow disk must not lose what waits for it, nor get it piecemeal."""
    disk = SlowDisk()
    at_once = ostler.RestartPolicy.immediate()
    async with opened(home, seams=Seams(fault=disk)) as fleet:
        one = await fleet.spawn(restart_policy=at_once)
        disk.slow = True
        await fleet.do(one, "speak", count=FLOOD)
        disk.commits = 0
        await end(fleet, one)
    assert disk.commits <= COMMITS
    assert not [line for line in caplog.messages if "not written down" in line]
    async with opened(home) as fleet:
        assert await kept(fleet, one) == list(range(FLOOD))


async def test_many_who_speak_at_once_leave_room_in_the_store(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses what is too much for it; so all agents together may not bring it so far."""
    monkeypatch.setattr(writer, "MAX_PENDING", 100)
    disk = SlowDisk()
    async with opened(home, seams=Seams(fault=disk)) as fleet:
        inside = ostler.AgentSpawnOptions(isolation_level=IsolationLevel.NONE)
        request = ostler.SpawnRequest(agent_definition_id=fleet.definition, options=inside)
        crowd = [await fleet.manager.spawn(request) for _ in range(4)]
        disk.slow = True
        await asyncio.gather(*(fleet.do(one, "speak", count=100) for one in crowd))
        for one in crowd:
            assert await written(fleet, one, 100) == list(range(100))
    assert not caplog.records


async def test_one_who_reads_as_it_comes_misses_nothing_of_a_flood(home: Path) -> None:
    """However many come in one commit, its buffer is that of anybody."""
    disk = SlowDisk()
    async with opened(home, seams=Seams(fault=disk)) as fleet:
        inside = ostler.AgentSpawnOptions(isolation_level=IsolationLevel.NONE)
        one = await fleet.manager.spawn(ostler.SpawnRequest(agent_definition_id=fleet.definition, options=inside))
        looking = fleet.manager.observe(one.instance_id)
        disk.slow = True
        speaking = fleet.start(one, "speak", count=SAID)
        seen: list[Any] = []
        async with asyncio.timeout(PATIENCE):
            async for event in looking:
                assert not isinstance(event, ostler.EventsMissed)
                if isinstance(event, AgentSignalEvent) and event.payload:
                    seen.append(event.payload["n"])
                if len(seen) == SAID:
                    break
        assert seen == list(range(SAID))
        await speaking


async def test_a_signal_that_the_store_refuses_takes_no_other_with_it(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(home) as fleet:
        one = await fleet.spawn()
        life = fleet.manager._house.lives[one.instance_id]  # noqa: SLF001 - tests may look inside
        hearing = ear.Ear(fleet.manager._house, life)  # noqa: SLF001 - as above
        for number in range(6):
            hearing.heard(1, Signal(name="n" if number != 3 else "\n", payload={"n": number}))
        assert await written(fleet, one, 5) == [0, 1, 2, 4, 5]
    (said,) = [line for line in caplog.messages if "not written down" in line]
    assert "name must be printable" in said


async def test_large_signals_are_not_written_all_at_once() -> None:
    """To check and write them takes long, and meanwhile others wait."""
    large = Signal(name="n", payload={"text": ["x" * 100_000]})
    waiting = deque([Signal(name="n"), *[large] * 25, *[Signal(name="n", payload={"n": 1})] * 1500])
    counts = []
    while waiting:
        counts.append(len(ear._next_of(waiting)))  # noqa: SLF001 - tests may look inside
    assert counts == [12, 11, 1000, 503]


@pytest.mark.parametrize("ends", [False, True], ids=["lives on", "ends"])
async def test_what_is_said_while_no_manager_is_there_is_heard_by_the_next(
    home: Path, tmp_path: Path, ends: bool
) -> None:
    when = tmp_path / "now"
    with swept(home):
        async with opened(home, outlive=timedelta(seconds=60)) as fleet:
            one = await fleet.spawn(restart_policy=RestartPolicy.none())
            await fleet.do(one, "speak_alone", when=str(when), count=60, ends=ends)
            pid = await fleet.pid(one)
        when.touch()
        await until(lambda: not when.exists() and not (ends and lives(pid)))
        async with opened(home, outlive=timedelta(seconds=60)) as fleet:
            assert await written(fleet, one, 60) == list(range(60))
            if ends:
                assert (await fleet.record(one)).error_message == "exit code 3"
        end_keeper(home)
