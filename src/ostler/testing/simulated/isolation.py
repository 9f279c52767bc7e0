"""A made-up place for agents, in which everything can go wrong that goes wrong in a real one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Protocol
from uuid import UUID

from ostler.agents import Progress, Signal, TokensUsed, WaitAsked
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation.base import Capabilities, Cell, Exit, Isolation, Listener, StartPlan, StopReport, Usage, Verb
from ostler.model.ledger import AttemptOutcome
from ostler.model.states import Enforcement, IsolationLevel
from ostler.seams import Clock

CAPABILITIES = Capabilities(
    limits={"execution_timeout": Enforcement.ENFORCED, "max_concurrent_tasks": Enforcement.ENFORCED},
    freezes=True,
    kills=True,
)
OUTCOMES = (
    AttemptOutcome.EXIT_CODE,
    AttemptOutcome.SIGNAL,
    AttemptOutcome.OOM,
    AttemptOutcome.CLEAN,
    AttemptOutcome.UNKNOWN,
)
FOREVER = 10.0**7
#: A cancelled call that is ignored is given up after so long.
GIVE_UP = 5.0


@dataclass(kw_only=True)
class Misfortune:
    """How likely each thing is to go wrong; all zero is a perfect world."""

    start_fails: float = 0.0
    start_hangs: float = 0.0
    init_fails: float = 0.0
    init_hangs: float = 0.0
    call_fails: float = 0.0
    call_hangs: float = 0.0
    ignores_cancel: float = 0.0
    dies_in_call: float = 0.0
    #: Of the notices of a death: lost, said twice, late.
    notice_lost: float = 0.0
    notice_doubled: float = 0.0
    notice_late: float = 0.0
    shutdown_hangs: float = 0.0
    stop_is_slow: float = 0.0

    @classmethod
    def none(cls) -> Misfortune:
        return cls()

    @classmethod
    def drawn(cls, chance: random.Random) -> Misfortune:
        """Each seed has a weather of its own: some things often, others never."""
        names = cls.__dataclass_fields__
        return cls(**{name: chance.choice((0.0, 0.0, 0.05, 0.2)) for name in names})


class Living(Protocol):
    """Something in the made-up machine that lives."""

    plan: StartPlan

    def die(self) -> None: ...

    def vanish(self) -> None: ...


@dataclass(kw_only=True)
class World:
    """What the made-up machine knows; what the invariants are held against."""

    chance: random.Random
    luck: Misfortune = field(default_factory=Misfortune)
    #: Everything that lives, by instance; more than one at a time is a twin.
    alive: dict[UUID, list[Living]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    #: How often each kind of misfortune really happened.
    hits: Counter[str] = field(default_factory=Counter)

    def strikes(self, what: str) -> bool:
        likely: float = getattr(self.luck, what)
        if likely and self.chance.random() < likely:
            self.hits[what] += 1
            return True
        return False

    def born(self, cell: Living) -> None:
        twins = self.alive.setdefault(cell.plan.instance_id, [])
        twins.append(cell)
        if len(twins) > 1:
            numbers = ", ".join(str(one.plan.attempt) for one in twins)
            self.faults.append(f"instance {cell.plan.instance_id} has twins: attempts {numbers} live at once")

    def buried(self, cell: Living) -> None:
        living = self.alive.get(cell.plan.instance_id, [])
        if cell in living:
            living.remove(cell)
        if not living:
            self.alive.pop(cell.plan.instance_id, None)

    def perish(self) -> None:
        """The program died, and with it all that lived inside it."""
        for cells in list(self.alive.values()):
            for cell in list(cells):
                cell.vanish()


class SimulatedIsolation(Isolation):
    level: ClassVar[IsolationLevel] = IsolationLevel.THREAD

    def __init__(self, clock: Clock, world: World) -> None:
        super().__init__(clock)
        self._world = world

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        world = self._world
        if world.strikes("start_hangs"):
            await self._clock.sleep(world.chance.uniform(0, 60))
        if world.strikes("start_fails"):
            raise OSError(11, "no more processes (made up)")
        return SimulatedCell(self._clock, world, plan, listener)


class SimulatedCell(Cell):
    def __init__(self, clock: Clock, world: World, plan: StartPlan, listener: Listener) -> None:
        self._clock = clock
        self._world = world
        self.plan = plan
        self._listener = listener
        self._dead = False
        self._ended: Exit | None = None
        self._stuck = False
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._calls: set[asyncio.Future[None]] = set()
        world.born(self)

    @property
    def handle(self) -> Mapping[str, Any]:
        return {"simulated": str(self.plan.instance_id), "attempt": self.plan.attempt}

    @property
    def is_stuck(self) -> bool:
        return self._stuck

    @property
    def ended(self) -> Exit | None:
        return self._ended

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        del call_id
        self._require_alive()
        await self._clock.sleep(self._world.chance.uniform(0, 0.01))
        self._require_alive()
        match verb:
            case Verb.INITIALIZE:
                await self._trouble("init_fails", "init_hangs")
            case Verb.PROCESS:
                return await self._process(payload)
            case Verb.SHUTDOWN if self._world.strikes("shutdown_hangs"):
                await self._while_alive(FOREVER)
            case Verb.FINAL_STATE:
                return {"attempt": self.plan.attempt}
            case Verb.CLEANUP:
                return []
            case _:
                return None
        return None

    async def _process(self, payload: Any) -> Any:
        chance, said = self._world.chance, (self._listener, self.plan.attempt)
        if chance.random() < 0.1:
            said[0].heard(said[1], TokensUsed(count=chance.randrange(100)))
            said[0].heard(said[1], Progress(fraction=chance.random()))
        if chance.random() < 0.05:
            said[0].heard(said[1], Signal(name="made-up"))
        if chance.random() < 0.05:
            await said[0].asked(said[1], WaitAsked(kind="answer", timeout=timedelta(seconds=chance.uniform(1, 30))))
        if self._world.strikes("dies_in_call"):
            await self._while_alive(chance.uniform(0, 1))
            self.die()
        await self._trouble("call_fails", "call_hangs")
        await self._while_alive(chance.expovariate(1.0))
        return payload

    async def _trouble(self, fails: str, hangs: str) -> None:
        if self._world.strikes(hangs):
            await self._while_alive(FOREVER)
        if self._world.strikes(fails):
            raise AgentExecutionError("RuntimeError: made up", exception_type="RuntimeError")

    async def _while_alive(self, seconds: float) -> None:
        """Work for so long, unless it dies, is cancelled and heeds that, or is frozen meanwhile."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.add(over)
        timer = self._clock.call_later(seconds, lambda: _set(over))
        deaf = self._world.strikes("ignores_cancel")
        try:
            await over
        except asyncio.CancelledError:
            if deaf and not self._dead:
                await self._clock.sleep(GIVE_UP)
                self._stuck = not self._dead
            raise
        finally:
            timer.cancel()
            self._calls.discard(over)
        await self._thawed.wait()
        self._require_alive()

    def _require_alive(self) -> None:
        if self._dead:
            raise AgentGoneError("the agent has ended (made up)")

    async def ping(self) -> None:
        self._require_alive()
        if self._stuck or not self._thawed.is_set():
            await self._clock.sleep(FOREVER)

    async def freeze(self) -> None:
        self._thawed.clear()

    async def thaw(self) -> None:
        self._thawed.set()

    async def stop(self, grace: timedelta) -> StopReport:
        if self._dead:
            return StopReport(graceful=True)
        graceful = bool(grace) and not self._stuck
        if self._world.strikes("stop_is_slow"):
            await self._clock.sleep(self._world.chance.uniform(0, 2))
        self.vanish()
        return StopReport(graceful=graceful)

    async def destroy(self) -> None:
        self.vanish()

    async def usage(self) -> Usage:
        return Usage(cpu_seconds=self._clock.mono() / 100, memory_bytes=1, memory_is_shared=True, thread_count=1)

    def die(self) -> None:
        """It ends by itself; whoever should be told may be told late, twice, or not at all."""
        if self._dead:
            return
        world, chance = self._world, self._world.chance
        how = self._ended = Exit(outcome=chance.choice(OUTCOMES), detail="made up")
        self.vanish()
        if world.strikes("notice_lost"):
            return
        for _ in range(2 if world.strikes("notice_doubled") else 1):
            late = chance.uniform(0, 30) if world.strikes("notice_late") else 0.0
            self._clock.call_later(late, lambda: self._listener.exited(self.plan.attempt, how))

    def vanish(self) -> None:
        """Nothing of it is left."""
        self._dead = True
        self._world.buried(self)
        self._thawed.set()
        for over in list(self._calls):
            _set(over)


def _set(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
