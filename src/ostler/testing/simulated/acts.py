"""What may happen next in a night: whatever a user, an agent, a clock or a disk might do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

from ostler.agents import AgentManifest
from ostler.errors import OstlerError, StoreBusyError, StoreFullError
from ostler.lifecycle import AgentLifecycleManager
from ostler.model.people import HOME_WORKSPACE_ID
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits, RestartPolicy, SpawnRequest, TerminationOptions
from ostler.model.states import SuspendDepth
from ostler.testing.simulated.isolation import World
from ostler.testing.simulated.loop import VirtualClock

_YEAR = timedelta(days=365)


class Night(Protocol):
    """What the acts need of the night they happen in."""

    chance: random.Random
    clock: VirtualClock
    world: World
    outliving: bool
    manager: AgentLifecycleManager | None
    definition: AgentManifest
    faults: list[str]
    #: Raised by the store at random while it is set.
    trouble: type[OstlerError] | None
    seen: list[tuple[UUID, list[Any]]]

    @property
    def space(self) -> UUID: ...

    @property
    def known(self) -> list[UUID]: ...


class Acts:
    def __init__(self, night: Night) -> None:
        self._night = night
        #: Requests that have a name, with whom they were asked of.
        self._asked: list[tuple[UUID, UUID]] = []

    def draw(self) -> tuple[str, Coroutine[Any, Any, Any] | None]:
        """One of them by chance: its name, and what is to be awaited of it."""
        kinds: list[tuple[int, Callable[[], Coroutine[Any, Any, Any] | None]]] = [
            (6, self._spawn),
            (10, self._ask),
            (3, self._suspend),
            (4, self._resume),
            (3, self._terminate),
            (2, self._restart),
            (3, self._death),
            (1, self._jump),
            (1, self._watch),
            (2, self._weather),
            (1, self._why),
        ]
        act = self._night.chance.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        return act.__name__, act()

    def _some(self) -> UUID | None:
        known = self._night.known
        return self._night.chance.choice(known[-8:]) if known else None

    async def _spawn_one(self) -> None:
        chance = self._night.chance
        policy = chance.choice((None, RestartPolicy.immediate(), RestartPolicy.immediate(), RestartPolicy.default()))
        options = AgentSpawnOptions(
            restart_policy=policy
            if self._night.space == HOME_WORKSPACE_ID or policy != RestartPolicy.default()
            else None,
            resource_limits=ResourceLimits(execution_timeout=timedelta(seconds=30), max_concurrent_tasks=2),
            initialization_timeout=timedelta(seconds=10),
        )
        if self._night.manager is not None:
            await self._night.manager.spawn(
                SpawnRequest(agent_definition_id=self._night.definition.id, options=options)
            )

    def _spawn(self) -> Coroutine[Any, Any, Any]:
        return self._spawn_one()

    def _ask(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        if chosen is None or self._night.manager is None:
            return None
        return self._ask_by_name(chosen) if self._night.outliving else self._night.manager.process(chosen, {"n": 1})

    async def _ask_by_name(self, chosen: UUID) -> None:
        """Once, or once more under the same name; whatever is answered is the answer to that."""
        night, asked = self._night, self._asked
        if asked and night.chance.random() < 0.3:
            await self._ask_for(*night.chance.choice(asked[-8:]))
            return
        name = UUID(int=night.chance.getrandbits(128))
        asked.append((chosen, name))
        await self._ask_for(chosen, name)

    def ask_again(self) -> list[Coroutine[Any, Any, Any]]:
        """What whoever lost the manager in mid-work does with the next one."""
        latest = self._asked[-4:]
        self._night.world.hits["asked_again"] += len(latest)
        return [self._ask_for(chosen, name) for chosen, name in latest]

    async def _ask_for(self, chosen: UUID, name: UUID) -> None:
        night = self._night
        if night.manager is not None:
            answer = await night.manager.process(chosen, {"name": str(name)}, request_id=name)
            if answer != {"name": str(name)}:
                night.faults.append(f"the request {name} was answered with {answer}")

    def _suspend(self) -> Coroutine[Any, Any, Any] | None:
        chosen, chance = self._some(), self._night.chance
        depth = chance.choice((None, *SuspendDepth))
        after = timedelta(seconds=chance.uniform(1, 600)) if chance.random() < 0.5 else None
        return (
            self._night.manager.suspend(chosen, depth, resume_after=after) if chosen and self._night.manager else None
        )

    def _resume(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self._night.manager.resume(chosen) if chosen and self._night.manager else None

    def _terminate(self) -> Coroutine[Any, Any, Any] | None:
        chosen, chance = self._some(), self._night.chance
        options = chance.choice(
            (
                TerminationOptions.default(),
                TerminationOptions.immediate(),
                TerminationOptions(graceful_timeout=timedelta(seconds=2), persist_final_state=True),
                TerminationOptions(graceful_timeout=timedelta(seconds=1), force_if_timeout=False),
            )
        )
        return self._night.manager.terminate(chosen, options) if chosen and self._night.manager else None

    def _restart(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self._night.manager.restart(chosen) if chosen and self._night.manager else None

    def _why(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self._night.manager.why(chosen) if chosen and self._night.manager else None

    def _death(self) -> None:
        cells = [cell for cells in self._night.world.alive.values() for cell in cells]
        if cells:
            self._night.world.hits["death"] += 1
            self._night.chance.choice(cells).die()

    def _jump(self) -> None:
        self._night.world.hits["clock_jump"] += 1
        self._night.clock.jump(self._night.chance.choice((-_YEAR, _YEAR, timedelta(hours=1), timedelta(seconds=-10))))

    def _weather(self) -> None:
        self._night.trouble = self._night.chance.choice((None, StoreBusyError, StoreFullError))

    def _watch(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        if chosen is None or self._night.manager is None:
            return None
        seen: list[Any] = []
        self._night.seen.append((chosen, seen))
        self._night.world.hits["observer"] += 1
        self._watching(chosen, seen)
        return None

    def _watching(self, instance_id: UUID, seen: list[Any]) -> None:
        """A task of its own that is no request: a stream may last as long as its instance."""
        if self._night.manager is None:
            return
        stream = self._night.manager.observe(instance_id, after=self._night.chance.choice((None, 0)))
        slow = self._night.chance.choice((0.0, 0.0, 40.0))

        async def look() -> None:
            with suppress(OstlerError):
                async for event in stream:
                    seen.append(event)
                    await self._night.clock.sleep(slow)

        asyncio.get_running_loop().create_task(look())
