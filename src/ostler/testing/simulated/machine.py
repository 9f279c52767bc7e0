"""A made-up machine on which agents live by themselves: managers come and go, and find them as they are.

An agent is a `Body`. What it works on, what it waits for and how it ended are its own; a manager has only a hand on
it, which a `kill -9` takes away without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

from ostler.agents import Message, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation.base import Exit, Listener, StartPlan, Verb
from ostler.isolation.calls import wake
from ostler.seams import Clock
from ostler.testing.simulated.isolation import FOREVER, OUTCOMES, World

_GONE = "the agent has ended (made up)"


class Holder(Protocol):
    """Whoever manages a body now."""

    listener: Listener

    def pass_on(self, ask_id: UUID) -> None: ...

    def unask(self, ask_id: UUID) -> None: ...

    def announce(self) -> None: ...

    def detach(self) -> None: ...


@dataclass(kw_only=True)
class Machine(World):
    """A world whose agents outlive the manager."""

    #: By instance and attempt; also those that have ended, until somebody lets go of them.
    bodies: dict[tuple[UUID, int], Body] = field(default_factory=dict)
    #: What the agents themselves do; a killed manager does not take it along.
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    #: Of those that ended while no manager looked: how.
    unseen: dict[tuple[UUID, int], Exit] = field(default_factory=dict)

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at; whoever collects it raises it

    def draw_id(self) -> UUID:
        return UUID(int=self.chance.getrandbits(128))

    def perish(self) -> None:
        """The manager died. Everything else goes on."""
        for body in self.bodies.values():
            if body.hand is not None:
                body.hand.detach()


class Body:
    """One agent, whoever manages it."""

    def __init__(self, clock: Clock, machine: Machine, plan: StartPlan) -> None:
        self.plan = plan
        self.hand: Holder | None = None
        #: What it was asked and nobody has had the answer to, by call.
        self.works: dict[UUID, tuple[Verb, asyncio.Task[Any]]] = {}
        self.asks: dict[UUID, tuple[WaitAsked, asyncio.Future[WaitAnswer]]] = {}
        self.exit: Exit | None = None
        self.dead = False
        self.stuck = False
        #: It has been told to clean up or to shut down: it is not what it was any more.
        self.leaving = False
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._clock = clock
        self._machine = machine
        self._breaths: set[asyncio.Future[None]] = set()
        machine.bodies[plan.instance_id, plan.attempt] = self
        machine.born(self)

    # --- what it does -----------------------------------------------------------------------------

    def begin(self, call_id: UUID, verb: Verb, payload: Any) -> asyncio.Task[Any]:
        if call_id in self.works and not self.stuck:
            self._machine.faults.append(f"the call {call_id} of {self.plan.instance_id} is executed twice")
        self.leaving = self.leaving or verb in {Verb.CLEANUP, Verb.SHUTDOWN}
        task = self._machine.run(self._do(call_id, verb, payload))
        self.works[call_id] = (verb, task)
        return task

    async def _do(self, call_id: UUID, verb: Verb, payload: Any) -> Any:
        match verb:
            case Verb.INITIALIZE:
                await self._trouble("init_fails", "init_hangs")
            case Verb.PROCESS:
                return await self._process(call_id, payload)
            case Verb.SHUTDOWN if self._machine.strikes("shutdown_hangs"):
                await self._live(FOREVER)
            case Verb.FINAL_STATE:
                return {"attempt": self.plan.attempt}
            case Verb.CLEANUP:
                return []
        return None

    async def _process(self, call_id: UUID, payload: Any) -> Any:
        chance = self._machine.chance
        if chance.random() < 0.1:
            self._say(TokensUsed(count=chance.randrange(100)))
            self._say(Progress(fraction=chance.random()))
        if chance.random() < 0.05:
            self._say(Signal(name="made-up"))
        if chance.random() < 0.1:
            limit = timedelta(seconds=chance.uniform(1, 30))
            named = self._machine.draw_id()
            await self._ask(named, WaitAsked(kind="answer", timeout=limit, ask_id=named, call_id=call_id))
        if self._machine.strikes("dies_in_call"):
            await self._live(chance.uniform(0, 1))
            self.die()
        await self._trouble("call_fails", "call_hangs")
        await self._live(chance.expovariate(0.1))
        return payload

    def _say(self, message: Message) -> None:
        if self.hand is not None:
            self.hand.listener.heard(self.plan.attempt, message)

    async def _ask(self, name: UUID, wait: WaitAsked) -> None:
        answered: asyncio.Future[WaitAnswer] = asyncio.get_running_loop().create_future()
        self.asks[name] = (wait, answered)
        if self.hand is not None:
            self.hand.pass_on(name)
        try:
            await answered
            await self.thawed.wait()
        finally:
            self.asks.pop(name, None)
            if self.hand is not None:
                self.hand.unask(name)
        self.require_alive()

    async def _trouble(self, fails: str, hangs: str) -> None:
        if self._machine.strikes(hangs):
            await self._live(FOREVER)
        if self._machine.strikes(fails):
            raise AgentExecutionError("RuntimeError: made up", exception_type="RuntimeError")

    async def _live(self, seconds: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._breaths.add(over)
        timer = self._clock.call_later(seconds, lambda: wake(over))
        try:
            await over
        finally:
            timer.cancel()
            self._breaths.discard(over)
        await self.thawed.wait()
        self.require_alive()

    def require_alive(self) -> None:
        if self.dead:
            raise AgentGoneError(_GONE)

    # --- how it ends ------------------------------------------------------------------------------

    def die(self) -> None:
        """By itself; whoever should be told may be told late, twice, or not at all."""
        if self.dead:
            return
        machine, chance = self._machine, self._machine.chance
        how = self.exit = Exit(outcome=chance.choice(OUTCOMES), detail="made up")
        self.vanish()
        if self.hand is None:
            machine.hits["unseen_death"] += 1
            machine.unseen[self.plan.instance_id, self.plan.attempt] = how
        elif not machine.strikes("notice_lost"):
            for _ in range(2 if machine.strikes("notice_doubled") else 1):
                late = chance.uniform(0, 30) if machine.strikes("notice_late") else 0.0
                self._clock.call_later(late, self.hand.announce)

    def vanish(self) -> None:
        self.dead = True
        self._machine.buried(self)
        self.thawed.set()
        for over in list(self._breaths):
            wake(over)
        for _, answered in list(self.asks.values()):
            if not answered.done():
                answered.set_exception(AgentGoneError(_GONE))
