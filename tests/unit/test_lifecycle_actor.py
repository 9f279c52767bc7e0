"""The task that owns an instance: the races of its messages, in virtual time."""

from __future__ import annotations

import asyncio

from virtual_ground import World, virtual

from ostler.model.states import AgentState


@virtual
async def test_a_life(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        assert await manager.process(ada, 1) == 1
        await asyncio.sleep(1)
        assert world.record(ada).state is AgentState.WAITING
        result = await manager.terminate(ada)
        assert result.success
        assert result.was_graceful
        assert world.states(ada) == ["ready", "processing", "waiting", "terminating", "terminated"]
        assert not world.machine.living()
