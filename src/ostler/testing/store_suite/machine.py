"""A state machine that drives a store by chance and holds it against a small model, crashes included.

It needs Hypothesis. A backend gives `home`; `run_state_machine_as_test(MyMachine, settings=…)` does the rest.
"""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from collections.abc import Container
from datetime import timedelta
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from ostler.errors import (
    AgentNotFoundError,
    InvalidOperationError,
    LicenseError,
    OutcomeUnknownError,
    StaleWriterError,
    VersionConflictError,
)
from ostler.model import (
    AGENT_TRANSITIONS,
    AgentHealthStatus,
    AgentInstance,
    AgentState,
    AttemptOutcome,
    HealthState,
    TaskState,
    Wait,
)
from ostler.store import Seams
from ostler.store.commands import (
    AttemptEnd,
    Beside,
    CreateTask,
    EndWait,
    Idempotency,
    MoveInstance,
    MoveTask,
    NewAttempt,
    OpenWait,
    ReportHealth,
    ReportProgress,
    Restarting,
    RestartInstance,
)
from ostler.testing.store_suite.crashing import KEPT, LOST
from ostler.testing.store_suite.driving import StoreDriver
from ostler.testing.store_suite.ground import reservation
from ostler.testing.store_suite.model import ModelInstance, ModelTask

_NOBODY = UUID(int=404)
_LONG_TTL = timedelta(hours=24)
#: What a move may bring with it.
EXTRAS = ("open", "end", "identity", "ended")


class StoreMachine(StoreDriver):
    """What may happen, each with what must come of it."""

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
    @rule(data=st.data(), by=st.integers(0, 1), extras=st.sets(st.sampled_from(EXTRAS)))
    def move_with_more(self, data: st.DataObject, by: int, extras: set[str]) -> None:
        """A move and what stands beside it: all of it happens, or none."""
        one = self.pick(data, self.model.instances)
        old = self.model.instances[one]
        to = data.draw(st.sampled_from([*sorted(AGENT_TRANSITIONS[old.state]), *AgentState]))
        self.move_beside(one, to, by, extras, self.pick_wait(data) if "end" in extras else None)

    def move_beside(
        self, one: UUID, to: AgentState, by: int, extras: Container[str], ending: UUID | None
    ) -> Wait | None:
        """Returns the wait that was opened with it."""
        old = self.model.instances[one]
        wrong = self.model.move_error(one, to, freezing=False)
        wait = self.new_wait(one) if "open" in extras else None
        if ending is not None:
            wrong = wrong or self.model.end_wait_error(ending, one)
        if "identity" in extras and (old.started or old.over):
            wrong = wrong or InvalidOperationError
        coming_back = wait is not None and to is AgentState.FAILED
        beside = Beside(
            open_wait=wait,
            end_wait=ending,
            identity={"start": old.version} if "identity" in extras else None,
            ended=AttemptEnd(outcome=AttemptOutcome.STOPPED) if "ended" in extras else None,
            restarting=Restarting(attempt_number=1, max_attempts=9) if coming_back else None,
            final_state={"at": old.version} if to is AgentState.TERMINATED else None,
        )
        if self.do(MoveInstance(instance_id=one, to=to, beside=beside), by, wrong) is None:
            return None
        self.model.move(one, to, self.clock.wall())
        old.started, old.over = old.started or "identity" in extras, old.over or "ended" in extras
        if ending is not None:
            self.model.end_wait(ending)
        if wait is not None:
            self.model.waits[wait.wait_id] = one
        return wait

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def fail_and_claim(self, data: st.DataObject, by: int) -> None:
        """Both handles want to bring it back; the claim is for one."""
        one = self.pick(data, self.model.instances)
        wait = self.move_beside(one, AgentState.FAILED, by, ("open", "ended"), None)
        if wait is not None:
            self.claim(one, 1 - by, wait.wait_id)
            self.claim(one, by, wait.wait_id)

    def claim(self, one: UUID, by: int, ending: UUID | None) -> None:
        wrong = self.model.restart_error(one)
        if ending is not None:
            wrong = wrong or self.model.end_wait_error(ending, one)
        if self.do(RestartInstance(instance_id=one, max_attempts=9, end_wait=ending), by, wrong) is not None:
            self.model.restart(one)
            if ending is not None:
                self.model.end_wait(ending)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def park_and_come_back(self, data: st.DataObject, by: int) -> None:
        one = self.pick(data, self.model.instances)
        wait = self.move_beside(one, AgentState.SUSPENDED, by, ("open", "ended"), None)
        self.new_attempt(one, 1 - by)
        if wait is not None:
            self.move_beside(one, AgentState.READY, by, ("identity",), wait.wait_id)
            self.new_attempt(one, by)

    def new_attempt(self, one: UUID, by: int) -> None:
        if self.do(NewAttempt(instance_id=one), by, self.model.start_error(one)) is not None:
            self.model.park(one)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1), claim=st.booleans())
    def restart(self, data: st.DataObject, by: int, claim: bool) -> None:
        one = self.pick(data, self.model.instances)
        self.claim(one, by, self.pick_wait(data) if claim else None)

    @precondition(lambda self: self.model.instances)
    @rule(data=st.data(), by=st.integers(0, 1))
    def progress(self, data: st.DataObject, by: int) -> None:
        one = self.pick(data, self.model.instances)
        wrong = None if self.model.instances[one].active else InvalidOperationError
        if self.do(ReportProgress(instance_id=one, fraction=0.5), by, wrong) is not None:
            self.model.instances[one].version += 1

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
        one = self.pick(data, self.model.instances)
        wait = self.new_wait(one)
        assert self.do(OpenWait(wait=wait), by) == wait
        self.model.waits[wait.wait_id] = one

    @precondition(lambda self: self.model.waits or self.model.ended_waits)
    @rule(data=st.data(), by=st.integers(0, 1))
    def end_wait(self, data: st.DataObject, by: int) -> None:
        one = self.pick_wait(data)
        assert one is not None
        wrong = None if one in self.model.waits else InvalidOperationError
        self.do(EndWait(wait_id=one, outcome="done"), by, wrong)
        self.model.end_wait(one)

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
