"""What a state machine over a store stands on: the handles, the model, and the look through everything."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from ostler.errors import OstlerError
from ostler.model import Tier, Wait, WaitKind
from ostler.policy import plan
from ostler.seams import FaultPlan
from ostler.store import Seams, Store
from ostler.store.commands import Command
from ostler.testing.clock import ManualClock
from ostler.testing.folding import invariant_faults
from ostler.testing.store_suite.ground import OpenStore, new_workspace
from ostler.testing.store_suite.model import Model

R = TypeVar("R")

TIER = Tier.WRITER_PRO
#: Every so many steps the whole store is looked through.
_FULL_LOOK = 10


class StoreDriver(RuleBasedStateMachine):
    """Two handles on the same content, a clock, a model beside them, and what must hold. The rules come on top."""

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

    def new_wait(self, instance_id: UUID) -> Wait:
        self.waits_made += 1
        return Wait(
            wait_id=UUID(int=self.waits_made),
            workspace_id=self.space,
            kind=WaitKind.BACKOFF,
            instance_id=instance_id,
            created_at=self.clock.wall(),
        )

    def pick_wait(self, data: st.DataObject) -> UUID | None:
        """An open or an ended one, where there is any."""
        known = sorted(set(self.model.waits) | self.model.ended_waits)
        return self.pick(data, known) if known else None

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
            start = self.run(store.list_attempts(instance_id, after=one.attempt - 1))
            assert [(at.number, at.identity is not None, not at.is_open) for at in start] == [
                (one.attempt, one.started, one.over)
            ]
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
