"""A manager in virtual time on a simulated machine, and an agent that does what its requests say."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

from simulated_isolation import SimulatedIsolation
from simulated_machine import Machine, SimulatedAgent

from ostler.agents import Agent, AgentContext, AgentManifest, AgentRegistry
from ostler.errors import StoreError, StoreFullError
from ostler.failpoints import FaultPoint, Seams, no_fault
from ostler.isolation.registry import IsolationLevels
from ostler.lifecycle.instance import Instance, Runtime
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.open import open_manager
from ostler.lifecycle.settings import LifecycleSettings
from ostler.model.access import HOME_WORKSPACE_ID
from ostler.model.attempt import Attempt
from ostler.model.events import AgentEvent, AgentStateChangedEvent, Event
from ostler.model.instance import AgentInstance
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits, RestartPolicy, SpawnRequest
from ostler.model.states import IsolationLevel
from ostler.store import attempts, audit, events, moves
from ostler.testing.simulated import InlineStore, KeptDatabase, VirtualClock, run_virtual

SETTINGS = LifecycleSettings(lease_ttl=timedelta(minutes=10), tick=timedelta(seconds=10))


class Worker(Agent):
    """Works `work` seconds, says `say` signals, asks `ask`, raises `fail`, and answers `answer` or its execution."""

    init_seconds = 0.002
    shutdown_seconds = 0.001
    executions: list[Any]

    def __init__(self) -> None:
        self.context: AgentContext | None = None

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        await context.clock.sleep(self.init_seconds)

    async def process(self, request: Any) -> Any:
        context = self.context
        assert context is not None
        wanted = request if isinstance(request, dict) else {"answer": request}
        self.executions.append(wanted.get("id"))
        for number in range(wanted.get("say", 0)):
            context.signal(f"said-{number}", {"id": wanted.get("id")})
        if "ask" in wanted:
            said = await context.wait_for("approval", timeout=wanted["ask"])
            wanted = {**wanted, "answer": said.outcome}
        await context.clock.sleep(wanted.get("work", 0))
        if wanted.get("fail"):
            raise ValueError("as asked")
        if wanted.get("exit"):
            raise SystemExit(3)
        return wanted.get("answer")

    async def shutdown(self) -> None:
        assert self.context is not None
        await self.context.clock.sleep(self.shutdown_seconds)


class SlowStart(Worker):
    init_seconds = 0.2


class SlowEnd(Worker):
    shutdown_seconds = 50.0


class BadStart(Worker):
    async def initialize(self, context: AgentContext) -> None:
        del context
        raise RuntimeError("no")


class World:
    """One machine and one database; managers come and go."""

    def __init__(self, clock: VirtualClock, *, outlives: bool = True) -> None:
        self.clock = clock
        self.machine = Machine(clock, random.Random(1), outlives=outlives)
        self.database = KeptDatabase()
        #: The `id` of every request that an agent has begun.
        self.executions: list[Any] = []
        self.registry = AgentRegistry()
        self.worker = self.register(Worker)
        self.level = SimulatedIsolation(clock, self.machine)
        self.store = InlineStore(self.database)
        self.settings = SETTINGS
        self.fault: FaultPoint = no_fault
        #: Seconds that a commit takes.
        self.delay = 0.001
        #: What every commit fails with while it is set.
        self.trouble: type[StoreError] | None = None
        self._until_lost = 0
        self._manager: AgentLifecycleManager | None = None
        self._stack = AsyncExitStack()

    def register(self, agent: type[Worker]) -> AgentManifest:
        # As a class inside a function: the next program cannot import it.
        name = f"World.register.<locals>.{agent.__name__}"
        bound = type(agent.__name__, (agent,), {"executions": self.executions, "__qualname__": name})
        return self.registry.register(bound, name=agent.__name__, replace=True)

    @property
    def manager(self) -> AgentLifecycleManager:
        assert self._manager is not None
        return self._manager

    @property
    def runtime(self) -> Runtime:
        return self.manager._runtime  # noqa: SLF001 - a test of the inside

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AgentLifecycleManager]:
        self.level = SimulatedIsolation(self.clock, self.machine)
        levels = IsolationLevels(self.clock, sources={})
        levels.use(IsolationLevel.THREAD, self.level)
        levels.use(IsolationLevel.PROCESS, self.level)
        seams = Seams(clock=self.clock, chance=random.Random(2), fault=self.fault)
        self.store = InlineStore(self.database, seams, delay=lambda: self.delay, trouble=self._trouble)
        async with (
            self.store,
            open_manager(
                self.store, settings=self.settings, registry=self.registry, levels=levels, seams=seams
            ) as manager,
        ):
            self._manager = manager
            yield manager

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """As `open`, for a test that opens it again on the way."""
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(self.open())
        try:
            yield
        finally:
            await self._stack.aclose()

    async def reopen(self, *, keep: bool) -> None:
        self.manager.keep_agents = keep
        await self._stack.aclose()
        self.machine.misfortune.report_is_late = 1.0
        await self._stack.enter_async_context(self.open())

    def _trouble(self, writing: bool) -> StoreError | None:
        if not writing:
            return None
        self._until_lost -= 1
        if self._until_lost == 0:
            return StoreFullError()
        return None if self.trouble is None else self.trouble()

    # --- short ways ------------------------------------------------------------------------------

    async def spawn(self, agent: type[Worker] | None = None, *, key: str | None = None, **options: Any) -> UUID:
        manifest = self.worker if agent is None else self.register(agent)
        record = await self.manager.spawn(request_for(manifest, **options), idempotency_key=key)
        return record.instance_id

    def actor(self, instance_id: UUID) -> Instance:
        return self.runtime.instances[instance_id]

    def agent(self, instance_id: UUID) -> SimulatedAgent:
        (found,) = self.machine.living(instance_id)
        return found

    def record(self, instance_id: UUID) -> AgentInstance:
        """As it is committed."""
        found = moves.get_instance(self.database.reader, instance_id)
        assert found is not None
        return found

    def attempts(self, instance_id: UUID) -> list[Attempt]:
        return attempts.list_attempts(self.database.reader, instance_id)

    def events(self, instance_id: UUID | None = None) -> list[Event]:
        return list(events.read_events(self.database.reader, 0, instance_id=instance_id).events)

    def acts(self, instance_id: UUID) -> list[str]:
        """What the audit tells of it."""
        entries = audit.list_entries(self.database.reader, HOME_WORKSPACE_ID)
        return [one.action for one in entries if one.subject == f"instance:{instance_id}" and one.outcome == "ok"]

    def states(self, instance_id: UUID) -> list[str]:
        return [one.new_state.value for one in self.events(instance_id) if isinstance(one, AgentStateChangedEvent)]

    def of_kind(self, instance_id: UUID, kind: type[AgentEvent]) -> list[Any]:
        return [one for one in self.events(instance_id) if isinstance(one, kind)]

    async def until(self, holds: Callable[[], bool], *, seconds: float = 60.0) -> None:
        end = self.clock.mono() + seconds
        while not holds():
            assert self.clock.mono() < end, f"it did not come within {seconds} s"
            await self.clock.sleep(0.001)

    def lose_commit(self, number: int) -> None:
        """The next commit but so many fails."""
        self._until_lost = number

    def fill_disk(self) -> None:
        self.trouble = StoreFullError

    def free_disk(self) -> None:
        self.trouble = None


def request_for(manifest: AgentManifest, **options: Any) -> SpawnRequest:
    limits = ResourceLimits(
        execution_timeout=timedelta(seconds=options.pop("timeout", 30)),
        max_concurrent_tasks=options.pop("tasks", 2),
    )
    options.setdefault("restart_policy", RestartPolicy.immediate())
    return SpawnRequest(agent_definition_id=manifest.id, options=AgentSpawnOptions(resource_limits=limits, **options))


def virtual(
    test: Callable[..., Coroutine[Any, Any, None]] | None = None, *, outlives: bool = True
) -> Callable[..., Any]:
    """Run an async test, which takes a `World` first, in virtual time."""
    if test is None:
        return functools.partial(virtual, outlives=outlives)

    @functools.wraps(test)
    def run(**given: Any) -> None:
        clock = VirtualClock()
        run_virtual(clock, _with_world(clock, test, given, outlives=outlives))

    signature = inspect.signature(test)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]  # pytest reads the fixtures from it
        parameters=list(signature.parameters.values())[1:]
    )
    return run


async def _with_world(
    clock: VirtualClock, test: Callable[..., Awaitable[None]], given: dict[str, Any], *, outlives: bool
) -> None:
    world = World(clock, outlives=outlives)
    try:
        async with asyncio.timeout(100_000):  # of virtual time: a test that hangs ends at once
            await test(world, **given)
    finally:
        world.machine.power_off()
    assert not world.machine.faults, world.machine.faults
