"""What the tests of the lifecycle stand on: managers of one home, a clock to drive, agents that do as they are told."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pytest
from lifecycle_agents import Actor, Stage

import ostler
from ostler import (
    HOME_WORKSPACE_ID,
    Agent,
    AgentGoneError,
    AgentHandle,
    AgentInstance,
    AgentLifecycleManager,
    AgentSpawnOptions,
    AgentState,
    AgentStateChangedEvent,
    Attempt,
    AuditEntry,
    Clock,
    Event,
    GetInstancesFilter,
    IsolationLevel,
    LifecycleSettings,
    Observation,
    Permission,
    Principal,
    Role,
    Seams,
    SpawnRequest,
    Tier,
    Wait,
    Workspace,
)
from ostler.store import attempts, audit, events, workspaces
from ostler.store.transaction import Transaction
from ostler.testing.clock import ManualClock

T = TypeVar("T")
E = TypeVar("E", bound=Event)

NONE, THREAD, PROCESS = IsolationLevel.NONE, IsolationLevel.THREAD, IsolationLevel.PROCESS
LEVELS = (NONE, THREAD, PROCESS)
S = AgentState
#: Real seconds in which a machine under load gets anything done that these tests wait for.
PATIENCE = 60.0
HOUR = timedelta(hours=1)
SETTINGS = LifecycleSettings(close_grace=timedelta(minutes=1))


def at(*levels: IsolationLevel) -> pytest.MarkDecorator:
    """Run a test, or every test of a module, at these levels alone."""
    return pytest.mark.parametrize("level", levels, ids=str)


def do(what: str, /, **more: Any) -> dict[str, Any]:
    """A request to an actor."""
    return {"do": what, **more}


async def until(holds: Callable[[], bool | Awaitable[bool]], what: str = "it did not happen") -> None:
    """Wait for something that happens elsewhere, and by itself."""
    end = time.monotonic() + PATIENCE
    while True:
        answer = holds()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        assert time.monotonic() < end, what
        await asyncio.sleep(0.002)


def _monitor_sleeps() -> bool:
    """Whether no monitor reads or sweeps: time that passes meanwhile would begin its next round later."""
    for task in asyncio.all_tasks():
        if task.get_name() == "ostler-monitor":
            waits_in: Any = task.get_coro()
            while waits_in is not None and getattr(waits_in, "cr_code", None) is not ManualClock.sleep.__code__:
                waits_in = getattr(waits_in, "cr_await", None)
            if waits_in is None:
                return False
    return True


class Crew:
    """Managers of one home come and go; agents, a clock and a stage stay."""

    def __init__(self, home: Path, clock: Clock, stage: Stage, level: IsolationLevel = THREAD) -> None:
        self.home = home
        self.clock = clock
        self.stage = stage
        self.level = level
        #: Where the managers keep their record; the home unless a test says otherwise.
        self.where: Any = home
        self.settings = SETTINGS
        self._manager: AgentLifecycleManager | None = None
        self._opening: AbstractAsyncContextManager[AgentLifecycleManager] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def manager(self) -> AgentLifecycleManager:
        assert self._manager is not None, "no manager is open"
        return self._manager

    @property
    def is_open(self) -> bool:
        return self._manager is not None

    @property
    def runtime(self) -> Any:
        """What a test may look at where nothing outside tells."""
        return self.manager._runtime  # noqa: SLF001 - tests may look inside

    # --- managers --------------------------------------------------------------------------------

    async def open(self, **more: Any) -> AgentLifecycleManager:
        seams = more.pop("seams", None) or Seams(clock=self.clock)
        settings = more.pop("settings", self.settings)
        self._opening = ostler.open(self.where, settings=settings, seams=seams, **more)
        self._manager = await self.passes(self._opening.__aenter__(), 300)
        return self._manager

    async def close(self, *, keep: bool = False) -> None:
        """With `keep` what can live without a manager lives on."""
        if self._opening is not None:
            self.manager.keep_agents = keep
            opening, self._opening = self._opening, None
            await self.passes(opening.__aexit__(None, None, None), 200)
            self._manager = None

    async def reopen(self, *, keep: bool = False, **more: Any) -> AgentLifecycleManager:
        await self.close(keep=keep)
        return await self.open(**more)

    async def finish(self) -> None:
        """The end of a test: whatever hangs goes on, and no thread may stay."""
        self.stage.release()
        if self._opening is not None:
            self.manager.keep_agents = False
        await self.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await until(lambda: not agent_threads(), "a thread of an agent was left")

    # --- doing -----------------------------------------------------------------------------------

    def request(
        self,
        context: Mapping[str, Any] | None = None,
        *,
        agent: type[Agent] | Any = Actor,
        about: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SpawnRequest:
        known = self.manager.registry.register(agent, replace=True, **(about or {}))
        chosen = AgentSpawnOptions.from_dict({"isolation_level": self.level, **options})
        data = {**(context or {}), "stage": str(self.stage.directory)}
        return SpawnRequest(agent_definition_id=known.id, options=chosen, context=data)

    async def start(
        self, context: Mapping[str, Any] | None = None, *, key: str | None = None, **more: Any
    ) -> AgentHandle:
        record = await self.manager.spawn(self.request(context, **more), idempotency_key=key)
        return self.manager.handle(record.instance_id)

    def again(self, agent: AgentHandle) -> AgentHandle:
        """The same instance at the manager that is open now."""
        return self.manager.handle(agent.instance_id)

    def begin(self, work: Coroutine[Any, Any, T] | Awaitable[T]) -> asyncio.Task[T]:
        """Let it go on beside the test; the end of the test looks at whatever it comes to."""
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def busy(self, agent: AgentHandle, what: str = "hang", **more: Any) -> asyncio.Task[Any]:
        """Have it work on something that ends when the test says so; the agent is at it when this returns."""
        before = self.stage.said.count("began")
        options = {name: more.pop(name) for name in ("id", "timeout", "wait") if name in more}
        task = self.begin(agent.ask(do(what, **more), **options))
        await until(lambda: task.done() or self.stage.said.count("began") > before, "it did not begin")
        return task

    async def crash(self, agent: AgentHandle) -> None:
        with pytest.raises(AgentGoneError):
            await agent.ask(do("exit"))

    async def passes(self, work: Awaitable[T], seconds: float, step: float = 0.25) -> T:
        """Let so much time pass, in steps, until the work is done."""
        task = self.begin(work)
        clock = self.clock
        for _ in range(round(seconds / step) if isinstance(clock, ManualClock) else 0):
            # Real time too, for what happens by itself.
            await asyncio.wait((task,), timeout=0.005)
            if task.done() or not isinstance(clock, ManualClock):
                break
            clock.advance(step)
        await asyncio.wait((task,), timeout=PATIENCE)
        assert task.done(), f"not done within {seconds} s"
        self._tasks.remove(task)
        return task.result()

    def advance(self, seconds: float) -> None:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(seconds)

    async def tick(self, seconds: int, step: float = 1.0) -> None:
        """Let time pass in steps, each of which has its effect before the next."""
        for _ in range(round(seconds / step)):
            self.advance(step)
            await self.calm()

    async def calm(self) -> None:
        """Until nothing is under way by itself that does not wait for the clock or at a gate."""

        def quiet() -> bool:
            instances = list(self.runtime.instances.values())
            return (not isinstance(self.clock, ManualClock) or _monitor_sleeps()) and all(
                instance._messages.empty() and not instance.liveness.probing  # noqa: SLF001 - as above
                for instance in instances
            )

        for _ in range(3):
            await asyncio.sleep(0)
            await until(quiet)
        await self.committed()

    async def drift(self, seconds: int) -> None:
        """As `tick`, but a probe that hangs may hang."""
        for _ in range(seconds):
            self.advance(1)
            for _ in range(5):
                await asyncio.sleep(0.001)
            await self.committed()

    async def committed(self) -> None:
        """What was submitted before is on the disk, and its effects have come back."""
        await self.manager.store.run(_nothing)
        await asyncio.sleep(0)

    # --- looking ---------------------------------------------------------------------------------

    async def record(self, agent: AgentHandle) -> AgentInstance:
        return await agent.record()

    async def state(self, agent: AgentHandle) -> AgentState:
        return (await agent.record()).state

    async def reaches(self, agent: AgentHandle, state: AgentState, attempt: int | None = None) -> AgentInstance:
        found = await agent.record()

        async def there() -> bool:
            nonlocal found
            found = await agent.record()
            return found.state is state and attempt in {None, found.attempt}

        with suppress(AssertionError):
            await until(there)
            return found
        raise AssertionError(f"it is {found.state} at attempt {found.attempt} and never came to {state}")

    async def comes_back(self, agent: AgentHandle, attempt: int, seconds: float = 0) -> AgentInstance:
        """The restart of a failed one, which is due after so long. Its start takes real time."""

        async def begun() -> None:
            while (await agent.record()).attempt < attempt:  # noqa: ASYNC110 - the record changes in its own time
                await asyncio.sleep(0.001)

        await self.passes(begun(), seconds + 5)
        return await self.reaches(agent, S.READY, attempt)

    async def only(self) -> AgentHandle:
        """The one instance there is, as soon as it is there."""
        wanted = GetInstancesFilter(include_terminated=True)

        async def there() -> bool:
            return bool(await self.manager.get_active_instances(wanted))

        await until(there)
        (found,) = await self.manager.get_active_instances(wanted)
        return self.manager.handle(found.instance_id)

    async def wait_of(self, agent: AgentHandle) -> Wait:
        """The one that is open, as soon as it is."""

        async def there() -> bool:
            return bool(await agent.waits())

        await until(there, "it waits for nothing")
        (wait,) = await agent.waits()
        return wait

    async def attempts(self, agent: AgentHandle) -> list[Attempt]:
        return await self.manager.store.read(attempts.list_attempts, _id(agent))

    async def events(self, agent: AgentHandle | None, kind: type[E] = Event) -> list[E]:  # type: ignore[assignment]  # the default is the bound
        """As the log has them."""
        found: list[Event] = []
        after = 0
        while True:
            page = await self.manager.store.read(
                events.read_events, after, instance_id=None if agent is None else _id(agent)
            )
            if not page.events:
                return [one for one in found if isinstance(one, kind)]
            found += page.events
            after = page.cursor

    async def moves(self, agent: AgentHandle) -> list[AgentState]:
        return [event.new_state for event in await self.events(agent, AgentStateChangedEvent)]

    async def audit(self, workspace_id: UUID = HOME_WORKSPACE_ID) -> list[AuditEntry]:
        return await self.manager.store.read(audit.list_entries, workspace_id)

    async def acts(self) -> list[tuple[str, str]]:
        """What the audit says was done, and how it ended."""
        return [(entry.action, entry.outcome) for entry in await self.audit()]

    # --- people ----------------------------------------------------------------------------------

    async def set_tier(self, tier: Tier, workspace_id: UUID = HOME_WORKSPACE_ID, **more: Any) -> None:
        home = await self.manager.store.read(workspaces.get_workspace, workspace_id)
        assert home is not None
        await self.put_workspace(home.evolve(tier=tier, **more))

    async def put_workspace(self, workspace: Workspace) -> None:
        await self.manager.store.run(workspaces.put_workspace, workspace)
        self.runtime.workspaces[workspace.workspace_id] = workspace  # the monitor reads it every few seconds

    async def found_workspace(self, tier: Tier = Tier.ENTERPRISE, number: int = 7) -> UUID:
        made = Workspace(workspace_id=UUID(int=number), name=f"room {number}", tier=tier, created_at=self.clock.wall())
        await self.put_workspace(made)
        return made.workspace_id

    def as_principal(
        self,
        *roles: Role,
        workspace: UUID = HOME_WORKSPACE_ID,
        permissions: tuple[Permission, ...] = (),
        disabled: bool = False,
        number: int = 100,
    ) -> AgentLifecycleManager:
        someone = Principal(
            principal_id=UUID(int=number),
            name="someone",
            workspace_id=workspace,
            roles=roles,
            permissions=permissions,
            created_at=self.clock.wall(),
            disabled_at=self.clock.wall() if disabled else None,
        )
        return self.manager.acting_as(someone, correlation_id="request-7")

    def metric(self, name: str) -> float:
        """One number of `metrics()`, by its name there."""
        lines = [line for line in self.manager.metrics().splitlines() if line.startswith(f"{name} ")]
        assert len(lines) == 1, f"{name} is there {len(lines)} times"
        return float(lines[0].split()[-1])


def _nothing(_tx: Transaction) -> None:
    """Committed behind everything that was submitted before."""


def _id(agent: AgentHandle) -> UUID:
    assert isinstance(agent.instance_id, UUID)
    return agent.instance_id


@asynccontextmanager
async def opened(crew: Crew, **more: Any) -> AsyncIterator[Crew]:
    await crew.open(**more)
    try:
        yield crew
    finally:
        await crew.finish()


def agent_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("ostler-agent")]


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The fields of every line about this event."""
    return [vars(one)["fields"] for one in caplog.records if getattr(one, "event", None) == event]


async def all_of(stream: Observation) -> list[Any]:
    """All that it says until it ends."""
    async with asyncio.timeout(PATIENCE):
        return [one async for one in stream]


async def take(stream: Observation, count: int) -> list[Any]:
    async with asyncio.timeout(PATIENCE):
        return [await anext(stream) for _ in range(count)]


def workdirs(home: Path) -> list[str]:
    work = home / "work"
    return [one.name for one in work.iterdir()] if work.exists() else []


# --- managers that are killed --------------------------------------------------------------------------

_VICTIM = Path(__file__).with_name("lifecycle_victim.py")


class Victim:
    """A program of its own that manages a home until it is killed with signal 9."""

    def __init__(self, scene: str, home: Any, stage: Stage, given: Mapping[str, Any] | None = None) -> None:
        """`scene` names a coroutine function of a crew, as module:name; what it returns is told here as JSON."""
        argv = [sys.executable, str(_VICTIM), scene, str(home), str(stage.directory), json.dumps(given or {})]
        self._program = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    def told(self) -> dict[str, Any]:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        assert line, f"it ended with {self._program.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """And wait until it is gone."""
        self._program.kill()
        self.wait()

    def wait(self) -> None:
        with self._program:
            code = self._program.wait(60)
        assert code == -signal.SIGKILL, f"it ended with {code}"

    def stop(self, number: int = signal.SIGSTOP) -> None:
        self._program.send_signal(number)


async def killed(scene: Callable[..., Any], crew: Crew, **given: Any) -> dict[str, Any]:
    """Let a program play this scene on the crew's home, and kill it with signal 9 when it has told what it made."""
    victim = Victim(f"{Path(inspect.getfile(scene)).stem}:{scene.__name__}", crew.home, crew.stage, given)
    try:
        return await asyncio.to_thread(victim.told)
    finally:
        victim.kill()
