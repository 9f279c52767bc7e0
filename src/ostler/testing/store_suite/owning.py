"""Who may write: leases and epochs. And what is written once: idempotent requests."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

from datetime import timedelta

import pytest

from ostler.errors import (
    IdempotencyConflictError,
    LeaseHeldError,
    LicenseError,
    OstlerError,
    StaleWriterError,
    ValidationError,
)
from ostler.model import AgentState, Tier
from ostler.store import Seams, Store
from ostler.store.commands import CreateTask, Idempotency
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import (
    OpenStore,
    StoreGround,
    brought_to,
    current,
    moved,
    new_workspace,
    reservation,
    reserved,
)

TTL = timedelta(seconds=30)


class OwningContract(StoreGround):
    async def test_each_owner_raises_the_epoch(self, store: Store, clock: ManualClock) -> None:
        first = await store.take_lease("one", ttl=TTL)
        assert (first.epoch, store.epoch, first.expires_at) == (1, 1, clock.wall() + TTL)
        assert (await store.head()).epoch == 1
        assert (await store.take_lease("one", ttl=TTL)).epoch == 2

    async def test_the_lease_can_be_looked_at_also_when_it_is_over(self, store: Store, clock: ManualClock) -> None:
        assert await store.get_lease() is None
        lease = await store.take_lease("one", ttl=TTL)
        clock.advance(60)
        assert await store.get_lease() == lease
        await store.release_lease()
        assert await store.get_lease() is None

    async def test_a_lease_is_held_until_it_ends_or_is_stolen(
        self, store: Store, open_store: OpenStore, seams: Seams, clock: ManualClock
    ) -> None:
        await store.take_lease("one", ttl=TTL)
        async with open_store(seams) as second, open_store(seams) as third:
            before = await store.head()
            clock.advance(29)
            with pytest.raises(LeaseHeldError, match="one owns this store"):
                await second.take_lease("two", ttl=TTL)
            assert await store.head() == before
            clock.advance(1)
            assert (await second.take_lease("two", ttl=TTL)).epoch == 2
            assert (await third.take_lease("three", ttl=TTL, steal=True)).epoch == 3
            await reserved(third)
            for shut_out in (store, second):
                with pytest.raises(StaleWriterError):
                    await reserved(shut_out)

    async def test_the_writes_of_an_old_owner_are_refused_and_leave_nothing(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        await store.take_lease("one", ttl=TTL)
        mine = await reserved(store)
        async with open_store(seams) as second:
            lease = await second.take_lease("two", ttl=TTL, steal=True)
            before, audit = await second.head(), await second.audit_head()
            with pytest.raises(StaleWriterError, match=rf"two owns this store until .* epoch {lease.epoch}, "):
                await moved(store, mine, AgentState.READY)
            with pytest.raises(StaleWriterError):
                await store.renew_lease(ttl=TTL)
            with pytest.raises(StaleWriterError):
                await store.sweep()
            assert (await second.head(), await second.audit_head()) == (before, audit)
            assert await current(store, mine.instance_id) == mine
            assert (await moved(second, mine, AgentState.READY)).state is AgentState.READY

    async def test_a_renewed_lease_lasts_longer(
        self, store: Store, open_store: OpenStore, seams: Seams, clock: ManualClock
    ) -> None:
        lease = await store.take_lease("one", ttl=TTL)
        clock.advance(20)
        renewed = await store.renew_lease(ttl=TTL)
        assert (renewed.epoch, renewed.expires_at) == (lease.epoch, clock.wall() + TTL)
        clock.advance(20)
        async with open_store(seams) as second:
            with pytest.raises(LeaseHeldError):
                await second.take_lease("two", ttl=TTL)

    async def test_a_released_lease_is_free_at_once(self, store: Store, open_store: OpenStore, seams: Seams) -> None:
        await store.take_lease("one", ttl=TTL)
        await store.release_lease()
        await store.release_lease()
        async with open_store(seams) as second:
            await reserved(second)  # nobody owns it now
            assert (await second.take_lease("two", ttl=TTL)).epoch == 3
        for late in (store.renew_lease(ttl=TTL), reserved(store)):
            with pytest.raises(OstlerError):
                await late

    async def test_helpers_of_one_owner_share_its_epoch(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        async with open_store(seams) as helper:
            lease = await store.take_lease("one", ttl=TTL)
            with pytest.raises(StaleWriterError):
                await reserved(helper)
            helper.adopt_epoch(lease.epoch)
            await reserved(helper)
            await reserved(store)

    async def test_a_newcomer_may_not_write_beside_an_owner(
        self, store: Store, open_store: OpenStore, seams: Seams, clock: ManualClock
    ) -> None:
        lease = await store.take_lease("one", ttl=TTL)
        before = await store.head()
        async with open_store(seams) as newcomer:
            with pytest.raises(StaleWriterError, match=r"one owns this store until [0-9:]{8} UTC, "):
                await reserved(newcomer)
            assert await newcomer.head() == before
            newcomer.adopt_epoch(lease.epoch)
            await reserved(newcomer)
        clock.advance(TTL.total_seconds())
        async with open_store(seams) as late:  # the lease has ended, and nobody took another
            await reserved(late)

    async def test_an_owner_that_closes_and_opens_again_still_owns(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        owner = open_store(seams)
        async with owner:
            await owner.take_lease("one", ttl=TTL)
        async with owner:
            await reserved(owner)
            await owner.renew_lease(ttl=TTL)
        with pytest.raises(StaleWriterError):
            await reserved(store)

    async def test_a_lease_that_could_not_be_released_is_not_forgotten(self, store: Store) -> None:
        await store.take_lease("one", ttl=TTL)
        await store.close()
        with pytest.raises(OstlerError):
            await store.release_lease()
        await store.open()
        await store.release_lease()
        with pytest.raises(StaleWriterError, match="has stepped down, so it may not write; open it again"):
            await reserved(store)

    async def test_a_lease_needs_an_owner_and_a_while(self, store: Store) -> None:
        with pytest.raises(ValidationError, match="owner is required"):
            await store.take_lease("", ttl=TTL)
        with pytest.raises(ValidationError, match="ttl"):
            await store.take_lease("one", ttl=timedelta(0))
        with pytest.raises(ValidationError, match="NUL"):
            await store.take_lease("one\0", ttl=TTL)
        await store.take_lease("one", ttl=TTL)
        with pytest.raises(ValidationError, match="ttl"):
            await store.renew_lease(ttl=timedelta(seconds=-1))

    # --- idempotency ----------------------------------------------------------------------------

    async def test_the_same_key_and_body_get_the_same_answer_even_after_the_record_changed(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        wish = reservation("one", idempotency=Idempotency.of("k", "body"))
        first = await store.commit(wish)
        await moved(store, first, AgentState.READY)
        before = await store.head()
        assert await store.commit(wish) == first
        assert await store.head() == before
        async with open_store(seams) as again:
            assert await again.commit(wish) == first
        assert len(await store.list_instances()) == 1

    async def test_the_same_key_with_another_body_is_refused(self, store: Store) -> None:
        await store.commit(reservation(idempotency=Idempotency.of("k", "body")))
        before = await store.head()
        for other in (reservation(idempotency=Idempotency.of("k", "other")),):
            with pytest.raises(IdempotencyConflictError, match="'k'"):
                await store.commit(other)
        assert (await store.head()).sequence == before.sequence

    async def test_a_key_counts_for_a_day_and_for_one_workspace(self, store: Store, clock: ManualClock) -> None:
        wish = reservation(idempotency=Idempotency.of("k", "body"))
        first = await store.commit(wish)
        elsewhere = await new_workspace(store, Tier.TEAMS)
        other = await store.commit(reservation(workspace_id=elsewhere, idempotency=Idempotency.of("k", "another")))
        assert other.instance_id != first.instance_id
        clock.advance(timedelta(hours=24).total_seconds() - 1)
        assert await store.commit(wish) == first
        clock.advance(1)
        fresh = await store.commit(wish)
        assert fresh.instance_id != first.instance_id
        assert await store.commit(wish) == fresh

    async def test_a_refused_request_does_not_use_up_its_key(self, store: Store) -> None:
        space = await new_workspace(store, Tier.CORE)
        running = [await brought_to(store, AgentState.READY, workspace_id=space) for _ in range(2)]
        wish = reservation(workspace_id=space, idempotency=Idempotency.of("k", "body"))
        with pytest.raises(LicenseError):
            await store.commit(wish)
        await moved(store, running[0], AgentState.FAILED)
        assert (await store.commit(wish)).state is AgentState.INITIALIZING

    async def test_tasks_are_made_once_per_key_too(self, store: Store) -> None:
        wish = CreateTask(task="dig", idempotency=Idempotency.of("k", "dig"))
        assert await store.commit(wish) == await store.commit(wish)
        assert len(await store.list_tasks()) == 1

    async def test_a_key_that_made_a_task_does_not_answer_for_an_instance(self, store: Store) -> None:
        await store.commit(CreateTask(task="dig", idempotency=Idempotency.of("k", "same")))
        with pytest.raises(IdempotencyConflictError):
            await store.commit(reservation(idempotency=Idempotency.of("k", "same")))

    @pytest.mark.parametrize("key", ["", "k" * 201, "a\0b", "\ud800"])
    async def test_an_unfit_key_is_refused_before_anything_is_written(self, store: Store, key: str) -> None:
        before = await store.head()
        with pytest.raises(ValidationError, match="idempotency_key"):
            await store.commit(reservation(idempotency=Idempotency(key=key, fingerprint="f")))
        assert await store.head() == before
