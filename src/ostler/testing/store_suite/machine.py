"""A state machine that drives a store by chance and holds it against a small model, crashes included.

It needs Hypothesis. A backend gives `home`; `run_state_machine_as_test(MyMachine, settings=…)` does the rest.
"""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostler.errors import (
    AgentNotFoundError,
    InvalidOperationError,
    LicenseError,
    OstlerError,
    OutcomeUnknownError,
    StaleWriterError,
    VersionConflictError,
)
from ostler.model import AgentHealthStatus, AgentInstance, AgentState, HealthState, TaskState, Tier, Wait, WaitKind
from ostler.policy import plan
from ostler.seams import FaultPlan
from ostler.store import Seams, Store
from ostler.store.commands import (
    Command,
    CreateTask,
    EndWait,
    Idempotency,
    MoveInstance,
    MoveTask,
    OpenWait,
    ReportHealth,
    RestartInstance,
)
from ostler.testing.clock import ManualClock
from ostler.testing.folding import invariant_faults
from ostler.testing.store_suite.crashing import KEPT, LOST
from ostler.testing.store_suite.ground import OpenStore, new_workspace, reservation
from ostler.testing.store_suite.model import Model, ModelInstance, ModelTask

R = TypeVar("R")

TIER = Tier.WRITER_PRO
_NOBODY = UUID(int=404)
_LONG_TTL = timedelta(hours=24)
#: Every so many steps the whole store is looked through.
_FULL_LOOK = 10


class StoreMachine(RuleBasedStateMachine):
    """Two handles on the same content, a clock, and chance."""

    #: Given by the subclass: opens the same content each time, anew for each machine.
    home: OpenStore

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.handles: list[Store] = []
        self.model = Model(cap=plan(TIER).max_concurrent or 0)
        self.steps, self.waits_made = 0, 0
        self.owned_until = self.clock.wall()
        self.reopen()
        self.space = self.run(new_workspace(self.handles[0], TIER))

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        return self.runner.run(work)

    def reopen(self) -> None:
        for handle in self.handles:
            self.run(handle.close())
        self.plan = FaultPlan()  # armed by a crash, once
        self.handles = [self.home(Seams(clock=self.clock, fault=fault)) for fault in (self.plan, FaultPlan())]
        for handle in self.handles:
            self.run(handle.open())
            if self.clock.wall() < self.owned_until:  # a newcomer may not write before it says for whom
                assert handle.epoch == -1
                handle.adopt_epoch(self.model.epoch)
            assert handle.epoch == self.model.epoch

    def do(self, command: Command[R], by: int, wrong: type[OstlerError] | None = None) -> R | None:
        """Commit through one of the handles; the outcome must be what the model says."""
        try:
            answer = self.run(self.handles[by].commit(command))
        except OstlerError as error:
            if type(error) is not wrong:
                raise AssertionError(f"{error!r} instead of {wrong}") from error
            return None
        assert wrong is None, f"should have been refused with {wrong}"
        return answer

    def pick(self, data: st.DataObject, known: Iterable[UUID]) -> UUID:
        """By place, in the order in which they were made: the ids themselves differ from run to run."""
        choices = list(known)
        return choices[data.draw(st.integers(0, len(choices) - 1))]

    # --- instances ------------------------------------------------------------------------------

    @rule(by=st.integers(0, 1), key=st.sampled_from([None, "k1", "k2"]), body=st.sampled_from(["x", "y"]))
    def reserve(self, by: int, key: str | None, body: str) -> None:
        now = self.clock.wall()
        known = self.model.answered(key, body, now) if key else None
        wish = reservation(workspace_id=self.space, idempotency=Idempotency.of(key, body) if key else None)
        if isinstance(known, UUID):
            again = self.do(wish, by)
            assert again is not None
            assert (again.instance_id, again.version) == (known, 1)
            return
        made = self.do(wish, by, known or self.model.room())
        if made is not None:
            self.keep(made)
            if key:
                self.model.answers[key] = (body, made.instance_id, now)

    def keep(self, made: AgentInstance) -> None:
        self.model.instances[made.instance_id] = ModelInstance()
        self.model.spawned += 1

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), to=st.sampled_from(AgentState), freezing=st.booleans())
    def move(self, data: st.DataObject, by: int, to: AgentState, freezing: bool) -> None:
        one = self.pick(data, self.model.instances)
        wrong = self.model.move_error(one, to, freezing=freezing)
        old = self.model.instances[one]
        command = MoveInstance(
            instance_id=one, to=to, freezing=freezing, expected_version=old.version, attempt=old.attempt
        )
        if self.do(command, by, wrong) is not None:
            self.model.move(one, to, self.clock.wall())

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), late=st.sampled_from(["version", "attempt"]))
    def move_too_late(self, data: st.DataObject, by: int, late: str) -> None:
        one = self.pick(data, self.model.instances)
        old = self.model.instances[one]
        if late == "version":
            stale = MoveInstance(instance_id=one, to=AgentState.FAILED, expected_version=old.version - 1)
            self.do(stale, by, VersionConflictError)
        else:
            self.do(MoveInstance(instance_id=one, to=AgentState.FAILED, attempt=old.attempt + 1), by, StaleWriterError)

    @rule(by=st.integers(0, 1))
    def move_nobody(self, by: int) -> None:
        self.do(MoveInstance(instance_id=_NOBODY, to=AgentState.READY), by, AgentNotFoundError)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def restart(self, data: st.DataObject, by: int) -> None:
        one = self.pick(data, self.model.instances)
        wrong = self.model.restart_error(one)
        if self.do(RestartInstance(instance_id=one, max_attempts=9), by, wrong) is not None:
            self.model.restart(one)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), state=st.sampled_from(HealthState))
    def report(self, data: st.DataObject, by: int, state: HealthState) -> None:
        one = self.pick(data, self.model.instances)
        wrong = None if self.model.instances[one].active else InvalidOperationError
        health = AgentHealthStatus(state=state)
        if self.do(ReportHealth(instance_id=one, health=health), by, wrong) is not None:
            self.model.report(one, state)

    @rule(count=st.integers(2, 12))
    def reserve_at_once_through_both(self, count: int) -> None:
        async def race() -> list[Any]:
            wishes = (self.handles[n % 2].commit(reservation(workspace_id=self.space)) for n in range(count))
            return await asyncio.gather(*wishes, return_exceptions=True)

        answers = self.run(race())
        room = max(self.model.cap - self.model.active, 0)
        made = [one for one in answers if isinstance(one, AgentInstance)]
        assert all(isinstance(one, AgentInstance | LicenseError) for one in answers), answers
        assert len(made) == min(room, count)
        for one in made:
            self.keep(one)

    # --- tasks and waits ------------------------------------------------------------------------

    @rule(by=st.integers(0, 1))
    def create_task(self, by: int) -> None:
        made = self.do(CreateTask(task="dig", workspace_id=self.space), by)
        assert made is not None
        self.model.tasks[made.task_id] = ModelTask(updated=self.clock.wall())

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), by=st.integers(0, 1), to=st.sampled_from(TaskState))
    def move_task(self, data: st.DataObject, by: int, to: TaskState) -> None:
        one = self.pick(data, self.model.tasks)
        if self.do(MoveTask(task_id=one, to=to), by, self.model.task_error(one, to)) is not None:
            task = self.model.tasks[one]
            task.state, task.version, task.updated = to, task.version + 1, self.clock.wall()

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def open_wait(self, data: st.DataObject, by: int) -> None:
        self.waits_made += 1
        wait = Wait(
            wait_id=UUID(int=self.waits_made),
            workspace_id=self.space,
            kind=WaitKind.BACKOFF,
            instance_id=self.pick(data, self.model.instances),
            created_at=self.clock.wall(),
        )
        assert self.do(OpenWait(wait=wait), by) == wait
        assert wait.instance_id is not None
        self.model.waits[wait.wait_id] = wait.instance_id

    @precondition(lambda self: self.model.waits or self.model.ended_waits)
    @rule(data=st.data(), by=st.integers(0, 1))
    def end_wait(self, data: st.DataObject, by: int) -> None:
        one = self.pick(data, sorted(set(self.model.waits) | self.model.ended_waits))
        wrong = None if one in self.model.waits else InvalidOperationError
        self.do(EndWait(wait_id=one, outcome="done"), by, wrong)
        self.model.waits.pop(one, None)
        self.model.ended_waits.add(one)

    # --- owners, time, crashes ------------------------------------------------------------------

    @rule()
    def another_owner_takes_over(self) -> None:
        async def steal() -> int:
            async with self.home(Seams(clock=self.clock)) as thief:
                return (await thief.take_lease("thief", ttl=_LONG_TTL, steal=True)).epoch

        self.model.epoch += 1
        self.owned_until = self.clock.wall() + _LONG_TTL
        assert self.run(steal()) == self.model.epoch
        before = self.run(self.handles[0].head())
        for by in (0, 1):
            self.do(CreateTask(task="too late"), by, StaleWriterError)
            self.handles[by].adopt_epoch(self.model.epoch)
        assert self.run(self.handles[1].head()) == before

    @rule(hours=st.sampled_from([0.001, 1, 12, 24, 49]))
    def time_passes(self, hours: float) -> None:
        self.clock.advance(hours * 3600)

    @rule(by=st.integers(0, 1))
    def sweep(self, by: int) -> None:
        self.run(self.handles[by].sweep())
        self.model.sweep(self.clock.wall())

    @precondition(lambda self: self.model.active < self.model.cap)
    @rule(point=st.sampled_from([*LOST, *KEPT]))
    def crash_while_reserving(self, point: str) -> None:
        self.plan.name = point
        self.do(reservation("crashed", workspace_id=self.space), 0, OutcomeUnknownError)
        before = set(self.model.instances)
        self.reopen()
        found = {one.instance_id for one in self.run(self.handles[1].list_instances(workspace_id=self.space))}
        new = found - before
        assert len(new) == (point in KEPT), f"{len(new)} instances after a crash at {point}"
        for instance_id in new:
            self.model.instances[instance_id] = ModelInstance()
            self.model.spawned += 1
        self.look_through_everything()

    @rule()
    def close_and_reopen(self) -> None:
        self.reopen()

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        self.steps += 1
        if self.steps % _FULL_LOOK == 0:
            self.look_through_everything()

    def look_through_everything(self) -> None:
        store = self.handles[self.steps % 2]
        for instance_id, one in self.model.instances.items():
            found = self.run(store.get_instance(instance_id))
            assert found is not None, f"instance {instance_id} is lost"
            held = (found.state, found.health.state, found.version, found.attempt, found.restart_count)
            assert (*held, found.terminated_at) == one.seen()
        for task_id, task in self.model.tasks.items():
            kept = self.run(store.get_task(task_id))
            assert kept is not None
            assert (kept.state, kept.version) == (task.state, task.version)
        assert {wait.wait_id for wait in self.run(store.open_waits())} == set(self.model.waits)
        told = self.run(store.statistics(self.space))
        assert (told.active_instances, told.total_spawned) == (self.model.active, self.model.spawned)
        assert sum(told.by_state.values()) == len(self.model.instances)
        assert self.run(invariant_faults(store, self.clock.wall())) == []

    def teardown(self) -> None:
        try:
            if self.handles:
                self.look_through_everything()
        finally:
            for handle in self.handles:
                self.run(handle.close())
            self.runner.close()
