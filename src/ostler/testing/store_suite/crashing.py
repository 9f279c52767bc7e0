"""A writer that dies at each step: nothing is there, or everything; never a part."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from ostler.errors import OutcomeUnknownError, StoreError, StoreFailedError
from ostler.model import AgentState
from ostler.seams import FaultPlan
from ostler.store import Seams, Store
from ostler.testing.store_suite.ground import (
    OpenStore,
    StoreGround,
    brought_to,
    moved,
    reservation,
    reserved,
    whole_log,
)

LOST = ("store.begin.before", "store.begin.after", "store.save.before", "store.save.after", "store.commit.before")
KEPT = ("store.commit.after", "store.ack.before")
ANSWERED = "store.ack.after"


class CrashingContract(StoreGround):
    async def test_every_commit_passes_the_named_points_in_order(self, store: Store, plan: FaultPlan) -> None:
        plan.seen.clear()
        await reserved(store)
        await reserved(store)  # the last point of a commit comes after its answer, and before the next commit
        points = [*LOST, *KEPT, ANSWERED]
        assert plan.seen[: len(points) + 1] == [*points, LOST[0]]

    @pytest.mark.parametrize("point", [*LOST, *KEPT])
    async def test_a_batch_that_dies_leaves_nothing_or_everything(
        self, store: Store, open_store: OpenStore, seams: Seams, plan: FaultPlan, point: str
    ) -> None:
        old = await brought_to(store, AgentState.READY)
        before, audit = await store.head(), await store.audit_head()
        plan.name = point
        wishes = (moved(store, old, AgentState.PROCESSING), store.commit(reservation("new")))
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        assert all(isinstance(one, (StoreFailedError, OutcomeUnknownError)) for one in answers), answers
        with pytest.raises(StoreFailedError):
            await reserved(store)
        await store.close()
        plan.name = ""
        async with open_store(seams) as again:
            found = await again.get_instance(old.instance_id)
            names = [one.name for one in await again.list_instances()]
            if point in LOST:
                assert (await again.head(), await again.audit_head()) == (before, audit)
                assert found == old
                assert "new" not in names
            else:
                # The two may have been one batch or two; what was reached is there whole.
                assert found is not None
                assert (found.state, found.version) == (AgentState.PROCESSING, 3)
                assert (await again.head()).sequence == before.sequence + 1 + ("new" in names)
                assert (await again.audit_head()).number == audit.number + 1 + ("new" in names)
            await brought_to(again, AgentState.TERMINATED)

    @pytest.mark.parametrize("action", ["raise", "oserror"])
    async def test_a_writer_that_dies_after_its_answer_has_kept_what_it_said(
        self, open_store: OpenStore, seams: Seams, plan: FaultPlan, action: Literal["raise", "oserror"]
    ) -> None:
        plan.name, plan.action = ANSWERED, action
        async with open_store(seams) as store:
            made = await reserved(store)
            with pytest.raises(StoreError):
                await moved(store, made, AgentState.READY)
            assert await store.get_instance(made.instance_id) == made
        plan.name = ""
        async with open_store(seams) as again:
            assert await again.get_instance(made.instance_id) == made
            assert len(await whole_log(again)) == 1
            await moved(again, made, AgentState.READY)

    @pytest.mark.parametrize("point", [*LOST, *KEPT])
    async def test_reading_goes_on_beside_a_dead_writer(self, store: Store, plan: FaultPlan, point: str) -> None:
        made = await reserved(store)
        plan.name = point
        with pytest.raises(StoreError):
            await moved(store, made, AgentState.READY)
        assert await store.get_instance(made.instance_id) is not None
        assert len(await whole_log(store)) == 1 + (point in KEPT)
        plan.name = ""
