"""What is written together with a move or a restart: all of it, or none."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import InvalidOperationError, LicenseError, StaleWriterError, TaskNotFoundError, ValidationError
from ostler.model import (
    AgentAttemptStartedEvent,
    AgentErrorEvent,
    AgentHealthStatus,
    AgentInstance,
    AgentRestartingEvent,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    AttemptOutcome,
    HealthState,
    Tier,
    Wait,
    WaitKind,
)
from ostler.store import AgentError, Seams, Store
from ostler.store.commands import (
    AttemptEnd,
    Beside,
    CreateTask,
    EndAttempt,
    EndWait,
    MoveInstance,
    NewAttempt,
    OpenWait,
    RecordIdentity,
    ReportHealth,
    Restarting,
    RestartInstance,
)
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import (
    HOME,
    OpenStore,
    StoreGround,
    brought_to,
    current,
    moved,
    new_workspace,
    reservation,
    reserved,
    whole_log,
)

SOON = timedelta(seconds=5)
WAIT = UUID(int=0x3A17)


def a_wait(clock: ManualClock, instance_id: UUID, number: int = WAIT.int, **fields: Any) -> Wait:
    known: dict[str, Any] = {"workspace_id": HOME, "kind": WaitKind.BACKOFF, "created_at": clock.wall()}
    return Wait(wait_id=UUID(int=number), instance_id=instance_id, **{**known, **fields})


async def failing(store: Store, clock: ManualClock, one: AgentInstance, number: int = WAIT.int) -> AgentInstance:
    """It fails, and will come back by itself."""
    wait = a_wait(clock, one.instance_id, number, due_at=clock.wall() + SOON, workspace_id=one.workspace_id)
    return await moved(
        store,
        one,
        AgentState.FAILED,
        error=AgentError(message="fell"),
        beside=Beside(
            open_wait=wait,
            ended=AttemptEnd(outcome=AttemptOutcome.EXIT_CODE, detail="1\0"),
            restarting=Restarting(attempt_number=1, max_attempts=3, delay=SOON, reason="fell"),
        ),
    )


def faulty(clock: ManualClock) -> list[tuple[AgentState, dict[str, Any], str]]:
    """The state to move to, what stands beside, and the one sentence that refuses it."""
    mine, other = UUID(int=1), UUID(int=2)
    soon = Restarting(attempt_number=1, max_attempts=3, delay=SOON)
    wait = a_wait(clock, mine)
    ready, failed, over = AgentState.READY, AgentState.FAILED, AgentState.TERMINATED
    return [
        (ready, {"open_wait": a_wait(clock, other)}, "beside.open_wait.instance_id must be the instance that moves"),
        (ready, {"open_wait": wait.evolve(ended_at=clock.wall())}, "beside.open_wait.ended_at must be empty"),
        (ready, {"open_wait": wait.evolve(reason="a\0")}, "beside.open_wait.reason must not contain NUL"),
        (ready, {"open_wait": "later"}, "beside.open_wait must be of type Wait"),
        (ready, {"end_wait": "w"}, "beside.end_wait must be a UUID"),
        (ready, {"wait_outcome": "\0"}, "beside.wait_outcome must not contain NUL"),
        (ready, {"identity": {"a": object()}}, "beside.identity.a must be a JSON value"),
        (ready, {"identity": "pid 1"}, "beside.identity must be a mapping"),
        (failed, {"ended": "clean"}, "beside.ended must be of type AttemptEnd"),
        (failed, {"ended": AttemptEnd(outcome="gone")}, "beside.ended.outcome must be one of clean"),  # type: ignore[arg-type]  # wrong on purpose
        (failed, {"ended": AttemptEnd(outcome=AttemptOutcome.LOST, detail=5)}, "beside.ended.detail must be text"),  # type: ignore[arg-type]  # wrong on purpose
        (failed, {"restarting": "soon", "open_wait": wait}, "beside.restarting must be of type Restarting"),
        (failed, {"restarting": soon}, "beside.open_wait is required with a restart to come"),
        (ready, {"restarting": soon, "open_wait": wait}, "beside.restarting goes only with a move to failed"),
        (
            failed,
            {"restarting": Restarting(attempt_number=-1, max_attempts=3), "open_wait": wait},
            "beside.restarting.attempt_number must be 0 to",
        ),
        (
            failed,
            {"restarting": Restarting(attempt_number=1, max_attempts=3, delay=-SOON), "open_wait": wait},
            "beside.restarting.delay must be 0 s to 3650 days, was -5 s",
        ),
        (failed, {"final_state": {}}, "beside.final_state is kept only of one that becomes terminated"),
        (over, {"final_state": {"a": float("nan")}}, "beside.final_state.a must be a finite number"),
        (over, {"final_state": [1]}, "beside.final_state must be a mapping"),
    ]


class BesideContract(StoreGround):
    async def test_a_failure_is_one_commit_with_its_wait_its_end_and_the_word_of_its_restart(
        self, store: Store, clock: ManualClock
    ) -> None:
        alive = await brought_to(store, AgentState.READY)
        before = await store.head()
        failed = await failing(store, clock, alive)
        assert (await store.head()).commit_number == before.commit_number + 1
        error, changed, restarting = await whole_log(store, before.sequence)
        assert isinstance(error, AgentErrorEvent)
        assert isinstance(changed, AgentStateChangedEvent)
        assert (changed.new_state, changed.is_final) == (AgentState.FAILED, False)
        assert isinstance(restarting, AgentRestartingEvent)
        assert (restarting.attempt_number, restarting.max_attempts) == (1, 3)
        assert (restarting.delay_before_retry, restarting.reason) == (SOON, "fell")
        assert {event.version for event in (error, changed, restarting)} == {failed.version}
        (wait,) = await store.open_waits(instance_id=alive.instance_id)
        assert wait == await store.get_wait(WAIT)
        (attempt,) = await store.list_attempts(alive.instance_id)
        assert (attempt.outcome, attempt.detail, attempt.is_open) == (AttemptOutcome.EXIT_CODE, "1\ufffd", False)
        audit = [entry.action for entry in await store.read_audit()]
        assert audit[-3:] == ["move", "wait.open", "attempt.end"]

    async def test_only_what_nothing_follows_is_final(self, store: Store) -> None:
        for state in AgentState:
            await brought_to(store, state)
        for event in await whole_log(store):
            if isinstance(event, AgentStateChangedEvent):
                assert event.is_final == (event.new_state in {AgentState.FAILED, AgentState.TERMINATED})

    async def test_a_move_ends_a_wait_exactly_once(self, store: Store, clock: ManualClock) -> None:
        one = await brought_to(store, AgentState.READY)
        wait = a_wait(clock, one.instance_id, kind=WaitKind.RESUME)
        await moved(store, one, AgentState.SUSPENDED, beside=Beside(open_wait=wait))
        clock.advance(1)
        wake = Beside(end_wait=WAIT, wait_outcome="due")
        assert (await moved(store, one, AgentState.READY, beside=wake)).state is AgentState.READY
        ended = await store.get_wait(WAIT)
        assert ended is not None
        assert (ended.ended_at, ended.outcome) == (clock.wall(), "due")
        held = await moved(store, one, AgentState.SUSPENDED)
        before = await store.head()
        with pytest.raises(InvalidOperationError, match=r"has ended already \(due\)"):
            await moved(store, one, AgentState.READY, beside=wake)
        assert await current(store, one.instance_id) == held
        assert (await store.head()).sequence == before.sequence

    async def test_of_many_who_wake_one_moves(self, store: Store, clock: ManualClock) -> None:
        one = await brought_to(store, AgentState.READY)
        await moved(store, one, AgentState.SUSPENDED, beside=Beside(open_wait=a_wait(clock, one.instance_id)))
        wake = (moved(store, one, AgentState.READY, beside=Beside(end_wait=WAIT)) for _ in range(10))
        answers = await asyncio.gather(*wake, return_exceptions=True)
        assert sum(isinstance(answer, AgentInstance) for answer in answers) == 1
        assert sum(isinstance(answer, InvalidOperationError) for answer in answers) == 9

    async def test_a_wait_that_is_anothers_or_nobodys_ends_no_wait_and_moves_nothing(
        self, store: Store, clock: ManualClock
    ) -> None:
        one, other = await brought_to(store, AgentState.SUSPENDED), await reserved(store)
        await store.commit(OpenWait(wait=a_wait(clock, other.instance_id)))
        for wait_id, said in ((WAIT, "is not about instance"), (UUID(int=9), "there is no wait")):
            with pytest.raises(InvalidOperationError, match=said):
                await moved(store, one, AgentState.READY, beside=Beside(end_wait=wait_id))
        assert await current(store, one.instance_id) == one
        assert len(await store.open_waits()) == 1

    async def test_a_wait_that_exists_or_lies_elsewhere_is_not_opened_and_moves_nothing(
        self, store: Store, clock: ManualClock
    ) -> None:
        one = await brought_to(store, AgentState.READY)
        elsewhere = await new_workspace(store, Tier.TEAMS)
        await store.commit(OpenWait(wait=a_wait(clock, one.instance_id)))
        known, foreign = a_wait(clock, one.instance_id), a_wait(clock, one.instance_id, 5, workspace_id=elsewhere)
        for wait, said in ((known, "exists already"), (foreign, "another workspace")):
            with pytest.raises(InvalidOperationError, match=said):
                await moved(store, one, AgentState.SUSPENDED, beside=Beside(open_wait=wait))
            assert await current(store, one.instance_id) == one
        with pytest.raises(InvalidOperationError, match="another workspace"):
            await store.commit(OpenWait(wait=foreign))
        lost = a_wait(clock, one.instance_id, 6, task_id=UUID(int=404))
        with pytest.raises(TaskNotFoundError):
            await moved(store, one, AgentState.SUSPENDED, beside=Beside(open_wait=lost))
        assert [wait.wait_id for wait in await store.open_waits()] == [WAIT]

    async def test_one_wait_may_follow_another_in_one_move(self, store: Store, clock: ManualClock) -> None:
        one = await brought_to(store, AgentState.READY)
        first, second = a_wait(clock, one.instance_id, 1), a_wait(clock, one.instance_id, 2)
        await moved(store, one, AgentState.SUSPENDED, beside=Beside(open_wait=first))
        await moved(store, one, AgentState.READY, beside=Beside(end_wait=first.wait_id, open_wait=second))
        assert await store.open_waits() == [second]

    async def test_a_move_may_say_what_was_started(self, store: Store, clock: ManualClock) -> None:
        one = await reserved(store)
        ready = await moved(store, one, AgentState.READY, beside=Beside(identity={"pid": 7, "at": (1, 2)}))
        (attempt,) = await store.list_attempts(one.instance_id)
        assert (attempt.identity, attempt.started_at) == ({"pid": 7, "at": [1, 2]}, clock.wall())
        with pytest.raises(InvalidOperationError, match="has an identity already"):
            await moved(store, one, AgentState.PROCESSING, beside=Beside(identity={"pid": 8}))
        assert await current(store, one.instance_id) == ready
        same = Beside(identity={"pid": 7, "at": [1, 2]}, ended=AttemptEnd(outcome=AttemptOutcome.CLEAN))
        await moved(store, one, AgentState.SUSPENDED, beside=same)
        assert await store.open_attempts() == []

    async def test_the_first_word_about_an_end_counts_also_beside_a_move(self, store: Store) -> None:
        one = await brought_to(store, AgentState.TERMINATING)
        first = await store.commit(
            EndAttempt(instance_id=one.instance_id, attempt=1, outcome=AttemptOutcome.OOM, detail="first")
        )
        later = Beside(ended=AttemptEnd(outcome=AttemptOutcome.STOPPED))
        await moved(store, one, AgentState.TERMINATED, beside=later)
        assert await store.list_attempts(one.instance_id) == [first]

    async def test_what_a_life_leaves_behind_is_kept_with_its_record(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        one = await brought_to(store, AgentState.TERMINATING)
        left: dict[str, Any] = {"notes": ["é", None, 1.5], "deep": {"a": True}}
        ended = AttemptEnd(outcome=AttemptOutcome.STOPPED)
        over = await moved(
            store, one, AgentState.TERMINATED, was_graceful=True, beside=Beside(final_state=left, ended=ended)
        )
        left["notes"].append("too late")
        assert over.final_state == {"notes": ["é", None, 1.5], "deep": {"a": True}}
        changed, last = (await whole_log(store))[-2:]
        assert isinstance(changed, AgentStateChangedEvent)
        assert changed.is_final
        assert isinstance(last, AgentTerminatedEvent)
        async with open_store(seams) as again:
            assert await current(again, one.instance_id) == over

    async def test_what_stands_beside_a_move_is_checked_before_anything_is_written(
        self, store: Store, clock: ManualClock
    ) -> None:
        before = await store.head()
        wrong: Any = "wrong"
        with pytest.raises(ValidationError, match="beside must be of type Beside"):
            await store.commit(MoveInstance(instance_id=UUID(int=1), to=AgentState.READY, beside=wrong))
        for to, fields, said in faulty(clock):
            with pytest.raises(ValidationError) as refused:
                await store.commit(MoveInstance(instance_id=UUID(int=1), to=to, beside=Beside(**fields)))
            (fault,) = refused.value.faults
            assert said in fault.message
        assert await store.head() == before

    async def test_exactly_one_gets_the_claim_on_a_restart(self, store: Store, clock: ManualClock) -> None:
        failed = await failing(store, clock, await brought_to(store, AgentState.READY))
        before = await store.head()
        claim = RestartInstance(instance_id=failed.instance_id, max_attempts=3, end_wait=WAIT)
        answers = await asyncio.gather(*(store.commit(claim) for _ in range(10)), return_exceptions=True)
        (back,) = [answer for answer in answers if isinstance(answer, AgentInstance)]
        assert sum(isinstance(answer, InvalidOperationError) for answer in answers) == 9
        assert (back.state, back.attempt, back.restart_count) == (AgentState.INITIALIZING, 2, 1)
        (event,) = await whole_log(store, before.sequence)
        assert isinstance(event, AgentStateChangedEvent)
        assert (event.new_state, event.is_final) == (AgentState.INITIALIZING, False)
        ended = await store.get_wait(WAIT)
        assert ended is not None
        assert ended.outcome == "restarted"

    async def test_a_claim_that_was_called_off_restarts_nothing(self, store: Store, clock: ManualClock) -> None:
        failed = await failing(store, clock, await brought_to(store, AgentState.READY))
        other = await failing(store, clock, await brought_to(store, AgentState.READY), 2)
        await store.commit(EndWait(wait_id=WAIT, outcome="called off"))
        for wait_id, said in ((WAIT, "has ended already"), (UUID(int=2), "is not about instance")):
            with pytest.raises(InvalidOperationError, match=said):
                await store.commit(RestartInstance(instance_id=failed.instance_id, max_attempts=3, end_wait=wait_id))
        assert await current(store, failed.instance_id) == failed
        assert [wait.instance_id for wait in await store.open_waits()] == [other.instance_id]
        wrong: Any = "wait"
        with pytest.raises(ValidationError, match="end_wait must be a UUID"):
            await store.commit(RestartInstance(instance_id=failed.instance_id, max_attempts=3, end_wait=wrong))
        by_hand = RestartInstance(instance_id=failed.instance_id, max_attempts=3)
        await store.commit(by_hand)
        told = (await whole_log(store))[-2:]
        assert [type(event) for event in told] == [AgentRestartingEvent, AgentStateChangedEvent]

    async def test_a_claim_that_finds_no_room_can_be_made_again(self, store: Store, clock: ManualClock) -> None:
        space = await new_workspace(store, Tier.CORE)
        failed = await failing(store, clock, await brought_to(store, AgentState.READY, workspace_id=space))
        others = [await reserved(store, workspace_id=space) for _ in range(2)]
        claim = RestartInstance(instance_id=failed.instance_id, max_attempts=3, end_wait=WAIT)
        with pytest.raises(LicenseError):
            await store.commit(claim)
        assert [wait.wait_id for wait in await store.open_waits()] == [WAIT]
        await moved(store, others[0], AgentState.FAILED)
        assert (await store.commit(claim)).attempt == 2

    async def test_a_failed_one_that_will_come_back_is_kept_however_long(
        self, store: Store, clock: ManualClock
    ) -> None:
        failed = await failing(store, clock, await brought_to(store, AgentState.READY))
        clock.advance(timedelta(days=3).total_seconds())
        assert (await store.sweep()).instances == 0
        await store.commit(RestartInstance(instance_id=failed.instance_id, max_attempts=3, end_wait=WAIT))

    async def test_a_parked_one_comes_back_with_a_new_attempt(self, store: Store) -> None:
        task = await store.commit(CreateTask(task="mend"))
        one = await store.commit(reservation(task_id=task.task_id))
        await moved(store, one, AgentState.READY, beside=Beside(identity={"pid": 1}))
        sick = AgentHealthStatus(state=HealthState.DEGRADED, consecutive_failures=1)
        await store.commit(ReportHealth(instance_id=one.instance_id, health=sick))
        parked = Beside(ended=AttemptEnd(outcome=AttemptOutcome.STOPPED, detail="parked"))
        held = await moved(store, one, AgentState.SUSPENDED, beside=parked)
        back = await store.commit(NewAttempt(instance_id=one.instance_id, attempt=1, expected_version=held.version))
        assert (back.state, back.attempt, back.version) == (AgentState.SUSPENDED, 2, held.version + 1)
        assert (back.health, back.restart_count) == (AgentHealthStatus(), 0)
        assert await current(store, one.instance_id) == back
        event = (await whole_log(store))[-1]
        assert isinstance(event, AgentAttemptStartedEvent)
        assert (event.attempt, event.version) == (2, back.version)
        first, second = await store.list_attempts(one.instance_id)
        assert (first.is_open, second.is_open, second.identity, second.task_id) == (False, True, None, task.task_id)
        assert (await store.read_audit())[-1].action == "attempt.new"
        with pytest.raises(StaleWriterError):
            await store.commit(RecordIdentity(instance_id=one.instance_id, attempt=1, identity={"pid": 1}))
        await store.commit(RecordIdentity(instance_id=one.instance_id, attempt=2, identity={"pid": 2}))
        await moved(store, back, AgentState.READY, attempt=2)

    async def test_only_a_suspended_one_whose_start_has_ended_gets_a_new_attempt(self, store: Store) -> None:
        frozen = await brought_to(store, AgentState.SUSPENDED)
        with pytest.raises(InvalidOperationError, match=r"attempt 1 of .* has not ended"):
            await store.commit(NewAttempt(instance_id=frozen.instance_id))
        for state in set(AgentState) - {AgentState.SUSPENDED}:
            one = await brought_to(store, state)
            await store.commit(EndAttempt(instance_id=one.instance_id, attempt=1, outcome=AttemptOutcome.LOST))
            with pytest.raises(InvalidOperationError, match=f"is {state}"):
                await store.commit(NewAttempt(instance_id=one.instance_id))
            assert await current(store, one.instance_id) == one
