"""A night in the life of a manager, made up from one number: the same number gives the same night.

Agents are spawned, asked, paused, restarted and ended at random, while starts fail and hang, notices of deaths are
lost, doubled and late, the store is busy or full, the clock jumps, and the manager itself is killed and opened again.
At every birth, and at the end, the invariants of the core are checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.agents import Agent, AgentManifest, AgentRegistry
from ostler.errors import OstlerError, StoreBusyError, StoreFullError
from ostler.isolation import IsolationLevels
from ostler.lifecycle import AgentLifecycleManager, LifecycleSettings, open_manager
from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentSpawnOptions,
    IsolationLevel,
    Permission,
    Principal,
    ResourceLimits,
    RestartPolicy,
    Role,
    SpawnRequest,
    SuspendDepth,
    TerminationOptions,
    Tier,
    Workspace,
)
from ostler.policy import RetentionPolicy
from ostler.store import Seams
from ostler.store.commands import Command, PutRecord, RenewLease, TakeLease
from ostler.store.kinds import Kind
from ostler.testing.inline import inline_store
from ostler.testing.memory import MemoryTables
from ostler.testing.simulated.checks import final_faults, observer_faults
from ostler.testing.simulated.isolation import Misfortune, SimulatedIsolation, World
from ostler.testing.simulated.loop import VirtualClock, VirtualLoop, run_virtual

_SPACE = UUID(int=77)
_YEAR = timedelta(days=365)
_AGES = timedelta(days=3650)
#: The watch looks seldom, to save made-up days from real minutes; nothing is removed, though the clock jumps by years.
_SETTINGS = LifecycleSettings(
    tick=timedelta(seconds=20),
    lease_ttl=timedelta(minutes=10),
    metrics_interval=timedelta(minutes=10),
    retention=RetentionPolicy(finished=_AGES, events=_AGES),
    sweep_interval=timedelta(hours=12),
)
_CALM = 1200.0


class Nobody(Agent):
    """What is registered; the made-up place does all the acting."""

    def process(self, request: Any) -> Any:
        return request


@dataclass(kw_only=True)
class Report:
    """What one night came to."""

    seed: int
    faults: list[str]
    hits: dict[str, int]
    events: int
    #: Of the whole log: equal seeds give equal digests.
    digest: str

    def require(self) -> None:
        if self.faults:
            raise AssertionError(f"seed {self.seed} breaks the rules:\n" + "\n".join(self.faults))


@dataclass(kw_only=True, eq=False)
class Rehearsal:
    seed: int
    steps: int = 60
    chance: random.Random = field(init=False)
    clock: VirtualClock = field(init=False)
    world: World = field(init=False)
    tables: MemoryTables = field(default_factory=MemoryTables)
    manager: AgentLifecycleManager | None = None
    faults: list[str] = field(default_factory=list)
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    _ops: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    _keeper: asyncio.Task[None] | None = None
    _leave: asyncio.Event | None = None
    _store: Any = None
    #: Raised by the store at random while it is set.
    _trouble: type[OstlerError] | None = None
    _seen: list[tuple[UUID, list[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)  # noqa: S311 - a seed is the point
        self.clock = VirtualClock()
        made_up = random.Random(self.chance.random())  # noqa: S311
        self.world = World(chance=made_up, luck=Misfortune.drawn(made_up))

    # --- a night --------------------------------------------------------------------------------

    def run(self) -> Report:
        return run_virtual(self.clock, self._night())

    async def _night(self) -> Report:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._made)
        await self._open()
        await self._settle_in()
        for _ in range(self.steps):
            await self._step()
            await self.clock.sleep(self.chance.expovariate(1.0))
            if self.world.faults:
                break
        await self._dawn()
        events = [event async for event in self._store.replay()]
        digest = hashlib.sha256("\n".join(repr(event) for event in events).encode()).hexdigest()
        await self._close()
        return Report(
            seed=self.seed,
            faults=[*self.world.faults, *self.faults],
            hits=dict(self.world.hits),
            events=len(events),
            digest=digest,
        )

    def _made(self, loop: asyncio.AbstractEventLoop, work: Any, **said: Any) -> asyncio.Task[Any]:
        """Every task is known in the order of its making, so that killing the manager is the same each time."""
        task = asyncio.Task(work, loop=loop, **said)
        if len(self._tasks) > 500:
            self._tasks = [one for one in self._tasks if not one.done()]
        self._tasks.append(task)
        return task

    async def _dawn(self) -> None:
        """The faults stop. All that was asked must come to an end, and the record must be true."""
        self.world.luck, self._trouble = Misfortune.none(), None
        self.clock.jump(_AGES)  # no time of the night lies in the future any more
        await self._thaw()
        await self.clock.sleep(_CALM)
        self.faults += [f"{name} has not ended in the calm" for task, name in self._ops.items() if not task.done()]
        for instance_id, seen in self._seen:
            self.faults += await observer_faults(self._store, instance_id, seen)
        self.faults += await final_faults(self._store, self.world, self._space, self.clock.wall())
        if self.manager is not None:
            for instance_id in self.known:
                with suppress(OstlerError):
                    await self.manager.terminate(instance_id, TerminationOptions.immediate())
        await self.clock.sleep(60)
        if self.world.alive:
            self.faults.append(f"after everything was terminated, {len(self.world.alive)} agents live on")
        stats = await self._store.statistics(self._space)
        if stats.active_instances:
            self.faults.append(f"after everything was terminated, {stats.active_instances} count as active")

    async def _thaw(self) -> None:
        """What is frozen in mid-work would stay so for ever, and so would whoever waits for its answer."""
        await self.clock.sleep(60)
        for wait in await self._store.open_waits():
            if (wait.detail or {}).get("depth") == SuspendDepth.FREEZE and self.manager is not None:
                with suppress(OstlerError):
                    await self.manager.resume(wait.instance_id)

    # --- the manager ----------------------------------------------------------------------------

    @property
    def _space(self) -> UUID:
        return _SPACE if self.seed % 2 else HOME_WORKSPACE_ID

    async def _settle_in(self) -> None:
        space = Workspace(workspace_id=_SPACE, name="small", tier=Tier.CORE, created_at=self.clock.wall())
        await self._store.commit(PutRecord(record=space))

    async def _open(self) -> None:
        opened: asyncio.Future[AgentLifecycleManager] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        draw = random.Random(self.chance.random())  # noqa: S311
        seams = Seams(clock=self.clock, chance=draw)
        self._store = inline_store(self.tables, seams, before_commit=self._before_commit)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(opened, seams, self._leave))
        manager = await opened
        self.manager = manager.acting_as(
            Principal(
                principal_id=UUID(int=9),
                name="rehearsal",
                workspace_id=self._space,
                roles=(Role.ADMIN,),
                permissions=(Permission.AGENTS_READ,),
                created_at=self.clock.wall(),
            )
        )

    async def _keep(self, opened: asyncio.Future[AgentLifecycleManager], seams: Seams, leave: asyncio.Event) -> None:
        levels = IsolationLevels(self.clock)
        levels.use(IsolationLevel.THREAD, SimulatedIsolation(self.clock, self.world))
        registry = AgentRegistry()
        try:
            async with open_manager(
                self._store, settings=_SETTINGS, registry=registry, levels=levels, seams=seams
            ) as manager:
                self.definition: AgentManifest = manager.registry.register(Nobody, name="nobody")
                opened.set_result(manager)
                await leave.wait()
        except OstlerError as error:
            if not opened.done():
                opened.set_exception(error)

    def _before_commit(self, command: Command[Any]) -> None:
        spared = isinstance(command, TakeLease | RenewLease | PutRecord)
        if self._trouble is not None and not spared and self.chance.random() < 0.5:
            self.world.hits[self._trouble.__name__] += 1
            raise self._trouble

    async def _close(self) -> None:
        if self._leave is not None and self._keeper is not None:
            self._leave.set()
            await asyncio.wait([self._keeper])

    async def _kill(self) -> None:
        """As kill -9 does: nothing more is written, every task is gone, and so is what lived in the program."""
        self.world.hits["manager_killed"] += 1
        await self._store.close()
        mine = asyncio.current_task()
        victims = [task for task in self._tasks if not task.done() and task is not mine]
        self._ops.clear()
        self._seen = []
        self.world.perish()
        for task in victims:
            task.cancel()
        await asyncio.wait(victims)
        self.world.perish()
        self.manager = None

    # --- what may happen next -------------------------------------------------------------------

    async def _step(self) -> None:
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
        if self.chance.random() < 0.04:
            await self._again()
            return
        act = self.chance.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        work = act()
        if work is not None:
            task = asyncio.get_running_loop().create_task(self._bear(act.__name__, work))
            self._ops[task] = act.__name__

    async def _again(self) -> None:
        if self.chance.random() < 0.5:
            await self._kill()
        else:
            self.world.hits["manager_closed"] += 1
            await self._close()
            self._ops.clear()
            self._seen = []
        self._trouble = None
        async with inline_store(self.tables, Seams(clock=self.clock)) as heir:  # who holds the lock on a home may
            await heir.take_lease("heir", ttl=timedelta(seconds=1), steal=True)
            await heir.release_lease()
        await self._open()

    async def _bear(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            if self.chance.random() < 0.15:  # whoever asked does not wait for the answer
                self.world.hits["caller_gone"] += 1
                async with asyncio.timeout(self.chance.expovariate(20)):
                    await work
            else:
                await work
        except (OstlerError, TimeoutError):
            pass  # refused, and said so
        except Exception as error:  # noqa: BLE001 - whatever else comes out is a fault of ours
            self.faults.append(f"{name} raised {type(error).__name__}: {error}")

    @property
    def known(self) -> list[UUID]:
        """Every instance there is, also those whose spawn nobody waited for."""
        return [key[0] for key in self.tables.rows[Kind.INSTANCE]]

    def _some(self) -> UUID | None:
        known = self.known
        return self.chance.choice(known[-8:]) if known else None

    async def _spawn_one(self) -> None:
        chance = self.chance
        policy = chance.choice((None, RestartPolicy.immediate(), RestartPolicy.immediate(), RestartPolicy.default()))
        options = AgentSpawnOptions(
            restart_policy=policy if self._space == HOME_WORKSPACE_ID or policy != RestartPolicy.default() else None,
            resource_limits=ResourceLimits(execution_timeout=timedelta(seconds=30), max_concurrent_tasks=2),
            initialization_timeout=timedelta(seconds=10),
        )
        if self.manager is not None:
            instance = await self.manager.spawn(SpawnRequest(agent_definition_id=self.definition.id, options=options))
            self.known.append(instance.instance_id)

    def _spawn(self) -> Coroutine[Any, Any, Any]:
        return self._spawn_one()

    def _ask(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self.manager.process(chosen, {"n": 1}) if chosen and self.manager else None

    def _suspend(self) -> Coroutine[Any, Any, Any] | None:
        chosen, chance = self._some(), self.chance
        depth = chance.choice((None, *SuspendDepth))
        after = timedelta(seconds=chance.uniform(1, 600)) if chance.random() < 0.5 else None
        return self.manager.suspend(chosen, depth, resume_after=after) if chosen and self.manager else None

    def _resume(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self.manager.resume(chosen) if chosen and self.manager else None

    def _terminate(self) -> Coroutine[Any, Any, Any] | None:
        chosen, chance = self._some(), self.chance
        options = chance.choice(
            (
                TerminationOptions.default(),
                TerminationOptions.immediate(),
                TerminationOptions(graceful_timeout=timedelta(seconds=2), persist_final_state=True),
                TerminationOptions(graceful_timeout=timedelta(seconds=1), force_if_timeout=False),
            )
        )
        return self.manager.terminate(chosen, options) if chosen and self.manager else None

    def _restart(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self.manager.restart(chosen) if chosen and self.manager else None

    def _why(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self.manager.why(chosen) if chosen and self.manager else None

    def _death(self) -> None:
        cells = [cell for cells in self.world.alive.values() for cell in cells]
        if cells:
            self.world.hits["death"] += 1
            self.chance.choice(cells).die()

    def _jump(self) -> None:
        self.world.hits["clock_jump"] += 1
        self.clock.jump(self.chance.choice((-_YEAR, _YEAR, timedelta(hours=1), timedelta(seconds=-10))))

    def _weather(self) -> None:
        self._trouble = self.chance.choice((None, StoreBusyError, StoreFullError))

    def _watch(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        if chosen is None or self.manager is None:
            return None
        seen: list[Any] = []
        self._seen.append((chosen, seen))
        self.world.hits["observer"] += 1
        self._watching(chosen, seen)
        return None

    def _watching(self, instance_id: UUID, seen: list[Any]) -> None:
        """A task of its own that is no request: a stream may last as long as its instance."""
        if self.manager is None:
            return
        stream = self.manager.observe(instance_id, after=self.chance.choice((None, 0)))
        slow = self.chance.choice((0.0, 0.0, 40.0))

        async def look() -> None:
            with suppress(OstlerError):
                async for event in stream:
                    seen.append(event)
                    await self.clock.sleep(slow)

        asyncio.get_running_loop().create_task(look())


def rehearse(seed: int, *, steps: int = 60) -> Report:
    """One night from one number."""
    return Rehearsal(seed=seed, steps=steps).run()


__all__ = ["Rehearsal", "Report", "VirtualLoop", "rehearse"]
