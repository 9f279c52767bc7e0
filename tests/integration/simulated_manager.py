"""A manager under random verbs and misfortune, made from one seed: the same seed gives the same history.

Agents are spawned, asked, suspended, restarted and terminated at random, while starts fail and hang, notices of deaths
are lost, doubled and late, the store is busy or full, clocks jump, callers give up, and managers are closed or killed.
Then the misfortune ends, everything must come to rest, and records, log and machine are compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from folding import all_events, all_instances, invariant_faults
from simulated_checks import Execution, exit_faults, machine_faults, observer_faults, signal_faults
from simulated_isolation import SimulatedIsolation
from simulated_machine import Machine, Misfortune

from ostler.agents import Agent, AgentContext, AgentManifest, AgentRegistry
from ostler.errors import ExecutionTimeoutError, OstlerError, StoreBusyError, StoreError, StoreFullError
from ostler.failpoints import POINTS, InjectedCrash, Seams
from ostler.isolation.registry import IsolationLevels
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.open import open_manager
from ostler.lifecycle.settings import LifecycleSettings
from ostler.model.access import HOME_WORKSPACE_ID, Permission, Principal, Role, Workspace
from ostler.model.attempt import RequestState
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits, RestartPolicy, SpawnRequest, TerminationOptions
from ostler.model.states import AgentState, IsolationLevel, SuspendDepth, Tier
from ostler.model.wait import WaitKind
from ostler.store import requests, waits, workspaces
from ostler.testing.simulated import InlineStore, KeptDatabase, VirtualClock, run_virtual

AGES = timedelta(days=3650)
#: The monitor looks seldom, to save time; nothing is removed, though the clock jumps by years.
SETTINGS = LifecycleSettings.from_dict(
    {
        "tick": "20s",
        "lease_ttl": "10m",
        "metrics_interval": "10m",
        "sweep_interval": "12h",
        "hold_timeout": "60s",
        "outlive": "1d",
        "retention": {"finished": AGES, "events": AGES},
    }
)
SMALL = UUID(int=77)
CALM_ROUNDS = 12
_PROGRAM: ContextVar[Program | None] = ContextVar("program", default=None)
_KILL_POINTS = sorted(point for point in POINTS if "migrate" not in point)


@dataclass(kw_only=True)
class Report:
    seed: int
    faults: list[str]
    hits: Counter[str]
    events: int
    #: Of the whole log.
    digest: str

    def require(self) -> None:
        assert not self.faults, f"seed {self.seed}:\n" + "\n".join(self.faults)


@dataclass(eq=False)
class Program:
    """One manager, its store and its callers. Killed, nothing of it has an effect any more."""

    store: InlineStore
    level: SimulatedIsolation
    manager: AgentLifecycleManager | None = None
    main: asyncio.Task[None] | None = None
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    callers: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    killed: bool = False
    #: The store has failed since it was opened.
    had_trouble: bool = False


class Scripted(Agent):
    """Does what the request says, and tells the simulation of it."""

    simulation: Simulation

    def __init__(self) -> None:
        self.context: AgentContext | None = None

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        await context.clock.sleep(self.simulation.nature.uniform(0, 0.5))

    async def process(self, request: dict[str, Any]) -> Any:
        context = self.context
        assert context is not None
        execution = self.simulation.begin_execution(context, request.get("id"))
        for number in range(request["say"]):
            name = f"{execution.number}-{number}"
            execution.signals.append(name)
            context.signal(name)
            await context.clock.sleep(request["pause"])
        context.report_tokens(1)
        if request["ask"]:
            limit = request["ask"]
            await context.wait_for("approval", timeout=None if limit > 60 else timedelta(seconds=limit))
        context.report(0.5)
        await context.clock.sleep(request["work"])
        if request["fail"]:
            raise ValueError("as asked")
        execution.done = True
        return {"execution": execution.number}

    async def final_state(self) -> Any:
        return {"is": "final"}

    async def shutdown(self) -> None:
        assert self.context is not None
        await self.context.clock.sleep(self.simulation.nature.uniform(0, 0.1))


class Simulation:
    def __init__(self, seed: int, *, outlives: bool, kills: bool, steps: int = 100) -> None:
        self.seed = seed
        self.steps = steps
        self.kills = kills
        self.clock = VirtualClock()
        #: What the driver does, what the agents do, and how long the store takes.
        self.chance = random.Random(seed)
        self.nature = random.Random(f"{seed} nature")
        self.speed = random.Random(f"{seed} speed")
        machine = random.Random(f"{seed} machine")
        self.machine = Machine(self.clock, machine, Misfortune.drawn(machine), outlives=outlives)
        self.database = KeptDatabase()
        #: Acts in a second.
        self.pace = self.chance.choice((1.0, 10.0, 100.0))
        self.space = SMALL if seed % 2 else HOME_WORKSPACE_ID
        self.faults: list[str] = []
        self.hits = self.machine.hits
        self.executions: dict[tuple[UUID, str], list[Execution]] = {}
        self.signals: dict[tuple[UUID, int], list[Execution]] = {}
        self.cancelled: set[tuple[UUID, str]] = set()
        self.answers: dict[tuple[UUID, str], Any] = {}
        self.asked: list[tuple[UUID, str, dict[str, Any]]] = []
        self.seen: list[tuple[UUID, list[Any]]] = []
        self.trouble: type[StoreError] | None = None
        self.kill_at: tuple[str, int] | None = None
        self.program: Program | None = None
        self.definition: AgentManifest | None = None
        self._tasks: dict[asyncio.Task[Any], Program | None] = {}
        self._number = 0

    def run(self) -> Report:
        return run_virtual(self.clock, self._run())

    async def _run(self) -> Report:
        asyncio.get_running_loop().set_task_factory(self._make_task)
        try:
            await self._open()
            await self._settle()
            for _ in range(3):
                self._call("_spawn", self._spawn())
            for _ in range(self.steps):
                await self._step()
                await self.clock.sleep(self.chance.expovariate(self.pace))
                if self.machine.faults or self.faults:
                    break
            await self._rest()
        finally:
            self.machine.power_off()
        log = all_events(self.database.reader)
        digest = hashlib.sha256("\n".join(map(repr, log)).encode()).hexdigest()
        faults = [*self.machine.faults, *self.faults]
        return Report(seed=self.seed, faults=faults, hits=self.hits, events=len(log), digest=digest)

    # --- programs --------------------------------------------------------------------------------

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        """Every task is known in the order of its making, with the program that made it."""
        task = asyncio.Task(work, loop=loop, **more)
        if len(self._tasks) > 500:
            self._tasks = {one: of for one, of in self._tasks.items() if not one.done()}
        self._tasks[task] = _PROGRAM.get()
        return task

    def _in_program(self, program: Program, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = copy_context()
        context.run(_PROGRAM.set, program)
        task: asyncio.Task[Any] = context.run(asyncio.get_running_loop().create_task, work)
        return task

    async def _open(self) -> None:
        """Open a manager; one that cannot open, or is killed on the way, is followed by another."""
        while True:
            seams = Seams(clock=self.clock, chance=random.Random(self.chance.random()), fault=self._pass_point)
            store = InlineStore(self.database, seams, delay=self._delay, trouble=self._trouble)
            self.program = program = Program(store, SimulatedIsolation(self.clock, self.machine))
            program.main = self._in_program(program, self._manage(program, seams))
            await asyncio.wait(
                [program.main, asyncio.ensure_future(program.opened.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            if program.opened.is_set() and not program.killed:
                return
            await self._take_over()

    async def _manage(self, program: Program, seams: Seams) -> None:
        levels = IsolationLevels(self.clock, sources={})
        for level in (IsolationLevel.THREAD, IsolationLevel.PROCESS):
            levels.use(level, program.level)
        registry = AgentRegistry()
        scripted = type("Scripted", (Scripted,), {"simulation": self, "__qualname__": "Simulation.<locals>.Scripted"})
        self.definition = registry.register(scripted, name="scripted")
        with suppress(OstlerError):
            async with (
                program.store,
                open_manager(
                    program.store, settings=SETTINGS, registry=registry, levels=levels, seams=seams
                ) as manager,
            ):
                principal = Principal(
                    principal_id=UUID(int=9),
                    name="simulation",
                    workspace_id=self.space,
                    roles=(Role.ADMIN,),
                    permissions=(Permission.AGENTS_READ,),
                    created_at=self.clock.wall(),
                )
                program.manager = manager.acting_as(principal)
                program.opened.set()
                await program.leave.wait()
                manager.keep_agents = program.manager.keep_agents

    async def _settle(self) -> None:
        space = Workspace(workspace_id=SMALL, name="small", tier=Tier.CORE, created_at=self.clock.wall())
        assert self.program is not None
        await self.program.store.run(workspaces.put_workspace, space)

    async def _close(self, *, keep: bool = False) -> None:
        program = self.program
        if program is None or program.main is None:
            return
        if program.manager is not None:
            program.manager.keep_agents = keep
        program.leave.set()
        began = self.clock.mono()
        await asyncio.wait([program.main])
        if self.clock.mono() - began > 2 * SETTINGS.close_grace.total_seconds() + 40:
            self.faults.append(f"closing took {self.clock.mono() - began:.0f} s")
        await self._all_answered(program, "after its manager was closed")
        left = [task.get_name() for task, of in self._tasks.items() if of is program and not task.done()]
        left = [name for name in left if name.startswith("ostler-instance")]
        if left and not program.killed:
            self.faults.append(f"tasks of a closed manager go on: {left}")

    def _kill(self) -> None:
        """As `kill -9`: from now on nothing that the program still does has an effect."""
        program = self.program
        if program is None or program.killed:
            return
        self.hits["manager_killed"] += 1
        program.killed = True
        program.store.kill()
        program.level.kill()
        program.callers.clear()
        mine = asyncio.current_task()
        for task, of in list(self._tasks.items()):
            if of is program and task is not mine and not task.done():
                task.cancel()

    async def _take_over(self) -> None:
        """A while without a manager, in which agents may die; then the lease of the dead one is taken away."""
        self.kill_at = None
        self.trouble = None
        await self.clock.sleep(self.chance.uniform(0, 5))
        for agent in self.machine.living():
            if self.chance.random() < 0.1:
                self.hits["died_alone"] += 1
                agent.die()
        async with InlineStore(self.database, Seams(clock=self.clock)) as store:
            await store.take_lease("next", ttl=timedelta(seconds=1), steal=True)
            await store.release_lease()

    def _pass_point(self, name: str) -> None:
        if self.kill_at is not None and self.kill_at[0] == name and _PROGRAM.get() is not None:
            left = self.kill_at[1] - 1
            self.kill_at = (name, left)
            if left == 0:
                self.hits[f"killed at {name}"] += 1
                self._kill()
                if name.startswith("store."):
                    raise InjectedCrash(name)

    def _delay(self) -> float:
        return self.speed.uniform(0, 0.3) if self.speed.random() < 0.02 else self.speed.uniform(0, 0.005)

    def _trouble(self, writing: bool) -> StoreError | None:
        if self.trouble is None or self.speed.random() < 0.5 or (not writing and self.trouble is StoreFullError):
            return None
        if self.program is not None:
            self.program.had_trouble = True
        self.hits[self.trouble.__name__] += 1
        return self.trouble()

    # --- what happens ----------------------------------------------------------------------------

    async def _step(self) -> None:
        program = self.program
        if program is not None and program.killed:  # at a fault point
            await self._take_over()
            await self._open()
            self._ask_again()
        if self.chance.random() < 0.06:
            await self._change_manager()
            return
        acts: dict[Callable[[], Coroutine[Any, Any, Any] | None], int] = {
            self._spawn: 6,
            self._ask: 20,
            self._suspend: 4,
            self._resume: 4,
            self._terminate: 3,
            self._restart: 2,
            self._answer: 4,
            self._look: 1,
            self._observe: 1,
            self._death: 3,
            self._jump: 1,
            self._weather: 2,
        }
        act = self.chance.choices(list(acts), list(acts.values()))[0]
        work = act()
        if work is not None:
            self._call(act.__name__, work)

    async def _change_manager(self) -> None:
        kind = self.chance.choice(("kill", "kill_at", "kill_at", "close", "keep") if self.kills else ("close", "keep"))
        if kind == "kill_at":
            # Mostly between an answer and its commit, or a commit and its acknowledgement.
            points = _KILL_POINTS if self.chance.random() < 0.5 else ("store.commit.before", "store.ack.before")
            self.kill_at = (self.chance.choice(points), self.chance.randrange(1, 6))
            return
        if kind == "kill":
            for _ in range(self.chance.randrange(20)):
                await asyncio.sleep(0)
            self._kill()
        else:
            self.hits[f"manager_{kind}"] += 1
            self.trouble = None if self.chance.random() < 0.7 else self.trouble
            await self._close(keep=kind == "keep")
        await self._take_over()
        await self._open()
        self._ask_again()

    def _call(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        assert self.program is not None
        program = self.program
        task = self._in_program(program, self._caller(program, name, work))
        program.callers[task] = name
        if self.chance.random() < 0.15:
            self.hits["caller_gone"] += 1
            loop = asyncio.get_running_loop()
            first = self.chance.expovariate(5)
            loop.call_later(first, task.cancel)
            if self.chance.random() < 0.3:
                loop.call_later(first + self.chance.expovariate(100), task.cancel)

    async def _caller(self, program: Program, name: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except OstlerError as error:
            if type(error).__name__ == "ActorEndedError":
                self.faults.append(f"{name} raised {error!r}")
        except Exception as error:  # noqa: BLE001 - it is a fault of ours
            if not program.killed:
                self.faults.append(f"{name} raised {type(error).__name__}: {error}")

    @property
    def manager(self) -> AgentLifecycleManager:
        assert self.program is not None
        assert self.program.manager is not None
        return self.program.manager

    def _some(self) -> UUID | None:
        """Mostly one that is active."""
        known = all_instances(self.database.reader)
        active = [one for one in known if one.is_active]
        chosen = active if active and self.chance.random() < 0.8 else known
        return self.chance.choice(chosen[-6:]).instance_id if chosen else None

    def _spawn(self) -> Coroutine[Any, Any, Any]:
        chance = self.chance
        linear = RestartPolicy.from_dict({"type": "linear", "initial_delay": "3s"})
        policies = (None, RestartPolicy.immediate(), RestartPolicy.default(), linear)
        policy = chance.choice(policies[:2] if self.space == SMALL else policies)
        options = AgentSpawnOptions(
            isolation_level=IsolationLevel.PROCESS
            if self.machine.outlives and self.space != SMALL
            else IsolationLevel.THREAD,
            restart_policy=policy,
            resource_limits=ResourceLimits(execution_timeout=timedelta(seconds=30), max_concurrent_tasks=2),
            initialization_timeout=timedelta(seconds=10),
        )
        key = None if chance.random() < 0.7 else f"key-{chance.randrange(4)}"
        assert self.definition is not None
        work = self._request()
        # One that always fails, or is late, would be restarted for ever, as it is healthy in between.
        work |= {"fail": False, "ask": min(work["ask"], 5), "work": min(work["work"], 20.0)}
        job = {"request": work} if chance.random() < 0.15 else None
        request = SpawnRequest(
            agent_definition_id=self.definition.id, options=options if key is None else None, job=job
        )
        return self.manager.spawn(request, idempotency_key=key)

    def _ask(self) -> Coroutine[Any, Any, Any] | None:
        chance, chosen = self.chance, self._some()
        if chosen is None:
            return None
        if self.asked and chance.random() < 0.25:
            return self._ask_named(*chance.choice(self.asked[-6:]))
        request = self._request()
        if chance.random() < 0.4:
            limit = chance.choice((None, None, 5.0))
            return self.manager.process(chosen, request, timeout=limit, wait=chance.random() < 0.8)
        name = f"r{len(self.asked)}"
        request["id"] = name
        self.asked.append((chosen, name, request))
        return self._ask_named(chosen, name, request)

    def _request(self) -> dict[str, Any]:
        chance = self.chance
        return {
            "say": chance.choice((0, 0, 1, 3)),
            "pause": chance.choice((0, 0.001, 0.1)),
            "ask": chance.choice((0, 0, 0, 5, 100)),
            "work": chance.expovariate(chance.choice((0.1, 1, 1000))),
            "fail": chance.random() < 0.05,
        }

    def _ask_again(self) -> None:
        """As callers do that have lost their manager in mid-work."""
        for asked in self.asked[-3:]:
            self._call("ask_again", self._ask_named(*asked))

    async def _ask_named(self, instance_id: UUID, name: str, request: dict[str, Any]) -> None:
        program, key = self.program, (instance_id, name)
        assert program is not None
        try:
            answer = await self.manager.process(
                instance_id, request, request_id=name, retries=self.chance.choice((0, 0, 2))
            )
        except (asyncio.CancelledError, ExecutionTimeoutError):
            self.cancelled.add(key)
            raise
        if program.killed:
            return
        row = requests.get_request(self.database.reader, instance_id, name)
        if row is None or row.state is not RequestState.DONE:
            self.hits["answered_unwritten"] += 1
            if not program.had_trouble:
                self.faults.append(f"request {name} was answered before its answer was kept")
            return
        before = self.answers.setdefault(key, answer)
        if before != answer:
            self.faults.append(f"request {name} was answered with {before}, then with {answer}")
        done = next((one for one in self.executions.get(key, []) if one.number == answer["execution"]), None)
        if done is None:
            self.faults.append(f"request {name} was answered with {answer}, which no agent gave")
        else:
            self.faults += signal_faults(self.database.reader, instance_id, done.signals)

    def _suspend(self) -> Coroutine[Any, Any, Any] | None:
        chosen, chance = self._some(), self.chance
        depth = chance.choice((None, *SuspendDepth))
        after = chance.uniform(1, 300) if chance.random() < 0.5 else None
        return self.manager.suspend(chosen, depth, resume_after=after) if chosen else None

    def _resume(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self.manager.resume(chosen) if chosen else None

    def _terminate(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        options = self.chance.choice(
            (
                TerminationOptions.default(),
                TerminationOptions.immediate(),
                TerminationOptions(graceful_timeout=timedelta(seconds=2), persist_final_state=True),
                TerminationOptions(graceful_timeout=timedelta(seconds=1), force_if_timeout=False),
            )
        )
        return self.manager.terminate(chosen, options) if chosen else None

    def _restart(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self.manager.restart(chosen) if chosen else None

    def _answer(self) -> Coroutine[Any, Any, Any] | None:
        found = [one for one in waits.open_waits(self.database.reader) if one.kind is WaitKind.HUMAN]
        return self.manager.answer(self.chance.choice(found).wait_id, "yes") if found else None

    def _look(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        return self.manager.why(chosen) if chosen and self.chance.random() < 0.5 else self.manager.get_statistics()

    def _observe(self) -> Coroutine[Any, Any, Any] | None:
        chosen = self._some()
        if chosen is None or self.program is None:
            return None
        self.hits["observer"] += 1
        seen: list[Any] = []
        self.seen.append((chosen, seen))
        stream = self.manager.observe(chosen, after=self.chance.choice((None, 0)))
        slow = self.chance.choice((0.0, 0.0, 40.0))

        async def look() -> None:
            with suppress(OstlerError):
                async for event in stream:
                    seen.append(event)
                    await self.clock.sleep(slow)

        self._in_program(self.program, look())
        return None

    def _death(self) -> None:
        living = self.machine.living()
        if living:
            self.hits["death"] += 1
            self.chance.choice(living).die()

    def _jump(self) -> None:
        self.hits["clock_jump"] += 1
        year = timedelta(days=365)
        if self.chance.random() < 0.3:
            self.clock.suspend_machine(self.chance.uniform(0, 3600))
        else:
            self.clock.jump(self.chance.choice((-year, year, timedelta(hours=1), timedelta(seconds=-10))))

    def _weather(self) -> None:
        self.trouble = self.chance.choice((None, None, StoreBusyError, StoreFullError))

    # --- what agents do --------------------------------------------------------------------------

    def begin_execution(self, context: AgentContext, name: str | None) -> Execution:
        self._number += 1
        agent = self.machine.agents[context.instance_id, context.attempt]
        execution = Execution(self._number, agent)
        self.signals.setdefault((context.instance_id, context.attempt), []).append(execution)
        if name is not None:
            key = (context.instance_id, name)
            before = self.executions.setdefault(key, [])
            self._check_again(key, before)
            before.append(execution)
        return execution

    def _check_again(self, key: tuple[UUID, str], before: list[Execution]) -> None:
        """An id is executed again only after its agent was lost, or after it failed or was cancelled."""
        row = requests.get_request(self.database.reader, *key)
        if row is not None and row.state is RequestState.DONE:
            self.faults.append(f"request {key[1]} is executed again, although its answer is kept")
        for one in before:
            if one.done and not one.agent.dead and not one.agent.stuck and key not in self.cancelled:
                self.faults.append(f"request {key[1]} is executed again, although its agent has the answer")

    # --- the end ---------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """The misfortune ends: everything that was asked must come to an end, and the record must be true."""
        self.trouble = self.kill_at = None
        if self.program is not None and self.program.killed:
            await self._take_over()
            await self._open()
        self.machine.misfortune = Misfortune()
        self.machine.settle()
        for _ in range(CALM_ROUNDS):
            await self.clock.sleep(100)
            await self._let_all_go_on()
        await self.clock.sleep(100)
        reader = self.database.reader
        assert self.program is not None
        await self._all_answered(self.program, "in the calm")
        self.faults += machine_faults(reader, self.machine)
        self.faults += exit_faults(reader, self.machine)
        for instance_id, seen in self.seen:
            self.faults += observer_faults(reader, instance_id, seen)
        for record in all_instances(reader):
            with suppress(OstlerError):
                await self.manager.terminate(record.instance_id, TerminationOptions.immediate())
        await self.clock.sleep(60)
        if self.machine.living():
            self.faults.append(f"after everything was terminated, {len(self.machine.living())} agents live")
        for record in all_instances(reader):
            if record.state is not AgentState.TERMINATED:
                self.faults.append(f"{record.instance_id} was terminated and is {record.state}")
        await self._close()
        self.faults += invariant_faults(reader)
        self.faults += self._all_signals()

    async def _let_all_go_on(self) -> None:
        """What stands still would stay so for ever, and so would its callers."""
        for wait in waits.open_waits(self.database.reader):
            with suppress(OstlerError):
                if wait.kind is WaitKind.RESUME and wait.instance_id is not None:
                    await self.manager.resume(wait.instance_id)
                elif wait.kind is WaitKind.HUMAN:
                    await self.manager.answer(wait.wait_id, "yes")

    async def _all_answered(self, program: Program, when: str) -> None:
        await asyncio.sleep(0.1)
        self.faults += [f"{name} was not answered {when}" for task, name in program.callers.items() if not task.done()]
        program.callers = {}

    def _all_signals(self) -> list[str]:
        faults: list[str] = []
        for (instance_id, attempt), executions in self.signals.items():
            said = [name for one in executions for name in one.signals]
            whole = self.machine.outlives and not executions[0].agent.unheard
            faults += signal_faults(self.database.reader, instance_id, said, attempt=attempt, whole=whole)
        return faults


def simulate(seed: int, *, outlives: bool = False, kills: bool = True, steps: int = 100) -> Report:
    return Simulation(seed, outlives=outlives, kills=kills, steps=steps).run()
