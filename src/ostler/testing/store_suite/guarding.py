"""What must not slip in: poisoned fields, starts that may still live, plans that change in mid-batch."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import (
    AgentNotFoundError,
    AuditBrokenError,
    InvalidOperationError,
    LicenseError,
    OstlerError,
    TaskNotFoundError,
    ValidationError,
)
from ostler.model import AgentMetrics, AgentState, AttemptOutcome, Permission, Role, TaskState, Tier, Wait, WaitKind
from ostler.store import Actor, AgentError, Store
from ostler.store.commands import (
    Command,
    CreateTask,
    EndAttempt,
    EndWait,
    Idempotency,
    MoveInstance,
    MoveTask,
    OpenWait,
    PutRecord,
    RecordAudit,
    RecordIdentity,
    ReportMetrics,
    RestartInstance,
    TakeLease,
)
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import HOME, StoreGround, moved, new_workspace, reservation, reserved

ANY = UUID(int=77)
FAR = datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12)))


def poisoned(clock: ManualClock) -> list[Command[Any]]:
    """Commands whose fields would break a reader later, were they written."""
    wrong: Any = "wrong"
    wait = Wait(wait_id=ANY, workspace_id=HOME, kind=WaitKind.HUMAN, created_at=clock.wall(), due_at=FAR)
    return [
        MoveInstance(instance_id=ANY, to=AgentState.READY, enforcement={"cpu": wrong}),
        MoveInstance(instance_id=ANY, to=AgentState.READY, reason=5),  # type: ignore[arg-type]  # wrong on purpose
        MoveInstance(instance_id=ANY, to=AgentState.READY, reason="x" * 5_000_000),
        MoveInstance(instance_id=ANY, to=AgentState.FAILED, error=wrong),
        MoveInstance(instance_id=ANY, to=AgentState.FAILED, error=AgentError(message="m", is_recoverable=wrong)),
        MoveInstance(instance_id=ANY, to=AgentState.TERMINATED, was_graceful=wrong),
        RestartInstance(instance_id=ANY, max_attempts=3, delay=wrong),
        RestartInstance(instance_id=ANY, max_attempts=2**70),
        EndAttempt(instance_id=ANY, attempt=2**70, outcome=AttemptOutcome.LOST),
        EndAttempt(instance_id=ANY, attempt=1, outcome=AttemptOutcome.LOST, detail=5),  # type: ignore[arg-type]  # wrong on purpose
        OpenWait(wait=wait),
        TakeLease(owner="me", ttl=timedelta.max),
        CreateTask(task="t", idempotency=Idempotency(key="k", fingerprint="\0")),
        RestartInstance(instance_id=ANY, max_attempts=3, idempotency=Idempotency(key="k", fingerprint="f")),
        PutRecord(record=wrong),
    ]


class GuardingContract(StoreGround):
    async def test_a_poisoned_field_is_refused_before_anything_is_written(
        self, store: Store, clock: ManualClock
    ) -> None:
        before = await store.head()
        for command in poisoned(clock):
            with pytest.raises(ValidationError) as refused:
                await store.commit(command)
            assert len(refused.value.faults) == 1, command
            assert len(str(refused.value)) < 400
        assert await store.head() == before

    async def test_an_instance_cannot_be_put_past_its_state_machine(self, store: Store) -> None:
        one = await reserved(store)
        smuggled: Any = one.evolve(state=AgentState.TERMINATED)
        with pytest.raises(ValidationError, match="Workspace, Principal, Token or Definition"):
            await store.commit(PutRecord(record=smuggled))
        assert await store.get_instance(one.instance_id) == one

    async def test_named_values_may_speak_in_the_audit(self, store: Store) -> None:
        by = Actor(name=Role.ADMIN)
        await store.commit(RecordAudit(by=by, what=Permission.AGENTS_SPAWN, about="x"))
        report = await store.verify_audit()
        assert report.is_sound
        report.require()
        with pytest.raises(AuditBrokenError, match="entry 3 is missing"):
            report.evolve(faults=("entry 3 is missing",)).require()

    async def test_a_start_that_may_still_live_is_not_followed_by_another(self, store: Store) -> None:
        one = await reserved(store)
        start: dict[str, Any] = {"instance_id": one.instance_id, "attempt": 1}
        await store.commit(RecordIdentity(**start, identity={"pid": 1}))
        await moved(store, one, AgentState.FAILED)
        with pytest.raises(InvalidOperationError, match=r"attempt 1 .* has not ended"):
            await store.commit(RestartInstance(instance_id=one.instance_id, max_attempts=3))
        await store.commit(EndAttempt(**start, outcome=AttemptOutcome.SIGNAL))
        again = await store.commit(RestartInstance(instance_id=one.instance_id, max_attempts=3))
        assert [attempt.number for attempt in await store.open_attempts()] == [again.attempt]

    async def test_a_start_may_be_a_try_at_a_task(self, store: Store) -> None:
        task = await store.commit(CreateTask(task="mend"))
        one = await store.commit(reservation(task_id=task.task_id))
        await moved(store, one, AgentState.FAILED)
        await store.commit(RestartInstance(instance_id=one.instance_id, max_attempts=3, task_id=task.task_id))
        assert [start.task_id for start in await store.list_attempts(one.instance_id)] == [task.task_id] * 2
        with pytest.raises(TaskNotFoundError):
            await store.commit(reservation(task_id=ANY))

    async def test_a_start_that_never_was_is_closed_by_the_next(self, store: Store) -> None:
        one = await reserved(store)
        await moved(store, one, AgentState.FAILED)
        await store.commit(RestartInstance(instance_id=one.instance_id, max_attempts=3))
        first, second = await store.list_attempts(one.instance_id)
        assert (first.outcome, first.identity, second.is_open) == (AttemptOutcome.UNKNOWN, None, True)

    async def test_what_may_still_live_is_kept_however_old(self, store: Store, clock: ManualClock) -> None:
        one = await reserved(store)
        start: dict[str, Any] = {"instance_id": one.instance_id, "attempt": 1}
        await store.commit(RecordIdentity(**start, identity={"pid": 1}))
        await moved(store, one, AgentState.FAILED)
        clock.advance(timedelta(days=2).total_seconds())
        assert (await store.sweep()).instances == 0
        assert len(await store.open_attempts()) == 1
        await store.commit(EndAttempt(**start, outcome=AttemptOutcome.LOST))
        assert (await store.sweep()).instances == 1

    async def test_a_task_that_something_waits_about_is_kept(self, store: Store, clock: ManualClock) -> None:
        task = await store.commit(CreateTask(task="mend"))
        for state in (TaskState.RUNNING, TaskState.REJECTED):
            await store.commit(MoveTask(task_id=task.task_id, to=state))
        asked = Wait(wait_id=ANY, workspace_id=HOME, kind=WaitKind.HUMAN, created_at=clock.wall(), task_id=task.task_id)
        await store.commit(OpenWait(wait=asked))
        clock.advance(timedelta(days=2).total_seconds())
        assert (await store.sweep()).tasks == 0
        await store.commit(EndWait(wait_id=ANY, outcome="answered"))
        assert (await store.sweep()).tasks == 1

    async def test_a_smaller_plan_beside_a_reservation_harms_nobody(self, store: Store) -> None:
        space = await new_workspace(store, Tier.TEAMS)
        for _ in range(5):
            await store.commit(reservation(workspace_id=space))
        large = await store.get_workspace(space)
        assert large is not None
        answers = await asyncio.gather(
            store.commit(reservation(workspace_id=space)),
            store.commit(PutRecord(record=large.evolve(tier=Tier.CORE))),
            store.commit(CreateTask(task="a stranger's")),
            return_exceptions=True,
        )
        assert not [answer for answer in answers if isinstance(answer, OstlerError)]
        assert (await store.statistics(space)).active_instances == 6
        with pytest.raises(LicenseError):
            await store.commit(reservation(workspace_id=space))
        await store.commit(PutRecord(record=large))

    async def test_what_does_not_exist_or_lies_elsewhere_is_not_leaned_on(
        self, store: Store, clock: ManualClock
    ) -> None:
        wait = Wait(
            wait_id=ANY, workspace_id=HOME, kind=WaitKind.BACKOFF, created_at=clock.wall(), instance_id=UUID(int=9)
        )
        with pytest.raises(AgentNotFoundError):
            await store.commit(OpenWait(wait=wait))
        space = await new_workspace(store, Tier.CORE)
        foreign = await store.commit(CreateTask(task="theirs", workspace_id=space))
        with pytest.raises(TaskNotFoundError):
            await store.commit(CreateTask(task="ours", dependencies=(foreign.task_id,)))

    async def test_the_dead_are_not_measured_and_an_identity_is_given_once(
        self, store: Store, clock: ManualClock
    ) -> None:
        one = await reserved(store)
        first = RecordIdentity(instance_id=one.instance_id, attempt=1, identity={"pid": 1})
        assert await store.commit(first) == await store.commit(first)
        with pytest.raises(InvalidOperationError, match="identity"):
            await store.commit(RecordIdentity(instance_id=one.instance_id, attempt=1, identity={"pid": 2}))
        for step in (AgentState.TERMINATING, AgentState.TERMINATED):
            await moved(store, one, step)
        with pytest.raises(InvalidOperationError, match="terminated"):
            await store.commit(
                ReportMetrics(instance_id=one.instance_id, metrics=AgentMetrics(sampled_at=clock.wall()))
            )
