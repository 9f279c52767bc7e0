"""An agent that says more than can be written down: it has to wait, and nothing that it said is dropped."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from promise_ground import PATIENCE, Fleet, opened

import ostler
from ostler import AgentInstance, AgentSignalEvent, IsolationLevel
from ostler.lifecycle import ear

pytestmark = pytest.mark.anyio

MOST, SAID = 50, 600


class Counted(deque[Any]):
    """Knows how many there were at most."""

    most = 0

    def append(self, one: Any) -> None:
        super().append(one)
        Counted.most = max(Counted.most, len(self))


async def written(fleet: Fleet, one: AgentInstance, count: int) -> list[int]:
    end = time.monotonic() + PATIENCE
    while True:
        found = await fleet.manager.store.read_events(instance_id=one.instance_id, limit=1000)
        numbers = [event.payload["n"] for event in found if isinstance(event, AgentSignalEvent) and event.payload]
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
