"""What the tests of the lifecycle are handed: a clock, a stage, a home, and a crew on it at each level."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ostler import IsolationLevel, Store, open_store
from ostler.testing.clock import ManualClock
from ostler.testing.isolation_suite.ground import until

pytest.register_assert_rewrite("lifecycle_ground")

from lifecycle_ground import LEVELS, Crew, Stage, agent_threads, opened  # noqa: E402 - rewritten first


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def stage(level: IsolationLevel, tmp_path: Path) -> Stage:
    if level is not IsolationLevel.PROCESS:
        return Stage()
    directory = tmp_path / "stage"
    directory.mkdir()
    return Stage(directory)


@pytest.fixture(params=LEVELS, ids=str)
def level(request: pytest.FixtureRequest) -> IsolationLevel:
    found: IsolationLevel = request.param
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
async def store(home: Path) -> AsyncIterator[Store]:
    async with open_store(home) as store:
        yield store


@pytest.fixture
async def crew(home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel) -> AsyncIterator[Crew]:
    """Every test runs at both levels; what it leaves running is ended, and no thread may stay."""
    before = len(agent_threads())
    async with opened(home, clock) as manager:
        try:
            yield Crew(manager, clock, stage, level)
        finally:
            stage.let_go.set()
    await until(lambda: len(agent_threads()) <= before)
