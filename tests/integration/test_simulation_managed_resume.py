"""Managed brains of a run that is taken up again: found, replaced, and none left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from lifecycle_ground import logged
from simulation_agents import Thinker
from simulation_ground import NONE, PROCESS, THREAD, Play, gone

import ostler
from ostler import (
    HOME_WORKSPACE_ID,
    AgentLifecycleManager,
    AgentSpawnOptions,
    IsolationLevel,
    LifecycleSettings,
    Permission,
    Principal,
    SpawnRequest,
)
from ostler.errors import InvalidOperationError
from ostler.simulation.brains import Managed
from ostler.simulation.managed import Stable

pytestmark = pytest.mark.anyio

OUTLIVE = LifecycleSettings(outlive=timedelta(minutes=1))


@pytest.fixture
async def manager(home: Path) -> AsyncIterator[AgentLifecycleManager]:
    async with ostler.open(home) as manager:
        yield manager


@asynccontextmanager
async def first_part(
    home: Path, names: Mapping[str, Mapping[str, Any]], settings: LifecycleSettings | None
) -> AsyncIterator[Play]:
    """A run that ends without saying goodbye to its brains."""
    async with ostler.open(home, settings=settings) as manager:
        play = Play(manager)
        for name, more in names.items():
            play.add(name, **{"level": PROCESS, **more})
        assert await play.house() == {}
        yield play
        await play.stable.close(keep=True)


async def test_a_run_that_goes_on_finds_its_brains_again(home: Path) -> None:
    async with first_part(home, {"ada": {}, "bo": {"context": {"mood": "glad"}}, "cy": {}}, OUTLIVE) as before:
        answers = [await before.ask(one) for one in before.members]
        ids = before.stable.instances()
        stranger = await before.manager.spawn(
            SpawnRequest(
                agent_definition_id=before.manager.registry.find("simulation_agents.Thinker").id,
                options=AgentSpawnOptions(tags=("simulation",)),
                context={"simulation_run": str(uuid4()), "simulation_number": 1},
            )
        )
        await before.manager.suspend(stranger.instance_id)  # so that closing leaves it
    async with ostler.open(home) as manager:
        play = Play(manager, before.run_id)
        ada = play.add("ada", PROCESS)
        bo = play.add("bo", PROCESS, context={"mood": "grim"})
        dee = play.state.admit("dee", Managed(definition=Thinker), {}, number=7)
        assert await play.stable.sweep(play.members) == 1, "cy has left"
        assert await play.house() == {}
        assert await play.stable.sweep(play.members) == 0, "what bo was before has ended"
        assert play.stable.instances()[ada.number] == ids[ada.number]
        assert await play.ask(ada) == answers[0], "a turn that was asked for before the crash is not done twice"
        play.state.turn = 2
        again = await play.ask(ada)
        assert (again["pid"], again["asked"]) == (answers[0]["pid"], 2)
        assert (await play.ask(bo))["mood"] == "grim"
        assert (await play.ask(dee))["known_as"] == ["dee", 7]
        await gone(answers[1]["pid"])
        await gone(answers[2]["pid"])
        await play.stable.close()
        assert [one.instance_id for one in await manager.get_active_instances()] == [stranger.instance_id]
    await gone(answers[0]["pid"])


@pytest.mark.parametrize("level", [THREAD, PROCESS], ids=str)
async def test_brains_that_ended_with_their_manager_are_replaced(home: Path, level: IsolationLevel) -> None:
    async with first_part(home, {"ada": {"level": level}}, None) as before:
        ids = before.stable.instances()
    async with ostler.open(home) as manager:
        play = Play(manager, before.run_id)
        ada = play.add("ada", level)
        assert await play.house() == {}
        assert await play.stable.sweep(play.members) == 0
        assert play.stable.instances()[ada.number] != ids[ada.number]
        assert (await play.ask(ada))["asked"] == 1
        await play.stable.close()


async def test_closing_ends_also_what_nobody_has_heard_of(manager: AgentLifecycleManager) -> None:
    first, second = Play(manager), Play(manager)
    first.add("ada", THREAD)
    await first.house()
    await first.stable.close(keep=True)
    second.run_id, second.stable = first.run_id, Stable(manager, first.run_id)
    second.add("bo", NONE)
    second.state.last_number = 1
    await second.house()
    await second.stable.close()
    assert await manager.get_active_instances() == []
    with pytest.raises(InvalidOperationError, match="take the run up again"):
        await second.house()


async def test_what_does_not_go_is_logged_and_found_by_the_next(
    manager: AgentLifecycleManager, caplog: pytest.LogCaptureFixture
) -> None:
    may = (Permission.AGENTS_SPAWN, Permission.AGENTS_READ, Permission.AGENTS_PROCESS)
    somebody = Principal(
        principal_id=UUID(int=100),
        name="somebody",
        workspace_id=HOME_WORKSPACE_ID,
        roles=(),
        permissions=may,
        created_at=ostler.SystemClock().wall(),
    )
    play = Play(manager.acting_as(somebody))
    ada = play.add("ada", THREAD)
    assert await play.house() == {}
    await play.stable.retire([ada.number])
    told = logged(caplog, "managed_brain_left")
    assert [one["agent_name"] for one in told] == ["ada"]
    assert "agents.terminate" in told[0]["reason"]
    assert play.stable.instances() == {}
    assert await Stable(manager, play.run_id).sweep([]) == 1
    assert await manager.get_active_instances() == []
