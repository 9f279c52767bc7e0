"""The isolation level on a simulated machine: how a manager starts agents there, holds them and finds them again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar
from uuid import UUID

from simulated_machine import Machine, SimulatedAgent, Work

from ostler.agents import Message
from ostler.aio import wait_ignoring_cancel
from ostler.clock import Clock
from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError, OstlerError
from ostler.isolation.base import (
    Capabilities,
    Cell,
    Exit,
    Isolation,
    LeftBehindError,
    Listener,
    StartPlan,
    StopReport,
    Usage,
    Verb,
)
from ostler.isolation.calls import wake
from ostler.model.attempt import AttemptOutcome
from ostler.model.states import Enforcement, IsolationLevel

_LIMITS = {"execution_timeout": Enforcement.ENFORCED, "max_concurrent_tasks": Enforcement.ENFORCED}
#: A cancelled call that does not stop is given up after so long.
_GIVE_UP_SECONDS = 5.0
_DETACHED = "the manager has let go of the agent"


class SimulatedIsolation(Isolation):
    level: ClassVar[IsolationLevel] = IsolationLevel.THREAD

    def __init__(self, clock: Clock, machine: Machine | None = None) -> None:
        super().__init__(clock)
        self.machine = machine or Machine(clock)
        #: Its manager was killed; nothing that it still does has an effect.
        self.killed = False
        self._cells: list[SimulatedCell] = []

    @property
    def capabilities(self) -> Capabilities:
        able = self.machine.outlives
        return Capabilities(limits=_LIMITS, freezes=able, kills=able, outlives_manager=able)

    def kill(self) -> None:
        """The program of the manager has died."""
        self.killed = True
        for cell in self._cells:
            cell.detach()
        for agent in [] if self.machine.outlives else self.machine.living():
            agent.vanish()

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        machine = self.machine
        if machine.strikes("start_hangs"):
            await self._clock.sleep(machine.chance.uniform(0, 60))
        if machine.strikes("start_fails"):
            raise OSError(11, "no more processes")
        self._require_manager()
        cell = SimulatedCell(self, SimulatedAgent(machine, plan), listener)
        self._cells.append(cell)
        try:
            await self.pause()  # it lives, and the manager does not know it yet
        except asyncio.CancelledError as error:
            stopping = asyncio.ensure_future(cell.stop(timedelta(0)))
            await wait_ignoring_cancel(stopping)
            left_behind = stopping.result().left_behind
            if left_behind is not None and machine.outlives:
                raise LeftBehindError(cell, left_behind) from error
            await cell.destroy()
            raise
        self._require_manager()
        return cell

    async def adopt(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell | Exit:
        del handle
        await self.pause()
        self._require_manager()
        if self.machine.strikes("adopt_fails"):
            raise InvalidOperationError("the keeper does not say what became of it")
        agent = self.machine.agents.get((plan.instance_id, plan.attempt))
        if agent is None:
            return Exit(outcome=AttemptOutcome.LOST, detail="it is not known on this machine")
        if agent.dead:
            for message in agent.unacked:
                listener.on_message(plan.attempt, message)
            return agent.exit or Exit(outcome=AttemptOutcome.STOPPED, detail="it was stopped")
        if agent.link is not None:
            self.machine.faults.append(f"two managers hold {plan.instance_id}")
        cell = SimulatedCell(self, agent, listener, adopted=True)
        self._cells.append(cell)
        return cell

    async def sweep(self, keep: Collection[tuple[UUID, int]]) -> int:
        await self.pause()
        if self.killed:
            return 0
        own = [cell.agent for cell in self._cells if not cell.is_detached]
        swept = {key: agent for key, agent in self.machine.agents.items() if key not in keep and agent not in own}
        living = [agent for agent in swept.values() if not agent.dead]
        for agent in living:
            self.machine.hits["swept"] += 1
            agent.vanish()
        for key in swept:
            del self.machine.agents[key]
        return len(living)

    async def close(self) -> None:
        for cell in self._cells:
            cell.detach()

    async def pause(self) -> None:
        await self._clock.sleep(self.machine.chance.uniform(0, 0.005))

    def _require_manager(self) -> None:
        if self.killed:
            raise OSError(32, "the manager is gone")


class SimulatedCell(Cell):
    """What a manager has of an agent. What the agent sends arrives in order, a moment later."""

    def __init__(
        self, level: SimulatedIsolation, agent: SimulatedAgent, listener: Listener, *, adopted: bool = False
    ) -> None:
        self.agent = agent
        self._level = level
        self._machine = level.machine
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._detached = False
        self._wire: deque[Callable[[], asyncio.Future[None] | None]] = deque()
        self._busy = False
        self._last_call = 0.0
        #: Answered when the answer of a call has arrived.
        self._waiters: dict[UUID, asyncio.Future[None]] = {}
        self._questions: dict[UUID, asyncio.Task[None]] = {}
        self._has_reported = not adopted
        agent.link = self
        if adopted:
            late = self._machine.chance.uniform(2, 30) if self._machine.strikes("report_is_late") else 0.0
            self._machine.run(self._report(late))

    @property
    def handle(self) -> Mapping[str, Any]:
        return {"instance_id": str(self.agent.plan.instance_id), "attempt": self.agent.plan.attempt}

    @property
    def is_detached(self) -> bool:
        return self._detached

    # --- calls -----------------------------------------------------------------------------------

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        self._require()
        # In the order in which they were made, as on a channel.
        due = self._last_call = max(self._loop.time() + self._machine.chance.uniform(0, 0.005), self._last_call) + 1e-6
        await self._machine.clock.sleep(due - self._loop.time())
        self._require()
        named = call_id or self._machine.new_id()
        work = self.agent.works.get(named)
        if work is None:
            work = self.agent.begin(named, verb, payload)
        else:
            self._machine.hits["joined"] += 1
        return await self._answer_of(work, acks=call_id is None)

    async def _answer_of(self, work: Work, *, acks: bool) -> Any:
        waiter = self._waiters[work.call_id] = self._loop.create_future()
        if work.outcome is not None:
            self.answer(work)
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            await self._withdraw(work)
            raise
        finally:
            self._waiters.pop(work.call_id, None)
        if self._detached or work.outcome is None:
            raise AgentGoneError(_DETACHED if self._detached else f"the agent ended: {self.agent.exit}")
        if acks:
            self.ack([work.call_id])
        outcome = work.outcome
        if outcome.error is not None:
            raise outcome.error
        if outcome.cancelled:
            raise AgentExecutionError("CancelledError: by itself", exception_type="asyncio.CancelledError")
        return outcome.answer

    async def _withdraw(self, work: Work) -> None:
        """Stop the work of a cancelled caller, and wait for that. More cancelling does not shorten the wait."""
        if self._detached:
            return
        if work.task is not None and not self._machine.strikes("ignores_cancel"):
            work.task.cancel()
        timer = self._loop.call_later(_GIVE_UP_SECONDS, wake, over := self._loop.create_future())
        while not (work.stopped.done() or over.done() or self._detached):
            try:
                await asyncio.wait((work.stopped, over), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                continue
        timer.cancel()
        if work.stopped.done():
            self.agent.works.pop(work.call_id, None)
        elif not self._detached:
            self.agent.stuck = True

    def answer(self, work: Work) -> None:
        """Sent by the agent."""
        self.send(partial(self._take_answer, work.call_id))

    def _take_answer(self, call_id: UUID) -> None:
        waiter = self._waiters.get(call_id)
        if waiter is not None:
            wake(waiter)

    def ack(self, calls: Collection[UUID] = (), message: int = 0) -> None:
        """A manager that is killed before this arrives has not acknowledged it."""
        self._loop.call_later(self._machine.chance.uniform(0, 0.05), self._take_ack, tuple(calls), message)

    def _take_ack(self, calls: tuple[UUID, ...], message: int) -> None:
        if not self._detached:
            for call_id in calls:
                self.agent.works.pop(call_id, None)
            self.agent.unacked = [unacked for unacked in self.agent.unacked if unacked.number > message]

    # --- an adopted agent ------------------------------------------------------------------------

    async def _report(self, late: float) -> None:
        """The agent says again what was not acknowledged, asks again, and says what it works on."""
        await self._machine.clock.sleep(late + self._machine.chance.uniform(0, 0.01))
        await self.agent.gate.wait()
        if self._detached or self.agent.dead:
            return
        for message in self.agent.unacked:
            self.hear(message)
        for ask_id in self.agent.asks:
            self.ask(ask_id)
        self.send(self._take_report)

    def _take_report(self) -> None:
        self._has_reported = True
        calls = {call_id: work.verb for call_id, work in self.agent.works.items() if call_id not in self._waiters}
        self._listener.on_report(self.agent.plan.attempt, calls, frozenset(self.agent.asks))

    # --- the wire --------------------------------------------------------------------------------

    def send(self, action: Callable[[], asyncio.Future[None] | None]) -> None:
        self._wire.append(action)
        self._pump()

    def _pump(self) -> None:
        if self._wire and not self._busy and not self._detached:
            self._busy = True
            self._context.copy().run(self._loop.call_later, self._machine.chance.uniform(0, 0.002), self._take)

    def _take(self) -> None:
        self._busy = False
        if self._wire and not self._detached:
            full = self._wire.popleft()()
            if full is None:
                self._pump()
            else:
                self._busy = True
                full.add_done_callback(self._go_on)

    def _go_on(self, _: object) -> None:
        self._busy = False
        self._pump()

    def close_wire(self) -> None:
        """The agent has ended: all that it sent arrives, and its open calls end."""
        self.agent.unheard = not self._has_reported
        while self._wire and not self._detached:
            self._wire.popleft()()
        for waiter in list(self._waiters.values()):
            wake(waiter)

    def hear(self, message: Message) -> None:
        self.send(partial(self._listener.on_message, self.agent.plan.attempt, message))

    def ask(self, ask_id: UUID) -> None:
        self.send(partial(self._take_question, ask_id))

    def unask(self, ask_id: UUID) -> None:
        self.send(partial(self._drop_question, ask_id))

    def _take_question(self, ask_id: UUID) -> None:
        if ask_id in self.agent.asks:
            self._questions[ask_id] = self._loop.create_task(self._put(ask_id))

    def _drop_question(self, ask_id: UUID) -> None:
        task = self._questions.pop(ask_id, None)
        if task is not None:
            task.cancel()

    async def _put(self, ask_id: UUID) -> None:
        wait, _ = self.agent.asks[ask_id]
        try:
            answer = await self._listener.on_question(self.agent.plan.attempt, wait)
        except OstlerError as error:
            if not self._detached:
                self.agent.answered(ask_id, error)
        else:
            if not self._detached:
                self.agent.answered(ask_id, answer)

    def notify(self) -> None:
        """The agent has ended by itself; the notice of it may be late, doubled or lost."""
        machine = self._machine
        if machine.strikes("notice_lost"):
            return
        for _ in range(2 if machine.strikes("notice_doubled") else 1):
            late = machine.chance.uniform(0, 30) if machine.strikes("notice_late") else 0.0
            self._context.copy().run(self._loop.call_later, late, self._tell_exit)

    def _tell_exit(self) -> None:
        if not self._detached and self.agent.exit is not None:
            self._listener.on_exit(self.agent.plan.attempt, self.agent.exit)

    # --- the rest of the contract ----------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        return self.agent.stuck

    @property
    def ended(self) -> Exit | None:
        return self.agent.exit

    async def ping(self) -> None:
        self._require()
        if self.agent.stuck or self.agent.gate.is_shut or not self._has_reported:
            await self._loop.create_future()
        await self._level.pause()
        self._require()

    async def freeze(self) -> None:
        self._require()
        await self._level.pause()
        if self._machine.strikes("freeze_hangs"):
            await self._level.machine.clock.sleep(self._machine.chance.uniform(0, 120))
        if self._machine.strikes("freeze_fails"):
            raise InvalidOperationError("it cannot be frozen now")
        self._require()
        self.agent.gate.shut()

    async def thaw(self) -> None:
        await self._level.pause()
        if self._machine.strikes("thaw_fails"):
            raise InvalidOperationError("it cannot be thawed now")
        if not self._detached:
            self.agent.gate.open()

    async def stop(self, grace: timedelta) -> StopReport:
        agent = self.agent
        if self._detached:
            return StopReport(graceful=True)
        if not agent.dead and self._machine.strikes("stop_is_slow"):
            await self._machine.clock.sleep(self._machine.chance.uniform(0, 2))
        if self._detached:
            return StopReport(graceful=True)
        graceful = agent.dead or (bool(grace) and not agent.stuck)
        left = None
        if not agent.dead and self._machine.outlives:
            if self._machine.strikes("unkillable"):
                agent.unkillable_until = self._machine.clock.mono() + self._machine.chance.uniform(0, 30)
            left = _survives(agent)
        elif agent.stuck and not self._machine.outlives:
            left = "its task does not end; it is cut off"
        if left is None or not self._machine.outlives:
            agent.vanish()
        return StopReport(graceful=graceful and left is None, left_behind=left)

    async def destroy(self) -> None:
        await self.stop(timedelta(0))
        if not self._detached and self.agent.dead:
            self._machine.agents.pop((self.agent.plan.instance_id, self.agent.plan.attempt), None)
            self.detach()

    def detach(self) -> None:
        if self._detached:
            return
        self._detached = True
        self.agent.link = None
        for waiter in list(self._waiters.values()):
            wake(waiter)
        for task in list(self._questions.values()):
            task.cancel()

    async def usage(self) -> Usage:
        self._require()
        return Usage(cpu_seconds=self._machine.clock.mono() / 100, memory_bytes=1, thread_count=1)

    def _require(self) -> None:
        if self._detached or self.agent.dead:
            raise AgentGoneError(_DETACHED if self._detached else f"the agent ended: {self.agent.exit}")


def _survives(agent: SimulatedAgent) -> str | None:
    if agent.machine.clock.mono() < agent.unkillable_until:
        return "process 42 does not die"
    return None
