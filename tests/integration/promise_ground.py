"""What the tests of the promises stand on: a real manager with process agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from machine_ground import PATIENCE, everyone, groups_of, lacking, until
from promise_agents import Doer

import ostler
from ostler import AgentInstance, AgentLifecycleManager, AgentState, Attempt, AttemptOutcome, Enforcement
from ostler.keeper import cgroup_files
from ostler.store.attempts import list_attempts


def box(one: AgentInstance, attempt: int = 1) -> str:
    return f"{one.instance_id.hex}.{attempt}"


class Fleet:
    """A manager over a home, and short words for what tests ask of it."""

    def __init__(self, manager: AgentLifecycleManager, home: Path) -> None:
        self.manager = manager
        self.home = home
        self.definition = manager.registry.register(Doer, name="doer", replace=True).id

    async def spawn(self, definition: UUID | None = None, **options: Any) -> AgentInstance:
        chosen = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.PROCESS, **options)
        return await self.manager.spawn(
            ostler.SpawnRequest(agent_definition_id=definition or self.definition, options=chosen)
        )

    async def several(self, count: int, **options: Any) -> list[AgentInstance]:
        return list(await asyncio.gather(*(self.spawn(**options) for _ in range(count))))

    async def do(self, one: AgentInstance, what: str, **more: Any) -> Any:
        return await self.manager.process(one.instance_id, {"do": what, **more})

    def start(self, one: AgentInstance, what: str, **more: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.do(one, what, **more))

    async def record(self, one: AgentInstance) -> AgentInstance:
        found = await self.manager.get_instance(one.instance_id)
        assert found is not None
        return found

    async def comes_to(
        self, one: AgentInstance, state: AgentState, attempt: int = 1, *, seconds: float = PATIENCE
    ) -> AgentInstance:
        end = time.monotonic() + seconds
        while True:
            found = await self.record(one)
            if found.state is state and found.attempt >= attempt:
                return found
            assert time.monotonic() < end, f"it is {found.state} in attempt {found.attempt}: {found.error_message}"
            await asyncio.sleep(0.01)

    async def pid(self, one: AgentInstance) -> int:
        """Of its present start."""
        return int(((await self.attempts(one))[-1].handle or {})["pid"])

    async def outcome(self, one: AgentInstance) -> tuple[AttemptOutcome | None, str]:
        """How its first start ended."""
        first = (await self.attempts(one))[0]
        return first.outcome, first.detail or ""

    async def attempts(self, one: AgentInstance) -> list[Attempt]:
        return await self.manager.store.read(list_attempts, one.instance_id)

    def tree(self, one: AgentInstance, attempt: int = 1) -> set[int]:
        if " cgroup" not in cgroup_files.read("/proc/self/mountinfo"):
            lacking("who belongs to an agent is looked up here by its control group, and there are none")
        return everyone(self.home, box(one, attempt))

    def require(self, one: AgentInstance, limit: str) -> None:
        """For what cannot be shown where a limit is held only by looking."""
        assert one.enforcement is not None
        if one.enforcement[limit] is not Enforcement.ENFORCED:
            lacking(f"nothing on this machine enforces {limit}; it is {one.enforcement[limit]}")


@asynccontextmanager
async def opened(home: Path, *, seams: ostler.Seams | None = None, **settings: Any) -> AsyncIterator[Fleet]:
    """Nothing may stay behind, no process and no group, unless it is to outlive it. The keeper and its templates leave
    when the manager has.
    """
    chosen = ostler.LifecycleSettings(**settings)
    async with ostler.open(home, settings=chosen, seams=seams) as manager:
        yield Fleet(manager, home)
    if "outlive" not in settings:
        await until(lambda: not everyone(home) and not groups_of(home), "something was left behind")
