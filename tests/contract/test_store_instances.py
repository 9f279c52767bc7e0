"""One instance in the store: reserved, ready, moved, failed, started again, parked, terminated."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from store_ground import (
    ALICE,
    DEFINITION,
    ENDED,
    HOME,
    brought_to,
    current,
    entries,
    failed,
    finished,
    moved,
    new_record,
    new_wait,
    newest,
    places_taken,
    readied,
    ready,
    reserved,
    restarted,
    seen,
    suspended,
    whole_log,
)

from ostler.errors import (
    DamagedRowError,
    InvalidOperationError,
    NotFoundError,
    OstlerError,
    StaleWriterError,
    VersionConflictError,
)
from ostler.failpoints import FaultPlan
from ostler.model.attempt import AttemptOutcome
from ostler.model.events import (
    AgentErrorEvent,
    AgentRestartingEvent,
    AgentSpawnedEvent,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
)
from ostler.model.instance import AgentHealthStatus, AgentInstance, AgentMetrics
from ostler.model.states import (
    AGENT_TRANSITIONS,
    FREEZE_TRANSITIONS,
    AgentState,
    Enforcement,
    HealthState,
    SuspendDepth,
)
from ostler.model.wait import WaitKind
from ostler.store import attempts, instances, moves, queries, reports, waits
from ostler.store.attempts import AttemptEnd
from ostler.store.instances import Finish
from ostler.store.moves import Move
from ostler.store.store import Store
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

PAIRS = list(itertools.product(AgentState, repeat=2))
#: A failed one comes back by a restart, which is no move.
LEGAL = [(old, new) for old, new in PAIRS if new in AGENT_TRANSITIONS[old] and new is not AgentState.INITIALIZING]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]
SOON = timedelta(seconds=5)


async def failing(store: Store, one: AgentInstance, clock: ManualClock) -> tuple[AgentInstance, UUID]:
    """It fails and will come back by itself; the second is the wait of its backoff."""
    wait = new_wait(one, kind=WaitKind.BACKOFF, created_at=clock.wall(), due_at=clock.wall() + SOON)
    restarting = instances.restarting_event(
        one, attempt_number=1, max_attempts=3, delay_before_retry=SOON, reason="it fell"
    )
    return await failed(store, one, backoff=wait, restarting=restarting), wait.wait_id


# --- reserved and ready ------------------------------------------------------------------------------


async def test_a_reservation_is_one_commit_of_record_attempt_audit_and_place(store: Store, plan: FaultPlan) -> None:
    plan.seen.clear()
    record = new_record("Scout", tags=("Blue", "fast"), context={"Key": [1, None]}, owner_id=ALICE.principal_id)
    made, is_new = await store.run(instances.reserve_instance, record, by=ALICE)
    assert plan.seen.count("store.commit.after") == 1
    assert is_new
    assert await current(store, made) == made
    assert (made.state, made.version, made.attempt) == (AgentState.INITIALIZING, 1, 1)
    assert (made.tags, made.owner_id, made.context) == (("blue", "fast"), ALICE.principal_id, {"Key": [1, None]})
    (attempt,) = await store.read(attempts.list_attempts, made.instance_id)
    assert (attempt.number, attempt.handle, attempt.is_open) == (1, None, True)
    entry = (await entries(store))[-1]
    assert (entry.actor, entry.action, entry.correlation_id) == ("alice", "spawn", "c-1")
    assert entry.subject == f"instance:{made.instance_id}"
    assert await store.read(places_taken) == 1
    assert await newest(store) == 0, "nothing has happened yet"


async def test_ready_is_one_commit_with_what_was_started_and_is_the_spawn_the_first_time(
    store: Store, clock: ManualClock
) -> None:
    one = await reserved(store, "Scout", owner_id=ALICE.principal_id)
    clock.advance(2)
    held = {"max_memory_mb": Enforcement.ENFORCED, "max_cpu_percent": Enforcement.ADVISORY}
    up = await readied(store, one, {"pid": 7, "at": (1, 2)}, enforcement=held)
    assert await current(store, one) == up
    assert (up.state, up.version, up.enforcement) == (AgentState.READY, 2, held)
    (attempt,) = await store.read(attempts.list_attempts, one.instance_id)
    assert (attempt.handle, attempt.started_at) == ({"pid": 7, "at": [1, 2]}, clock.wall())
    move, spawned = await whole_log(store)
    assert isinstance(move, AgentStateChangedEvent)
    assert (move.previous_state, move.new_state) == (AgentState.INITIALIZING, AgentState.READY)
    assert isinstance(spawned, AgentSpawnedEvent)
    assert (spawned.instance_id, spawned.definition_id, spawned.name) == (one.instance_id, DEFINITION, "Scout")
    assert (spawned.user_id, spawned.correlation_id, spawned.version) == (ALICE.principal_id, "c-1", 2)
    again = await readied(store, await restarted(store, await failed(store, up)))
    kinds = [type(event) for event in await whole_log(store)]
    assert kinds.count(AgentSpawnedEvent) == 1
    assert (await store.read(queries.statistics, HOME, clock.wall())).total_spawned == 1
    assert again.attempt == 2


# --- moves -------------------------------------------------------------------------------------------


async def test_every_legal_move_changes_the_record_and_is_told(store: Store, clock: ManualClock) -> None:
    for start, to in LEGAL:
        old = await brought_to(store, start)
        clock.advance(1)
        before, acts = await newest(store), len(await entries(store))
        new = await moved(store, old, to, reason="so it goes", by=ALICE)
        assert (new.state, new.version, new.updated_at) == (to, old.version + 1, clock.wall())
        assert await current(store, old) == new
        (told,) = await whole_log(store, before)
        assert isinstance(told, AgentStateChangedEvent)
        assert (told.previous_state, told.new_state, told.reason) == (start, to, "so it goes")
        assert (told.version, told.attempt, told.correlation_id) == (new.version, 1, "c-1")
        assert (new.terminated_at is not None) == (not new.is_active)
        assert len(await entries(store)) == acts, "a move that is no act is not audited"
        if to is AgentState.TERMINATED:  # so that nothing of it is left open
            await store.run(waits.end_waits_of, old.instance_id, "over")


async def test_an_act_is_audited_with_its_move(store: Store) -> None:
    old = await ready(store)
    await moved(store, old, AgentState.TERMINATING, act="terminate", by=ALICE, reason="enough")
    entry = (await entries(store))[-1]
    assert (entry.action, entry.actor, entry.detail) == ("terminate", "alice", "ready to terminating: enough")
    assert (entry.outcome, entry.sequence) == ("ok", await newest(store))


async def test_an_illegal_act_names_both_states_and_leaves_only_an_audit_entry(store: Store) -> None:
    for start, to in ILLEGAL:
        old = await brought_to(store, start)
        before, acts = await newest(store), (await entries(store))[-1].number
        with pytest.raises(InvalidOperationError) as refused:
            await moved(store, old, to, act="push", by=ALICE)
        assert (refused.value.current, refused.value.wanted) == (start, to)
        assert start.value in str(refused.value)
        assert to.value in str(refused.value)
        assert refused.value.audited
        assert await current(store, old) == old
        assert await newest(store) == before
        (entry,) = await entries(store, after=acts)
        assert (entry.action, entry.outcome, entry.detail) == ("push", "InvalidOperationError", str(refused.value))


async def test_two_moves_are_open_to_freezing_and_thawing_alone(store: Store) -> None:
    for start, to in sorted(FREEZE_TRANSITIONS):
        old = await brought_to(store, start)
        with pytest.raises(InvalidOperationError):
            await moved(store, old, to)
        assert (await moved(store, old, to, freezing=True)).state is to
    for start, to in ILLEGAL:
        if (start, to) not in FREEZE_TRANSITIONS:
            old = await brought_to(store, start)
            with pytest.raises(InvalidOperationError):
                await moved(store, old, to, freezing=True)


async def test_of_two_that_move_from_the_same_state_one_is_refused(store: Store) -> None:
    old = await ready(store)
    new = await moved(store, old, AgentState.PROCESSING)
    with pytest.raises(VersionConflictError, match="is processing, not ready; read it again"):
        await moved(store, old, AgentState.SUSPENDED)
    assert await current(store, old) == new


async def test_metrics_are_kept_with_a_change_of_state(store: Store, clock: ManualClock) -> None:
    one = await ready(store)
    sample = AgentMetrics(sampled_at=clock.wall(), cpu_percent=12.5, memory_bytes=2**40, custom={"files": 1.5})
    new = await moved(store, one, AgentState.PROCESSING, metrics=sample)
    assert new.metrics == sample
    assert await current(store, one) == new


# --- a row that fell behind --------------------------------------------------------------------------


async def test_a_row_that_fell_behind_takes_the_steps_that_it_missed(store: Store) -> None:
    one = await ready(store)
    before = await newest(store)
    held = one.evolve(state=AgentState.WAITING)  # what the actor knows, and the store could not write
    new = await moved(store, held, AgentState.SUSPENDED, catch_up=True)
    assert new.state is AgentState.SUSPENDED
    told = [(event.previous_state, event.new_state) for event in await moves_in(store, before)]
    steps = (AgentState.READY, AgentState.SUSPENDED)
    assert told == list(itertools.pairwise(steps))
    later = (await moved(store, new, AgentState.READY)).evolve(state=AgentState.PROCESSING)
    before = await newest(store)
    assert (await moved(store, later, AgentState.WAITING, catch_up=True)).state is AgentState.WAITING
    steps3 = (AgentState.READY, AgentState.PROCESSING, AgentState.WAITING)
    told = [(event.previous_state, event.new_state) for event in await moves_in(store, before)]
    assert told == list(itertools.pairwise(steps3))


async def test_an_end_can_be_written_late(store: Store) -> None:
    one = await ready(store, tags=("t",))
    changes = await store.run(
        instances.finish_instance,
        one.evolve(state=AgentState.TERMINATING),
        Finish(end=ENDED, was_graceful=True),
        catch_up=True,
    )
    assert changes["state"] is AgentState.TERMINATED
    assert await store.read(places_taken) == 0
    other = await ready(store)
    busy = await moved(store, other, AgentState.PROCESSING)
    failure = instances.Failure(end=ENDED, error=instances.error_event(busy, "x"), reason="x")
    stale = other.evolve(state=AgentState.WAITING)
    assert (await store.run(instances.fail_instance, stale, failure, catch_up=True))["state"] is AgentState.FAILED
    assert await store.read(places_taken) == 0


async def moves_in(store: Store, after: int) -> list[AgentStateChangedEvent]:
    return [event for event in await whole_log(store, after) if isinstance(event, AgentStateChangedEvent)]


# --- failed ------------------------------------------------------------------------------------------


async def test_a_failure_is_one_commit_with_its_end_its_wait_and_the_restart_to_come(
    store: Store, clock: ManualClock, plan: FaultPlan
) -> None:
    alive = await ready(store)
    before = await newest(store)
    clock.advance(5)
    plan.seen.clear()
    end = AttemptEnd(outcome=AttemptOutcome.EXIT_CODE, detail="1\0", exit_code=1)
    wait = new_wait(alive, kind=WaitKind.BACKOFF, due_at=clock.wall() + SOON)
    restarting = instances.restarting_event(alive, attempt_number=1, max_attempts=3, delay_before_retry=SOON)
    over = await failed(store, alive, end=end, backoff=wait, restarting=restarting)
    assert plan.seen.count("store.commit.after") == 1
    assert await current(store, alive) == over
    assert (over.terminated_at, over.failing_since, over.error_message) == (clock.wall(), clock.wall(), "it fell")
    changed, error, coming = await whole_log(store, before)
    assert isinstance(changed, AgentStateChangedEvent)
    assert (changed.new_state, changed.is_final) == (AgentState.FAILED, False)
    assert isinstance(error, AgentErrorEvent)
    assert isinstance(coming, AgentRestartingEvent)
    assert (coming.attempt_number, coming.max_attempts, coming.delay_before_retry) == (1, 3, SOON)
    assert {event.version for event in (error, changed, coming) if isinstance(event, AgentStateChangedEvent)} == {
        over.version
    }
    assert await store.read(waits.open_waits, instance_id=alive.instance_id) == [wait]
    (attempt,) = await store.read(attempts.list_attempts, alive.instance_id)
    assert (attempt.outcome, attempt.detail, attempt.exit_code) == (AttemptOutcome.EXIT_CODE, "1\ufffd", 1)
    assert attempt.ended_at == clock.wall()


async def test_a_failure_without_a_restart_is_final(store: Store) -> None:
    await failed(store, await ready(store))
    (last,) = [event for event in await moves_in(store, 0) if event.new_state is AgentState.FAILED]
    assert last.is_final


async def test_the_first_failure_since_it_was_healthy_is_remembered(store: Store, clock: ManualClock) -> None:
    first = await failed(store, await ready(store))
    clock.advance(60)
    again = await failed(store, await readied(store, await restarted(store, first)))
    assert again.failing_since == first.failing_since
    assert again.terminated_at == clock.wall()


async def test_foreign_text_of_an_error_is_cleaned_cut_and_kept(store: Store) -> None:
    one = await ready(store)
    text = "out\0 of \ud800 luck"
    error = instances.error_event(one, text, exception_type="E\0\ud800", stack_trace="a\0b\ud800" * 10)
    end = AttemptEnd(outcome=AttemptOutcome.ERROR, detail="x\0\ud800" * 100_000)
    wait = new_wait(one, kind=WaitKind.BACKOFF, reason="x\0" * 2000)
    coming = instances.restarting_event(one, attempt_number=1, max_attempts=2, reason="\ud800")
    over = await failed(store, one, end=end, error=error, reason="\ud800 reason\0", backoff=wait, restarting=coming)
    (kept,) = await store.read(waits.all_open_waits)
    assert kept.reason is not None
    assert kept.reason.endswith("(2000 more characters)")
    assert over.error_message == "out\ufffd of ? luck"
    assert await current(store, one) == over
    (attempt,) = await store.read(attempts.list_attempts, one.instance_id)
    assert attempt.detail is not None
    assert "\0" not in attempt.detail
    assert len(attempt.detail) < 11_000
    assert attempt.detail.endswith("more characters)")
    (told,) = [event for event in await whole_log(store) if isinstance(event, AgentErrorEvent)]
    assert (told.error_message, told.exception_type) == ("out\ufffd of ? luck", "E\ufffd?")
    assert told.stack_trace == "a\ufffdb?" * 10
    again = await restarted(store, over)
    assert again.error_message is None


# --- started again -----------------------------------------------------------------------------------


async def test_a_failed_instance_comes_back_only_by_a_restart_with_a_new_attempt(
    store: Store, clock: ManualClock
) -> None:
    over = await failed(store, await ready(store, tags=("t",)))
    with pytest.raises(InvalidOperationError):
        await moved(store, over, AgentState.INITIALIZING)
    clock.advance(10)
    back = await restarted(store, over)
    assert await current(store, over) == back
    assert (back.state, back.attempt, back.terminated_at) == (AgentState.INITIALIZING, 2, None)
    assert (back.restart_count, back.lifetime_restarts) == (0, 0), "by hand it spends no retry"
    assert back.downtime == timedelta(seconds=10)
    assert [one.number for one in await store.read(attempts.list_attempts, back.instance_id)] == [1, 2]
    assert (await entries(store))[-1].action == "restart"
    assert (await moves_in(store, 0))[-1].attempt == 2
    with pytest.raises(InvalidOperationError):
        await restarted(store, back)


async def test_exactly_one_of_many_gets_the_restart_and_the_wait_ends_with_it(store: Store, clock: ManualClock) -> None:
    over, wait_id = await failing(store, await ready(store), clock)
    answers = await asyncio.gather(*(restarted(store, over, wait_id) for _ in range(10)), return_exceptions=True)
    (back,) = [answer for answer in answers if isinstance(answer, AgentInstance)]
    assert sum(isinstance(answer, OstlerError) for answer in answers) == 9
    assert (back.attempt, back.restart_count, back.lifetime_restarts) == (2, 1, 1)
    ended = await store.read(waits.get_wait, wait_id)
    assert ended is not None
    assert (ended.outcome, ended.ended_at) == ("restarted", clock.wall())


async def test_a_backoff_that_was_called_off_or_is_of_another_instance_restarts_nothing(
    store: Store, clock: ManualClock
) -> None:
    over, wait_id = await failing(store, await ready(store), clock)
    other, other_wait = await failing(store, await ready(store), clock)
    await store.run(waits.end_wait, wait_id, "called off")
    for wrong, error in ((wait_id, InvalidOperationError), (other_wait, InvalidOperationError), (HOME, NotFoundError)):
        with pytest.raises(error):
            await restarted(store, over, wrong)
    assert await current(store, over) == over
    assert [one.instance_id for one in await store.read(waits.all_open_waits)] == [other.instance_id]
    await restarted(store, over)


async def test_a_restart_by_hand_ends_the_wait_of_the_backoff(store: Store, clock: ManualClock) -> None:
    over, wait_id = await failing(store, await ready(store), clock)
    await restarted(store, over)
    ended = await store.read(waits.get_wait, wait_id)
    assert ended is not None
    assert ended.outcome == "restarted"


async def test_no_attempt_begins_while_the_one_before_may_still_live(store: Store) -> None:
    one = await ready(store)
    await moved(store, one, AgentState.FAILED)  # nothing says how its attempt ended
    over = await current(store, one)
    with pytest.raises(InvalidOperationError, match=r"attempt 1 of .* was started and has not ended; end it first"):
        await restarted(store, over)
    assert await current(store, over) == over
    await store.run(attempts.end_attempt, one.instance_id, 1, ENDED)
    assert (await restarted(store, over)).attempt == 2


async def test_an_intent_without_a_process_is_closed_by_the_next_attempt(store: Store) -> None:
    one = await moved(store, await reserved(store), AgentState.FAILED)
    await restarted(store, one)
    first, second = await store.read(attempts.list_attempts, one.instance_id)
    assert (first.outcome, first.handle, second.is_open) == (AttemptOutcome.UNKNOWN, None, True)


async def test_a_living_instance_restarts_through_failed_in_one_commit_and_keeps_its_place(
    store: Store, plan: FaultPlan, clock: ManualClock
) -> None:
    one = await moved(store, await ready(store, tags=("t",)), AgentState.PROCESSING)
    wait = await store.run(waits.open_wait, new_wait(one))
    before = await newest(store)
    plan.seen.clear()
    end = AttemptEnd(outcome=AttemptOutcome.STOPPED, detail="by hand")
    changes = await store.run(instances.restart_instance, one, end, by=ALICE, reason="stuck")
    assert plan.seen.count("store.commit.after") == 1
    back = one.evolve(**changes)
    assert await current(store, one) == back
    assert (back.state, back.attempt, back.restart_count) == (AgentState.INITIALIZING, 2, 0)
    states = [(event.previous_state, event.new_state) for event in await moves_in(store, before)]
    assert states == [
        (AgentState.PROCESSING, AgentState.FAILED),
        (AgentState.FAILED, AgentState.INITIALIZING),
    ]
    assert await store.read(places_taken) == 1
    ended = await store.read(waits.get_wait, wait.wait_id)
    assert ended is not None
    assert ended.ended_at is not None
    assert (await entries(store))[-1].detail == "attempt 2: stuck"
    assert (await store.read(queries.statistics, HOME, clock.wall())).total_restarts == 1


# --- suspended and parked ----------------------------------------------------------------------------


async def test_a_suspension_and_its_wait_are_one_and_a_deeper_one_replaces_it(store: Store) -> None:
    held = await suspended(store, await ready(store))
    (first,) = await store.read(waits.open_waits, instance_id=held.instance_id)
    assert (first.kind, first.detail) == (WaitKind.RESUME, {"depth": "hold"})
    frozen = await suspended(store, held, SuspendDepth.FREEZE)
    assert frozen == held, "the record is suspended already"
    (second,) = await store.read(waits.open_waits, instance_id=held.instance_id)
    assert second.detail == {"depth": "freeze"}
    assert [entry.action for entry in await entries(store)][-2:] == ["suspend", "suspend"]
    changes = await store.run(instances.resume_instance, held, AgentState.READY, by=ALICE, reason="go on")
    assert changes["state"] is AgentState.READY
    assert await store.read(waits.open_waits, instance_id=held.instance_id) == []
    ended = await store.read(waits.get_wait, second.wait_id)
    assert ended is not None
    assert ended.outcome == "resumed"


async def test_the_end_of_a_suspension_that_was_written_late_ends_its_wait_too(store: Store) -> None:
    held = await suspended(store, await ready(store))
    await moved(store, held, AgentState.READY, catch_up=True)
    assert await store.read(waits.open_waits, instance_id=held.instance_id) == []


async def test_only_a_freeze_stops_in_mid_work_and_only_a_thaw_goes_on_there(store: Store) -> None:
    busy = await brought_to(store, AgentState.PROCESSING)
    with pytest.raises(InvalidOperationError):
        await suspended(store, busy, SuspendDepth.HOLD)
    frozen = await suspended(store, busy, SuspendDepth.FREEZE)
    changes = await store.run(instances.resume_instance, frozen, AgentState.PROCESSING, by=ALICE, reason="thaw")
    assert changes["state"] is AgentState.PROCESSING


async def test_a_parked_instance_comes_back_with_a_new_attempt_fresh_health_and_all_retries(store: Store) -> None:
    one = await ready(store)
    sick = AgentHealthStatus(state=HealthState.DEGRADED, consecutive_failures=1)
    one = one.evolve(**await store.run(reports.report_health, one, sick))
    held = await suspended(store, one, SuspendDepth.PARK)
    with pytest.raises(InvalidOperationError, match=r"attempt 1 of .* has not ended"):
        await store.run(instances.unpark_instance, held, by=ALICE)
    await store.run(instances.park_instance, held, AttemptEnd(outcome=AttemptOutcome.STOPPED, detail="parked"))
    assert len(await store.read(waits.open_waits, instance_id=one.instance_id)) == 1, "it is still suspended"
    back = held.evolve(**await store.run(instances.unpark_instance, held, by=ALICE))
    assert await current(store, one) == back
    assert (back.state, back.attempt, back.version) == (AgentState.SUSPENDED, 2, held.version + 1)
    assert (back.health, back.restart_count) == (AgentHealthStatus(), 0)
    assert (await entries(store))[-1].action == "resume"
    up = await readied(store, back)
    assert up.state is AgentState.READY
    assert await store.read(waits.open_waits, instance_id=one.instance_id) == []
    first, second = await store.read(attempts.list_attempts, one.instance_id)
    assert (first.detail, first.is_open, second.is_open, second.handle) == ("parked", False, True, {"pid": 2})


async def test_only_a_suspended_instance_is_unparked(store: Store) -> None:
    for state in set(AgentState) - {AgentState.SUSPENDED}:
        one = await brought_to(store, state)
        with pytest.raises(InvalidOperationError, match=f"is {state}, not parked"):
            await store.run(instances.unpark_instance, one, by=ALICE)
        assert await current(store, one) == one


# --- terminated --------------------------------------------------------------------------------------


async def test_the_last_event_tells_how_long_it_lived_and_how_it_ended(store: Store, clock: ManualClock) -> None:
    alive = await brought_to(store, AgentState.TERMINATING)
    clock.advance(90)
    left: dict[str, Any] = {"notes": ["é", None, 1.5], "deep": {"a": True}}
    sample = AgentMetrics(sampled_at=clock.wall(), tokens_used=7)
    over = await finished(store, alive, reason="done", final_state=left, metrics=sample)
    left["notes"].append("too late")
    found = await current(store, alive)
    assert found.final_state == {"notes": ["é", None, 1.5], "deep": {"a": True}}
    assert (found.metrics, found.terminated_at, found.version) == (sample, clock.wall(), over.version)
    change, last = (await whole_log(store))[-2:]
    assert isinstance(change, AgentStateChangedEvent)
    assert change.is_final
    assert isinstance(last, AgentTerminatedEvent)
    assert (last.uptime, last.was_graceful, last.reason) == (timedelta(seconds=90), True, "done")
    assert (await store.read(queries.statistics, HOME, clock.wall())).total_terminated == 1


async def test_terminating_a_failed_instance_keeps_the_time_of_its_end_and_frees_no_place(
    store: Store, clock: ManualClock
) -> None:
    over = await failed(store, await ready(store))
    other = await ready(store)
    clock.advance(60)
    gone = await finished(store, over, end=None, act="terminate")
    assert (gone.terminated_at, gone.updated_at) == (over.terminated_at, clock.wall())
    assert (await entries(store))[-1].action == "terminate"
    assert await store.read(places_taken) == 1
    await moved(store, other, AgentState.TERMINATING)


async def test_the_time_of_the_end_may_be_known_better_than_by_the_commit(store: Store, clock: ManualClock) -> None:
    one, two = await ready(store), await brought_to(store, AgentState.TERMINATING)
    ended = clock.wall() + SOON
    clock.advance(60)
    end = AttemptEnd(outcome=AttemptOutcome.SIGNAL, exit_signal=9, ended_at=ended)
    assert (await failed(store, one, end=end)).terminated_at == ended
    assert (await finished(store, two, end=end)).terminated_at == ended
    (attempt,) = await store.read(attempts.list_attempts, one.instance_id)
    assert (attempt.ended_at, attempt.exit_signal) == (ended, 9)


async def test_an_end_takes_waits_and_requests_with_it(store: Store) -> None:
    one = await ready(store)
    for _ in range(3):
        await store.run(waits.open_wait, new_wait(one))
    await finished(store, await moved(store, one, AgentState.TERMINATING))
    assert await store.read(waits.all_open_waits) == []


# --- attempts ----------------------------------------------------------------------------------------


async def test_an_attempt_ends_once(store: Store, clock: ManualClock) -> None:
    one = await ready(store)
    (opened,) = await store.read(attempts.open_attempts)
    assert (opened.instance_id, opened.handle) == (one.instance_id, {"pid": 1})
    first = AttemptEnd(outcome=AttemptOutcome.SIGNAL, detail="KILL\0")
    await store.run(attempts.end_attempt, one.instance_id, 1, first)
    clock.advance(1)
    await store.run(attempts.end_attempt, one.instance_id, 1, AttemptEnd(outcome=AttemptOutcome.CLEAN))
    await finished(store, await moved(store, one, AgentState.TERMINATING))
    (attempt,) = await store.read(attempts.list_attempts, one.instance_id)
    assert (attempt.outcome, attempt.detail) == (AttemptOutcome.SIGNAL, "KILL\ufffd")
    assert await store.read(attempts.open_attempts) == []


async def test_attempts_are_read_in_pages_and_open_ones_in_order(store: Store) -> None:
    lives = [await ready(store) for _ in range(5)]
    back = lives[2]
    for _ in range(3):
        back = await readied(store, await restarted(store, await failed(store, back)))
    numbers: list[int] = []
    while page := await store.read(
        attempts.list_attempts, back.instance_id, limit=3, after=numbers[-1] if numbers else 0
    ):
        numbers += [one.number for one in page]
    assert numbers == [1, 2, 3, 4]
    keys = [(one.instance_id, one.number) for one in await store.read(attempts.open_attempts)]
    assert keys == sorted(keys)
    assert {key[0] for key in keys} == {one.instance_id for one in lives}


# --- stale and unknown -------------------------------------------------------------------------------


async def test_an_earlier_attempt_may_not_write_any_more(store: Store) -> None:
    stale = await ready(store)
    back = await readied(store, await restarted(store, await failed(store, stale)))
    before = await seen(store)
    end, wait = ENDED, new_wait(stale)
    failure = instances.Failure(end=end, error=instances.error_event(stale, "x"), reason="x")
    late: list[tuple[Any, ...]] = [
        (moves.move_instance, Move(to=AgentState.PROCESSING)),
        (instances.suspend_instance, wait, {"by": ALICE}),
        (instances.fail_instance, failure),
        (instances.fail_instance, failure, {"catch_up": True}),
        (instances.restart_instance, end, {"by": ALICE, "reason": "r"}),
        (reports.report_health, AgentHealthStatus()),
        (reports.report_progress, 0.5, None, None),
        (reports.report_signals, (("n", None),), 0, 1),
        (reports.begin_call, None, None),
        (reports.end_call, None, reports.CallEnd(error=instances.error_event(stale, "x"))),
        (reports.open_agent_wait, None, wait),
        (instances.park_instance, end),
    ]
    for command, *arguments in late:
        named = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        with pytest.raises(StaleWriterError, match="is at attempt 2, attempt 1 may not write"):
            await store.run(command, stale, *arguments, **named)
        assert await current(store, back) == back, command
    held = stale.evolve(state=AgentState.SUSPENDED)
    with pytest.raises(StaleWriterError):
        await store.run(instances.suspend_instance, held, wait, by=ALICE)
    assert (await seen(store))[0] == before[0]
    assert await store.read(waits.all_open_waits) == []


async def test_an_unknown_instance_is_not_there_and_stops_only_the_command_that_needs_it(store: Store) -> None:
    gone = new_record().evolve(state=AgentState.READY)
    assert await store.read(moves.get_instance, gone.instance_id) is None
    with pytest.raises(DamagedRowError, match=f"the row of instance:{gone.instance_id} is gone"):
        await moved(store, gone, AgentState.PROCESSING)
    with pytest.raises(DamagedRowError):
        await store.run(reports.report_progress, gone, None, "hm", None)
    assert (await ready(store)).state is AgentState.READY
