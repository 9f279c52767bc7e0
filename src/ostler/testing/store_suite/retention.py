"""What goes after its time, and what stays."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest

from ostler.errors import CursorGoneError, InvalidOperationError, ValidationError
from ostler.model import AgentState, AttemptOutcome, TaskState, Tier, Wait, WaitKind
from ostler.policy import RetentionPolicy
from ostler.store import Store, SweepResult
from ostler.store.commands import (
    CreateTask,
    EndAttempt,
    EndWait,
    Idempotency,
    MoveTask,
    OpenWait,
    RecordIdentity,
    RemoveAnswers,
)
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import (
    DAY,
    HOME,
    StoreGround,
    brought_to,
    current,
    moved,
    new_workspace,
    reservation,
    reserved,
    restarted,
    whole_log,
)


class RetentionContract(StoreGround):
    async def test_what_ended_goes_after_a_day_and_its_history_stays(self, store: Store, clock: ManualClock) -> None:
        ended = await brought_to(store, AgentState.TERMINATED, tags=("t",))
        failed = await brought_to(store, AgentState.FAILED)
        alive = await brought_to(store, AgentState.READY, tags=("t",))
        before, uptime = await store.statistics(), (await whole_log(store))
        clock.advance(DAY - 1)
        assert await store.sweep() == SweepResult()
        clock.advance(1)
        assert await store.sweep() == SweepResult(instances=2)
        assert await store.get_instance(ended.instance_id) is None
        assert await store.get_instance(failed.instance_id) is None
        assert await store.list_attempts(ended.instance_id) == []
        assert await current(store, alive.instance_id) == alive
        assert await whole_log(store) == uptime
        after = await store.statistics()
        assert (after.total_spawned, after.total_terminated) == (before.total_spawned, before.total_terminated)
        assert (after.by_state[AgentState.TERMINATED], after.by_state[AgentState.FAILED]) == (0, 0)
        assert after.average_uptime == timedelta(days=1) / 3
        assert (await store.read_audit())[-1].detail == "removed 2"

    async def test_a_sweep_is_bounded_and_says_that_there_is_more(self, store: Store, clock: ManualClock) -> None:
        for _ in range(7):
            await brought_to(store, AgentState.FAILED)
            task = await store.commit(CreateTask(task="dig"))
            await store.commit(MoveTask(task_id=task.task_id, to=TaskState.RUNNING))
            await store.commit(MoveTask(task_id=task.task_id, to=TaskState.REJECTED))
        clock.advance(DAY)
        policy = RetentionPolicy(batch=3)
        rounds = [await store.sweep(policy) for _ in range(4)]
        assert [(one.instances, one.tasks, one.more) for one in rounds] == [
            (3, 3, True),
            (3, 3, True),
            (1, 1, False),
            (0, 0, False),
        ]
        assert await store.list_tasks() == []

    async def test_a_task_in_review_is_never_due(self, store: Store, clock: ManualClock) -> None:
        task = await store.commit(CreateTask(task="dig"))
        for state in (TaskState.RUNNING, TaskState.COMPLETED):
            await store.commit(MoveTask(task_id=task.task_id, to=state))
        clock.advance(40 * DAY)
        assert (await store.sweep()).tasks == 0
        await store.commit(MoveTask(task_id=task.task_id, to=TaskState.ACCEPTED))
        clock.advance(DAY)
        assert (await store.sweep()).tasks == 1

    async def test_what_waits_for_a_restart_is_not_due(self, store: Store, clock: ManualClock) -> None:
        failed = await brought_to(store, AgentState.FAILED)
        wait = Wait(
            wait_id=UUID(int=1),
            workspace_id=HOME,
            kind=WaitKind.BACKOFF,
            instance_id=failed.instance_id,
            created_at=clock.wall(),
        )
        await store.commit(OpenWait(wait=wait))
        clock.advance(2 * DAY)
        assert (await store.sweep()).instances == 0
        await store.commit(EndWait(wait_id=wait.wait_id, outcome="given up"))
        assert (await store.sweep()).instances == 1

    async def test_a_restarted_one_starts_its_day_anew(self, store: Store, clock: ManualClock) -> None:
        failed = await brought_to(store, AgentState.FAILED)
        clock.advance(DAY - 1)
        back = await restarted(store, failed)
        clock.advance(1)
        assert (await store.sweep()).instances == 0
        await moved(store, back, AgentState.FAILED)
        clock.advance(DAY)
        assert (await store.sweep()).instances == 1

    async def test_a_cursor_past_retention_is_told_so(self, store: Store, clock: ManualClock) -> None:
        for _ in range(5):
            await reserved(store)
        clock.advance(31 * DAY)
        await reserved(store)
        policy = RetentionPolicy(batch=3)
        assert [(one.events, one.more) for one in [await store.sweep(policy) for _ in range(3)]] == [
            (3, True),
            (2, False),
            (0, False),
        ]
        assert (await store.head()).horizon == 5
        for gone in (0, 4):
            with pytest.raises(CursorGoneError) as refused:
                await store.read_events(gone)
            assert (refused.value.cursor, refused.value.horizon) == (gone, 5)
        assert [event.sequence for event in await whole_log(store, 5)] == [6]
        await reserved(store)
        assert [event.sequence for event in await whole_log(store, 5)] == [6, 7]

    async def test_one_that_came_after_what_went_has_its_whole_history(self, store: Store, clock: ManualClock) -> None:
        old = await reserved(store)
        for _ in range(3):
            await reserved(store)
        clock.advance(31 * DAY)
        await moved(store, old, AgentState.READY)
        young = await brought_to(store, AgentState.READY)
        assert (await store.sweep()).events == 4
        whole = [event.sequence for event in await store.read_events(0, instance_id=young.instance_id)]
        assert whole == [6, 7]
        first = await store.read_page(0, instance_id=young.instance_id, limit=1)
        assert [event.sequence for event in first.events] == [6]
        rest = await store.read_page(first.cursor, instance_id=young.instance_id)
        assert [event.sequence for event in rest.events] == [7]
        for gone in (old.instance_id, UUID(int=1)):  # the one has lost its first event, of the other nothing is known
            with pytest.raises(CursorGoneError):
                await store.read_events(0, instance_id=gone)
        with pytest.raises(CursorGoneError):
            await store.read_events(0, workspace_id=HOME)

    async def test_one_who_is_up_to_date_in_a_quiet_workspace_misses_nothing(
        self, store: Store, clock: ManualClock
    ) -> None:
        quiet = await new_workspace(store, Tier.TEAMS)
        await reserved(store, workspace_id=quiet)
        for _ in range(4):
            await reserved(store)
        cursor = (await store.read_page(0, workspace_id=quiet)).cursor
        clock.advance(31 * DAY)
        assert (await store.sweep()).events == 5
        assert await store.read_events(cursor, workspace_id=quiet) == []
        later = await reserved(store, workspace_id=quiet)
        (event,) = [event async for event in store.replay(cursor, workspace_id=quiet)]
        assert getattr(event, "instance_id", None) == later.instance_id

    async def test_a_task_that_another_still_needs_is_not_due(self, store: Store, clock: ManualClock) -> None:
        needed = await store.commit(CreateTask(task="dig"))
        needing = await store.commit(CreateTask(task="fill", dependencies=(needed.task_id,), tags=("t",)))
        for task in (needed, needing):
            await store.commit(MoveTask(task_id=task.task_id, to=TaskState.RUNNING))
        await store.commit(MoveTask(task_id=needed.task_id, to=TaskState.REJECTED))
        clock.advance(2 * DAY)
        assert (await store.sweep()).tasks == 0
        await store.commit(MoveTask(task_id=needing.task_id, to=TaskState.REJECTED))
        assert (await store.sweep()).tasks == 1
        clock.advance(DAY)
        assert (await store.sweep()).tasks == 1
        assert await store.list_tasks() == []

    async def test_one_that_was_started_and_not_seen_to_end_is_not_due(self, store: Store, clock: ManualClock) -> None:
        made = await reserved(store)
        await store.commit(RecordIdentity(instance_id=made.instance_id, attempt=1, identity={"pid": 1}))
        await moved(store, made, AgentState.FAILED)
        clock.advance(1)
        await brought_to(store, AgentState.FAILED)
        clock.advance(2 * DAY)
        small = RetentionPolicy(batch=1)
        # The one that is held does not stand in the way of the next.
        assert [(await store.sweep(small)).instances for _ in range(3)] == [1, 0, 0]
        await store.commit(EndAttempt(instance_id=made.instance_id, attempt=1, outcome=AttemptOutcome.LOST))
        assert (await store.sweep()).instances == 1

    async def test_ended_waits_go_after_a_day_in_bounded_batches(self, store: Store, clock: ManualClock) -> None:
        for number in range(1, 7):
            wait = Wait(wait_id=UUID(int=number), workspace_id=HOME, kind=WaitKind.HUMAN, created_at=clock.wall())
            await store.commit(OpenWait(wait=wait))
            if number < 6:
                await store.commit(EndWait(wait_id=wait.wait_id, outcome="done"))
        clock.advance(DAY - 1)
        assert await store.sweep() == SweepResult()
        clock.advance(1)
        policy = RetentionPolicy(batch=3)
        assert [(one.waits, one.more) for one in [await store.sweep(policy) for _ in range(3)]] == [
            (3, True),
            (2, False),
            (0, False),
        ]
        assert [wait.wait_id for wait in await store.open_waits()] == [UUID(int=6)]
        with pytest.raises(InvalidOperationError, match="there is no wait"):
            await store.commit(EndWait(wait_id=UUID(int=1), outcome="again"))

    async def test_answers_to_old_keys_go_in_bounded_batches(self, store: Store, clock: ManualClock) -> None:
        space = await new_workspace(store, Tier.TEAMS)
        wishes = [reservation(idempotency=Idempotency.of(f"k{number}", "body")) for number in range(4)]
        wishes.append(reservation(workspace_id=space, idempotency=Idempotency.of("k0", "body")))
        first = [await store.commit(wish) for wish in wishes]
        clock.advance(DAY - 1)
        young = await store.commit(reservation(idempotency=Idempotency.of("young", "body")))
        assert await store.sweep() == SweepResult()
        assert [await store.commit(wish) for wish in wishes] == first
        clock.advance(1)
        before = await store.audit_head()
        policy = RetentionPolicy(batch=3)
        assert [(one.answers, one.more) for one in [await store.sweep(policy) for _ in range(3)]] == [
            (3, True),
            (2, False),
            (0, False),
        ]
        assert await store.audit_head() == before
        assert await store.commit(reservation(idempotency=Idempotency.of("young", "body"))) == young
        again = [await store.commit(wish) for wish in wishes]
        assert not {one.instance_id for one in again} & {one.instance_id for one in first}

    async def test_an_answer_that_was_given_anew_meanwhile_stays(self, store: Store, clock: ManualClock) -> None:
        wish = reservation(idempotency=Idempotency.of("k", "body"))
        await store.commit(wish)
        clock.advance(DAY)
        due = clock.wall() - timedelta(days=1)
        anew = await store.commit(wish)
        assert await store.commit(RemoveAnswers(keys=((HOME, "k"), (HOME, "unknown")), before=due)) == 0
        assert await store.commit(wish) == anew

    async def test_a_pruned_audit_still_verifies(self, store: Store, clock: ManualClock) -> None:
        for _ in range(5):
            await reserved(store)
        kept = await store.audit_head()
        clock.advance(2 * DAY)
        await reserved(store)
        policy = RetentionPolicy(audit=timedelta(days=1), batch=2)
        assert [(one.audit, one.more) for one in [await store.sweep(policy) for _ in range(4)]] == [
            (2, True),
            (2, True),
            (1, False),
            (0, False),
        ]
        entries = await store.read_audit()
        assert (entries[0].number, entries[-1].number) == (6, 9)
        report = await store.verify_audit()
        assert (report.faults, report.entries) == ((), 4)
        assert (await store.verify_audit(kept_head=kept)).is_sound
        rewritten = await store.verify_audit(kept_head=kept.evolve(hash="f" * 64))
        assert rewritten.faults == ("entry 5 is not the one whose hash was kept outside: the chain was rewritten",)
        older = await store.verify_audit(kept_head=kept.evolve(number=4))
        assert older.faults == ("kept head 4 is older than what is kept, so it cannot be checked",)
        assert (await store.sweep()).audit == 0

    async def test_a_policy_out_of_bounds_is_refused(self, store: Store) -> None:
        with pytest.raises(ValidationError, match="batch"):
            await store.sweep(RetentionPolicy(batch=0))
