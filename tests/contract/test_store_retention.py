"""What is removed after its time, and what stays."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest
from store_ground import (
    ALICE,
    DAY,
    HOME,
    audit_head,
    brought_to,
    count,
    current,
    entries,
    failed,
    finished,
    moved,
    new_wait,
    new_workspace,
    newest,
    readied,
    ready,
    reserved,
    restarted,
    verified,
    whole_log,
)

from ostler.errors import CursorGoneError, InvalidOperationError, NotFoundError
from ostler.model.attempt import AttemptOutcome, Request
from ostler.model.states import AgentState, Tier
from ostler.model.wait import WaitKind
from ostler.policy.retention import RetentionPolicy
from ostler.store import attempts, events, moves, queries, reports, retention, waits
from ostler.store.attempts import AttemptEnd
from ostler.store.idempotency import IdempotencyKey
from ostler.store.retention import Swept
from ostler.store.store import Store
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

NOTHING = Swept(removed=0, more=False)
DEFAULT = RetentionPolicy()


async def sweep(store: Store, policy: RetentionPolicy = DEFAULT) -> Swept:
    return await store.run(retention.sweep, policy)


async def sweeps(store: Store, number: int, policy: RetentionPolicy) -> list[tuple[int, bool]]:
    swept = [await sweep(store, policy) for _ in range(number)]
    return [(one.removed, one.more) for one in swept]


async def test_ended_instances_go_after_a_day_and_their_history_stays(store: Store, clock: ManualClock) -> None:
    ended = await brought_to(store, AgentState.TERMINATED, tags=("t",))
    over = await brought_to(store, AgentState.FAILED)
    alive = await ready(store, tags=("t",))
    before, log = await store.read(queries.statistics, HOME, clock.wall()), await whole_log(store)
    clock.advance(DAY - 1)
    assert await sweep(store) == NOTHING
    clock.advance(1)
    assert await sweep(store) == Swept(removed=2, more=False)
    for gone in (ended, over):
        assert await store.read(moves.get_instance, gone.instance_id) is None
        assert await store.read(attempts.list_attempts, gone.instance_id) == []
    assert await store.read(count("agent_instance_tags")) == 1
    assert await current(store, alive) == alive
    assert await whole_log(store) == log
    after = await store.read(queries.statistics, HOME, clock.wall())
    assert (after.total_spawned, after.total_terminated) == (before.total_spawned, before.total_terminated) == (3, 1)
    assert (after.by_state[AgentState.TERMINATED], after.by_state[AgentState.FAILED]) == (0, 0)
    assert (await entries(store))[-1].detail == "removed 2"
    assert await sweep(store) == NOTHING


async def test_a_sweep_is_bounded_and_says_whether_more_is_due(store: Store, clock: ManualClock) -> None:
    for _ in range(7):
        await brought_to(store, AgentState.FAILED)
    clock.advance(DAY)
    assert await sweeps(store, 4, RetentionPolicy(batch=3)) == [(3, True), (3, True), (1, False), (0, False)]


async def test_the_oldest_go_first(store: Store, clock: ManualClock) -> None:
    made = []
    for _ in range(3):
        made.append(await brought_to(store, AgentState.FAILED))
        clock.advance(1)
    clock.advance(DAY)
    await sweep(store, RetentionPolicy(batch=1))
    left = [await store.read(moves.get_instance, one.instance_id) is not None for one in made]
    assert left == [False, True, True]


async def test_an_instance_that_waits_for_its_restart_stays(store: Store, clock: ManualClock) -> None:
    one = await ready(store)
    wait = new_wait(one, kind=WaitKind.BACKOFF, created_at=clock.wall())
    over = await failed(store, one, backoff=wait)
    clock.advance(3 * DAY)
    assert await sweep(store) == NOTHING
    assert await current(store, over) == over
    await store.run(waits.end_wait, wait.wait_id, "given up")
    assert (await sweep(store)).removed == 1


async def test_a_restart_begins_the_day_anew(store: Store, clock: ManualClock) -> None:
    over = await brought_to(store, AgentState.FAILED)
    clock.advance(DAY - 1)
    back = await readied(store, await restarted(store, over))
    clock.advance(1)
    assert await sweep(store) == NOTHING
    await failed(store, back)
    clock.advance(DAY)
    assert (await sweep(store)).removed == 1


async def test_what_may_still_live_stays_however_old_and_does_not_hold_up_the_next(
    store: Store, clock: ManualClock
) -> None:
    one = await moved(store, await ready(store), AgentState.FAILED)  # nothing says that its attempt has ended
    clock.advance(1)
    await brought_to(store, AgentState.FAILED)
    clock.advance(2 * DAY)
    assert await sweeps(store, 3, RetentionPolicy(batch=1)) == [(1, True), (0, False), (0, False)]
    assert len(await store.read(attempts.open_attempts)) == 1
    await store.run(attempts.end_attempt, one.instance_id, 1, AttemptEnd(outcome=AttemptOutcome.LOST))
    assert (await sweep(store)).removed == 1


async def test_a_living_instance_stays_whatever_its_row_says_of_an_end(store: Store, clock: ManualClock) -> None:
    for state in set(AgentState) - {AgentState.FAILED, AgentState.TERMINATED}:
        await brought_to(store, state)
    clock.advance(29 * DAY)
    assert await sweep(store) == NOTHING


async def test_requests_go_with_their_instance(store: Store, clock: ManualClock) -> None:
    one = await ready(store)
    asked = Request(
        instance_id=one.instance_id,
        request_id="r",
        workspace_id=HOME,
        attempt=1,
        input_digest="d",
        begun_at=clock.wall(),
    )
    await store.run(reports.begin_call, one, None, asked)
    await finished(store, await moved(store, one, AgentState.TERMINATING))
    assert await store.read(count("requests", "state = 'lost'")) == 1
    clock.advance(DAY)
    await sweep(store)
    assert await store.read(count("requests")) == 0


async def test_an_ended_instance_can_be_removed_by_hand_and_its_history_stays(store: Store) -> None:
    one = await ready(store, "coder", tags=("t",))
    wait = new_wait(one, kind=WaitKind.BACKOFF)
    over = await failed(store, one, backoff=wait)
    log = await whole_log(store)
    await store.run(retention.remove_instance, over, by=ALICE)
    assert await store.read(moves.get_instance, one.instance_id) is None
    for table in ("attempts", "requests", "agent_instance_tags"):
        assert await store.read(count(table)) == 0
    assert await store.read(waits.all_open_waits) == []
    assert await whole_log(store) == log
    entry = (await entries(store))[-1]
    assert (entry.action, entry.actor, entry.detail) == ("remove", "alice", "coder")
    with pytest.raises(InvalidOperationError, match="is active or gone"):
        await store.run(retention.remove_instance, over, by=ALICE)


async def test_what_lives_or_may_still_live_is_not_removed_by_hand(store: Store) -> None:
    for state in set(AgentState) - {AgentState.FAILED, AgentState.TERMINATED}:
        one = await brought_to(store, state)
        with pytest.raises(InvalidOperationError, match="is active"):
            await store.run(retention.remove_instance, one, by=ALICE)
        assert await current(store, one) == one
    unknown = await moved(store, await ready(store), AgentState.FAILED)  # nothing says that its attempt has ended
    with pytest.raises(InvalidOperationError, match=r"attempt 1 of .* has not ended"):
        await store.run(retention.remove_instance, unknown, by=ALICE)
    assert (await entries(store))[-1].outcome == "InvalidOperationError"


# --- events ------------------------------------------------------------------------------------------


async def test_a_cursor_behind_retention_is_told_where_to_go_on(store: Store, clock: ManualClock) -> None:
    for _ in range(3):
        await ready(store)
    clock.advance(31 * DAY)
    await ready(store)
    assert await sweeps(store, 3, RetentionPolicy(batch=4)) == [(4, True), (2, False), (0, False)]
    assert await store.read(events.pruned_until) == 6
    for gone in (0, 5):
        with pytest.raises(CursorGoneError) as refused:
            await store.read(events.read_events, gone)
        assert (refused.value.cursor, refused.value.horizon) == (gone, 6)
    assert [event.sequence for event in await whole_log(store, 6)] == [7, 8]
    await ready(store)
    assert [event.sequence for event in await whole_log(store, 6)] == [7, 8, 9, 10]


async def test_an_instance_that_is_younger_than_what_went_is_read_from_its_beginning(
    store: Store, clock: ManualClock
) -> None:
    old = await ready(store)
    await ready(store)
    clock.advance(31 * DAY)
    await moved(store, old, AgentState.PROCESSING)
    clock.advance(1)
    young = await ready(store)
    assert (await sweep(store)).removed == 4
    page = await store.read(events.read_events, 0, instance_id=young.instance_id, limit=1)
    assert [event.sequence for event in page.events] == [6]
    rest = await store.read(events.read_events, page.cursor, instance_id=young.instance_id)
    assert [event.sequence for event in rest.events] == [7]
    for gone in (old.instance_id, UUID(int=1)):  # one has lost its first event, of the other nothing is known
        with pytest.raises(CursorGoneError):
            await store.read(events.read_events, 0, instance_id=gone)
    with pytest.raises(CursorGoneError):
        await store.read(events.read_events, 0, workspace_id=HOME)


async def test_an_instance_whose_first_event_is_the_oldest_that_is_kept_is_read_from_its_beginning(
    store: Store, clock: ManualClock
) -> None:
    old = await ready(store)
    clock.advance(31 * DAY)
    young = await reserved(store)
    clock.advance(1)
    await readied(store, young)
    assert (await sweep(store)).removed == 2
    page = await store.read(events.read_events, 0, instance_id=young.instance_id)
    assert [event.sequence for event in page.events] == [3, 4]
    with pytest.raises(CursorGoneError):
        await store.read(events.read_events, 0, instance_id=old.instance_id)


async def test_a_reader_that_is_up_to_date_in_a_quiet_workspace_misses_nothing(
    store: Store, clock: ManualClock
) -> None:
    quiet = await new_workspace(store, Tier.TEAMS)
    await ready(store, workspace_id=quiet)
    for _ in range(4):
        await ready(store)
    cursor = (await store.read(events.read_events, 0, workspace_id=quiet)).cursor
    clock.advance(31 * DAY)
    assert (await sweep(store)).removed == 10
    assert await whole_log(store, cursor, workspace_id=quiet) == []
    later = await ready(store, workspace_id=quiet)
    told = await whole_log(store, cursor, workspace_id=quiet)
    assert {event.instance_id for event in told} == {later.instance_id}  # type: ignore[attr-defined]  # all of them are of an agent


async def test_an_event_that_is_young_is_not_removed_with_an_older_one_that_follows_it(
    store: Store, clock: ManualClock
) -> None:
    clock.jump(timedelta(days=60))
    await ready(store)
    clock.jump(timedelta(days=-60))  # the clock was wrong, and was set right
    await ready(store)
    clock.advance(31 * DAY)
    assert await sweep(store) == NOTHING
    assert len(await whole_log(store)) == 4


# --- waits, keys, audit ------------------------------------------------------------------------------


async def test_ended_waits_go_after_a_day_and_open_ones_stay(store: Store, clock: ManualClock) -> None:
    made = [await store.run(waits.open_wait, new_wait(created_at=clock.wall())) for _ in range(6)]
    for wait in made[:5]:
        await store.run(waits.end_wait, wait.wait_id, "done")
    clock.advance(DAY - 1)
    assert await sweep(store) == NOTHING
    clock.advance(1)
    assert await sweeps(store, 3, RetentionPolicy(batch=3)) == [(3, True), (2, False), (0, False)]
    assert await store.read(waits.all_open_waits) == [made[5]]
    with pytest.raises(NotFoundError):
        await store.run(waits.end_wait, made[0].wait_id, "again")


async def test_answers_to_old_keys_go_unaudited_and_young_ones_stay(store: Store, clock: ManualClock) -> None:
    space = await new_workspace(store, Tier.TEAMS)
    keys = [(HOME, IdempotencyKey.of(f"k{number}", "body")) for number in range(4)]
    keys.append((space, IdempotencyKey.of("k0", "body")))
    first = [(await reserved(store, workspace_id=where, key=key)).instance_id for where, key in keys]
    clock.advance(DAY - 1)
    young = await reserved(store, key=IdempotencyKey.of("young", "body"))
    assert await sweep(store) == NOTHING
    clock.advance(1)
    before = await audit_head(store)
    assert await sweeps(store, 3, RetentionPolicy(batch=3)) == [(3, True), (2, False), (0, False)]
    assert await audit_head(store) == before
    assert (await reserved(store, key=IdempotencyKey.of("young", "body"))).instance_id == young.instance_id
    again = [(await reserved(store, workspace_id=where, key=key)).instance_id for where, key in keys]
    assert not set(again) & set(first)


async def test_a_pruned_audit_still_verifies_also_against_a_kept_head(store: Store, clock: ManualClock) -> None:
    for _ in range(5):
        await reserved(store)
    kept = await audit_head(store)
    clock.advance(2 * DAY)
    await reserved(store)
    policy = RetentionPolicy(audit=timedelta(days=1), batch=2, events=timedelta(days=100))
    assert await sweeps(store, 4, policy) == [(2, True), (2, True), (1, False), (0, False)]
    left = await entries(store)
    assert (left[0].number, left[-1].number) == (6, 9)
    report = await verified(store)
    assert (report.faults, report.entries) == ((), 4)
    assert (await verified(store, kept=kept)).is_sound
    rewritten = await verified(store, kept=kept.evolve(hash="f" * 64))
    assert rewritten.faults == ("entry 5 is not the one whose hash was kept outside: the chain was rewritten",)
    older = await verified(store, kept=kept.evolve(number=4))
    assert older.faults == ("kept head 4 is older than what is kept, so it cannot be checked",)
    assert await sweep(store) == NOTHING, "by default the audit is kept for ever"


async def test_an_audit_that_is_pruned_again_and_again_verifies(store: Store, clock: ManualClock) -> None:
    policy = RetentionPolicy(audit=timedelta(days=1))
    for _ in range(4):
        await reserved(store)
        clock.advance(DAY)
        assert (await sweep(store, policy)).removed >= 1
        assert (await verified(store)).is_sound
    assert await newest(store) == 0
