"""What an agent says and answers while no manager reads it: bounded, kept for the next manager, and its own words only."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import uuid4

import pytest
from defect_ground import do, plan_for
from isolation.ground import RecordingListener, until
from process_ground import Begin, beginning, isolation, listener, site

from ostler.agent_process.framing import MAX_UNSENT
from ostler.agent_process.outbox import MAX_BYTES
from ostler.agents import Signal
from ostler.clock import SystemClock
from ostler.isolation import Cell, Exit, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.keeper import protocol
from ostler.model.attempt import AttemptOutcome

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio

NextManager = Callable[[], ProcessIsolation]


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    return beginning(isolation, listener, plan_for)


@pytest.fixture
async def next_manager(isolation: ProcessIsolation, site: Site) -> AsyncIterator[NextManager]:
    """A manager that takes over from the one before."""
    levels: list[ProcessIsolation] = []

    def take_over() -> ProcessIsolation:
        site.epoch += 1
        levels.append(ProcessIsolation(SystemClock(), site))
        return levels[-1]

    yield take_over
    for level in levels:
        await level.close()


def unsent(site: Site, plan: StartPlan) -> Path:
    assert site.directory is not None
    return site.directory / protocol.RUN / f"{plan.instance_id.hex}.{plan.attempt}" / protocol.UNSENT


async def noted(path: Path) -> str:
    await until(path.exists)
    return path.read_text()


async def start(begin: Begin) -> tuple[StartPlan, Cell]:
    plan = plan_for()
    return plan, await begin(plan)


async def leave_with(cell: Cell, request: dict[str, object]) -> None:
    """Ask for something that happens once this manager is gone, and go."""
    call = cell.call(Verb.PROCESS, request, call_id=uuid4())
    with pytest.raises(StopAsyncIteration):
        await _begin_and_leave(cell, call)


async def test_signals_beyond_eight_megabytes_are_refused(begin: Begin, listener: RecordingListener) -> None:
    """None of them is acknowledged, so the agent has to hold them all."""
    cell = await begin()
    count = await cell.call(Verb.PROCESS, do("fill", most=300, length=60_000))
    assert 100 < count <= MAX_BYTES // 60_000
    assert listener.signals.count("filled") == count
    cell.ack(message=count)
    await cell.ping()
    assert await cell.call(Verb.PROCESS, do("fill", most=10, length=60_000)) == 10
    await cell.destroy()
