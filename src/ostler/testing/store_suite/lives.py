"""One life in the store: the reservation, every move, restarts, health, attempts."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import AgentNotFoundError, InvalidOperationError, StaleWriterError, VersionConflictError
from ostler.model import (
    AGENT_TRANSITIONS,
    FREEZE_TRANSITIONS,
    AgentErrorEvent,
    AgentHealthChangedEvent,
    AgentHealthStatus,
    AgentMetrics,
    AgentSpawnedEvent,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    Attempt,
    AttemptOutcome,
    Enforcement,
    HealthState,
)
from ostler.store import AgentError, Store
from ostler.store.commands import Command, EndAttempt, MoveInstance, RecordIdentity, ReportHealth, ReportMetrics
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import (
    ALICE,
    DEFINITION,
    HOME,
    StoreGround,
    brought_to,
    current,
    moved,
    reserved,
    restarted,
    whole_log,
)

PAIRS = [(one, other) for one in AgentState for other in AgentState]
LEGAL = [(one, other) for one, other in PAIRS if other in AGENT_TRANSITIONS[one]]
#: Coming back from failed is a restart, not a move.
MOVES = [(one, other) for one, other in LEGAL if other is not AgentState.INITIALIZING]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]


class LivesContract(StoreGround):
    async def test_a_reservation_writes_record_attempt_event_audit_and_quota_in_one_commit(self, store: Store) -> None:
        before = await store.head()
        made = await reserved(store, "Scout", tags=("Blue", "fast"), context={"Key": [1, None]}, by=ALICE)
        after = await store.head()
        assert (after.commit_number, after.sequence) == (before.commit_number + 1, before.sequence + 1)
        assert await store.get_instance(made.instance_id) == made
        assert (made.state, made.version, made.attempt) == (AgentState.INITIALIZING, 1, 1)
        assert (made.tags, made.owner_id, made.context) == (("blue", "fast"), ALICE.principal_id, {"Key": [1, None]})
        attempts = await store.list_attempts(made.instance_id)
        assert [(one.number, one.identity, one.is_open) for one in attempts] == [(1, None, True)]
        (event,) = await whole_log(store, before.sequence)
        assert isinstance(event, AgentSpawnedEvent)
        assert (event.instance_id, event.definition_id, event.name) == (made.instance_id, DEFINITION, "Scout")
        assert (event.user_id, event.correlation_id) == (ALICE.principal_id, "c-1")
        entry = (await store.read_audit())[-1]
        assert (entry.actor, entry.action, entry.sequence) == ("alice", "spawn", event.sequence)
        assert entry.subject == f"instance:{made.instance_id}"
        assert (await store.statistics()).active_instances == 1

    @pytest.mark.parametrize(("start", "to"), MOVES)
    async def test_a_legal_move_changes_the_record_and_tells_of_it(
        self, store: Store, start: AgentState, to: AgentState
    ) -> None:
        old = await brought_to(store, start)
        before = await store.head()
        new = await moved(store, old, to, reason="so it goes", by=ALICE)
        assert (new.state, new.version) == (to, old.version + 1)
        assert await current(store, old.instance_id) == new
        told = await whole_log(store, before.sequence)
        assert isinstance(told[0], AgentStateChangedEvent)
        assert (told[0].previous_state, told[0].new_state, told[0].reason) == (start, to, "so it goes")
        assert len(told) == 1 + (to is AgentState.TERMINATED)
        assert (await store.read_audit())[-1].detail == f"{start} to {to}"
        assert (new.terminated_at is not None) == (not new.is_active)

    @pytest.mark.parametrize(("start", "to"), ILLEGAL)
    async def test_an_illegal_move_is_refused_by_name_and_leaves_only_an_audit_entry(
        self, store: Store, start: AgentState, to: AgentState
    ) -> None:
        old = await brought_to(store, start)
        before, audit = await store.head(), (await store.audit_head()).number
        with pytest.raises(InvalidOperationError) as refused:
            await moved(store, old, to)
        assert (refused.value.current, refused.value.wanted) == (start, to)
        assert start.value in str(refused.value)
        assert to.value in str(refused.value)
        assert await current(store, old.instance_id) == old
        assert (await store.head()).sequence == before.sequence
        (entry,) = await store.read_audit(after=audit)
        assert (entry.action, entry.outcome) == ("move", "InvalidOperationError")

    @pytest.mark.parametrize(("start", "to"), sorted(FREEZE_TRANSITIONS))
    async def test_two_moves_are_open_to_freezing_and_thawing_alone(
        self, store: Store, start: AgentState, to: AgentState
    ) -> None:
        old = await brought_to(store, start)
        with pytest.raises(InvalidOperationError):
            await moved(store, old, to)
        assert (await moved(store, old, to, freezing=True)).state is to

    async def test_freezing_opens_no_other_door(self, store: Store) -> None:
        for start, to in ILLEGAL:
            if (start, to) not in FREEZE_TRANSITIONS:
                old = await brought_to(store, start)
                with pytest.raises(InvalidOperationError):
                    await moved(store, old, to, freezing=True)

    async def test_a_failed_one_comes_back_only_by_a_restart(self, store: Store) -> None:
        failed = await brought_to(store, AgentState.FAILED)
        with pytest.raises(InvalidOperationError, match="restart"):
            await moved(store, failed, AgentState.INITIALIZING)
        back = await restarted(store, failed)
        assert (back.state, back.attempt, back.restart_count) == (AgentState.INITIALIZING, 2, 1)
        assert back.terminated_at is None
        assert [one.number for one in await store.list_attempts(back.instance_id)] == [1, 2]
        with pytest.raises(InvalidOperationError):
            await restarted(store, back)

    async def test_a_failed_one_that_is_terminated_later_ended_when_it_failed(
        self, store: Store, clock: ManualClock
    ) -> None:
        failed = await brought_to(store, AgentState.FAILED)
        clock.advance(60)
        over = await moved(store, failed, AgentState.TERMINATED)
        assert (over.terminated_at, over.updated_at) == (failed.terminated_at, clock.wall())

    async def test_an_error_stays_on_the_record_and_in_the_log_with_its_bad_characters_replaced(
        self, store: Store, clock: ManualClock
    ) -> None:
        alive = await brought_to(store, AgentState.READY)
        clock.advance(5)
        error = AgentError(message="out\0 of \ud800 luck", exception_type="E\0", stack_trace="a\0b")
        failed = await moved(store, alive, AgentState.FAILED, error=error, reason="\ud800")
        assert failed.error_message == "out\ufffd of ? luck"
        assert failed.failing_since == failed.terminated_at == clock.wall()
        error_event = (await whole_log(store))[-2]
        assert isinstance(error_event, AgentErrorEvent)
        assert (error_event.error_message, error_event.version) == (failed.error_message, failed.version)
        assert (await restarted(store, failed)).error_message is None

    async def test_the_last_event_of_a_life_tells_how_long_it_was(self, store: Store, clock: ManualClock) -> None:
        alive = await brought_to(store, AgentState.TERMINATING)
        clock.advance(90)
        await moved(store, alive, AgentState.TERMINATED, was_graceful=True)
        last = (await whole_log(store))[-1]
        assert isinstance(last, AgentTerminatedEvent)
        assert (last.uptime, last.was_graceful) == (timedelta(seconds=90), True)

    async def test_a_writer_that_read_an_older_version_is_refused(self, store: Store) -> None:
        old = await reserved(store)
        await moved(store, old, AgentState.READY, expected_version=1)
        before = await store.head()
        with pytest.raises(VersionConflictError, match="version 2, not 1"):
            await moved(store, old, AgentState.PROCESSING, expected_version=1)
        assert await store.head() == before

    async def test_an_earlier_attempt_may_not_speak_any_more(self, store: Store) -> None:
        failed = await brought_to(store, AgentState.FAILED)
        back = await restarted(store, failed)
        stale: list[Command[Any]] = [
            MoveInstance(instance_id=back.instance_id, to=AgentState.READY, attempt=1),
            ReportHealth(instance_id=back.instance_id, health=AgentHealthStatus(), attempt=1),
            ReportMetrics(instance_id=back.instance_id, metrics=AgentMetrics(sampled_at=back.created_at), attempt=1),
            RecordIdentity(instance_id=back.instance_id, attempt=1, identity={"pid": 1}),
        ]
        for command in stale:
            with pytest.raises(StaleWriterError, match="attempt 2"):
                await store.commit(command)
        assert await current(store, back.instance_id) == back
        assert (await moved(store, back, AgentState.READY, attempt=2)).state is AgentState.READY

    async def test_becoming_healthy_ends_a_series_of_restarts_but_not_the_count_of_a_life(self, store: Store) -> None:
        back = await restarted(store, await brought_to(store, AgentState.FAILED))
        ready = await moved(store, back, AgentState.READY)
        health = AgentHealthStatus(state=HealthState.HEALTHY, consecutive_successes=2)
        well = await store.commit(ReportHealth(instance_id=ready.instance_id, health=health))
        assert (well.restart_count, well.lifetime_restarts, well.failing_since) == (0, 1, None)
        last = (await whole_log(store))[-1]
        assert isinstance(last, AgentHealthChangedEvent)
        assert (last.previous_health, last.new_health) == (HealthState.UNKNOWN, HealthState.HEALTHY)

    async def test_a_probe_that_finds_the_same_again_writes_no_event(self, store: Store) -> None:
        ready = await brought_to(store, AgentState.READY)
        health = AgentHealthStatus(state=HealthState.DEGRADED, consecutive_failures=1)
        await store.commit(ReportHealth(instance_id=ready.instance_id, health=health))
        before = await store.head()
        await store.commit(ReportHealth(instance_id=ready.instance_id, health=health))
        assert await store.head() == before
        again = health.evolve(consecutive_failures=2, details="\0 still \ud800 so")
        assert (await store.commit(ReportHealth(instance_id=ready.instance_id, health=again))).health.state
        assert (await store.head()).sequence == before.sequence
        assert (await current(store, ready.instance_id)).health.consecutive_failures == 2

    async def test_the_health_of_what_has_ended_is_of_no_account(self, store: Store) -> None:
        failed = await brought_to(store, AgentState.FAILED)
        with pytest.raises(InvalidOperationError):
            await store.commit(ReportHealth(instance_id=failed.instance_id, health=AgentHealthStatus()))

    async def test_metrics_and_enforcement_come_back_as_they_went(self, store: Store, clock: ManualClock) -> None:
        held = {"max_memory_mb": Enforcement.ENFORCED, "max_cpu_percent": Enforcement.ADVISORY}
        ready = await moved(store, await reserved(store), AgentState.READY, enforcement=held)
        metrics = AgentMetrics(sampled_at=clock.wall(), cpu_percent=12.5, memory_bytes=2**40, tokens_used=7)
        await store.commit(ReportMetrics(instance_id=ready.instance_id, metrics=metrics))
        found = await current(store, ready.instance_id)
        assert (found.metrics, found.enforcement) == (metrics, held)

    async def test_an_attempt_gets_its_identity_and_ends_once(self, store: Store, clock: ManualClock) -> None:
        made = await reserved(store)
        identity = {"pid": 4242, "boot": "b-1", "start": 1.5}
        await store.commit(RecordIdentity(instance_id=made.instance_id, attempt=1, identity=identity))
        (opened,) = await store.open_attempts()
        assert (opened.identity, opened.started_at) == (identity, clock.wall())
        end = EndAttempt(instance_id=made.instance_id, attempt=1, outcome=AttemptOutcome.SIGNAL, detail="KILL\0")
        first = await store.commit(end)
        clock.advance(1)
        again = EndAttempt(instance_id=made.instance_id, attempt=1, outcome=AttemptOutcome.CLEAN)
        assert await store.commit(again) == first
        assert await store.list_attempts(made.instance_id) == [first]
        assert (first.outcome, first.detail) == (AttemptOutcome.SIGNAL, "KILL\ufffd")
        assert await store.open_attempts() == []
        with pytest.raises(InvalidOperationError, match="ended already"):
            await store.commit(RecordIdentity(instance_id=made.instance_id, attempt=1))
        with pytest.raises(InvalidOperationError, match="never had"):
            await store.commit(EndAttempt(instance_id=made.instance_id, attempt=9, outcome=AttemptOutcome.LOST))

    async def test_attempts_can_be_read_on_from_the_last_one(self, store: Store) -> None:
        lives = [await reserved(store) for _ in range(5)]
        back = lives[2]
        for _ in range(3):
            await moved(store, back, AgentState.FAILED)
            back = await restarted(store, back)
        numbers: list[int] = []
        while page := await store.list_attempts(back.instance_id, limit=3, after=numbers[-1] if numbers else 0):
            numbers += [one.number for one in page]
        assert numbers == [1, 2, 3, 4]
        seen: list[Attempt] = []
        while more := await store.open_attempts(limit=2, after=seen[-1] if seen else None):
            seen += more
        keys = [(one.instance_id, one.number) for one in seen]
        assert keys == sorted(keys)
        assert {key[0] for key in keys} == {one.instance_id for one in lives}
        assert len(set(keys)) == len(keys) == len(await store.open_attempts())

    async def test_what_is_not_there_is_said_to_be_not_there(self, store: Store) -> None:
        nobody = UUID(int=7)
        assert await store.get_instance(nobody) is None
        with pytest.raises(AgentNotFoundError, match=str(nobody)):
            await store.commit(MoveInstance(instance_id=nobody, to=AgentState.READY))
        assert (await store.statistics(HOME)).total_spawned == 0
