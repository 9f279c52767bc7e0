from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from isolation import IsolationContract
from isolation.crashing import CrashingContract
from isolation.leaving import LeavingContract
from isolation.starting import StartingContract

from ostler.errors import StaleWriterError
from ostler.isolation import Isolation, Site
from ostler.isolation.process.level import ProcessIsolation
from ostler.testing.clock import ManualClock

OUTLIVE = timedelta(seconds=30)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    yield home
    end = time.monotonic() + 20
    while (home / "keeper" / "keeper.sock").exists():
        assert time.monotonic() < end, "a keeper with nothing to keep goes away"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def epochs() -> Iterator[int]:
    return count(1)


class TestProcessIsolation(IsolationContract):
    """A home, and agents that go on without a manager. All tests share the keeper, as managers of one home do."""

    @pytest.fixture
    async def isolation(self, clock: ManualClock, home: Path, epochs: Iterator[int]) -> AsyncIterator[Isolation]:
        level = ProcessIsolation(clock, Site(directory=home, outlive=OUTLIVE, epoch=next(epochs)))
        yield level
        with contextlib.suppress(StaleWriterError):  # then its successor has swept
            await level.sweep(keep=())
        await level.close()

    @pytest.fixture
    def successor(self, clock: ManualClock, home: Path, epochs: Iterator[int]) -> Callable[[], Isolation]:
        return lambda: ProcessIsolation(clock, Site(directory=home, outlive=OUTLIVE, epoch=next(epochs)))


class TestHomelessProcessIsolation(StartingContract, CrashingContract, LeavingContract):
    """A manager with no home: its agents end with it. Each test has a keeper of its own."""

    @pytest.fixture
    async def isolation(self, clock: ManualClock) -> AsyncIterator[Isolation]:
        level = ProcessIsolation(clock)
        yield level
        await level.close()
