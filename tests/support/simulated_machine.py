"""A machine that does not exist, and the agents on it: real objects that live apart from any manager.

An agent keeps what it works on, what it has said and what it asks until a manager has acknowledged it. A manager
holds it by a cell (`simulated_isolation.py`); when the manager is killed the cell goes and the agent stays, or dies.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from types import coroutine
from typing import Any, Protocol
from uuid import UUID

from ostler.agents import AgentContext, AgentRunner, Message, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.agents.context import CURRENT_CALL
from ostler.clock import Clock, Timer
from ostler.errors import AgentExecutionError, AgentGoneError, OstlerError
from ostler.isolation.base import Exit, StartPlan, Verb
from ostler.isolation.calls import Outcome, exit_by
from ostler.model.attempt import AttemptOutcome
from ostler.model.context import ContextData

_OUTCOMES = (AttemptOutcome.EXIT_CODE, AttemptOutcome.SIGNAL, AttemptOutcome.OOM, AttemptOutcome.UNKNOWN)
_DEAD = "the agent has ended"


@dataclass(kw_only=True)
class Misfortune:
    """The probability of each thing that can go wrong."""

    start_fails: float = 0.0
    start_hangs: float = 0.0
    init_fails: float = 0.0
    init_hangs: float = 0.0
    call_fails: float = 0.0
    call_hangs: float = 0.0
    dies_in_call: float = 0.0
    ignores_cancel: float = 0.0
    #: Of the notices of a death.
    notice_lost: float = 0.0
    notice_doubled: float = 0.0
    notice_late: float = 0.0
    shutdown_hangs: float = 0.0
    stop_is_slow: float = 0.0
    #: It outlives every signal for some seconds.
    unkillable: float = 0.0
    freeze_fails: float = 0.0
    freeze_hangs: float = 0.0
    thaw_fails: float = 0.0
    adopt_fails: float = 0.0
    #: An adopted agent blocks its loop, and reports late.
    report_is_late: float = 0.0

    @classmethod
    def drawn(cls, chance: random.Random) -> Misfortune:
        """Some things often, others never."""
        return cls(**{one.name: chance.choice((0.0, 0.0, 0.0, 0.05, 0.2)) for one in fields(cls)})


class Link(Protocol):
    """What an agent has of its manager: a wire that keeps the order of what is sent."""

    def send(self, action: Callable[[], asyncio.Future[None] | None]) -> None: ...

    def hear(self, message: Message) -> asyncio.Future[None] | None: ...

    def answer(self, work: Work) -> None: ...

    def ask(self, ask_id: UUID) -> None: ...

    def unask(self, ask_id: UUID) -> None: ...

    def close_wire(self) -> None: ...

    def notify(self) -> None: ...


class Machine:
    """Where simulated agents live.

    `outlives`: they go on without a manager, can be frozen, and are killed for certain.
    """

    def __init__(
        self,
        clock: Clock,
        chance: random.Random | None = None,
        misfortune: Misfortune | None = None,
        *,
        outlives: bool = False,
    ) -> None:
        self.clock = clock
        self.chance = chance or random.Random(0)
        self.misfortune = misfortune or Misfortune()
        self.outlives = outlives
        #: By instance and attempt; also those that have ended, until their cell is destroyed.
        self.agents: dict[tuple[UUID, int], SimulatedAgent] = {}
        #: What must never happen, and did.
        self.faults: list[str] = []
        #: How often each misfortune happened.
        self.hits: Counter[str] = Counter()
        #: How those ended that ended by themselves.
        self.exits: dict[tuple[UUID, int], Exit] = {}
        #: Outside of every manager, so that killing one does not end what agents do.
        self._context = copy_context()
        self._tasks: set[asyncio.Task[Any]] = set()

    def strikes(self, what: str) -> bool:
        likely: float = getattr(self.misfortune, what)
        if likely and self.chance.random() < likely:
            self.hits[what] += 1
            return True
        return False

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._context.copy().run(asyncio.get_running_loop().create_task, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        return self._context.copy().run(self.clock.call_later, seconds, action)

    def new_id(self) -> UUID:
        return UUID(int=self.chance.getrandbits(128), version=4)

    def living(self, instance_id: UUID | None = None) -> list[SimulatedAgent]:
        found = [one for one in self.agents.values() if not one.dead]
        return found if instance_id is None else [one for one in found if one.plan.instance_id == instance_id]

    def settle(self) -> None:
        """No agent outlives its signals any longer."""
        for agent in self.agents.values():
            agent.unkillable_until = 0.0

    def power_off(self) -> None:
        """Everything on it ends, without a word."""
        for agent in self.living():
            agent.link = None
            agent.vanish()

    def add(self, agent: SimulatedAgent) -> None:
        others = self.living(agent.plan.instance_id)
        if others:
            numbers = ", ".join(str(one.plan.attempt) for one in (*others, agent))
            self.faults.append(f"attempts {numbers} of {agent.plan.instance_id} live at once")
        self.agents[agent.plan.instance_id, agent.plan.attempt] = agent


@dataclass(eq=False, slots=True)
class Work:
    """One call, until the manager has acknowledged its answer."""

    call_id: UUID
    verb: Verb
    task: asyncio.Task[None] | None = None
    outcome: Outcome | None = None
    #: Resolved when it has stopped.
    stopped: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SimulatedAgent:
    """One start of an instance. It is the `Voice` of its own context."""

    def __init__(self, machine: Machine, plan: StartPlan) -> None:
        self.machine = machine
        self.plan = plan
        self.link: Link | None = None
        self.works: dict[UUID, Work] = {}
        self.asks: dict[UUID, tuple[WaitAsked, asyncio.Future[WaitAnswer]]] = {}
        #: What it has said and no manager has acknowledged, in order.
        self.unacked: list[Signal | TokensUsed] = []
        self.number = 0
        #: It was ended before it could say again what an earlier manager had not acknowledged.
        self.unheard = False
        self.dead = False
        self.exit: Exit | None = None
        #: A cancelled call did not stop.
        self.stuck = False
        self.unkillable_until = 0.0
        self.gate = _Gate()
        self._runner = AgentRunner(
            plan.maker,
            AgentContext(
                instance_id=plan.instance_id,
                attempt=plan.attempt,
                definition_id=plan.manifest.id,
                name=plan.name,
                data=ContextData(plan.context),
                limits=plan.limits,
                clock=machine.clock,
                voice=self,
                directory=plan.workdir,
                owns_directory=plan.owns_workdir,
                env=plan.env,
            ),
        )
        self._runner.make()
        machine.add(self)

    # --- its work --------------------------------------------------------------------------------

    def begin(self, call_id: UUID, verb: Verb, payload: Any) -> Work:
        work = self.works[call_id] = Work(call_id, verb)
        work.task = self.machine.run(self._work(work, payload))
        return work

    async def _work(self, work: Work, payload: Any) -> None:
        outcome: Outcome | None = None
        try:
            outcome = Outcome(answer=await _gated(self._do(work, payload), self.gate))
        except asyncio.CancelledError:
            outcome = Outcome(cancelled=True)
        except Exception as error:  # noqa: BLE001 - it is raised where the call is awaited
            outcome = Outcome(error=error)
        except BaseException as error:  # noqa: BLE001 - the agent ends its program
            self.die(exit_by(error))
        if self.dead or outcome is None:
            return
        work.outcome = outcome
        work.stopped.set_result(None)
        if self.link is not None:
            self.link.answer(work)

    async def _do(self, work: Work, payload: Any) -> Any:
        strikes, chance = self.machine.strikes, self.machine.chance
        match work.verb:
            case Verb.INITIALIZE:
                await self._trouble("init_fails", "init_hangs")
            case Verb.PROCESS:
                if strikes("dies_in_call"):
                    self.machine.call_later(chance.uniform(0, 1), self.die)
                await self._trouble("call_fails", "call_hangs")
            case Verb.SHUTDOWN if strikes("shutdown_hangs"):
                await _forever()
        return await self._runner.run(work.verb.value, payload, call_id=work.call_id)

    async def _trouble(self, fails: str, hangs: str) -> None:
        if self.machine.strikes(hangs):
            await _forever()
        if self.machine.strikes(fails):
            raise AgentExecutionError("RuntimeError: by misfortune", exception_type="RuntimeError")

    # --- what it says ----------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        if self.dead:
            return
        if isinstance(message, Signal | TokensUsed) and self.machine.outlives:
            self.number += 1
            message = replace(message, number=self.number)
            self.unacked.append(message)
        if self.link is not None:
            self.link.hear(message)

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        if self.dead:
            raise AgentGoneError(_DEAD)
        ask_id, call = self.machine.new_id(), CURRENT_CALL.get()
        call_id = call.call_id if call is not None and isinstance(call.call_id, UUID) else None
        reply: asyncio.Future[WaitAnswer] = asyncio.get_running_loop().create_future()
        self.asks[ask_id] = (replace(wait, ask_id=ask_id, call_id=call_id), reply)
        if self.link is not None:
            self.link.ask(ask_id)
        try:
            return await reply
        finally:
            self.asks.pop(ask_id, None)
            if self.link is not None and not self.dead:
                self.link.unask(ask_id)

    def answered(self, ask_id: UUID, answer: WaitAnswer | OstlerError) -> None:
        _, reply = self.asks.get(ask_id, (None, None))
        if reply is None or reply.done():
            return
        if isinstance(answer, WaitAnswer):
            reply.set_result(answer)
        else:
            reply.set_exception(answer)

    # --- its end ---------------------------------------------------------------------------------

    def die(self, how: Exit | None = None) -> None:
        """It ends by itself."""
        if self.dead:
            return
        outcome = self.machine.chance.choice(_OUTCOMES)
        self.exit = how or Exit(
            outcome=outcome, detail=f"by misfortune ({outcome})", ended_at=self.machine.clock.wall()
        )
        self.machine.exits[self.plan.instance_id, self.plan.attempt] = self.exit
        self.vanish()
        if self.link is not None:
            self.link.notify()

    def vanish(self) -> None:
        """Nothing of it runs any more."""
        if self.dead:
            return
        self.dead = True
        if self.link is not None:
            self.link.close_wire()
        self.gate.open()
        for work in self.works.values():
            if work.task is not None:
                work.task.cancel()
            if not work.stopped.done():
                work.stopped.set_result(None)


class _Gate:
    """Shut while the agent is frozen."""

    def __init__(self) -> None:
        self._opened: asyncio.Future[None] | None = None

    @property
    def is_shut(self) -> bool:
        return self._opened is not None

    def shut(self) -> None:
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()

    def open(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set_result(None)

    async def wait(self) -> None:
        while self._opened is not None:
            await asyncio.wait([self._opened])


@coroutine
def _gated(work: Coroutine[Any, Any, Any], gate: _Gate) -> Generator[Any, Any, Any]:
    """Run a coroutine step by step, and none while the gate is shut. A cancellation waits for the gate too."""
    value: Any = None
    error: BaseException | None = None
    while True:
        while gate.is_shut:
            try:
                yield from gate.wait().__await__()
            except asyncio.CancelledError as cancelled:
                error = cancelled
        try:
            waiting = work.send(value) if error is None else work.throw(error)
        except StopIteration as stop:
            return stop.value
        value, error = None, None
        try:
            value = yield waiting
        except BaseException as raised:  # noqa: BLE001 - it is for the code inside
            error = raised


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
