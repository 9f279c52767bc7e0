"""Every test of the contract runs on a SQLite file, in memory, and on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from store_ground import Place
from store_invariants import invariant_faults

from ostler.errors import StoreError
from ostler.failpoints import FaultPlan, Seams
from ostler.store.store import Store
from ostler.testing.clock import ManualClock


@pytest.fixture(params=["sqlite", "memory", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind = str(request.param)
    match kind:
        case "sqlite":
            return Place(kind, str(tmp_path / "home"))
        case "memory":
            return Place(kind, ":memory:")
        case _:
            return Place(kind, request.getfixturevalue("migrated_address"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def plan() -> FaultPlan:
    """Does nothing until a test arms it."""
    return FaultPlan()


@pytest.fixture
def seams(clock: ManualClock, plan: FaultPlan) -> Seams:
    return Seams(clock=clock, fault=plan)


@pytest.fixture
async def store(place: Place, seams: Seams) -> AsyncIterator[Store]:
    """An open store, in which every invariant must hold when the test is done."""
    async with place.store(seams) as opened:
        yield opened
        try:
            faults = await invariant_faults(opened, seams.clock.wall())
        except StoreError:  # the test closed it, or let its writer die
            faults = []
            if place.is_durable:
                async with place.store(Seams(clock=seams.clock)) as again:
                    faults = await invariant_faults(again, seams.clock.wall())
        assert faults == []
