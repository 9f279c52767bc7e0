"""What the tests of the lifecycle are handed: a clock, a stage, a home, and a crew at each level."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ostler import IsolationLevel
from ostler.testing.clock import ManualClock

pytest.register_assert_rewrite("lifecycle_ground", "loop_ground")

from lifecycle_agents import Stage  # noqa: E402 - the ground is rewritten first
from lifecycle_ground import NONE, THREAD, Crew, opened  # noqa: E402 - as above
from loop_ground import LoopGround  # noqa: E402 - as above


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "stage")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture(params=[NONE, THREAD], ids=str)
def level(request: pytest.FixtureRequest) -> IsolationLevel:
    """Levels inside the program, unless a test names others."""
    found: IsolationLevel = request.param
    return found


@pytest.fixture
async def crew(home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel) -> AsyncIterator[Crew]:
    """What a test leaves running is ended, and no thread may stay."""
    async with opened(Crew(home, clock, stage, level)) as crew:
        yield crew


@pytest.fixture
async def loop_ground(tmp_path: Path) -> AsyncIterator[LoopGround]:
    """A repository, a home, and an agent that does what its next script says."""
    ground = LoopGround(tmp_path)
    await ground.open()
    yield ground
    await ground.close()


@pytest.fixture
async def timed_ground(tmp_path: Path, clock: ManualClock) -> AsyncIterator[LoopGround]:
    """The same on a clock that the test drives."""
    ground = LoopGround(tmp_path, clock)
    await ground.open()
    yield ground
    await ground.close()
