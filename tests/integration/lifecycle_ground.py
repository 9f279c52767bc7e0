"""What the tests of the lifecycle stand on: a manager on a real home, a clock to drive, agents that do as told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

import pytest

import ostler
from ostler import (
    HOME_WORKSPACE_ID,
    Agent,
    AgentContext,
    AgentInstance,
    AgentLifecycleManager,
    AgentSpawnOptions,
    AgentState,
    AuditEntry,
    Event,
    IsolationLevel,
    Permission,
    Principal,
    PutRecord,
    Role,
    Seams,
    SpawnRequest,
    Tier,
    Wait,
    Workspace,
)
from ostler.agents.marks import About
from ostler.testing.clock import ManualClock
from ostler.testing.isolation_suite.ground import passing, until

LEVELS = (IsolationLevel.NONE, IsolationLevel.THREAD)
#: Agents that misbehave are let go of after so many real seconds, even when a test forgets.
_LAST_RESORT_SECONDS = 30


class Flag(Protocol):
    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


class FileFlag:
    """An event that another process can see."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self) -> None:
        self._path.touch()

    def is_set(self) -> bool:
        return self._path.exists()

    def wait(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self.is_set() and time.monotonic() < end:
            time.sleep(0.005)
        return self.is_set()


class Stage:
    """Where a test and its agents meet. Usable from every thread and, on a directory, from every process."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._said: list[str] = []
        #: Whatever waits, blocks or refuses to end goes on when this is set.
        self.let_go: Flag = FileFlag(directory / "let_go") if directory else threading.Event()
        self._began = time.monotonic()

    @property
    def said(self) -> list[str]:
        if self.directory is None:
            return self._said
        file = self.directory / "said"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def over(self) -> bool:
        return self.let_go.is_set() or time.monotonic() - self._began > _LAST_RESORT_SECONDS

    def say(self, word: str) -> None:
        if self.directory is None:
            self._said.append(word)
            return
        with (self.directory / "said").open("a") as file:
            file.write(f"{word}\n")

    async def heard(self, word: str, times: int = 1) -> None:
        await until(lambda: self.said.count(word) >= times)

    async def hang(self, *, heeds: bool = True) -> None:
        """Until let go of. One that does not heed its cancelling goes on all the same."""
        while not self.over:
            try:
                await asyncio.sleep(0.002)
            except asyncio.CancelledError:
                self.say("cancelled")
                if heeds:
                    raise


class Actor(Agent):
    """A request is a mapping: `do` names a method below. What else it does stands in the context of its spawn."""

    stage: Stage

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        self.stage.say("initialize")
        quirk = context.data.get("initialize")
        if quirk == "fail":
            _ = context.workspace
            raise ValueError("not today")
        if quirk == "exit":
            raise SystemExit(3)
        if quirk is not None:
            await self.stage.hang(heeds=quirk == "hang")

    async def process(self, request: Mapping[str, Any]) -> Any:
        return await getattr(self, request["do"])(request)

    async def final_state(self) -> Any:
        self.stage.say("final_state")
        return {"said": len(self.stage.said)}

    async def shutdown(self) -> None:
        self.stage.say("shutdown")
        quirk = self.context.data.get("shutdown")
        if quirk == "fail":
            raise ValueError("it will not close")
        if quirk is not None:
            await self.stage.hang(heeds=quirk == "hang")

    # --- what it can be told to do --------------------------------------------------------------

    async def echo(self, request: Mapping[str, Any]) -> Any:
        return request.get("value")

    async def fail(self, _request: Mapping[str, Any]) -> None:
        raise ValueError("as told")

    async def exit(self, _request: Mapping[str, Any]) -> None:
        raise SystemExit(3)

    async def hang(self, _request: Mapping[str, Any]) -> str:
        self.stage.say("began")
        await self.stage.hang()
        return "let go"

    async def stubborn(self, _request: Mapping[str, Any]) -> str:
        self.stage.say("began")
        await self.stage.hang(heeds=False)
        return "let go"

    async def block(self, _request: Mapping[str, Any]) -> str:
        """Nothing else happens on its loop."""
        self.stage.say("began")
        self.stage.let_go.wait(_LAST_RESORT_SECONDS)
        return "let go"

    async def ask(self, request: Mapping[str, Any]) -> Any:
        limit = request.get("seconds")
        answer = await self.context.wait_for(
            "human", reason="which colour?", timeout=timedelta(seconds=limit) if limit else None
        )
        self.stage.say(f"answered {answer.outcome}")
        return [answer.outcome, dict(answer.answer) if answer.answer else None]

    async def speak(self, request: Mapping[str, Any]) -> None:
        for number in range(request.get("progress", 0)):
            self.context.report((number + 1) / request["progress"], f"step {number + 1}")
        if "signal" in request:
            self.context.signal(request["signal"], {"by": "the agent"})
        if "tokens" in request:
            self.context.report_tokens(request["tokens"])
        if "metric" in request:
            self.context.report_metric("lines", request["metric"])

    async def know(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """What it knows of itself."""
        mine = self.context
        return {
            "instance_id": str(mine.instance_id),
            "attempt": mine.attempt,
            "name": mine.name,
            "depth": mine.data.get("ANALYSISDEPTH"),
            "workspace": str(mine.workspace),
            "thread": threading.get_ident(),
        }

    async def hook(self, request: Mapping[str, Any]) -> None:
        """Add clean-up hooks, each with a quirk."""
        for name, quirk in request["hooks"].items():
            self.context.add_cleanup(self._hook(name, quirk), name=name, timeout=timedelta(seconds=1))

    def _hook(self, name: str, quirk: str | None) -> Any:
        async def run() -> None:
            self.stage.say(f"hook {name}")
            if quirk == "fail":
                raise ValueError("dirty")
            if quirk is not None:
                await self.stage.hang(heeds=quirk == "hang")

        return run


class ProcessActor(Actor):
    """The same in a process of its own: it is told where the stage is."""

    agent_name = "actor"

    async def initialize(self, context: AgentContext) -> None:
        self.stage = Stage(Path(context.data["stage"]))
        await super().initialize(context)


class Crew:
    """A manager, and short words for what the tests do with it all the time."""

    def __init__(self, manager: AgentLifecycleManager, clock: ManualClock, stage: Stage, level: IsolationLevel) -> None:
        self.manager = manager
        self.clock = clock
        self.stage = stage
        self.level = level

    def request(
        self,
        context: Mapping[str, Any] | None = None,
        *,
        agent: type[Agent] | None = None,
        about: About | None = None,
        **options: Any,
    ) -> SpawnRequest:
        kind = agent or type("Actor", (Actor,), {"stage": self.stage, "agent_name": "actor"})
        if self.level is IsolationLevel.PROCESS and agent is None:
            kind, context = ProcessActor, {**(context or {}), "stage": str(self.stage.directory)}
        known = self.manager.registry.register(kind, replace=True, **(about or {}))
        chosen = AgentSpawnOptions(**{"isolation_level": self.level, **options})
        return SpawnRequest(agent_definition_id=known.id, options=chosen, context=context)

    async def spawn(self, context: Mapping[str, Any] | None = None, **more: Any) -> AgentInstance:
        return await self.manager.spawn(self.request(context, **more))

    async def do(self, one: AgentInstance, what: str, *, wait: bool = True, **more: Any) -> Any:
        return await self.manager.process(one.instance_id, {"do": what, **more}, wait=wait)

    def start(self, one: AgentInstance, what: str, **more: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.do(one, what, **more))

    async def get(self, one: AgentInstance) -> AgentInstance:
        """As the store has it."""
        found = await self.manager.store.get_instance(one.instance_id)
        assert found is not None
        return found

    async def state(self, one: AgentInstance) -> AgentState:
        return (await self.get(one)).state

    async def comes_to(self, one: AgentInstance, state: AgentState) -> AgentInstance:
        for _ in range(5000):
            if (found := await self.get(one)).state is state:
                return found
            await asyncio.sleep(0.002)
        raise AssertionError(f"it is {found.state} and never came to {state}")

    async def wait_of(self, one: AgentInstance) -> Wait:
        """The one that is open."""
        for _ in range(5000):
            if waits := await self.manager.get_waits(one.instance_id):
                return waits[0]
            await asyncio.sleep(0.002)
        raise AssertionError("it waits for nothing")

    async def events(self, one: AgentInstance) -> list[Event]:
        return [event async for event in self.manager.store.replay(instance_id=one.instance_id)]

    async def audit(self, workspace_id: UUID = HOME_WORKSPACE_ID) -> list[AuditEntry]:
        return await self.manager.store.read_audit(workspace_id)

    async def set_tier(self, tier: Tier) -> None:
        home = await self.manager.store.get_workspace(HOME_WORKSPACE_ID)
        assert home is not None
        await self.manager.store.commit(PutRecord(record=home.evolve(tier=tier)))
        self.clock.advance(1)  # a plan is believed for a second

    async def as_somebody(
        self, *roles: Role, workspace: UUID = HOME_WORKSPACE_ID, permissions: tuple[Permission, ...] = ()
    ) -> AgentLifecycleManager:
        somebody = Principal(
            principal_id=UUID(int=len(roles) + 100),
            name="somebody",
            workspace_id=workspace,
            roles=roles,
            permissions=permissions,
            created_at=self.clock.wall(),
        )
        return self.manager.acting_as(somebody, correlation_id="request-7")

    async def found_workspace(self, tier: Tier = Tier.ENTERPRISE, number: int = 7) -> UUID:
        made = Workspace(workspace_id=UUID(int=number), name=f"room {number}", tier=tier, created_at=self.clock.wall())
        await self.manager.store.commit(PutRecord(record=made))
        return made.workspace_id

    def counted(self, name: str) -> float:
        """One number of `metrics()`, by its name there."""
        lines = [line for line in self.manager.metrics().splitlines() if line.startswith(f"{name} ")]
        assert len(lines) == 1, f"{name} is there {len(lines)} times"
        return float(lines[0].split()[-1])


def agent_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("ostler-agent")]


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The fields of every line about this event."""
    return [vars(one)["fields"] for one in caplog.records if getattr(one, "event", None) == event]


@asynccontextmanager
async def opened(home: Path, clock: ManualClock, **more: Any) -> AsyncIterator[AgentLifecycleManager]:
    """A manager whose closing does not wait for a clock that stands still."""
    seams = more.pop("seams", None) or Seams(clock=clock)
    opening = ostler.open(home, seams=seams, **more)
    manager = await opening.__aenter__()
    try:
        yield manager
    finally:
        await passing(clock, opening.__aexit__(None, None, None), 60)
