"""A night on the simulated clock: a crew works a queue, while agents crash, hang, lie and conflict, the daemon is
killed, and a person reviews. Made from one seed: the same seed gives the same history.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from folding import all_events
from simulated_isolation import SimulatedIsolation
from simulated_machine import Machine

from ostler.agents import Agent, AgentContext, AgentRegistry
from ostler.crews.supervisor import Supervisor
from ostler.errors import MergeConflictError, OstlerError
from ostler.failpoints import Seams
from ostler.isolation.registry import IsolationLevels
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.open import open_manager
from ostler.lifecycle.settings import LifecycleSettings
from ostler.model.crew import CrewSettings
from ostler.model.events import TaskStateChangedEvent
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import IsolationLevel
from ostler.model.task import Task, TaskFilter, TaskSettings, TaskState
from ostler.model.wait import WaitKind
from ostler.tasks.context import TaskContext
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.queue import TaskQueue
from ostler.testing.simulated import InlineStore, KeptDatabase, VirtualClock, run_virtual
from ostler.workdirs.records import Accepted, BaseChange, FileChange, Snapshot, VaultEntry, Workdir, WorkdirKind

TASKS, MEMBERS, KILLS = 20, 6, 10
#: What the first task does, so that every night has each of these; it waits for no other.
FIRST_TASK = ("crashes", "lies", "works")
SENT_BACK_MOST, SENT_BACK_TOO_OFTEN = 6, "sent back too often"
_PROGRAM: ContextVar[Program | None] = ContextVar("program", default=None)
_AGES = timedelta(days=3650)
SETTINGS = LifecycleSettings.from_dict(
    {"tick": "20s", "lease_ttl": "10m", "metrics_interval": "10m", "sweep_interval": "12h", "outlive": "1d",
     "retention": {"finished": _AGES, "events": _AGES}}
)  # fmt: skip


@dataclass(eq=False)
class World:
    """The repository, the worktrees, and what agents did in them; none of it knows of daemons."""

    folder: Path
    chance: random.Random
    #: File to how often it was changed on main.
    main: dict[str, int] = field(default_factory=Counter)
    #: Key to the files that its work changed, each with the version that it began from.
    changed: dict[str, dict[str, int]] = field(default_factory=dict)
    accepted: Counter[str] = field(default_factory=Counter)
    executions: Counter[str] = field(default_factory=Counter)
    did: Counter[str] = field(default_factory=Counter)
    at_work: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class ScriptedWorkdirs:
    """The verbs of `Workdirs` that tasks use, over the world; nothing waits for a disk or for git."""

    def __init__(self, world: World) -> None:
        self._world = world

    def allow(self, place: Path) -> None: ...

    async def plan(self, key: str, **_: Any) -> Workdir:
        where = dict.fromkeys(("repository", "base", "target"), "main")
        return Workdir(kind=WorkdirKind.WORKTREE, key=key, path=str(self._world.folder / key), **where)

    async def prepare(self, workdir: Workdir, *, fresh: bool = False) -> tuple[str, ...]:
        del fresh
        Path(workdir.path).mkdir(exist_ok=True)
        return ()

    async def snapshot(self, workdir: Workdir, message: str) -> Snapshot:
        del message
        files = tuple(FileChange(path=one, status="M") for one in sorted(self._world.changed.get(workdir.key, {})))
        return Snapshot(key=workdir.key, number=1, mirror="m", commit="c", tree="t", base="b", files=files)

    async def changed_since_base(self, workdir: Workdir, snapshot: Snapshot) -> BaseChange:
        del snapshot
        mine = self._world.changed.get(workdir.key, {})
        return BaseChange(commits=1, conflicts=tuple(sorted(f for f, v in mine.items() if self._world.main[f] != v)))

    async def bring_target(self, workdir: Workdir) -> None:
        mine = self._world.changed.get(workdir.key, {})
        mine.update({name: self._world.main[name] for name in mine})

    async def accept(self, workdir: Workdir, snapshot: Snapshot, **_: Any) -> Accepted:
        done = Accepted(key=workdir.key, mirror="m", repository="main", target="main", commit="c", before="b")
        if self._world.accepted[workdir.key]:  # a killed daemon had done it
            return done
        change = await self.changed_since_base(workdir, snapshot)
        if change.conflicts:
            raise MergeConflictError("conflicts", paths=change.conflicts)
        self._world.accepted[workdir.key] += 1
        for name in self._world.changed.get(workdir.key, {}):
            self._world.main[name] += 1
        return done

    async def retire(self, workdir: Workdir, **_: Any) -> VaultEntry:
        raise OstlerError(f"{workdir.key} stays until the morning")

    async def orphans(self, keys: Any) -> list[Path]:
        del keys
        return []

    async def recover(self) -> list[str]:
        return []

    async def close(self) -> None: ...


class Coder(Agent):
    """Does what its task says, or crashes, hangs or lies, by the seed."""

    world: World

    def __init__(self) -> None:
        self.context: AgentContext | None = None

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        await context.clock.sleep(self.world.chance.uniform(0, 2))

    async def process(self, request: dict[str, Any]) -> Any:
        assert self.context is not None
        key, world, clock = str(request["prompt"]).split()[0], self.world, self.context.clock
        how = world.chance.choices(("works", "crashes", "hangs", "lies"), (10, 4, 1, 3))[0]
        if key == "T001" and world.executions[key] < len(FIRST_TASK):
            how = FIRST_TASK[world.executions[key]]
        world.executions[key] += 1
        world.did[how] += 1
        world.at_work[key] += 1
        if world.at_work[key] > 1:
            world.faults.append(f"two agents work on {key} at once")
        try:
            await clock.sleep(world.chance.uniform(30, 900))
            if how == "crashes":
                raise ValueError("it crashed")
            if how == "hangs":
                await clock.sleep(1e6)
            if how == "works":
                files = [f"file{world.chance.randrange(4)}" for _ in range(2)]
                world.changed[key] = {name: world.main[name] for name in files}
            return {"summary": "done", "changed_files": []}
        finally:
            world.at_work[key] -= 1


@dataclass(eq=False)
class Program:
    """One life of the daemon."""

    store: InlineStore
    level: SimulatedIsolation
    orchestrator: TaskOrchestrator | None = None
    main: asyncio.Task[None] | None = None
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False


@dataclass
class Report:
    faults: list[str]
    #: How each task ended.
    ends: dict[str, str]
    did: Counter[str]
    kills: int
    hours: float
    digest: str


class Night:
    def __init__(self, seed: int, folder: Path) -> None:
        self.clock = VirtualClock()
        self.chance = random.Random(seed)
        self.world = World(folder, random.Random(f"{seed} world"))
        self.machine = Machine(self.clock, random.Random(f"{seed} machine"), outlives=True)
        self.database = KeptDatabase()
        self.program: Program | None = None
        self.kills = 0
        self._tasks: dict[asyncio.Task[Any], Program | None] = {}

    def run(self) -> Report:
        return run_virtual(self.clock, self._run())

    async def _run(self) -> Report:
        asyncio.get_running_loop().set_task_factory(self._make_task)
        try:
            await self._open()
            await self._submit()
            kills = sorted(self.chance.uniform(60, 5000) for _ in range(KILLS))
            while (kills or not await self._is_over()) and self.clock.mono() < 72 * 3600:
                await self.clock.sleep(120)
                if kills and self.clock.mono() > kills[0]:
                    del kills[0]
                    self._kill()
                    await self._take_over()
                    await self._open()
                await self._review()
            tasks = {task.key: task for task in await self._all()}
            ends = {key: f"{task.state}: {task.error or ''}" for key, task in tasks.items()}
            self.world.faults += [fault for task in tasks.values() for fault in self._faults_of(task, tasks)]
        finally:
            self._kill()
            self.machine.power_off()
        log = all_events(self.database.reader)
        twice = Counter(
            one.key for one in log if isinstance(one, TaskStateChangedEvent) and one.new_state == "accepted"
        )
        faults = [f"{key} was accepted {n} times" for key, n in twice.items() if n > 1]
        digest = hashlib.sha256("\n".join(map(repr, log)).encode()).hexdigest()
        faults += [*self.world.faults, *self.machine.faults]
        return Report(faults, ends, self.world.did, self.kills, self.clock.mono() / 3600, digest)

    # --- the daemon ------------------------------------------------------------------------------

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **more)
        if len(self._tasks) > 500:
            self._tasks = {one: of for one, of in self._tasks.items() if not one.done()}
        self._tasks[task] = _PROGRAM.get()
        return task

    def _in(self, program: Program, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = copy_context()
        context.run(_PROGRAM.set, program)
        task: asyncio.Task[Any] = context.run(asyncio.get_running_loop().create_task, work)
        return task

    async def _open(self) -> None:
        seams = Seams(clock=self.clock, chance=random.Random(self.chance.random()))
        store = InlineStore(self.database, seams)
        self.program = program = Program(store, SimulatedIsolation(self.clock, self.machine))
        program.main = self._in(program, self._serve(program, seams))
        waiting = asyncio.ensure_future(program.opened.wait())
        await asyncio.wait([program.main, waiting], return_when=asyncio.FIRST_COMPLETED)
        if program.main.done():
            program.main.result()

    async def _serve(self, program: Program, seams: Seams) -> None:
        levels = IsolationLevels(self.clock, sources={})
        levels.use(IsolationLevel.PROCESS, program.level)
        registry = AgentRegistry()
        coder = type("Coder", (Coder,), {"world": self.world, "__qualname__": "Night.<locals>.Coder"})
        registry.register(coder, name="coder", defaults=AgentSpawnOptions(isolation_level=IsolationLevel.PROCESS))
        opening = open_manager(program.store, settings=SETTINGS, registry=registry, levels=levels, seams=seams)
        async with program.store, opening as manager:
            orchestrator = self._orchestrator(manager)
            crews = {"coder": CrewSettings(agent="coder", count=MEMBERS)}
            supervisor = Supervisor(orchestrator, crews)
            queue = TaskQueue(orchestrator, selects=lambda task: not supervisor.owns(task))
            await supervisor.open(await queue.open())
            await supervisor.up()
            program.orchestrator = orchestrator
            program.opened.set()
            await asyncio.get_running_loop().create_future()

    def _orchestrator(self, manager: AgentLifecycleManager) -> TaskOrchestrator:
        manager._runtime.home = self.world.folder  # noqa: SLF001 - a store in memory has no home of its own
        settings = TaskSettings(timeout=timedelta(hours=1), retention=_AGES)
        shared = TaskContext(manager, self.world.folder, settings)
        shared.workdirs = ScriptedWorkdirs(self.world)  # type: ignore[assignment]  # the verbs that are used
        return TaskOrchestrator(manager, shared=shared)

    def _kill(self) -> None:
        """As `kill -9`: from now on nothing that it still does has an effect."""
        program = self.program
        if program is None or program.killed:
            return
        self.kills += 1
        program.killed = True
        program.store.kill()
        program.level.kill()
        mine = asyncio.current_task()
        for task, of in list(self._tasks.items()):
            if of is program and task is not mine and not task.done():
                task.cancel()

    async def _take_over(self) -> None:
        await self.clock.sleep(self.chance.uniform(0, 300))
        async with InlineStore(self.database, Seams(clock=self.clock)) as store:
            await store.take_lease("next", ttl=timedelta(seconds=1), steal=True)
            await store.release_lease()

    # --- the person ------------------------------------------------------------------------------

    @property
    def _person(self) -> TaskOrchestrator:
        assert self.program is not None
        assert self.program.orchestrator is not None
        return self.program.orchestrator

    async def _submit(self) -> None:
        for number in range(1, TASKS + 1):
            earlier = [f"T{one:03d}" for one in range(1, number) if self.chance.random() < 0.15][:2]
            await self._person.submit(f"T{number:03d} edit", agent="coder", depends_on=earlier)

    async def _all(self) -> list[Task]:
        return await self._person.list_tasks(TaskFilter(include_finished=True, limit=1000))

    async def _is_over(self) -> bool:
        return all(task.is_finished for task in await self._all())

    async def _review(self) -> None:
        """Accepts work, sends lies and conflicts back, rejects what was sent back too often or can never begin."""
        tasks = {task.key: task for task in await self._all()}
        for task in tasks.values():
            with suppress(OstlerError):
                if task.state is TaskState.COMPLETED:
                    await self._judge(task)
                elif task.state is TaskState.QUEUED:
                    dead = [key for key in task.depends_on if tasks[key].state is TaskState.REJECTED]
                    parked = [one for one in await self._person.waits(task.key) if one.kind is WaitKind.HUMAN]
                    if dead or parked:
                        await self._person.reject(task.key, reason=f"needs {dead}" if dead else str(parked[0].reason))

    async def _judge(self, task: Task) -> None:
        if len(task.comments) > SENT_BACK_MOST:
            await self._person.reject(task.key, reason=SENT_BACK_TOO_OFTEN)
        elif not task.changed_files:
            await self._person.send_back(task.key, "you changed nothing")
        else:
            try:
                await self._person.accept(task.key)
            except MergeConflictError:
                self.world.did["conflicts"] += 1
                await self._person.send_back(task.key)

    def _faults_of(self, task: Task, tasks: Mapping[str, Task]) -> list[str]:
        """Merged exactly when it is accepted; rejected only for a reason that the night gave."""
        key, merges, executions = task.key, self.world.accepted[task.key], self.world.executions[task.key]
        faults = (
            [] if merges == (task.state is TaskState.ACCEPTED) else [f"{key} is {task.state}, merged {merges} times"]
        )
        if not task.is_finished:
            faults.append(f"{key} is still {task.state} in the morning")
        dead = [other for other in task.depends_on if tasks[other].state is TaskState.REJECTED]
        if dead and (executions or not str(task.error).startswith("needs ")):
            faults.append(f"{key} was begun {executions} times, though it needs {dead}: {task.error}")
        if task.state is TaskState.REJECTED and not dead:
            sent_back = task.error == SENT_BACK_TOO_OFTEN and len(task.comments) > SENT_BACK_MOST
            failed = str(task.error).startswith("failed 3 times") and executions >= 3
            if not (sent_back or failed):
                faults.append(f"{key} was rejected after {executions} executions: {task.error}")
        return faults
