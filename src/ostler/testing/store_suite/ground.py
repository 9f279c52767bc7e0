"""What all parts of the suite stand on: the fixtures, and short ways to make records."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentInstance,
    AgentSpawnOptions,
    AgentState,
    Event,
    SpawnRequest,
    Tier,
    Workspace,
    from_micros,
)
from ostler.seams import FaultPlan
from ostler.store import Actor, Seams, Store
from ostler.store.commands import MoveInstance, PutRecord, ReserveInstance, RestartInstance
from ostler.testing.clock import ManualClock
from ostler.testing.folding import invariant_faults

OpenStore = Callable[[Seams], Store]

DEFINITION = UUID(int=0xD1)
DAY = timedelta(days=1).total_seconds()

#: Moves that lead from a fresh reservation to each state.
ROADS: Mapping[AgentState, tuple[AgentState, ...]] = {
    AgentState.INITIALIZING: (),
    AgentState.READY: (AgentState.READY,),
    AgentState.PROCESSING: (AgentState.READY, AgentState.PROCESSING),
    AgentState.WAITING: (AgentState.READY, AgentState.PROCESSING, AgentState.WAITING),
    AgentState.SUSPENDED: (AgentState.READY, AgentState.SUSPENDED),
    AgentState.TERMINATING: (AgentState.READY, AgentState.TERMINATING),
    AgentState.TERMINATED: (AgentState.READY, AgentState.TERMINATING, AgentState.TERMINATED),
    AgentState.FAILED: (AgentState.FAILED,),
}


def reservation(name: str | None = None, *, tags: Iterable[str] = (), **fields: Any) -> ReserveInstance:
    """A wish for one instance; what else is given goes to the command."""
    request = SpawnRequest(
        agent_definition_id=fields.pop("definition_id", DEFINITION),
        options=AgentSpawnOptions(name=name, tags=tuple(tags)),
        context=fields.pop("context", None),
    )
    return ReserveInstance(request=request, **fields)


async def reserved(store: Store, name: str | None = None, **fields: Any) -> AgentInstance:
    return await store.commit(reservation(name, **fields))


async def brought_to(store: Store, state: AgentState, **fields: Any) -> AgentInstance:
    """A fresh instance, moved until it is in that state."""
    instance = await reserved(store, **fields)
    for step in ROADS[state]:
        instance = await moved(store, instance, step)
    return instance


async def moved(store: Store, instance: AgentInstance, to: AgentState, **fields: Any) -> AgentInstance:
    return await store.commit(MoveInstance(instance_id=instance.instance_id, to=to, **fields))


async def restarted(store: Store, instance: AgentInstance) -> AgentInstance:
    return await store.commit(RestartInstance(instance_id=instance.instance_id, max_attempts=5))


async def new_workspace(store: Store, tier: Tier, number: int = 2) -> UUID:
    space = UUID(int=(0x7000_8000 << 64) + number)
    name = f"space {number}"
    await store.commit(PutRecord(record=Workspace(workspace_id=space, name=name, tier=tier, created_at=from_micros(0))))
    return space


async def current(store: Store, instance_id: UUID) -> AgentInstance:
    found = await store.get_instance(instance_id)
    assert found is not None, f"instance {instance_id} is gone"
    return found


async def whole_log(store: Store, after: int = 0) -> list[Event]:
    return [event async for event in store.replay(after)]


ALICE = Actor(name="alice", principal_id=UUID(int=0xA11CE), correlation_id="c-1")


class StoreGround:
    """The fixtures. A subclass gives `open_store`; the rest follows from it."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    def open_store(self) -> OpenStore:
        raise NotImplementedError("a subclass says how its store is opened")

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def plan(self) -> FaultPlan:
        """Does nothing until a test arms it."""
        return FaultPlan()

    @pytest.fixture
    def seams(self, clock: ManualClock, plan: FaultPlan) -> Seams:
        return Seams(clock=clock, fault=plan)

    @pytest.fixture
    async def store(self, open_store: OpenStore, seams: Seams) -> AsyncIterator[Store]:
        """An open store, in which every invariant must hold when the test is done."""
        async with open_store(seams) as opened:
            yield opened
            # A test may have closed it or let its writer die; what it left is looked at through another.
        async with open_store(seams) as again:
            assert await invariant_faults(again, seams.clock.wall()) == []


HOME = HOME_WORKSPACE_ID
