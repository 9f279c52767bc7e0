"""A level for tests whose agents live on when their manager goes, and do exactly as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID, uuid4

from lifecycle_aids import Scene, until

from ostler.agents import AgentRegistry, WaitAnswer, WaitAsked
from ostler.errors import AgentExecutionError, AgentGoneError, OstlerError
from ostler.isolation import IsolationLevels
from ostler.isolation.base import Capabilities, Cell, Exit, Isolation, Listener, StartPlan, StopReport, Usage, Verb
from ostler.lifecycle import AgentLifecycleManager, LifecycleSettings
from ostler.model.events import AgentStateChangedEvent
from ostler.model.instance import AgentInstance
from ostler.model.ledger import AttemptOutcome
from ostler.model.states import AgentState, IsolationLevel
from ostler.testing.clock import ManualClock

_GONE = "the agent has ended"
Name = tuple[UUID, int]


@dataclass(kw_only=True, eq=False)
class Soul:
    """One agent. A request is a word: "work" lasts until `finish`, "ask" asks a question, others come back."""

    name: Name
    exit: Exit | None = None
    dead: bool = False
    frozen: bool = False
    #: What was asked of it, by call; kept until somebody has the answer.
    calls: dict[UUID, tuple[Verb, asyncio.Task[Any]]] = field(default_factory=dict)
    asks: dict[UUID, tuple[WaitAsked, asyncio.Future[WaitAnswer]]] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)
    finish: asyncio.Event = field(default_factory=asyncio.Event)
    hand: HavenCell | None = None
    stops: int = 0
    #: So many stops it lives through.
    clings: int = 0

    async def do(self, call_id: UUID, verb: Verb, payload: Any) -> Any:
        if verb is not Verb.PROCESS:
            return None
        self.requests.append(payload)
        if payload == "work":
            await self.finish.wait()
        if payload == "fail":
            raise AgentExecutionError("ValueError: as told", exception_type="ValueError")
        if payload == "ask":
            answer = await self.ask(call_id)
            return [answer.outcome, dict(answer.answer or {})]
        if self.dead:
            raise AgentGoneError(_GONE)
        return payload

    async def ask(self, call_id: UUID) -> WaitAnswer:
        wait = WaitAsked(kind="human", timeout=timedelta(hours=1), ask_id=uuid4(), call_id=call_id)
        answered: asyncio.Future[WaitAnswer] = asyncio.get_running_loop().create_future()
        assert wait.ask_id is not None
        self.asks[wait.ask_id] = (wait, answered)
        if self.hand is not None:
            self.hand.pass_on(wait.ask_id)
        try:
            return await answered
        finally:
            self.asks.pop(wait.ask_id)

    def end(self, outcome: AttemptOutcome, detail: str = "it ended") -> None:
        self.exit = Exit(outcome=outcome, detail=detail)
        self.vanish()
        if self.hand is not None:
            self.hand.listener.exited(self.name[1], self.exit)

    def vanish(self) -> None:
        self.dead = True
        self.finish.set()
        for _, answered in list(self.asks.values()):
            if not answered.done():
                answered.set_exception(AgentGoneError(_GONE))


@dataclass(kw_only=True)
class Haven:
    """What outlives the managers of a test."""

    souls: dict[Name, Soul] = field(default_factory=dict)
    swept: list[Name] = field(default_factory=list)
    kept: set[Name] = field(default_factory=set)
    outlives: bool = True
    #: Starts wait here.
    birth: asyncio.Event | None = None

    def levels(self, clock: ManualClock) -> IsolationLevels:
        levels = IsolationLevels(clock)
        levels.use(IsolationLevel.PROCESS, HavenIsolation(clock, self))
        return levels

    def soul(self, instance_id: UUID, attempt: int = 1) -> Soul:
        return self.souls.setdefault((instance_id, attempt), Soul(name=(instance_id, attempt)))


class HavenIsolation(Isolation):
    level: ClassVar[IsolationLevel] = IsolationLevel.PROCESS

    def __init__(self, clock: ManualClock, haven: Haven) -> None:
        super().__init__(clock)
        self._haven = haven

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(kills=True, freezes=True, outlives_manager=self._haven.outlives)

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        if self._haven.birth is not None:
            await self._haven.birth.wait()
        assert (plan.instance_id, plan.attempt) not in self._haven.souls
        return HavenCell(self._haven, self._haven.soul(plan.instance_id, plan.attempt), listener)

    async def recover(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell | Exit:
        assert handle in (None, {"haven": str(plan.instance_id)})
        soul = self._haven.souls.get((plan.instance_id, plan.attempt))
        if soul is None:
            return Exit(outcome=AttemptOutcome.LOST, detail="nobody has seen it")
        if soul.dead:
            return soul.exit or Exit(outcome=AttemptOutcome.STOPPED, detail="it was stopped")
        return HavenCell(self._haven, soul, listener)

    async def sweep(self, keep: Collection[Name]) -> int:
        self._haven.kept = set(keep)
        gone = [soul for name, soul in self._haven.souls.items() if name not in keep and not soul.dead]
        for soul in gone:
            soul.vanish()
            self._haven.swept.append(soul.name)
        return len(gone)


class HavenCell(Cell):
    def __init__(self, haven: Haven, soul: Soul, listener: Listener) -> None:
        assert soul.hand is None, "somebody else has a hand on it"
        self._haven = haven
        self._soul = soul
        self.listener = listener
        self._found = {name: verb for name, (verb, _) in soul.calls.items()}
        self._loose: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking: list[asyncio.Task[None]] = []
        soul.hand = self
        for ask_id in list(soul.asks):
            self.pass_on(ask_id)

    @property
    def handle(self) -> Mapping[str, Any]:
        return {"haven": str(self._soul.name[0])}

    @property
    def ended(self) -> Exit | None:
        return self._soul.exit

    @property
    def in_flight(self) -> Mapping[UUID, Verb]:
        return dict(self._found)

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        if self._soul.dead or self._loose.done():
            raise AgentGoneError(_GONE)
        name = call_id or uuid4()
        assert name not in self._soul.calls, "it is asked twice"
        self._soul.calls[name] = (verb, asyncio.ensure_future(self._soul.do(name, verb, payload)))
        return await self._answer(name)

    async def rejoin(self, call_id: UUID) -> Any:
        self._found.pop(call_id)
        return await self._answer(call_id)

    async def _answer(self, name: UUID) -> Any:
        work = self._soul.calls[name][1]
        try:
            await asyncio.wait([work, self._loose], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not self._loose.done():
                work.cancel()
                self._soul.calls.pop(name, None)
            raise
        if self._loose.done():
            raise AgentGoneError("let go of")
        self._soul.calls.pop(name, None)
        return work.result()

    def pass_on(self, ask_id: UUID) -> None:
        self._asking.append(asyncio.ensure_future(self._pass_on(*self._soul.asks[ask_id])))

    async def _pass_on(self, wait: WaitAsked, answered: asyncio.Future[WaitAnswer]) -> None:
        try:
            answer = await self.listener.asked(self._soul.name[1], wait)
        except OstlerError:
            return
        if not answered.done():
            answered.set_result(answer)

    async def ping(self) -> None:
        if self._soul.dead:
            raise AgentGoneError(_GONE)

    async def freeze(self) -> None:
        self._soul.frozen = True

    async def thaw(self) -> None:
        self._soul.frozen = False

    async def stop(self, grace: timedelta) -> StopReport:
        if not self._loose.done():
            self._soul.stops += 1
            if self._soul.clings:
                self._soul.clings -= 1
                return StopReport(graceful=False, left_behind="process 7 (state D)")
            self._soul.vanish()
        return StopReport(graceful=bool(grace))

    async def destroy(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        if not self._loose.done():
            self._loose.set_result(None)
            self._soul.hand = None
            for task in self._asking:
                task.cancel()

    async def usage(self) -> Usage:
        return Usage()


@dataclass(kw_only=True)
class Managers(Scene):
    """Managers come and go; the haven stays."""

    haven: Haven = field(default_factory=Haven)
    settings: LifecycleSettings = field(
        default_factory=lambda: LifecycleSettings(close_grace=timedelta(0), outlive=timedelta(days=1))
    )

    @asynccontextmanager
    async def open(
        self, *, levels: IsolationLevels | None = None, registry: AgentRegistry | None = None, **about: Any
    ) -> AsyncIterator[AgentLifecycleManager]:
        known = levels or self.haven.levels(self.clock)
        async with super().open(levels=known, registry=registry, **about) as manager:
            yield manager

    def soul(self, instance: AgentInstance, attempt: int = 1) -> Soul:
        return self.haven.souls[instance.instance_id, attempt]

    async def ask(self, instance: AgentInstance, request: Any, name: UUID | None = None) -> asyncio.Task[Any]:
        """Asked, and come to the agent."""
        soul = self.haven.souls[instance.instance_id, 1]
        before = len(soul.requests)
        task = self.begin(self.manager.process(instance.instance_id, request, request_id=name))
        await until(lambda: len(soul.requests) > before)
        return task

    async def moves(self, instance: AgentInstance) -> list[AgentState]:
        return [event.new_state for event in await self.events(instance, AgentStateChangedEvent)]
