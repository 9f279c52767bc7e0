"""Populations in a home that somebody manages: they are played beside the manager, who does not notice."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from simulation_scenes import economy

import ostler
from ostler.errors import StaleWriterError
from ostler.model import RunState
from ostler.simulation import (
    AgentGroup,
    Brains,
    OnFailure,
    Scenario,
    SimulationSettings,
    begin_run,
    resume_run,
)
from ostler.simulation.brains import ManagedMaker
from ostler.store import open_store

pytestmark = pytest.mark.anyio


class Echo(ostler.Agent):
    def process(self, request: Any) -> Any:
        return request


async def test_a_plain_run_is_played_and_resumed_beside_a_manager(home: Path) -> None:
    async with ostler.open(home) as manager:
        echo = manager.registry.register(Echo, name="echo")
        options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.NONE)
        one = await manager.spawn(ostler.SpawnRequest(agent_definition_id=echo.id, options=options))
        async with open_store(home) as store:
            async with begin_run(store, economy(turns=6)) as run:
                await run.run(3)
            assert await manager.process(one.instance_id, 1) == 1
            async with resume_run(store, run.run_id, economy(turns=6)) as again:
                assert (await again.finish()).turn == 6
        async with resume_run(manager.store, run.run_id, economy(turns=8)) as again:
            assert (await again.finish()).turn == 8
        assert await manager.process(one.instance_id, 2) == 2
        (await manager.store.verify_audit()).require()


class Far(ostler.Agent):
    def process(self, request: Any) -> Any:
        return {"asked": request["turn"]}


def far_away() -> Scenario:
    maker = ManagedMaker(definition=Far, isolation=ostler.IsolationLevel.NONE)
    return Scenario(
        name="far",
        turns=8,
        brains=Brains({"far": maker}),
        agents=(AgentGroup(name="far", kind="far", count=3),),
        settings=SimulationSettings(on_error=OnFailure.REMOVE),
    )


@pytest.mark.parametrize("own", [True, False], ids=["store of the manager", "store beside it"])
async def test_who_is_no_longer_the_owner_does_not_lay_it_at_the_agents_door(home: Path, own: bool) -> None:
    async with ostler.open(home) as manager, open_store(home) as beside:
        store = manager.store if own else beside
        async with begin_run(store, far_away(), manager=manager) as run:
            await run.run(5)
            async with open_store(home) as other:
                await other.take_lease("other", ttl=timedelta(seconds=60), steal=True)
                with pytest.raises(StaleWriterError):
                    await run.finish()
                kept = await other.get_run(run.run_id)
                assert kept is not None
                assert (kept.turn, kept.state, len(run.state.members)) == (5, RunState.OPEN, 3)
                await other.release_lease()


async def test_the_end_of_a_managed_run_is_for_the_owner_to_write(home: Path) -> None:
    async with ostler.open(home) as manager, begin_run(manager.store, far_away(), manager=manager) as run:
        await run.run(5)
        async with open_store(home) as other:
            await other.take_lease("other", ttl=timedelta(seconds=60), steal=True)
            with pytest.raises(StaleWriterError, match="other owns this store"):
                await run.finish(5)
            await other.release_lease()


async def test_a_closed_manager_ends_the_turn_and_nobody_in_it(home: Path) -> None:
    async with open_store(home) as beside:
        async with ostler.open(home) as manager:
            opened = begin_run(beside, far_away(), manager=manager)
            run = await opened.__aenter__()
            await run.run(2)
        with pytest.raises(ostler.InvalidOperationError, match="this manager is closed"):
            await run.run(2)
        assert (run.record.turn, len(run.state.members)) == (2, 3)
        await opened.__aexit__(None, None, None)
