"""What happened: the numbered log with its cursors, and the chained audit."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from ostler.errors import ValidationError
from ostler.model import AgentState, AuditHead, Tier
from ostler.store import Actor, EventPage, Seams, Store
from ostler.store.commands import CreateTask, RecordAudit
from ostler.testing.folding import sequence_faults
from ostler.testing.store_suite.ground import (
    HOME,
    OpenStore,
    StoreGround,
    brought_to,
    new_workspace,
    reserved,
    whole_log,
)


class HistoryContract(StoreGround):
    async def test_the_log_has_no_gap_and_can_be_read_on_from_anywhere(self, store: Store) -> None:
        await asyncio.gather(*(brought_to(store, state) for state in AgentState))
        await store.commit(CreateTask(task="dig"))
        log = await whole_log(store)
        assert sequence_faults(log) == []
        assert log[-1].sequence == (await store.head()).sequence == len(log)
        assert len({event.event_id for event in log}) == len(log)
        for cursor in range(len(log) + 1):
            assert await store.read_events(cursor) == log[cursor:]
            assert await store.read_events(cursor, limit=3) == log[cursor : cursor + 3]

    async def test_a_cursor_beyond_the_end_waits_for_what_comes(self, store: Store) -> None:
        await reserved(store)
        assert await store.read_events(1) == []
        later = await reserved(store)
        assert [getattr(event, "instance_id", None) for event in await store.read_events(1)] == [later.instance_id]

    async def test_a_cursor_that_no_event_of_this_store_can_have_is_refused(self, store: Store) -> None:
        await reserved(store)
        with pytest.raises(ValidationError, match="cursor 99 lies beyond the newest event 1; it belongs to another"):
            await store.read_events(99)
        for impossible in (-1, 2**63, 2**70):
            with pytest.raises(ValidationError, match="after must be"):
                await store.read_events(impossible)

    async def test_a_page_tells_how_far_it_looked(self, store: Store) -> None:
        other = await new_workspace(store, Tier.TEAMS)
        quiet = await reserved(store, workspace_id=other)
        for _ in range(4):
            await reserved(store)
        assert (await store.read_page(0, limit=2)).cursor == 2
        assert (await store.read_page(0, limit=5)).cursor == 5
        assert (await store.read_page(5)).cursor == 5
        for space, one in ((other, None), (None, quiet.instance_id)):
            page = await store.read_page(0, workspace_id=space, instance_id=one)
            assert ([event.sequence for event in page.events], page.cursor) == ([1], 5)
            assert (await store.read_page(0, limit=1, workspace_id=space, instance_id=one)).cursor == 1
        assert await store.read_page(instance_id=quiet.instance_id, workspace_id=HOME) == EventPage(events=(), cursor=5)

    async def test_the_log_can_be_played_for_one_workspace_or_one_instance(self, store: Store) -> None:
        other = await new_workspace(store, Tier.TEAMS)
        mine = await brought_to(store, AgentState.WAITING)
        theirs = await brought_to(store, AgentState.READY, workspace_id=other)
        log = await whole_log(store)
        in_home = [event async for event in store.replay(workspace_id=HOME)]
        assert in_home == [event for event in log if event.workspace_id == HOME]
        of_theirs = [event async for event in store.replay(instance_id=theirs.instance_id)]
        assert of_theirs == [event for event in log if getattr(event, "instance_id", None) == theirs.instance_id]
        assert len(of_theirs) == 2
        assert await store.read_events(in_home[1].sequence, workspace_id=HOME) == in_home[2:]
        assert await store.read_events(instance_id=mine.instance_id, workspace_id=other) == []
        assert await store.read_events(instance_id=mine.instance_id, workspace_id=HOME) == in_home

    async def test_a_long_log_is_played_page_by_page(self, store: Store) -> None:
        await asyncio.gather(*(reserved(store) for _ in range(1100)))
        cursor, count = 0, 0
        async for event in store.replay():
            assert event.sequence == cursor + 1
            cursor, count = event.sequence, count + 1
        assert count == 1100
        assert len(await store.read_events(limit=5000)) == 1000

    @pytest.mark.parametrize("limit", [0, -1])
    async def test_a_page_without_room_is_refused_everywhere(self, store: Store, limit: int) -> None:
        await reserved(store)
        with pytest.raises(ValidationError, match="limit"):
            await store.read_events(limit=limit)
        with pytest.raises(ValidationError, match="limit"):
            await store.read_audit(limit=limit)
        with pytest.raises(ValidationError, match="limit"):
            await store.open_attempts(limit=limit)
        with pytest.raises(ValidationError, match="limit"):
            await store.open_waits(limit=limit)

    async def test_the_audit_is_a_sound_chain_for_each_workspace(self, store: Store) -> None:
        other = await new_workspace(store, Tier.CORE)
        start = {space: (await store.audit_head(space)).number for space in (HOME, other)}
        await brought_to(store, AgentState.TERMINATED)
        await reserved(store, workspace_id=other)
        await store.commit(RecordAudit(what="look", about="door", outcome="AuthorizationError", detail="no \0 key"))
        for space, added in ((HOME, 5), (other, 1)):
            report = await store.verify_audit(space)
            assert report.is_sound, report.faults
            assert report.head.number == start[space] + added == report.entries
            entries = await store.read_audit(space)
            assert [entry.number for entry in entries] == list(range(1, report.entries + 1))
            assert {entry.workspace_id for entry in entries} == {space}
            assert entries[-1].hash == report.head.hash
        assert (await store.read_audit())[-1].detail == "no \ufffd key"

    async def test_every_chain_is_listed_by_id_a_page_at_a_time(self, store: Store) -> None:
        spaces = sorted([HOME, *[await new_workspace(store, Tier.CORE, number) for number in (2, 5)]])
        await reserved(store)
        assert await store.list_chains() == spaces
        assert await store.list_chains(limit=2) == spaces[:2]
        assert await store.list_chains(spaces[1]) == spaces[2:]
        assert await store.list_chains(UUID(int=2**128 - 1)) == []

    async def test_a_workspace_that_is_not_there_has_no_sound_chain(self, store: Store) -> None:
        report = await store.verify_audit(UUID(int=99))
        assert report.faults == ("there is no row of this workspace itself: it was removed, or its id is wrong",)

    async def test_a_head_kept_outside_proves_that_the_chain_only_grew(self, store: Store) -> None:
        await brought_to(store, AgentState.READY)
        kept = await store.audit_head()
        await brought_to(store, AgentState.READY)
        assert (await store.verify_audit(kept_head=kept)).is_sound
        rewritten = await store.verify_audit(kept_head=kept.evolve(hash="f" * 64))
        assert rewritten.faults == (
            f"entry {kept.number} is not the one whose hash was kept outside: the chain was rewritten",
        )
        longer = AuditHead(workspace_id=HOME, number=1000, hash=kept.hash)
        assert "1000" in (await store.verify_audit(kept_head=longer)).faults[0]

    async def test_the_audit_names_who_acted_and_is_read_from_a_cursor(self, store: Store) -> None:
        await reserved(store, by=Actor(name="bob", correlation_id="c-9"))
        entries = await store.read_audit()
        assert (entries[-1].actor, entries[-1].correlation_id) == ("bob", "c-9")
        assert await store.read_audit(after=entries[-1].number) == []
        assert await store.read_audit(UUID(int=77)) == []

    async def test_reopening_shows_everything(self, store: Store, open_store: OpenStore, seams: Seams) -> None:
        for state in AgentState:
            await brought_to(store, state, name=str(state), tags=("t",), context={"a": {"b": 1}})
        seen = (await store.list_instances(), await whole_log(store), await store.read_audit(), await store.head())
        await store.close()
        async with open_store(seams) as again:
            assert seen == (
                await again.list_instances(),
                await whole_log(again),
                await again.read_audit(),
                await again.head(),
            )
