"""What happened: the numbered log with its cursors, its subscribers, and the chained audit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
from store_ground import (
    ALICE,
    HOME,
    Place,
    audit_head,
    brought_to,
    do_nothing,
    entries,
    moved,
    new_workspace,
    newest,
    ready,
    reserved,
    verified,
    whole_log,
)
from store_invariants import all_instances, fold

from ostler.errors import OstlerError, StoreError, ValidationError
from ostler.failpoints import Seams
from ostler.model.access import Actor
from ostler.model.audit import AuditHead
from ostler.model.events import Event
from ostler.model.states import AgentState, Tier
from ostler.store import attempts, audit, events, reports, waits
from ostler.store.events import EventPage
from ostler.store.store import Store
from ostler.store.transaction import PAGE, Act, Transaction

pytestmark = pytest.mark.anyio

DURABLE = pytest.mark.parametrize("place", ["sqlite", "postgres"], indirect=True)


async def until(condition: Callable[[], bool]) -> None:
    """Subscribers are called on another thread; the time limit of the test bounds the wait."""
    while not condition():  # noqa: ASYNC110 - the thread of the writer sets no event of ours
        await asyncio.sleep(0.001)


# --- the log -----------------------------------------------------------------------------------------


async def test_the_log_has_no_gap_and_can_be_read_on_from_any_number(store: Store) -> None:
    await asyncio.gather(*(brought_to(store, state) for state in AgentState))
    log = await whole_log(store)
    assert fold(log)[1] == []
    assert log[-1].sequence == await newest(store) == len(log) == store.newest
    for cursor in range(len(log) + 1):
        page = await store.read(events.read_events, cursor)
        assert list(page.events) == log[cursor:]
        few = await store.read(events.read_events, cursor, limit=3)
        assert list(few.events) == log[cursor : cursor + 3]


async def test_a_cursor_at_the_end_reads_what_comes_later(store: Store) -> None:
    await ready(store)
    end = await newest(store)
    assert await store.read(events.read_events, end) == EventPage((), end)
    later = await ready(store)
    assert [event.instance_id for event in await whole_log(store, end)] == [later.instance_id] * 2  # type: ignore[attr-defined]  # all of them are of an agent


async def test_a_cursor_that_no_event_of_this_store_can_have_is_refused(store: Store) -> None:
    await ready(store)
    with pytest.raises(
        ValidationError, match="after must be 0 to 2, the newest event; a larger number is of another store, was 99"
    ):
        await store.read(events.read_events, 99)
    with pytest.raises(ValidationError, match="after"):
        await store.read(events.read_events, -1)


async def test_the_cursor_of_a_page_covers_all_that_was_looked_at(store: Store) -> None:
    other = await new_workspace(store, Tier.TEAMS)
    quiet = await ready(store, workspace_id=other)
    for _ in range(2):
        await ready(store)
    end = await newest(store)
    assert end == 6
    assert (await store.read(events.read_events, 0, limit=2)).cursor == 2
    assert (await store.read(events.read_events, 0, limit=6)).cursor == 6
    both: list[dict[str, Any]] = [{"workspace_id": other}, {"instance_id": quiet.instance_id}]
    for wanted in both:
        page = await store.read(events.read_events, 0, **wanted)
        assert ([event.sequence for event in page.events], page.cursor) == ([1, 2], 6)
        assert (await store.read(events.read_events, 0, limit=1, **wanted)).cursor == 1


async def test_the_log_can_be_read_for_one_workspace_or_one_instance(store: Store) -> None:
    other = await new_workspace(store, Tier.TEAMS)
    mine = await brought_to(store, AgentState.WAITING)
    theirs = await ready(store, workspace_id=other)
    log = await whole_log(store)
    at_home = await whole_log(store, workspace_id=HOME)
    assert at_home == [event for event in log if event.workspace_id == HOME]
    assert await whole_log(store, instance_id=theirs.instance_id) == log[-2:]
    assert await whole_log(store, at_home[1].sequence, workspace_id=HOME) == at_home[2:]
    assert await whole_log(store, instance_id=mine.instance_id) == at_home
    newest_two = await store.read(events.last_events, 2, workspace_id=HOME)
    assert newest_two == at_home[-2:]
    assert await store.read(events.last_events, 9, workspace_id=HOME, instance_id=theirs.instance_id) == log[-2:]


async def test_a_long_log_is_read_in_bounded_pages(store: Store) -> None:
    one = await ready(store)
    await store.run(reports.report_signals, one, tuple((f"n{number}", None) for number in range(1100)), 0, 0)
    assert len((await store.read(events.read_events, 0, limit=5000)).events) == PAGE
    assert [event.sequence for event in await whole_log(store)] == list(range(1, 1103))


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_page_without_room_is_refused_everywhere(store: Store, limit: int) -> None:
    one = await ready(store)
    with pytest.raises(ValidationError, match="limit must be at least 1"):
        await store.read(events.read_events, 0, limit=limit)
    with pytest.raises(ValidationError, match="limit must be at least 1"):
        await store.read(events.last_events, limit, workspace_id=HOME)
    with pytest.raises(ValidationError, match="limit must be at least 1"):
        await store.read(audit.list_entries, HOME, limit=limit)
    with pytest.raises(ValidationError, match="limit must be at least 1"):
        await store.read(audit.last_entries, HOME, limit)
    with pytest.raises(ValidationError, match="limit must be at least 1"):
        await store.read(attempts.list_attempts, one.instance_id, limit=limit)
    with pytest.raises(ValidationError, match="limit must be at least 1"):
        await store.read(waits.open_waits, HOME, limit=limit)


@DURABLE
async def test_reopening_shows_everything(store: Store, place: Place, seams: Seams) -> None:
    for state in AgentState:
        await brought_to(store, state, str(state), tags=("t",), context={"a": {"b": 1}})
    before = (
        await store.read(all_instances, HOME),
        await whole_log(store),
        await entries(store),
        await audit_head(store),
    )
    await store.close()
    async with place.store(seams) as again:
        assert before == (
            await again.read(all_instances, HOME),
            await whole_log(again),
            await entries(again),
            await audit_head(again),
        )


# --- subscribers -------------------------------------------------------------------------------------


async def test_a_subscriber_gets_the_committed_events_once_in_order(store: Store) -> None:
    heard: list[Event] = []
    batches: list[int] = []

    def listen(told: Sequence[Event]) -> None:
        heard.extend(told)
        batches.append(len(told))

    end = store.subscribe(listen)
    one = await ready(store)
    await until(lambda: len(heard) == 2)
    assert batches == [2], "the events of one commit come together"
    await moved(store, one, AgentState.PROCESSING)
    await asyncio.gather(*(ready(store) for _ in range(20)))
    await until(lambda: len(heard) == 43)
    assert heard == await whole_log(store)
    end()
    end()
    await ready(store)
    await store.run(do_nothing)  # the subscribers of the commit before have been called by now
    other: list[Event] = []
    store.subscribe(other.extend)
    await ready(store)
    await until(lambda: len(other) == 2)
    assert len(heard) == 43


async def test_a_commit_without_events_is_not_published(store: Store) -> None:
    heard: list[int] = []
    store.subscribe(lambda told: heard.append(len(told)))
    await store.run(audit.record_act, Act(HOME, ALICE, "look", "door"))
    with pytest.raises(OstlerError):
        await moved(store, await reserved(store), AgentState.WAITING)
    await ready(store)
    await until(lambda: bool(heard))
    assert heard == [2]


@DURABLE
async def test_what_a_subscriber_is_given_is_durable(store: Store, place: Place, seams: Seams) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    async with place.store(seams) as other:

        def listen(_: Sequence[Event]) -> None:
            loop.call_soon_threadsafe(told.set)

        store.subscribe(listen)
        making = asyncio.ensure_future(ready(store))
        await told.wait()
        assert await newest(other) == 2
        await making


async def test_a_subscriber_that_fails_harms_no_other_and_no_commit(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(error: BaseException) -> Callable[[Sequence[Event]], None]:
        def listen(_: Sequence[Event]) -> None:
            raise error

        return listen

    heard: list[Event] = []
    for one in (ZeroDivisionError(), asyncio.CancelledError(), SystemExit()):
        store.subscribe(failing(one))
    store.subscribe(heard.extend)
    with caplog.at_level(logging.ERROR):
        await ready(store)
        await ready(store)
        await until(lambda: len(heard) == 4)
    assert sum("a subscriber of the store failed" in record.getMessage() for record in caplog.records) >= 3
    await ready(store)


# --- the audit ---------------------------------------------------------------------------------------


async def test_each_workspace_has_a_sound_chain_of_its_own(store: Store) -> None:
    other = await new_workspace(store, Tier.CORE)
    start = {space: (await audit_head(store, space)).number for space in (HOME, other)}
    await brought_to(store, AgentState.TERMINATED)
    await reserved(store, workspace_id=other)
    refusal = Act(HOME, ALICE, "look", "door", "AuthorizationError", "no \0 key")
    await store.run(audit.record_act, refusal)
    for space, added in ((HOME, 3), (other, 1)):
        report = await verified(store, space)
        assert report.is_sound, report.faults
        report.require()
        assert report.head.number == start[space] + added == report.entries
        kept = await entries(store, space)
        assert [entry.number for entry in kept] == list(range(1, report.entries + 1))
        assert {entry.workspace_id for entry in kept} == {space}
        assert kept[-1].hash == report.head.hash
        assert await store.read(audit.last_entries, space, 2) == kept[-2:]
    last = (await entries(store))[-1]
    assert (last.action, last.outcome, last.detail) == ("look", "AuthorizationError", "no \ufffd key")


async def test_every_chain_is_listed_by_id(store: Store) -> None:
    spaces = [HOME, *[await new_workspace(store, Tier.CORE, number) for number in (5, 2)]]
    assert await store.read(audit.list_chains) == sorted(spaces)


async def test_a_workspace_that_is_not_there_has_no_sound_chain(store: Store) -> None:
    report = await verified(store, UUID(int=99))
    assert report.faults == ("there is no row of this workspace: it was removed, or its id is wrong",)


async def test_a_head_kept_outside_proves_that_the_chain_only_grew(store: Store) -> None:
    await ready(store)
    kept = await audit_head(store)
    await ready(store)
    assert (await verified(store, kept=kept)).is_sound
    rewritten = await verified(store, kept=kept.evolve(hash="f" * 64))
    assert rewritten.faults == (
        f"entry {kept.number} is not the one whose hash was kept outside: the chain was rewritten",
    )
    longer = AuditHead(workspace_id=HOME, number=1000, hash=kept.hash)
    assert "1000" in (await verified(store, kept=longer)).faults[0]


async def test_the_audit_names_the_actor_and_is_read_from_a_number(store: Store) -> None:
    await reserved(store, by=Actor(name="bob", correlation_id="c-9"))
    kept = await entries(store)
    assert (kept[-1].actor, kept[-1].correlation_id) == ("bob", "c-9")
    assert await entries(store, after=kept[-1].number) == []
    assert await entries(store, UUID(int=77)) == []


async def test_a_long_chain_is_verified_over_many_pages(store: Store) -> None:
    def many(tx: Transaction) -> None:
        for number in range(2300):
            tx.audit(HOME, ALICE, "act", f"subject {number}")

    await store.run(many)
    report = await verified(store)
    assert (report.faults, report.entries) == ((), 2300)


async def test_acts_of_foreign_text_are_kept_and_harm_no_other_command(store: Store) -> None:
    by = Actor(name="mal\0lory\ud800", correlation_id="c\0\ud800")
    bad = Act(HOME, by, "act\0\ud800", "subject\0\ud800", "out\0\ud800", "detail\0" * 1000)
    answers = await asyncio.gather(
        store.submit(do_nothing),
        store.submit(audit.record_act, bad),
        store.submit(_emit_by, by, await ready(store)),
        ready(store),
        return_exceptions=True,
    )
    assert not [answer for answer in answers if isinstance(answer, BaseException)]
    entry = next(entry for entry in await entries(store) if entry.action.startswith("act"))
    assert (entry.actor, entry.subject, entry.correlation_id) == ("mal\ufffdlory?", "subject\ufffd?", "c\ufffd?")
    assert entry.detail is not None
    assert entry.detail.endswith("more characters)")
    assert (await verified(store)).is_sound
    assert "c\ufffd?" in {event.correlation_id for event in await whole_log(store)}


def _emit_by(tx: Transaction, by: Actor, one: object) -> None:
    tx.emit(reports.AgentProgressEvent(workspace_id=HOME, instance_id=one.instance_id, message="x"), by)  # type: ignore[attr-defined]  # an instance


async def test_a_refusal_is_audited_only_where_it_is_worth_knowing(store: Store) -> None:
    def refused(tx: Transaction, error: Exception) -> None:
        tx.audit(HOME, ALICE, "half", "done")
        tx.audit_refusal(HOME, ALICE, "try", "door")
        raise error

    before = await audit_head(store)
    for plain in (ZeroDivisionError(), StoreError("busy")):
        with pytest.raises(type(plain)):
            await store.run(refused, plain)
    assert await audit_head(store) == before
    with pytest.raises(ValidationError) as told:
        await store.run(refused, ValidationError([]))
    assert told.value.audited
    (entry,) = await entries(store, after=before.number)
    assert (entry.action, entry.outcome) == ("try", "ValidationError")
    with pytest.raises(ValidationError):
        await store.run(_refuse_in, UUID(int=404))


def _refuse_in(tx: Transaction, space: UUID) -> None:
    """There is no chain in an unknown workspace to write the refusal into."""
    tx.audit_refusal(space, ALICE, "try", "door")
    raise ValidationError([])
