"""The level on such a machine: how a manager starts agents there, finds them again and holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError, OstlerError
from ostler.isolation.base import Capabilities, Cell, Exit, Isolation, Listener, StartPlan, StopReport, Usage, Verb
from ostler.model.ledger import AttemptOutcome
from ostler.model.states import IsolationLevel
from ostler.seams import Clock
from ostler.testing.simulated.isolation import CAPABILITIES, FOREVER, GIVE_UP
from ostler.testing.simulated.machine import Body, Machine

_CAPABILITIES = replace(CAPABILITIES, outlives_manager=True)


class OutlivingIsolation(Isolation):
    level: ClassVar[IsolationLevel] = IsolationLevel.THREAD

    def __init__(self, clock: Clock, machine: Machine) -> None:
        super().__init__(clock)
        self._machine = machine
        #: Its manager was killed; whatever is still said in its name is not heard.
        self.killed = False

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        machine = self._machine
        if machine.strikes("start_hangs"):
            await self._clock.sleep(machine.chance.uniform(0, 60))
        if machine.strikes("start_fails"):
            raise OSError(11, "no more processes (made up)")
        if self.killed:
            raise OSError(32, "nobody listens (made up)")
        body = Body(self._clock, machine, plan)
        hand = Hand(self._clock, machine, body, listener)
        try:
            await self._clock.sleep(machine.chance.uniform(0, 0.01))  # it lives, and the manager does not know it yet
        except asyncio.CancelledError:
            await hand.stop(timedelta(0))
            await hand.destroy()
            raise
        return hand

    async def recover(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell | Exit:
        del handle
        await self._clock.sleep(self._machine.chance.uniform(0, 0.05))
        body = self._machine.bodies.get((plan.instance_id, plan.attempt))
        if body is None:
            return Exit(outcome=AttemptOutcome.LOST, detail="nothing of it is known (made up)")
        if body.dead:
            return body.exit or Exit(outcome=AttemptOutcome.STOPPED, detail="it was stopped (made up)")
        if body.hand is not None:
            self._machine.faults.append(f"two managers have a hand on {plan.instance_id}")
        return Hand(self._clock, self._machine, body, listener)

    async def sweep(self, keep: Collection[tuple[UUID, int]]) -> int:
        left = [body for name, body in self._machine.bodies.items() if name not in keep and not body.dead]
        for body in left:
            self._machine.hits["swept"] += 1
            body.vanish()
        return len(left)


class Hand(Cell):
    """What a manager has of an agent."""

    def __init__(self, clock: Clock, machine: Machine, body: Body, listener: Listener) -> None:
        self._clock = clock
        self._machine = machine
        self.body = body
        self.listener = listener
        self._found = {name: verb for name, (verb, _) in body.works.items()}
        self._loose: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking: dict[UUID, asyncio.Task[None]] = {}
        body.hand = self
        for ask_id in list(body.asks):
            self.pass_on(ask_id)

    @property
    def handle(self) -> Mapping[str, Any]:
        return {"simulated": str(self.body.plan.instance_id), "attempt": self.body.plan.attempt}

    @property
    def is_stuck(self) -> bool:
        return self.body.stuck

    @property
    def ended(self) -> Exit | None:
        return self.body.exit

    @property
    def in_flight(self) -> Mapping[UUID, Verb]:
        return dict(self._found)

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        self._require()
        await self._clock.sleep(self._machine.chance.uniform(0, 0.01))
        self._require()
        named = call_id or self._machine.draw_id()
        self.body.begin(named, verb, payload)
        return await self._answer(named)

    async def rejoin(self, call_id: UUID) -> Any:
        if self._found.pop(call_id, None) is None:
            raise InvalidOperationError(f"no call {call_id} was found again")
        self._machine.hits["rejoined"] += 1
        return await self._answer(call_id)

    async def _answer(self, call_id: UUID) -> Any:
        _, work = self.body.works[call_id]
        try:
            await asyncio.wait([work, self._loose], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not self._loose.done() and not work.done():
                await self._call_off(work)
                if work.done() and not self._loose.done():
                    self.body.works.pop(call_id, None)
            raise
        if not work.done() or self._loose.done():
            raise AgentGoneError("the manager has let go of it (made up)")
        self.body.works.pop(call_id, None)
        if work.cancelled():
            raise AgentExecutionError("CancelledError: made up", exception_type="asyncio.CancelledError")
        return work.result()

    async def _call_off(self, work: asyncio.Task[Any]) -> None:
        if self._machine.strikes("ignores_cancel"):
            await self._clock.sleep(GIVE_UP)
            self.body.stuck = not self.body.dead and not work.done()
        else:
            work.cancel()
            await asyncio.wait([work])

    def _require(self) -> None:
        if self._loose.done():
            raise AgentGoneError("the manager has let go of it (made up)")
        self.body.require_alive()

    # --- what it says -----------------------------------------------------------------------------

    def pass_on(self, ask_id: UUID) -> None:
        self._asking[ask_id] = asyncio.get_running_loop().create_task(self._pass_on(ask_id))

    async def _pass_on(self, ask_id: UUID) -> None:
        wait, answered = self.body.asks[ask_id]
        try:
            answer = await self.listener.asked(self.body.plan.attempt, wait)
        except OstlerError as error:
            if not self._loose.done() and not answered.done():
                answered.set_exception(AgentExecutionError(f"its question failed: {error}"))
        else:
            if not self._loose.done() and not answered.done():
                answered.set_result(answer)

    def unask(self, ask_id: UUID) -> None:
        task = self._asking.pop(ask_id, None)
        if task is not None:
            task.cancel()

    def announce(self) -> None:
        if not self._loose.done() and self.body.exit is not None:
            self.listener.exited(self.body.plan.attempt, self.body.exit)

    # --- the rest of the contract -----------------------------------------------------------------

    async def ping(self) -> None:
        self._require()
        if self.body.stuck or not self.body.thawed.is_set():
            await self._clock.sleep(FOREVER)

    async def freeze(self) -> None:
        if not self._loose.done():
            self.body.thawed.clear()

    async def thaw(self) -> None:
        if not self._loose.done():
            self.body.thawed.set()

    async def stop(self, grace: timedelta) -> StopReport:
        graceful = bool(grace) and not self.body.stuck
        if self.body.dead or self._loose.done():
            return StopReport(graceful=True)
        if self._machine.strikes("stop_is_slow"):
            await self._clock.sleep(self._machine.chance.uniform(0, 2))
        if not self._loose.done():
            self.body.vanish()
        return StopReport(graceful=graceful)

    async def destroy(self) -> None:
        if not self._loose.done():
            self.body.vanish()
            self._machine.bodies.pop((self.body.plan.instance_id, self.body.plan.attempt), None)

    def detach(self) -> None:
        if not self._loose.done():
            self._loose.set_result(None)
            self.body.hand = None
            for task in self._asking.values():
                task.cancel()

    async def usage(self) -> Usage:
        return Usage(cpu_seconds=self._clock.mono() / 100, memory_bytes=1, memory_is_shared=True, thread_count=1)
