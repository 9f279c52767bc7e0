"""What the tests of managed brains stand on: a population with instances behind it."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from simulation_agents import Thinker

import ostler
from ostler import (
    AgentInstance,
    AgentLifecycleManager,
    AgentState,
    IsolationLevel,
)
from ostler.simulation.answers import Failed
from ostler.simulation.brains import Managed
from ostler.simulation.managed import Stable
from ostler.simulation.members import Member
from ostler.simulation.state import SimulationState
from ostler.simulation.view import AgentView, World

LEVELS = (IsolationLevel.NONE, IsolationLevel.THREAD, IsolationLevel.PROCESS)
NONE, THREAD, PROCESS = LEVELS
SOON = timedelta(milliseconds=150)
LONG = timedelta(seconds=20)


class Play:
    """A population, and the instances behind it."""

    def __init__(self, manager: AgentLifecycleManager, run_id: UUID | None = None, **more: Any) -> None:
        self.manager = manager
        self.run_id = run_id or uuid4()
        self.state = SimulationState(turn=1, global_state={"prices": [1]})
        self.world = World(self.state, 7, {})
        self.stable = Stable(manager, self.run_id, **more)

    def add(self, name: str, level: IsolationLevel, agent: type[ostler.Agent] = Thinker, **more: Any) -> Member:
        return self.state.admit(name, Managed(definition=agent, isolation=level, **more), {})

    @property
    def members(self) -> list[Member]:
        return list(self.state.members.values())

    async def house(self) -> dict[int, Failed]:
        return await self.stable.house(self.members)

    async def ask(self, member: Member, do: str = "decide", limit: timedelta = LONG) -> Any:
        member.state["do"] = do
        return await self.stable.ask(member, AgentView(member, self.world), limit)

    async def record(self, member: Member) -> AgentInstance:
        found = await self.manager.store.get_instance(self.stable.instances()[member.number])
        assert found is not None
        return found

    async def comes_to(self, instance_id: UUID, state: AgentState) -> None:
        for _ in range(5000):
            found = await self.manager.get_instance(instance_id)
            if found is not None and found.state is state:
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"it never came to {state}")


async def gone(pid: int) -> None:
    for _ in range(5000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"process {pid} is still there")
