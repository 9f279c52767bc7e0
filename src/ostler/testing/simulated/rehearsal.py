"""A night in the life of a manager, made up from one number: the same number gives the same night.

Agents are spawned, asked, paused, restarted and ended at random, while starts fail and hang, notices of deaths are
lost, doubled and late, the store is busy or full, the clock jumps, and the manager itself is killed and opened again.
In some nights the agents die with it, in others they live on and are found again. At every birth, and at the end, the
invariants of the core are checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.agents import AgentManifest, AgentRegistry
from ostler.errors import OstlerError
from ostler.isolation import Isolation, IsolationLevels
from ostler.lifecycle import AgentLifecycleManager, open_manager
from ostler.model.people import HOME_WORKSPACE_ID, Permission, Principal, Role, Workspace
from ostler.model.spawn import TerminationOptions
from ostler.model.states import IsolationLevel, SuspendDepth, Tier
from ostler.store import Seams, Store
from ostler.store.commands import Command, PutRecord, RenewLease, TakeLease
from ostler.store.kinds import Kind
from ostler.testing.inline import inline_store
from ostler.testing.memory import MemoryTables
from ostler.testing.simulated.acts import Acts
from ostler.testing.simulated.checks import final_faults, observer_faults, survivors, unseen_faults
from ostler.testing.simulated.ground import AGES, SETTINGS, Nobody, Report
from ostler.testing.simulated.isolation import Misfortune, SimulatedIsolation, World
from ostler.testing.simulated.loop import VirtualClock, VirtualLoop, run_virtual
from ostler.testing.simulated.machine import Body, Machine
from ostler.testing.simulated.outliving import OutlivingIsolation

_SPACE = UUID(int=77)
#: Every so many nights the agents outlive their manager.
_OUTLIVING = 3
_CALM = 1200.0


@dataclass(kw_only=True, eq=False)
class Rehearsal:
    seed: int
    steps: int = 60
    chance: random.Random = field(init=False)
    clock: VirtualClock = field(init=False)
    world: World = field(init=False)
    outliving: bool = field(init=False)
    definition: AgentManifest = field(init=False)
    _acts: Acts = field(init=False)
    _level: Isolation | None = None
    tables: MemoryTables = field(default_factory=MemoryTables)
    manager: AgentLifecycleManager | None = None
    faults: list[str] = field(default_factory=list)
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    _ops: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    _keeper: asyncio.Task[None] | None = None
    _leave: asyncio.Event | None = None
    _store: Any = None
    #: Raised by the store at random while it is set.
    trouble: type[OstlerError] | None = None
    seen: list[tuple[UUID, list[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)  # noqa: S311 - a seed is the point
        self.clock = VirtualClock()
        made_up = random.Random(self.chance.random())  # noqa: S311 - drawn from the seed
        self.outliving = self.seed % _OUTLIVING == _OUTLIVING - 1
        kind = Machine if self.outliving else World
        self.world = kind(chance=made_up, luck=Misfortune.drawn(made_up))
        self._acts = Acts(self)

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
        self.world.luck, self.trouble = Misfortune.none(), None
        self.clock.jump(AGES)  # no time of the night lies in the future any more
        await self._thaw()
        await self.clock.sleep(_CALM)
        self.faults += [f"{name} has not ended in the calm" for task, name in self._ops.items() if not task.done()]
        for instance_id, seen in self.seen:
            self.faults += await observer_faults(self._store, instance_id, seen)
        self.faults += await final_faults(self._store, self.world, self.space, self.clock.wall())
        if isinstance(self.world, Machine):
            self.faults += await unseen_faults(self._store, self.world)
        if self.manager is not None:
            for instance_id in self.known:
                with suppress(OstlerError):
                    await self.manager.terminate(instance_id, TerminationOptions.immediate())
        await self.clock.sleep(60)
        if self.world.alive:
            self.faults.append(f"after everything was terminated, {len(self.world.alive)} agents live on")
        stats = await self._store.statistics(self.space)
        if stats.active_instances:
            self.faults.append(f"after everything was terminated, {stats.active_instances} count as active")

    async def _thaw(self) -> None:
        """What is frozen in mid-work would stay so for ever, and so would whoever waits for its answer.

        Also what is held after it has asked something: it goes on only when it is resumed.
        """
        await self.clock.sleep(60)
        asked = any(not task.done() and "ask" in name for task, name in self._ops.items())
        still = {SuspendDepth.FREEZE, SuspendDepth.HOLD} if asked else {SuspendDepth.FREEZE}
        for wait in await self._store.open_waits():
            if (wait.detail or {}).get("depth") in still and self.manager is not None:
                with suppress(OstlerError):
                    await self.manager.resume(wait.instance_id)

    # --- the manager ----------------------------------------------------------------------------

    @property
    def space(self) -> UUID:
        return _SPACE if self.seed % 2 else HOME_WORKSPACE_ID

    async def _settle_in(self) -> None:
        space = Workspace(workspace_id=_SPACE, name="small", tier=Tier.CORE, created_at=self.clock.wall())
        await self._store.commit(PutRecord(record=space))

    async def _open(self) -> None:
        opened: asyncio.Future[AgentLifecycleManager] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        draw = random.Random(self.chance.random())  # noqa: S311 - drawn from the seed
        seams = Seams(clock=self.clock, chance=draw)
        self._store = inline_store(self.tables, seams, before_commit=self._before_commit)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(opened, seams, self._leave))
        manager = await opened
        self.manager = manager.acting_as(
            Principal(
                principal_id=UUID(int=9),
                name="rehearsal",
                workspace_id=self.space,
                roles=(Role.ADMIN,),
                permissions=(Permission.AGENTS_READ,),
                created_at=self.clock.wall(),
            )
        )

    async def _keep(self, opened: asyncio.Future[AgentLifecycleManager], seams: Seams, leave: asyncio.Event) -> None:
        levels = IsolationLevels(self.clock)
        world = self.world
        self._level = (
            OutlivingIsolation(self.clock, world)
            if isinstance(world, Machine)
            else SimulatedIsolation(self.clock, world)
        )
        levels.use(IsolationLevel.THREAD, self._level)
        settings = SETTINGS.evolve(outlive=timedelta(days=1)) if self.outliving else SETTINGS
        registry = AgentRegistry()
        try:
            async with open_manager(
                self._store, settings=settings, registry=registry, levels=levels, seams=seams
            ) as manager:
                self.definition = manager.registry.register(Nobody, name="nobody")
                opened.set_result(manager)
                await leave.wait()
        except OstlerError as error:
            if not opened.done():
                opened.set_exception(error)

    def _before_commit(self, command: Command[Any]) -> None:
        spared = isinstance(command, TakeLease | RenewLease | PutRecord)
        if self.trouble is not None and not spared and self.chance.random() < 0.5:
            self.world.hits[self.trouble.__name__] += 1
            raise self.trouble

    async def _close(self) -> None:
        if self._leave is not None and self._keeper is not None:
            self._leave.set()
            await asyncio.wait([self._keeper])

    async def _kill(self) -> None:
        """As kill -9 does: nothing more is written, every task is gone, and so is what lived in the program."""
        self.world.hits["manager_killed"] += 1
        if isinstance(self._level, OutlivingIsolation):
            self._level.killed = True
        await self._store.close()
        mine = asyncio.current_task()
        spared = self.world.tasks if isinstance(self.world, Machine) else set()
        victims = [task for task in self._tasks if not task.done() and task is not mine and task not in spared]
        self._ops.clear()
        self.seen = []
        self.world.perish()
        for task in victims:
            task.cancel()
        await asyncio.wait(victims)
        self.world.perish()
        self.manager = None

    # --- what may happen next -------------------------------------------------------------------

    async def _step(self) -> None:
        if self.chance.random() < 0.04:
            await self._again()
            return
        name, work = self._acts.draw()
        if work is not None:
            self._let(name, work)

    def _let(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._bear(name, work))
        self._ops[task] = name

    async def _again(self) -> None:
        if self.chance.random() < 0.5:
            await self._kill()
        else:
            self.world.hits["manager_closed"] += 1
            await self._close()
            self._ops.clear()
            self.seen = []
        self.trouble = None
        async with inline_store(self.tables, Seams(clock=self.clock)) as heir:  # who holds the lock on a home may
            await heir.take_lease("heir", ttl=timedelta(seconds=1), steal=True)
            await heir.release_lease()
            living = await self._alone(heir)
        await self._open()
        for body in living:
            if body.hand is not None and not body.dead:
                self.world.hits["adopted"] += 1
            elif body.exit is None:
                self.faults.append(f"{body.plan.instance_id} lived on, and was not taken up again")
        for work in self._acts.ask_again():
            self._let("ask_again", work)

    async def _alone(self, store: Store) -> list[Body]:
        """A while without a manager, in which some agents may end. Answers those whom the next one must find."""
        if not isinstance(self.world, Machine):
            return []
        await self.clock.sleep(self.chance.uniform(0, 5))
        for body in list(self.world.bodies.values()):
            if not body.dead and self.chance.random() < 0.1:
                body.die()
        return await survivors(store, self.world, self.space)

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


def rehearse(seed: int, *, steps: int = 60) -> Report:
    """One night from one number. In every third the agents outlive their manager."""
    return Rehearsal(seed=seed, steps=steps).run()


__all__ = ["Rehearsal", "Report", "VirtualLoop", "rehearse"]
