"""The same life over a real PostgreSQL server: one store for a team, one manager that owns it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ostler
from ostler.lifecycle import open_manager

pytestmark = pytest.mark.anyio


class Echo(ostler.Agent):
    def initialize(self, context: ostler.AgentContext) -> None:
        self.context = context

    async def process(self, request: Any) -> Any:
        if request == "leave a note":
            (self.context.workspace or Path()).joinpath("note").write_text("here")
        return request


def thread(definition: ostler.AgentManifest) -> ostler.SpawnRequest:
    return ostler.SpawnRequest(agent_definition_id=definition.id)


async def test_a_whole_life_over_postgres(make_database: Callable[[], str], tmp_path: Path) -> None:
    address = make_database()
    async with ostler.open(address, workroom=tmp_path) as manager:
        echo = manager.registry.register(Echo)
        instance = await manager.spawn(thread(echo))
        assert await manager.process(instance.instance_id, "leave a note") == "leave a note"
        assert (tmp_path / str(instance.instance_id) / "note").read_text() == "here"
        restarted = await manager.restart(instance.instance_id)
        assert restarted.attempt == 2
        await manager.suspend(instance.instance_id)
        result = await manager.terminate(instance.instance_id)
        assert result.was_graceful
        seen = [event async for event in manager.observe(instance.instance_id, after=0)]
    states = [event.new_state for event in seen if isinstance(event, ostler.AgentStateChangedEvent)]
    assert states[-1] is ostler.AgentState.TERMINATED
    assert [event.sequence for event in seen if isinstance(event, ostler.AgentEvent)] == sorted(
        event.sequence for event in seen if isinstance(event, ostler.AgentEvent)
    )


async def test_a_pause_outlives_the_manager_over_postgres(make_database: Callable[[], str]) -> None:
    address = make_database()
    async with ostler.open(address) as manager:
        instance = await manager.spawn(thread(manager.registry.register(Echo)))
        await manager.suspend(instance.instance_id)
    async with ostler.open(address) as manager:
        manager.registry.register(Echo)
        found = await manager.get_instance(instance.instance_id)
        assert found is not None
        assert found.state is ostler.AgentState.SUSPENDED
        resumed = await manager.resume(instance.instance_id)
        assert (resumed.state, resumed.attempt) == (ostler.AgentState.READY, 2)
        assert await manager.process(instance.instance_id, 1) == 1


async def test_two_managers_cannot_own_one_store(make_database: Callable[[], str]) -> None:
    address = make_database()
    async with open_manager(address):
        with pytest.raises(ostler.LeaseHeldError, match="owns this store"):
            async with open_manager(address):
                pytest.fail("two owners")
