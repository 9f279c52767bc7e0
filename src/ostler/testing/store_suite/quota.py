"""How many a workspace may have: every tier, restarts, and many callers at once."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio

import pytest

from ostler.errors import LicenseError, WorkspaceNotFoundError
from ostler.model import AgentInstance, AgentState, Tier, Workspace
from ostler.policy import plan
from ostler.store import Seams, Store
from ostler.store.commands import PutRecord
from ostler.testing.folding import quota_faults
from ostler.testing.store_suite.ground import (
    DEFINITION,
    HOME,
    OpenStore,
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

LIMITED = [(Tier.CORE, 2, Tier.WRITER_PRO), (Tier.WRITER_PRO, 5, Tier.TEAMS), (Tier.TEAMS, 20, Tier.ENTERPRISE)]


class QuotaContract(StoreGround):
    @pytest.mark.parametrize(("tier", "cap", "next_tier"), LIMITED)
    async def test_a_full_plan_refuses_by_name_number_and_remedy(
        self, store: Store, tier: Tier, cap: int, next_tier: Tier
    ) -> None:
        space = await new_workspace(store, tier)
        for _ in range(cap):
            await reserved(store, workspace_id=space)
        before, audit = await store.head(), (await store.audit_head(space)).number
        with pytest.raises(LicenseError) as refused:
            await reserved(store, workspace_id=space)
        sentence = str(refused.value)
        assert f"the {tier} plan admits {cap}" in sentence
        assert f"{cap} are active" in sentence
        assert next_tier.value in sentence
        assert (await store.head()).sequence == before.sequence
        (entry,) = await store.read_audit(space, after=audit)
        assert (entry.outcome, entry.subject) == ("LicenseError", f"definition:{DEFINITION}")
        assert (await store.statistics(space)).max_concurrent == plan(tier).max_concurrent
        await reserved(store, workspace_id=HOME)

    async def test_enterprise_has_no_limit(self, store: Store) -> None:
        await asyncio.gather(*(reserved(store) for _ in range(50)))
        statistics = await store.statistics()
        assert (statistics.active_instances, statistics.max_concurrent) == (50, None)

    @pytest.mark.parametrize("end", [AgentState.FAILED, AgentState.TERMINATED])
    async def test_what_ends_makes_room(self, store: Store, end: AgentState) -> None:
        space = await new_workspace(store, Tier.CORE)
        await brought_to(store, end, workspace_id=space)
        await reserved(store, workspace_id=space)
        await reserved(store, workspace_id=space)

    async def test_a_restart_needs_a_place_again(self, store: Store) -> None:
        space = await new_workspace(store, Tier.CORE)
        failed = await brought_to(store, AgentState.FAILED, workspace_id=space)
        first = await reserved(store, workspace_id=space)
        await reserved(store, workspace_id=space)
        with pytest.raises(LicenseError, match="admits 2"):
            await restarted(store, failed)
        assert await current(store, failed.instance_id) == failed
        await moved(store, first, AgentState.FAILED)
        assert (await restarted(store, failed)).state is AgentState.INITIALIZING
        with pytest.raises(LicenseError):
            await restarted(store, first)

    async def test_two_hundred_at_once_for_two_places_get_exactly_two(self, store: Store) -> None:
        space = await new_workspace(store, Tier.CORE)
        wishes = (store.commit(reservation(workspace_id=space)) for _ in range(200))
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        assert sum(isinstance(one, AgentInstance) for one in answers) == 2
        assert sum(isinstance(one, LicenseError) for one in answers) == 198
        assert quota_faults(await whole_log(store), space, 2) == []
        assert (await store.statistics(space)).active_instances == 2

    async def test_a_larger_plan_makes_room_and_a_smaller_one_ends_nobody(
        self, open_store: OpenStore, seams: Seams
    ) -> None:
        async with open_store(seams) as store:  # its log breaks the smaller plan, rightly
            space = await new_workspace(store, Tier.CORE)
            lives = [await reserved(store, workspace_id=space) for _ in range(2)]
            small = await store.get_workspace(space)
            assert isinstance(small, Workspace)
            await store.commit(PutRecord(record=small.evolve(tier=Tier.WRITER_PRO)))
            lives += [await reserved(store, workspace_id=space) for _ in range(3)]
            await store.commit(PutRecord(record=small))
            assert (await store.statistics(space)).active_instances == 5
            for one in lives[2:]:
                with pytest.raises(LicenseError, match="are active"):
                    await reserved(store, workspace_id=space)
                await moved(store, one, AgentState.READY)
                await moved(store, one, AgentState.FAILED)
            with pytest.raises(LicenseError, match="2 are active"):
                await reserved(store, workspace_id=space)

    async def test_there_is_no_reserving_in_a_workspace_that_is_not_there(self, store: Store) -> None:
        before = await store.head()
        with pytest.raises(WorkspaceNotFoundError):
            await reserved(store, workspace_id=DEFINITION)
        with pytest.raises(WorkspaceNotFoundError):
            await store.statistics(DEFINITION)
        assert await store.head() == before
