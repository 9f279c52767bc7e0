"""A state machine that drives a store by chance and holds it against a few dictionaries, crashes included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_ground import ALICE, ENDED, Place, current, new_record, new_wait, new_workspace, places_taken
from store_invariants import all_instances, invariant_faults

from ostler.errors import (
    ConflictError,
    IdempotencyConflictError,
    InvalidOperationError,
    LicenseError,
    OstlerError,
    OutcomeUnknownError,
    StaleWriterError,
)
from ostler.failpoints import FaultPlan, Seams
from ostler.model.access import SYSTEM
from ostler.model.instance import AgentHealthStatus, AgentInstance
from ostler.model.states import ACTIVE_STATES, AgentState, AgentStateTransitions, HealthState, SuspendDepth, Tier
from ostler.model.wait import WaitKind
from ostler.policy.quota import plan
from ostler.policy.retention import RetentionPolicy
from ostler.store import attempts, instances, moves, reports, retention, waits
from ostler.store.idempotency import IdempotencyKey
from ostler.store.instances import Failure, Finish
from ostler.store.moves import Move
from ostler.store.store import Store
from ostler.testing.clock import ManualClock

R = TypeVar("R")
Wrong = type[OstlerError] | None

TIER = Tier.WRITER_PRO
CAP = plan(TIER).max_concurrent or 0
DAY = timedelta(days=1)
#: Every so many steps the whole store is looked through.
FULL_LOOK = 10
#: Where a writer may die, and whether its commit is there afterwards.
CRASHES = {
    "store.begin.after": False,
    "store.save.after": False,
    "store.commit.before": False,
    "store.commit.after": True,
}
BUT_BACKOFF = frozenset(WaitKind) - {WaitKind.BACKOFF}
#: Moves that the machine makes without a command of their own.
PLAIN = [AgentState.READY, AgentState.PROCESSING, AgentState.WAITING, AgentState.TERMINATING]


# --- the model ---------------------------------------------------------------------------------------


@dataclass
class ModelInstance:
    state: AgentState = AgentState.INITIALIZING
    health: HealthState = HealthState.UNKNOWN
    attempt: int = 1
    retries: int = 0
    ended: datetime | None = None
    #: Of the present attempt: whether it was seen to start, and to end.
    started: bool = False
    over: bool = False

    @property
    def active(self) -> bool:
        return self.state in ACTIVE_STATES

    def seen(self) -> tuple[object, ...]:
        return self.state, self.health, self.attempt, self.retries, self.ended

    def begin(self) -> None:
        """A new attempt, of which nothing is known yet."""
        self.attempt, self.started, self.over = self.attempt + 1, False, False
        self.health = HealthState.UNKNOWN


@dataclass
class Model:
    """It knows nothing of commits, batches or rows."""

    instances: dict[UUID, ModelInstance] = field(default_factory=dict)
    #: Open waits: whose they are, and their kind.
    waits: dict[UUID, tuple[UUID, WaitKind]] = field(default_factory=dict)
    ended_waits: list[UUID] = field(default_factory=list)
    #: Key to body, answer and time.
    answers: dict[str, tuple[str, UUID, datetime]] = field(default_factory=dict)
    epoch: int = 0

    @property
    def active(self) -> int:
        return sum(one.active for one in self.instances.values())

    def room(self) -> Wrong:
        return LicenseError if self.active >= CAP else None

    def answered(self, key: str, body: str, now: datetime) -> UUID | Wrong:
        """The answer that a repeated key must get, or the conflict, or None for a fresh one."""
        if key not in self.answers or now - self.answers[key][2] >= DAY:
            return None
        known, answer, _ = self.answers[key]
        if known != body:
            return IdempotencyConflictError
        return answer if answer in self.instances else None

    def move(self, instance_id: UUID, to: AgentState) -> None:
        one = self.instances[instance_id]
        if one.state is AgentState.SUSPENDED and to in {AgentState.READY, AgentState.PROCESSING}:
            self.end_waits(instance_id, WaitKind.RESUME)
        one.state = to

    def end_waits(self, instance_id: UUID, *kinds: WaitKind) -> None:
        for wait_id, (about, kind) in list(self.waits.items()):
            if about == instance_id and kind in kinds:
                self.end_wait(wait_id)

    def end_wait(self, wait_id: UUID) -> None:
        del self.waits[wait_id]
        self.ended_waits.append(wait_id)

    def sweep(self, now: datetime) -> None:
        held = {about for about, _ in self.waits.values()}
        for instance_id, one in list(self.instances.items()):
            may_live = one.started and not one.over
            if one.ended is not None and one.ended <= now - DAY and instance_id not in held and not may_live:
                del self.instances[instance_id]


# --- the machine -------------------------------------------------------------------------------------


class StoreMachine(RuleBasedStateMachine):
    """Handles on the same content, a clock, a model beside them, and what must hold."""

    #: Given by the subclass: a new, empty place.
    fresh: Callable[[], Place]

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.place = self.fresh()
        self.handles: list[Store] = []
        self.model = Model()
        self.steps = 0
        self.owned = False
        self.reopen()
        self.space = self.run(new_workspace(self.handles[0], TIER))

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        return self.runner.run(work)

    def reopen(self) -> None:
        for handle in self.handles:
            self.run(handle.close())
        self.plan = FaultPlan()  # armed by a crash, once
        faults = (self.plan, FaultPlan()) if self.place.is_durable else (self.plan,)
        self.handles = [self.place.store(Seams(clock=self.clock, fault=fault)) for fault in faults]
        for handle in self.handles:
            self.run(handle.open())
            if self.owned:  # a newcomer may not write beside an owner
                assert handle.epoch == -1
                self.run(handle.own_without_lease())
            assert handle.epoch == self.model.epoch

    def store(self, by: int) -> Store:
        return self.handles[by % len(self.handles)]

    def do(self, handle: int, wrong: Wrong, command: Callable[..., R], *args: Any, **named: Any) -> R | None:
        """Run it through one of the handles; the outcome must be what the model says."""
        try:
            answer = self.run(self.store(handle).run(command, *args, **named))
        except OstlerError as error:
            if wrong is None or not isinstance(error, wrong):
                raise AssertionError(f"{error!r} instead of {wrong}") from error
            return None
        assert wrong is None, f"should have been refused with {wrong}"
        return answer

    def pick(self, data: st.DataObject, known: Iterable[UUID]) -> UUID:
        """By place, in the order in which they were made: the ids themselves differ from run to run."""
        choices = list(known)
        return choices[data.draw(st.integers(0, len(choices) - 1))]

    def held(self, instance_id: UUID) -> AgentInstance:
        return self.run(current(self.handles[0], instance_id))

    # --- instances ------------------------------------------------------------------------------

    @rule(by=st.integers(0, 1), key=st.sampled_from([None, "k1", "k2"]), body=st.sampled_from(["x", "y"]))
    def reserve(self, by: int, key: str | None, body: str) -> None:
        now = self.clock.wall()
        known = self.model.answered(key, body, now) if key else None
        wrong = None if isinstance(known, UUID) else known or self.model.room()
        given = IdempotencyKey.of(key, body) if key else None
        record = new_record(workspace_id=self.space)
        answer = self.do(by, wrong, instances.reserve_instance, record, by=ALICE, key=given)
        if isinstance(known, UUID):
            assert answer is not None
            assert (answer[0].instance_id, answer[1]) == (known, False)
        elif answer is not None:
            self.model.instances[record.instance_id] = ModelInstance()
            if key:
                self.model.answers[key] = (body, record.instance_id, now)

    @rule(count=st.integers(2, 12))
    def reserve_at_once_through_all(self, count: int) -> None:
        async def race() -> list[Any]:
            wishes = (
                self.store(n).run(instances.reserve_instance, new_record(workspace_id=self.space), by=ALICE)
                for n in range(count)
            )
            return await asyncio.gather(*wishes, return_exceptions=True)

        answers = self.run(race())
        made = [answer[0] for answer in answers if isinstance(answer, tuple)]
        assert all(isinstance(one, tuple | LicenseError) for one in answers), answers
        assert len(made) == min(max(CAP - self.model.active, 0), count)
        self.model.instances.update((one.instance_id, ModelInstance()) for one in made)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def ready(self, data: st.DataObject, by: int) -> None:
        instance_id = self.pick(data, self.model.instances)
        one = self.model.instances[instance_id]
        legal = AgentStateTransitions.is_valid(one.state, AgentState.READY)
        wrong = None if legal else InvalidOperationError
        if self.do(by, wrong, instances.ready_instance, self.held(instance_id), {"pid": 1}, {}, by=ALICE) is not None:
            self.model.move(instance_id, AgentState.READY)
            one.started = True

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), to=st.sampled_from(PLAIN), freezing=st.booleans())
    def move(self, data: st.DataObject, by: int, to: AgentState, freezing: bool) -> None:
        instance_id = self.pick(data, self.model.instances)
        one = self.model.instances[instance_id]
        legal = AgentStateTransitions.is_valid(one.state, to, freezing=freezing)
        wrong = None if legal else InvalidOperationError
        move = Move(to=to, freezing=freezing, act="push", by=ALICE)
        if self.do(by, wrong, moves.move_instance, self.held(instance_id), move) is not None:
            self.model.move(instance_id, to)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), late=st.sampled_from(["state", "attempt"]))
    def write_too_late(self, data: st.DataObject, by: int, late: str) -> None:
        instance_id = self.pick(data, self.model.instances)
        record = self.held(instance_id)
        if late == "attempt":
            stale = record.evolve(attempt=record.attempt - 1)
            self.do(by, StaleWriterError, reports.report_progress, stale, 0.5, None, None)
        else:
            other = AgentState.READY if record.state is not AgentState.READY else AgentState.WAITING
            move = Move(to=AgentState.PROCESSING)
            self.do(by, ConflictError, moves.move_instance, record.evolve(state=other), move)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), comes_back=st.booleans())
    def fail(self, data: st.DataObject, by: int, comes_back: bool) -> None:
        instance_id = self.pick(data, self.model.instances)
        one, record = self.model.instances[instance_id], self.held(instance_id)
        wait = new_wait(record, kind=WaitKind.BACKOFF) if comes_back else None
        failure = Failure(end=ENDED, error=instances.error_event(record, "x"), reason="x", backoff=wait)
        legal = AgentStateTransitions.is_valid(one.state, AgentState.FAILED)
        if self.do(by, None if legal else InvalidOperationError, instances.fail_instance, record, failure) is None:
            return
        one.state, one.over, one.ended = AgentState.FAILED, True, self.clock.wall()
        self.model.end_waits(instance_id, *BUT_BACKOFF)
        if wait is not None:
            self.model.waits[wait.wait_id] = (instance_id, WaitKind.BACKOFF)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), by_hand=st.booleans())
    def start_again(self, data: st.DataObject, by: int, by_hand: bool) -> None:
        """Both handles want to bring it back; the wait of its backoff is for one."""
        instance_id = self.pick(data, self.model.instances)
        one, record = self.model.instances[instance_id], self.held(instance_id)
        waits_of = [key for key, about in self.model.waits.items() if about == (instance_id, WaitKind.BACKOFF)]
        wait_id = None if by_hand or not waits_of else waits_of[0]
        wrong = self.model.room() if one.state is AgentState.FAILED else InvalidOperationError
        for handle, expected in ((by, wrong), (1 - by, wrong or OstlerError)):
            done = self.do(handle, expected, instances.new_attempt, record, by=SYSTEM, reason="again", wait_id=wait_id)
            if done is not None:
                one.state, one.ended = AgentState.INITIALIZING, None
                one.retries += wait_id is not None
                one.begin()
                if wait_id is None:
                    self.model.end_waits(instance_id, WaitKind.BACKOFF)
                else:
                    self.model.end_wait(wait_id)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def restart_alive(self, data: st.DataObject, by: int) -> None:
        instance_id = self.pick(data, self.model.instances)
        one = self.model.instances[instance_id]
        legal = AgentStateTransitions.is_valid(one.state, AgentState.FAILED)
        wrong = None if legal else InvalidOperationError
        record = self.held(instance_id)
        if self.do(by, wrong, instances.restart_instance, record, ENDED, by=ALICE, reason="stuck") is not None:
            one.state = AgentState.INITIALIZING
            one.begin()
            self.model.end_waits(instance_id, *BUT_BACKOFF)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), depth=st.sampled_from(SuspendDepth))
    def suspend(self, data: st.DataObject, by: int, depth: SuspendDepth) -> None:
        instance_id = self.pick(data, self.model.instances)
        one, record = self.model.instances[instance_id], self.held(instance_id)
        again = one.state is AgentState.SUSPENDED
        freezing = depth is SuspendDepth.FREEZE
        legal = again or AgentStateTransitions.is_valid(one.state, AgentState.SUSPENDED, freezing=freezing)
        wait = new_wait(record, kind=WaitKind.RESUME, detail={"depth": depth.value})
        wrong = None if legal else InvalidOperationError
        if self.do(by, wrong, instances.suspend_instance, record, wait, by=ALICE) is not None:
            self.model.end_waits(instance_id, WaitKind.RESUME)
            one.state = AgentState.SUSPENDED
            self.model.waits[wait.wait_id] = (instance_id, WaitKind.RESUME)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def park_and_unpark(self, data: st.DataObject, by: int) -> None:
        instance_id = self.pick(data, self.model.instances)
        one, record = self.model.instances[instance_id], self.held(instance_id)
        if one.state is AgentState.SUSPENDED:
            self.do(by, None, instances.park_instance, record, ENDED)
            one.over = True
            self.model.end_waits(instance_id, *(set(WaitKind) - {WaitKind.RESUME}))
        wrong = None if one.state is AgentState.SUSPENDED else InvalidOperationError
        if self.do(1 - by, wrong, instances.unpark_instance, record, by=ALICE) is not None:
            one.begin()

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def finish(self, data: st.DataObject, by: int) -> None:
        instance_id = self.pick(data, self.model.instances)
        one = self.model.instances[instance_id]
        legal = AgentStateTransitions.is_valid(one.state, AgentState.TERMINATED)
        finish = Finish(end=None if one.over else ENDED, was_graceful=True, by=ALICE)
        wrong = None if legal else InvalidOperationError
        if self.do(by, wrong, instances.finish_instance, self.held(instance_id), finish) is not None:
            one.ended = one.ended or self.clock.wall()
            one.state, one.over = AgentState.TERMINATED, True
            self.model.end_waits(instance_id, *WaitKind)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), state=st.sampled_from(HealthState))
    def report(self, data: st.DataObject, by: int, state: HealthState) -> None:
        instance_id = self.pick(data, self.model.instances)
        one = self.model.instances[instance_id]
        health = AgentHealthStatus(state=state)
        wrong = None if one.active else ConflictError
        if self.do(by, wrong, reports.report_health, self.held(instance_id), health) is not None:
            one.health = state
            one.retries = 0 if state is HealthState.HEALTHY else one.retries

    # --- waits ----------------------------------------------------------------------------------

    @precondition(lambda self: any(one.active for one in self.model.instances.values()))
    @rule(data=st.data(), by=st.integers(0, 1))
    def open_wait(self, data: st.DataObject, by: int) -> None:
        alive = [key for key, one in self.model.instances.items() if one.active]
        instance_id = self.pick(data, alive)
        wait = new_wait(self.held(instance_id), kind=WaitKind.HUMAN)
        assert self.do(by, None, waits.open_wait, wait) == wait
        self.model.waits[wait.wait_id] = (instance_id, WaitKind.HUMAN)

    @precondition(lambda self: self.model.waits or self.model.ended_waits)
    @rule(data=st.data(), by=st.integers(0, 1))
    def end_wait(self, data: st.DataObject, by: int) -> None:
        wait_id = self.pick(data, [*self.model.waits, *self.model.ended_waits])
        is_open = wait_id in self.model.waits
        # One that has ended may have been removed since.
        self.do(by, None if is_open else OstlerError, waits.end_wait, wait_id, "done")
        if is_open:
            self.model.end_wait(wait_id)

    # --- owners, time, crashes ------------------------------------------------------------------

    @precondition(lambda self: self.place.is_durable)
    @rule()
    def another_owner_takes_over(self) -> None:
        async def steal() -> int:
            async with self.place.store(Seams(clock=self.clock)) as thief:
                return (await thief.take_lease("thief", ttl=timedelta(days=3650), steal=True)).epoch

        self.model.epoch += 1
        self.owned = True
        assert self.run(steal()) == self.model.epoch
        for by, handle in enumerate(self.handles):
            record = new_record(workspace_id=self.space)
            self.do(by, StaleWriterError, instances.reserve_instance, record, by=ALICE)
            self.run(handle.own_without_lease())

    @rule(hours=st.sampled_from([0.001, 1, 12, 24, 49]))
    def time_passes(self, hours: float) -> None:
        self.clock.advance(hours * 3600)

    @rule(by=st.integers(0, 1))
    def sweep(self, by: int) -> None:
        self.do(by, None, retention.sweep, RetentionPolicy())
        self.model.sweep(self.clock.wall())

    @precondition(lambda self: self.place.is_durable and self.model.active < CAP)
    @rule(point=st.sampled_from(sorted(CRASHES)))
    def crash_while_reserving(self, point: str) -> None:
        self.plan.name = point
        record = new_record(workspace_id=self.space)
        self.do(0, OutcomeUnknownError, instances.reserve_instance, record, by=ALICE)
        self.reopen()
        found = {one.instance_id for one in self.run(self.handles[-1].read(all_instances, self.space))}
        assert (record.instance_id in found) == CRASHES[point]
        if CRASHES[point]:
            self.model.instances[record.instance_id] = ModelInstance()
        self.look_through_everything()

    @precondition(lambda self: self.place.is_durable)
    @rule()
    def close_and_reopen(self) -> None:
        self.reopen()

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        self.steps += 1
        if self.steps % FULL_LOOK == 0:
            self.look_through_everything()

    def look_through_everything(self) -> None:
        store = self.store(self.steps)
        found = {one.instance_id: one for one in self.run(store.read(all_instances, self.space))}
        assert set(found) == set(self.model.instances)
        for instance_id, one in self.model.instances.items():
            record = found[instance_id]
            told = (record.state, record.health.state, record.attempt, record.restart_count, record.terminated_at)
            assert told == one.seen()
            attempt = self.run(store.read(attempts.get_attempt, instance_id, one.attempt))
            assert attempt is not None
            assert (attempt.handle is not None, not attempt.is_open) == (one.started, one.over)
        assert {wait.wait_id for wait in self.run(store.read(waits.all_open_waits))} == set(self.model.waits)
        assert self.run(store.read(places_taken, self.space)) == self.model.active
        assert self.run(invariant_faults(store, self.clock.wall())) == []

    def teardown(self) -> None:
        try:
            if self.handles:
                self.look_through_everything()
        finally:
            for handle in self.handles:
                self.run(handle.close())
            self.runner.close()
