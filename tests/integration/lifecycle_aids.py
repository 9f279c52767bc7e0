"""What the lifecycle tests lean on: an agent that does as it is told, a home to open again, and ways to wait."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import ostler
from ostler.agents import Agent, AgentContext, AgentRegistry
from ostler.isolation import IsolationLevels
from ostler.lifecycle import AgentLifecycleManager, LifecycleSettings
from ostler.lifecycle.observe import Observation
from ostler.model.events import AgentStateChangedEvent, Event
from ostler.model.instance import AgentInstance
from ostler.model.ledger import Attempt
from ostler.model.query import GetInstancesFilter
from ostler.model.spawn import AgentSpawnOptions, SpawnRequest
from ostler.model.states import AgentState, IsolationLevel
from ostler.store import Seams
from ostler.testing.clock import ManualClock

#: Real seconds in which a machine under load gets anything done that these tests wait for.
PATIENCE = 20.0
HOUR = timedelta(hours=1)
WORKER = "worker"


async def until(holds: Callable[[], bool | Awaitable[bool]], *, what: str = "") -> None:
    """Wait for something that happens elsewhere, and by itself."""
    end = time.monotonic() + PATIENCE
    while True:
        answer = holds()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        assert time.monotonic() < end, what or "it did not happen"
        await asyncio.sleep(0.002)


class Gate:
    """Shut until it is opened; may be waited at from any loop, and heeds cancelling."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._lock = threading.Lock()
        self._open = is_open
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._open:
                return
            passed = loop.create_future()
            self._waiting.append((loop, passed))
        await passed

    def open(self) -> None:
        with self._lock:
            self._open = True
            waiting, self._waiting = self._waiting, []
        for loop, passed in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_pass, passed)

    def shut(self) -> None:
        with self._lock:
            self._open = False


def _pass(passed: asyncio.Future[None]) -> None:
    if not passed.done():
        passed.set_result(None)


@dataclass(kw_only=True)
class Stage:
    """What the test and its agents share."""

    #: Requests that say "block" wait here.
    gate: Gate = field(default_factory=Gate)
    starting: Gate = field(default_factory=lambda: Gate(is_open=True))
    ending: Gate = field(default_factory=lambda: Gate(is_open=True))
    #: Which starts were begun, and which were shut down in order.
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    #: As many starts fail from now on.
    bad_starts: int = 0
    #: What `health` answers; an exception is raised, a gate waited at.
    health: Any = None
    looks: int = 0
    #: A real block: the loop of the agent stands still until it is set.
    wall: threading.Event = field(default_factory=threading.Event)


class Worker(Agent):
    """Does what the request says."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._context: AgentContext | None = None

    @property
    def context(self) -> AgentContext:
        assert self._context is not None
        return self._context

    async def initialize(self, context: AgentContext) -> None:
        self._context = context
        self._stage.starts.append(context.attempt)
        if self._stage.bad_starts:
            self._stage.bad_starts -= 1
            raise ValueError("a bad start")
        await self._stage.starting.wait()

    async def process(self, request: Any) -> Any:
        self._stage.begun.append(str(request))
        match request:
            case "block":
                await self._stage.gate.wait()
            case "wait":
                return (await self.context.wait_for("answer", reason="a test")).outcome
            case "crash":
                raise SystemExit(3)
            case "err":
                raise ValueError("it went wrong")
            case {"signals": int(count)}:
                for number in range(count):
                    self.context.signal("count", {"number": number})
            case {"tokens": int(count)}:
                self.context.report_tokens(count)
            case _:
                self._plainly(request)
        return request

    def _plainly(self, request: Any) -> None:
        """All that needs no awaiting; some of it stops the loop on which it lives, for as long as it takes."""
        if isinstance(request, dict):
            for number in range(request.get("reports", 0)):
                self.context.report(message=f"step {number}")
        elif request == "wall":
            self._stage.wall.wait()
        elif request == "mumble":
            while not self._stage.wall.wait(0.005):
                self.context.report(message="still at it")
        elif request == "write":
            assert self.context.workspace is not None
            (self.context.workspace / "work.txt").write_text("done")

    async def health(self) -> Any:
        self._stage.looks += 1
        found = self._stage.health
        if isinstance(found, Gate):
            await found.wait()
        if isinstance(found, Exception):
            raise found
        return found

    async def shutdown(self) -> None:
        await self._stage.ending.wait()
        self._stage.ends.append(self.context.attempt)


@dataclass(kw_only=True)
class Scene:
    """One home and one clock; managers come and go."""

    home: Path
    clock: ManualClock = field(default_factory=ManualClock)
    stage: Stage = field(default_factory=Stage)
    settings: LifecycleSettings = field(default_factory=lambda: LifecycleSettings(close_grace=timedelta(0)))
    manager: AgentLifecycleManager = field(init=False)
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def registry(self, **about: Any) -> AgentRegistry:
        registry = AgentRegistry()
        self.register(registry, **about)
        return registry

    def register(self, registry: AgentRegistry, **about: Any) -> UUID:
        return registry.register(lambda: Worker(self.stage), name=WORKER, **about).id

    @asynccontextmanager
    async def open(
        self, *, levels: IsolationLevels | None = None, registry: AgentRegistry | None = None, **about: Any
    ) -> AsyncIterator[AgentLifecycleManager]:
        seams = Seams(clock=self.clock)
        known = registry or self.registry(**about)
        async with ostler.open(
            self.home, settings=self.settings, registry=known, levels=levels, seams=seams
        ) as manager:
            self.manager = manager
            try:
                yield manager
            finally:
                for gate in (self.stage.gate, self.stage.starting, self.stage.ending):
                    gate.open()
                self.stage.wall.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- doing ----------------------------------------------------------------------------------

    async def spawn(self, level: IsolationLevel = IsolationLevel.NONE, **options: Any) -> AgentInstance:
        return await self.manager.spawn(self.request(level, **options))

    def request(self, level: IsolationLevel = IsolationLevel.NONE, **options: Any) -> SpawnRequest:
        definition = self.manager.registry.find(WORKER).id
        return SpawnRequest(agent_definition_id=definition, options=AgentSpawnOptions(isolation_level=level, **options))

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Let it go on beside the test; whatever it comes to is looked at."""
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def busy(self, instance: AgentInstance, request: str = "block") -> asyncio.Task[Any]:
        """Have it work on something that ends when the test says so."""
        before = len(self.stage.begun)
        task = self.begin(self.manager.process(instance.instance_id, request))
        await until(lambda: len(self.stage.begun) > before)
        return task

    async def crash(self, instance: AgentInstance) -> None:
        task = self.begin(self.manager.process(instance.instance_id, "crash"))
        await asyncio.wait([task])
        assert isinstance(task.exception(), ostler.AgentGoneError)

    async def crash_again(self, instance: AgentInstance) -> None:
        """Whatever it comes to: it may be dead already."""
        await asyncio.wait([self.begin(self.manager.process(instance.instance_id, "crash"))])

    async def tick(self, seconds: int, *, step: float = 1.0) -> None:
        """Let time pass in steps, each of which has its effect before the next."""
        for _ in range(int(seconds / step)):
            self.clock.advance(step)
            await self.calm()

    async def drift(self, seconds: int) -> None:
        """The same, but nobody is waited for: what hangs may hang."""
        for _ in range(seconds):
            self.clock.advance(1)
            for _ in range(5):
                await asyncio.sleep(0)
            await self.manager.store.head()

    async def calm(self) -> None:
        """Until nothing is under way by itself that does not wait for the clock or for a gate."""
        house = self.manager._house  # noqa: SLF001 - tests may look inside
        for _ in range(5):
            await asyncio.sleep(0)
        await until(lambda: all(not life.pulse.looking for life in house.living()))
        await self.manager.store.head()

    # --- looking --------------------------------------------------------------------------------

    async def record(self, instance: AgentInstance) -> AgentInstance:
        found = await self.manager.store.get_instance(instance.instance_id)
        assert found is not None
        return found

    async def state(self, instance: AgentInstance) -> AgentState:
        return (await self.record(instance)).state

    async def reaches(self, instance: AgentInstance, state: AgentState, attempt: int | None = None) -> AgentInstance:
        """The record, once it says this and the manager has acted on it."""
        lives = self.manager._house.lives  # noqa: SLF001 - tests may look inside

        async def there() -> bool:
            record = await self.record(instance)
            life = lives.get(instance.instance_id)
            settled = life is None or (life.state is state and not life.lock.locked())
            return settled and record.state is state and attempt in {None, record.attempt}

        await until(there, what=f"it is not {state}")
        return await self.record(instance)

    async def only(self) -> AgentInstance:
        """The one instance there is, as soon as it is there."""
        wanted = GetInstancesFilter(include_terminated=True)
        await until(lambda: self._any(wanted))
        (found,) = await self.manager.get_active_instances(wanted)
        return found

    async def _any(self, wanted: GetInstancesFilter) -> bool:
        return bool(await self.manager.get_active_instances(wanted))

    async def attempts(self, instance: AgentInstance) -> list[Attempt]:
        return await self.manager.store.list_attempts(instance.instance_id)

    async def events(self, instance: AgentInstance, kind: type[Event] = Event) -> list[Any]:
        found = await self.manager.store.read_events(instance_id=instance.instance_id, limit=1000)
        return [one for one in found if isinstance(one, kind)]

    async def events_all(self, instance: AgentInstance) -> list[int]:
        """The numbers of all its events."""
        return [one.sequence async for one in self.manager.store.replay(instance_id=instance.instance_id)]


async def all_of(stream: Observation) -> list[Any]:
    """All that it says until it ends."""
    async with asyncio.timeout(PATIENCE):
        return [one async for one in stream]


async def take(stream: Observation, count: int) -> list[Any]:
    async with asyncio.timeout(PATIENCE):
        return [await anext(stream) for _ in range(count)]


def moves(seen: list[Any]) -> list[AgentState]:
    return [one.new_state for one in seen if isinstance(one, AgentStateChangedEvent)]


async def delivered(scene: Scene) -> None:
    """Until everything that is committed has gone to whoever looks."""
    fanout = scene.manager._fanout  # noqa: SLF001 - tests may look inside
    head = (await scene.manager.store.head()).sequence
    await until(lambda: fanout.cursor >= head)


def kill_manager(home: Path, what: str) -> dict[str, UUID]:
    """Let a program of its own open this home, do what `what` names in `lifecycle_victim`, and die of `kill -9`."""
    program = Path(__file__).with_name("lifecycle_victim.py")
    with subprocess.Popen([sys.executable, str(program), str(home), what], stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        line = victim.stdout.readline()
        victim.kill()
    assert victim.returncode == -signal.SIGKILL, line
    return {name: UUID(text) for name, text in json.loads(line).items()}
