"""Populations in a home that somebody manages: they are played beside the manager, who does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulation_scenes import economy

import ostler
from ostler.simulation import begin_run, resume_run
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
