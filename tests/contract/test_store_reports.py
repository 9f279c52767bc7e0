"""What happens to a live instance without ending it: calls, waits, health, progress, signals."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest
from store_ground import (
    ALICE,
    HOME,
    IDS,
    audit_head,
    brought_to,
    count,
    current,
    entries,
    failed,
    moved,
    new_wait,
    newest,
    readied,
    ready,
    restarted,
    whole_log,
)

from ostler.errors import ConflictError, InvalidOperationError, NotFoundError, ValidationError
from ostler.failpoints import FaultPlan
from ostler.model.attempt import Request, RequestState
from ostler.model.events import (
    AgentErrorEvent,
    AgentHealthChangedEvent,
    AgentProgressEvent,
    AgentSignalEvent,
    AgentStateChangedEvent,
    AgentWaitEndedEvent,
    AgentWaitOpenedEvent,
)
from ostler.model.instance import AgentHealthStatus, AgentInstance, AgentMetrics
from ostler.model.states import AgentState, HealthState
from ostler.model.wait import Wait, WaitKind
from ostler.store import instances, reports, requests, waits
from ostler.store.attempts import get_attempt
from ostler.store.moves import Move
from ostler.store.reports import CallEnd
from ostler.store.requests import RequestEnd
from ostler.store.store import Store
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

HEALTHY = AgentHealthStatus(state=HealthState.HEALTHY, consecutive_successes=2)
SICK = AgentHealthStatus(state=HealthState.DEGRADED, consecutive_failures=1)
WORKING, WAITING = Move(to=AgentState.PROCESSING), Move(to=AgentState.WAITING)


def a_request(one: AgentInstance, request_id: str = "r-1", **fields: object) -> Request:
    return Request(
        instance_id=one.instance_id,
        request_id=request_id,
        workspace_id=one.workspace_id,
        attempt=one.attempt,
        input_digest="d",
        begun_at=one.created_at,
    ).evolve(**fields)


# --- calls and requests ------------------------------------------------------------------------------


async def test_a_request_and_the_move_that_it_causes_are_one_commit(
    store: Store, clock: ManualClock, plan: FaultPlan
) -> None:
    one, asked = await ready(store), None
    clock.advance(1)
    plan.seen.clear()
    changes = await store.run(reports.begin_call, one, WORKING, a_request(one))
    busy = one.evolve(**changes)
    assert plan.seen.count("store.commit.after") == 1
    asked = await store.read(requests.get_request, one.instance_id, "r-1")
    assert asked is not None
    assert (asked.state, asked.begun_at, asked.ended_at) == (RequestState.RUNNING, clock.wall(), None)
    end = RequestEnd(request=asked, state=RequestState.DONE, answer='{"a": 1}')
    changes = await store.run(reports.end_call, busy, WAITING, CallEnd(request=end))
    assert (await current(store, one)).state is changes["state"] is AgentState.WAITING
    done = await store.read(requests.get_request, one.instance_id, "r-1")
    assert done is not None
    assert (done.state, done.answer, done.ended_at) == (RequestState.DONE, '{"a": 1}', clock.wall())
    assert await store.read(requests.get_request, one.instance_id, "other") is None


async def test_a_move_that_is_refused_takes_the_request_with_it(store: Store) -> None:
    held = await brought_to(store, AgentState.SUSPENDED)
    with pytest.raises(InvalidOperationError):
        await store.run(reports.begin_call, held, WORKING, a_request(held))
    assert await store.read(requests.list_requests, held.instance_id) == []


async def test_an_error_of_a_request_is_told_and_the_agent_goes_on(store: Store) -> None:
    busy = await brought_to(store, AgentState.PROCESSING)
    asked = a_request(busy)
    await store.run(reports.begin_call, busy, None, asked)
    error = instances.error_event(busy, "no\0luck", exception_type="E", is_recoverable=True)
    end = RequestEnd(request=asked, state=RequestState.FAILED, error="no\0luck" * 10_000)
    await store.run(reports.end_call, busy, WAITING, CallEnd(request=end, error=error))
    kept = await store.read(requests.get_request, busy.instance_id, "r-1")
    assert kept is not None
    assert kept.error is not None
    assert "\0" not in kept.error
    assert kept.error.endswith("more characters)")
    told, move = (await whole_log(store))[-2:]
    assert isinstance(told, AgentErrorEvent)
    assert (told.error_message, told.is_recoverable) == ("no\ufffdluck", True)
    assert isinstance(move, AgentStateChangedEvent)


async def test_an_answer_that_is_too_large_is_not_kept(store: Store) -> None:
    busy = await brought_to(store, AgentState.PROCESSING)
    for number, size in enumerate((requests.MAX_ANSWER_BYTES - 2, requests.MAX_ANSWER_BYTES - 1)):
        asked = a_request(busy, f"r-{number}")
        await store.run(reports.begin_call, busy, None, asked)
        end = RequestEnd(
            request=asked, state=RequestState.DONE, answer='"' + "ä" * (size // 2) + "x" * (size % 2) + '"'
        )
        await store.run(reports.end_call, busy, None, CallEnd(request=end))
    kept = [await store.read(requests.get_request, busy.instance_id, f"r-{number}") for number in range(2)]
    assert [one is not None and one.answer is not None for one in kept] == [True, False]
    assert {one.state for one in kept if one is not None} == {RequestState.DONE}


async def test_what_was_not_answered_is_lost_with_the_agent_and_begins_again_under_the_same_id(store: Store) -> None:
    busy = await brought_to(store, AgentState.PROCESSING)
    await store.run(reports.begin_call, busy, None, a_request(busy))
    over = await failed(store, busy, "it fell\0")
    lost = await store.read(requests.get_request, busy.instance_id, "r-1")
    assert lost is not None
    assert (lost.state, lost.error) == (RequestState.LOST, "it fell\ufffd")
    back = await readied(store, await restarted(store, over))
    await store.run(reports.begin_call, back, WORKING, lost.evolve(state=RequestState.RUNNING, tries=2, attempt=2))
    again = await store.read(requests.get_request, busy.instance_id, "r-1")
    assert again is not None
    assert (again.state, again.tries, again.attempt) == (RequestState.RUNNING, 2, 2)


async def test_requests_are_listed_newest_first_and_by_state(store: Store, clock: ManualClock) -> None:
    busy = await brought_to(store, AgentState.PROCESSING)
    for number in range(4):
        clock.advance(1)
        asked = a_request(busy, f"r-{number}")
        await store.run(reports.begin_call, busy, None, asked)
        if number % 2:
            end = RequestEnd(request=asked, state=RequestState.CANCELLED)
            await store.run(reports.end_call, busy, None, CallEnd(request=end))
    listed = await store.read(requests.list_requests, busy.instance_id)
    assert [one.request_id for one in listed] == ["r-3", "r-2", "r-1", "r-0"]
    running = await store.read(requests.list_requests, busy.instance_id, RequestState.RUNNING)
    assert [one.request_id for one in running] == ["r-2", "r-0"]


async def test_a_thousand_answers_are_kept_and_the_oldest_go(store: Store, clock: ManualClock) -> None:
    busy = await brought_to(store, AgentState.PROCESSING)
    await store.run(reports.begin_call, busy, None, a_request(busy, "running"))
    for first in range(0, requests.MAX_KEPT + 200, 100):
        clock.advance(1)
        ends = [
            RequestEnd(request=a_request(busy, f"r-{number}"), state=RequestState.DONE)
            for number in range(first, first + 100)
        ]
        await asyncio.gather(*(store.run(reports.end_call, busy, None, CallEnd(request=end)) for end in ends))
    kept = {one.request_id for one in await store.read(requests.list_requests, busy.instance_id)}
    assert requests.MAX_KEPT <= len(kept) - 1 < requests.MAX_KEPT + 100
    assert {"running", "r-1199", "r-300"} <= kept
    assert "r-0" not in kept


# --- waits -------------------------------------------------------------------------------------------


async def test_a_wait_and_the_move_that_it_causes_are_one_commit(store: Store, clock: ManualClock) -> None:
    busy = await brought_to(store, AgentState.PROCESSING)
    due = clock.wall() + timedelta(minutes=5)
    wait = new_wait(busy, kind=WaitKind.HUMAN, reason="may I?", due_at=due, detail={"question": [1, "ü"]})
    known, changes = await store.run(reports.open_agent_wait, busy, WAITING, wait)
    assert known == wait == await store.read(waits.get_wait, wait.wait_id)
    assert changes["state"] is AgentState.WAITING
    opened, move = (await whole_log(store))[-2:]
    assert isinstance(opened, AgentWaitOpenedEvent)
    assert (opened.wait_id, opened.kind, opened.due_at, opened.detail) == (
        wait.wait_id,
        WaitKind.HUMAN,
        due,
        {"question": [1, "ü"]},
    )
    assert (opened.attempt, isinstance(move, AgentStateChangedEvent)) == (1, True)


async def test_a_wait_that_is_asked_for_again_is_joined(store: Store) -> None:
    busy = await brought_to(store, AgentState.PROCESSING)
    wait = new_wait(busy)
    await store.run(reports.open_agent_wait, busy, None, wait)
    before = await newest(store)
    again, _ = await store.run(reports.open_agent_wait, busy, None, wait.evolve(reason="again"))
    assert (again, await newest(store)) == (wait, before)
    await store.run(waits.end_wait, wait.wait_id, "answered", {"yes": True})
    late, _ = await store.run(reports.open_agent_wait, busy, None, wait)
    assert (late.outcome, late.answer) == ("answered", {"yes": True})
    other = await ready(store)
    with pytest.raises(InvalidOperationError, match="is of another instance"):
        await store.run(reports.open_agent_wait, other, None, new_wait(other, wait_id=wait.wait_id))


async def test_exactly_one_of_many_ends_a_wait(store: Store, clock: ManualClock) -> None:
    one = await ready(store)
    wait = await store.run(waits.open_wait, new_wait(one))
    clock.advance(1)
    ends = (store.run(waits.end_wait, wait.wait_id, f"by {number}", {"n": number}) for number in range(20))
    answers = await asyncio.gather(*ends, return_exceptions=True)
    (ended,) = [answer for answer in answers if isinstance(answer, Wait)]
    refused = [answer for answer in answers if isinstance(answer, InvalidOperationError)]
    assert len(refused) == 19
    assert "has ended already" in str(refused[0])
    kept = await store.read(waits.get_wait, wait.wait_id)
    assert kept == ended
    assert ended.ended_at == clock.wall()
    assert sum(isinstance(event, AgentWaitEndedEvent) for event in await whole_log(store)) == 1


async def test_an_answer_is_kept_with_the_wait_and_audited_as_an_act(store: Store) -> None:
    one = await ready(store)
    wait = await store.run(waits.open_wait, new_wait(one, detail={"question": "why?"}))
    answer = {"text": ["so", None]}
    ended = await store.run(waits.end_wait, wait.wait_id, "answered", answer, by=ALICE, act="answer")
    assert (ended.outcome, ended.answer, ended.detail) == ("answered", answer, {"question": "why?"})
    entry = (await entries(store))[-1]
    assert (entry.actor, entry.action, entry.detail) == ("alice", "answer", "answered")
    with pytest.raises(InvalidOperationError):
        await store.run(waits.end_wait, wait.wait_id, "again", by=ALICE, act="answer")
    assert (await entries(store))[-1].outcome == "InvalidOperationError"
    with pytest.raises(NotFoundError, match="there is no wait"):
        await store.run(waits.end_wait, IDS.new(), "?")


async def test_an_unfit_answer_is_refused_by_field_and_leaves_the_wait_open(store: Store) -> None:
    one = await ready(store)
    wait = await store.run(waits.open_wait, new_wait(one))
    for outcome, answer, field in (
        ("answered", {"text": "x" * 2**20}, "answer must be at most 256 KiB"),
        ("answered", {"text": "\0"}, "answer.text must not contain NUL"),
        ("answered", {"text": float("nan")}, "answer.text must be a finite number"),
        ("\ud800", None, "outcome must be text without lone surrogates"),
    ):
        with pytest.raises(ValidationError, match=field):
            await store.run(waits.end_wait, wait.wait_id, outcome, answer)
    assert await store.read(waits.all_open_waits) == [wait]


async def test_an_unfit_wait_is_refused_by_field(store: Store) -> None:
    one = await ready(store)
    for wait, field in (
        (new_wait(one, reason="a\0"), "reason must not contain NUL"),
        (new_wait(one, detail={"a": {1, 2}}), "detail.a must be a JSON value"),
        (new_wait(one, detail={"a": "\ud800"}), "detail.a must be text without lone surrogates"),
    ):
        with pytest.raises(ValidationError, match=field):
            await store.run(reports.open_agent_wait, one, None, wait)
    assert await store.read(waits.all_open_waits) == []


async def test_open_waits_are_found_by_instance_and_by_workspace_and_read_in_pages(store: Store) -> None:
    one, other = await ready(store), await ready(store)
    made = [await store.run(waits.open_wait, new_wait(about)) for about in (one, other, one, one, other)]
    await store.run(waits.end_wait, made[3].wait_id, "done")
    still = [made[0], made[1], made[2], made[4]]
    assert await store.read(waits.open_waits, HOME) == still
    assert await store.read(waits.all_open_waits) == still
    assert await store.read(waits.open_waits, instance_id=one.instance_id) == [made[0], made[2]]
    assert await store.read(waits.open_waits, UUID(int=404)) == []
    paged: list[Wait] = []
    while page := await store.read(waits.open_waits, HOME, limit=3, after=paged[-1].wait_id if paged else None):
        paged += page
    assert paged == still


async def test_an_end_ends_all_waits_of_the_instance_however_many(store: Store) -> None:
    one, other = await ready(store), await ready(store)
    opening = [store.run(waits.open_wait, new_wait(one)) for _ in range(1100)]
    await asyncio.gather(*opening, store.run(waits.open_wait, new_wait(other)))
    await failed(store, one)
    assert await store.read(count("waits", "ended_at IS NULL")) == 1
    assert len(await store.read(waits.all_open_waits)) == 1
    ended = [event for event in await whole_log(store) if isinstance(event, AgentWaitEndedEvent)]
    assert len(ended) == 1100
    assert [event.wait_id for event in ended] == sorted(event.wait_id for event in ended)


async def test_all_open_waits_are_read_beyond_one_page(store: Store) -> None:
    await asyncio.gather(*(store.run(waits.open_wait, new_wait()) for _ in range(1001)))
    assert len(await store.read(waits.all_open_waits)) == 1001
    assert len(await store.read(waits.open_waits, HOME)) == 1000


# --- health ------------------------------------------------------------------------------------------


async def test_becoming_healthy_forgives_the_restarts_but_not_the_count_of_a_life(store: Store) -> None:
    one = await ready(store)
    wait = new_wait(one, kind=WaitKind.BACKOFF)
    over = await failed(store, one, backoff=wait)
    back = await readied(store, await restarted(store, over, wait.wait_id))
    assert (back.restart_count, back.lifetime_restarts) == (1, 1)
    assert back.failing_since is not None
    well = back.evolve(**await store.run(reports.report_health, back, HEALTHY))
    assert (well.restart_count, well.lifetime_restarts, well.failing_since) == (0, 1, None)
    assert await current(store, one) == well
    last = (await whole_log(store))[-1]
    assert isinstance(last, AgentHealthChangedEvent)
    assert (last.previous_health, last.new_health) == (HealthState.UNKNOWN, HealthState.HEALTHY)
    assert last.version == well.version


async def test_a_probe_that_finds_the_same_again_writes_no_event(store: Store, clock: ManualClock) -> None:
    one = await ready(store)
    one = one.evolve(**await store.run(reports.report_health, one, SICK))
    before, acts = await newest(store), await audit_head(store)
    again = SICK.evolve(consecutive_failures=2, checked_at=clock.wall(), details="still \0 so")
    changes = await store.run(reports.report_health, one, again)
    assert (await newest(store), await audit_head(store)) == (before, acts)
    assert await current(store, one) == one.evolve(**changes)
    assert (await current(store, one)).health == again


async def test_the_health_of_an_instance_that_has_ended_is_not_reported(store: Store) -> None:
    for state in (AgentState.FAILED, AgentState.TERMINATED):
        over = await brought_to(store, state)
        with pytest.raises(ConflictError):
            await store.run(reports.report_health, over, HEALTHY)
        assert await current(store, over) == over


# --- progress and signals ----------------------------------------------------------------------------


async def test_progress_is_an_event_and_no_act(store: Store) -> None:
    one = await brought_to(store, AgentState.PROCESSING)
    acts = await audit_head(store)
    await store.run(reports.report_progress, one, 0.25, "a\0 quarter", {"files": [1, None]})
    event = (await whole_log(store))[-1]
    assert isinstance(event, AgentProgressEvent)
    assert (event.fraction, event.details) == (0.25, {"files": [1, None]})
    assert event.message in {"a\0 quarter", "a\ufffd quarter"}
    assert (event.version, event.attempt) == (one.version, 1)
    assert await audit_head(store) == acts


async def test_an_event_has_the_version_of_the_row_also_where_the_caller_holds_an_older_one(store: Store) -> None:
    old = await ready(store)
    new = await moved(store, old, AgentState.PROCESSING)
    await store.run(reports.report_progress, old, 0.5, None, None)
    await store.run(reports.report_signals, old, (("n", None),), 0, 0)
    assert [event.version for event in await whole_log(store, 3)] == [new.version, new.version]


async def test_signals_are_single_events_in_their_order(store: Store) -> None:
    one = await brought_to(store, AgentState.PROCESSING)
    acts = await audit_head(store)
    said = tuple((f"n-{number}", {"n": number} if number % 2 else None) for number in range(2000))
    assert await store.run(reports.report_signals, one, said, 0, 2000) == []
    told = [event for event in await whole_log(store) if isinstance(event, AgentSignalEvent)]
    assert tuple((event.name, event.payload) for event in told) == said
    assert await audit_head(store) == acts
    assert await current(store, one) == one


async def test_the_last_message_that_was_heard_is_kept_with_the_attempt_and_never_falls(
    store: Store, clock: ManualClock
) -> None:
    one = await ready(store)
    sample = AgentMetrics(sampled_at=clock.wall(), tokens_used=12)
    await store.run(reports.report_signals, one, (("a", None),), 0, 7, sample)
    await store.run(reports.report_signals, one, (), 5, 5)
    attempt = await store.read(get_attempt, one.instance_id, 1)
    assert attempt is not None
    assert attempt.heard == 7
    assert (await current(store, one)).metrics == sample


async def test_a_signal_that_cannot_be_written_is_told_and_takes_no_other_with_it(store: Store) -> None:
    one = await ready(store)
    said = (("first", None), ("bad", {"a": object()}), ("worse", {"a": "\ud800"}), ("last", None))
    lost = await store.run(reports.report_signals, one, said, 0, 4)
    assert [text.split(":")[0] for text in lost] == ["signal 'bad'", "signal 'worse'"]
    names = [event.name for event in await whole_log(store) if isinstance(event, AgentSignalEvent)]
    assert names == ["first", "last"]


async def test_messages_are_committed_in_their_order_and_before_the_answer_that_follows(store: Store) -> None:
    one = await brought_to(store, AgentState.PROCESSING)
    asked = a_request(one)
    await store.run(reports.begin_call, one, None, asked)
    end = CallEnd(request=RequestEnd(request=asked, state=RequestState.DONE), after=2)
    for early in (
        store.run(reports.report_signals, one, (("second", None),), 1, 2),
        store.run(reports.end_call, one, WAITING, end),
    ):
        with pytest.raises(ConflictError, match="said before is not written yet"):
            await early
    assert await current(store, one) == one
    await store.run(reports.report_signals, one, (("first", None),), 0, 1)
    await store.run(reports.report_signals, one, (("second", None),), 1, 2)
    await store.run(reports.end_call, one, WAITING, end)
    names = [event.name for event in await whole_log(store) if isinstance(event, AgentSignalEvent)]
    assert names == ["first", "second"]
