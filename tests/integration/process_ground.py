"""What the tests of level process stand on below the manager: a home, the level on it, and a listener."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest
from isolation.ground import RecordingListener

from ostler.clock import SystemClock
from ostler.isolation import Cell, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation

#: Starts and initialises an agent; without a plan the one that its file is about.
Begin = Callable[..., Awaitable[Cell]]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(directory=tmp_path / "home", outlive=timedelta(seconds=20), epoch=1)


@pytest.fixture
async def isolation(site: Site) -> AsyncIterator[ProcessIsolation]:
    level = ProcessIsolation(SystemClock(), site)
    yield level
    site.outlive = timedelta(0)  # what a test has left ends now
    await level.close()


@pytest.fixture
async def listener() -> RecordingListener:
    return RecordingListener()


def beginning(isolation: ProcessIsolation, listener: RecordingListener, plan_for: Callable[[], StartPlan]) -> Begin:
    async def begin(plan: StartPlan | None = None) -> Cell:
        plan = plan or plan_for()
        await isolation.prepare(plan)
        cell = await isolation.start(plan, listener)
        await cell.call(Verb.INITIALIZE)
        return cell

    return begin
