"""One owner writes: leases and epochs. One request is done once: idempotency keys."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest
from store_ground import (
    ALICE,
    HOME,
    Place,
    brought_to,
    count,
    current,
    entries,
    failed,
    moved,
    new_record,
    new_workspace,
    ready,
    reserved,
    seen,
)

from ostler.errors import (
    IdempotencyConflictError,
    LeaseHeldError,
    LicenseError,
    OstlerError,
    StaleWriterError,
    ValidationError,
)
from ostler.failpoints import Seams
from ostler.model.attempt import Lease
from ostler.model.states import AgentState, Tier
from ostler.policy.retention import RetentionPolicy
from ostler.store import idempotency, instances, leases, retention
from ostler.store.idempotency import IdempotencyKey
from ostler.store.store import Store
from ostler.store.transaction import Transaction
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

TTL = timedelta(seconds=30)
DURABLE = pytest.mark.parametrize("place", ["sqlite", "postgres"], indirect=True)


# --- the lease ---------------------------------------------------------------------------------------


async def test_each_owner_raises_the_epoch_and_is_audited(store: Store, clock: ManualClock) -> None:
    assert store.epoch == 0
    first = await store.take_lease("one", ttl=TTL)
    assert (first.epoch, store.epoch, first.expires_at) == (1, 1, clock.wall() + TTL)
    assert await store.read(leases.current_epoch) == 1
    assert (await store.take_lease("one", ttl=TTL, steal=True)).epoch == 2
    assert (await entries(store))[-1].detail == "one, epoch 2"
    await reserved(store)


async def test_the_lease_can_be_read_also_when_it_has_expired(store: Store, clock: ManualClock) -> None:
    assert await store.read(leases.get_lease) is None
    lease = await store.take_lease("one", ttl=TTL)
    clock.advance(60)
    assert await store.read(leases.get_lease) == lease
    await store.release_lease()
    assert await store.read(leases.get_lease) is None


async def test_a_renewed_lease_lasts_longer_and_keeps_its_epoch(store: Store, clock: ManualClock) -> None:
    lease = await store.take_lease("one", ttl=TTL)
    clock.advance(20)
    renewed = await store.renew_lease(ttl=TTL)
    assert (renewed.epoch, renewed.expires_at) == (lease.epoch, clock.wall() + TTL)
    assert await store.read(leases.get_lease) == renewed


async def test_a_store_that_gave_up_its_lease_may_not_write(store: Store) -> None:
    await store.take_lease("one", ttl=TTL)
    await store.release_lease()
    await store.release_lease()
    with pytest.raises(StaleWriterError, match="take the lease"):
        await reserved(store)
    with pytest.raises(StaleWriterError, match="holds no lease"):
        await store.renew_lease(ttl=TTL)
    assert (await store.take_lease("one", ttl=TTL)).epoch == 3
    await reserved(store)


@DURABLE
async def test_a_lease_is_held_until_it_expires_or_is_stolen(
    store: Store, place: Place, seams: Seams, clock: ManualClock
) -> None:
    await store.take_lease("one", ttl=TTL)
    async with place.store(seams) as second, place.store(seams) as third:
        before = await seen(store)
        clock.advance(29)
        with pytest.raises(LeaseHeldError, match=r"one owns this store until [0-9:]{8} UTC; stop it first"):
            await second.take_lease("two", ttl=TTL)
        assert await seen(store) == before
        clock.advance(1)
        assert (await second.take_lease("two", ttl=TTL)).epoch == 2
        assert (await third.take_lease("three", ttl=TTL, steal=True)).epoch == 3
        await reserved(third)
        for shut_out in (store, second):
            with pytest.raises(StaleWriterError, match="three owns this store until"):
                await reserved(shut_out)


@DURABLE
async def test_a_lease_that_was_released_is_free_at_once(store: Store, place: Place, seams: Seams) -> None:
    await store.take_lease("one", ttl=TTL)
    await store.release_lease()
    async with place.store(seams) as second:
        await reserved(second)  # without an owner every store may write
        assert (await second.take_lease("two", ttl=TTL)).epoch == 3


@DURABLE
async def test_of_many_that_take_the_lease_at_once_one_gets_it_and_the_others_are_told_by_whom(
    store: Store, place: Place, seams: Seams
) -> None:
    others = [place.store(seams) for _ in range(4)]
    await asyncio.gather(*(one.open() for one in others))
    try:
        answers = await asyncio.gather(
            *(one.take_lease(f"n{number}", ttl=TTL) for number, one in enumerate([store, *others])),
            return_exceptions=True,
        )
        (lease,) = [one for one in answers if isinstance(one, Lease)]
        refused = [one for one in answers if isinstance(one, LeaseHeldError)]
        assert len(refused) == 4, answers
        assert all(f"{lease.owner} owns this store" in str(one) for one in refused)
    finally:
        await asyncio.gather(*(one.close() for one in others))


@DURABLE
async def test_the_writes_of_an_old_owner_are_refused_and_leave_nothing(
    store: Store, place: Place, seams: Seams
) -> None:
    await store.take_lease("one", ttl=TTL)
    mine = await ready(store)
    async with place.store(seams) as second:
        await second.take_lease("two", ttl=TTL, steal=True)
        before = await seen(second)
        with pytest.raises(StaleWriterError):
            await moved(store, mine, AgentState.PROCESSING, act="push", by=ALICE)
        with pytest.raises(StaleWriterError):
            await store.renew_lease(ttl=TTL)
        with pytest.raises(StaleWriterError):
            await store.run(retention.sweep, RetentionPolicy())
        with pytest.raises(StaleWriterError):
            await store.release_lease()
        assert await seen(second) == before, "not even the audit"
        assert await current(store, mine) == mine, "it may still read"
        assert (await moved(second, mine, AgentState.PROCESSING)).state is AgentState.PROCESSING


@DURABLE
async def test_a_newcomer_beside_an_owner_only_reads(
    store: Store, place: Place, seams: Seams, clock: ManualClock
) -> None:
    await store.take_lease("one", ttl=TTL)
    one = await reserved(store)
    before = await seen(store)
    async with place.store(seams) as newcomer:
        with pytest.raises(StaleWriterError, match=r"one owns this store until [0-9:]{8} UTC"):
            await reserved(newcomer)
        assert await current(newcomer, one) == one
        assert await seen(newcomer) == before
    clock.advance(TTL.total_seconds())
    async with place.store(seams) as late:
        await reserved(late)  # the lease has expired, and no other store has taken it
    await reserved(store)


@DURABLE
async def test_an_owner_that_closes_and_opens_again_still_owns(store: Store, place: Place, seams: Seams) -> None:
    owner = place.store(seams)
    async with owner:
        await owner.take_lease("one", ttl=TTL)
    async with owner:
        await reserved(owner)
        await owner.renew_lease(ttl=TTL)
    with pytest.raises(StaleWriterError):
        await reserved(store)


@DURABLE
async def test_an_owner_that_was_robbed_while_it_was_closed_only_reads(
    store: Store, place: Place, seams: Seams
) -> None:
    owner = place.store(seams)
    async with owner:
        await owner.take_lease("one", ttl=TTL)
    await store.take_lease("two", ttl=TTL, steal=True)
    async with owner:
        with pytest.raises(StaleWriterError):
            await reserved(owner)
    await reserved(store)


@DURABLE
async def test_helpers_of_one_owner_may_share_its_epoch(store: Store, place: Place, seams: Seams) -> None:
    async with place.store(seams) as helper:
        lease = await store.take_lease("one", ttl=TTL)
        assert (store.lease, helper.lease) == (lease, None)
        with pytest.raises(StaleWriterError):
            await reserved(helper)
        assert await helper.own_without_lease() == lease.epoch
        await reserved(helper)
        await reserved(store)


# --- idempotency keys --------------------------------------------------------------------------------


async def test_the_same_key_gets_the_same_instance_also_after_it_has_changed(store: Store) -> None:
    key = IdempotencyKey.of("k", "body")
    first = await ready(store, "one", key=key)
    before = await seen(store)
    again, is_new = await store.run(instances.reserve_instance, new_record("two"), by=ALICE, key=key)
    assert (again, is_new) == (first, False)
    assert await seen(store) == before
    assert await store.read(count("agent_instances")) == 1


@DURABLE
async def test_a_key_is_known_to_the_next_store(store: Store, place: Place, seams: Seams) -> None:
    key = IdempotencyKey.of("k", "body")
    first = await reserved(store, key=key)
    await store.close()
    async with place.store(seams) as again:
        assert (await reserved(again, key=key)).instance_id == first.instance_id


async def test_many_at_once_with_one_key_get_one_instance(store: Store) -> None:
    key = IdempotencyKey.of("k", "body")
    made = await asyncio.gather(*(reserved(store, key=key) for _ in range(50)))
    assert len({one.instance_id for one in made}) == 1
    assert await store.read(count("agent_instances")) == 1


async def test_the_same_key_with_another_request_is_refused(store: Store) -> None:
    first = await reserved(store, key=IdempotencyKey.of("k", "body"))
    with pytest.raises(IdempotencyConflictError, match="the key 'k' was used with another request; use a new key"):
        await reserved(store, key=IdempotencyKey.of("k", "other"))
    assert await store.read(count("agent_instances")) == 1
    assert (await entries(store))[-1].outcome == "IdempotencyConflictError"
    assert (await reserved(store, key=IdempotencyKey.of("k", "body"))).instance_id == first.instance_id


async def test_a_key_counts_for_24_hours_and_for_one_workspace(store: Store, clock: ManualClock) -> None:
    key = IdempotencyKey.of("k", "body")
    first = await reserved(store, key=key)
    elsewhere = await new_workspace(store, Tier.TEAMS)
    other = await reserved(store, workspace_id=elsewhere, key=IdempotencyKey.of("k", "another"))
    assert other.instance_id != first.instance_id
    clock.advance(idempotency.LIFETIME.total_seconds() - 1)
    assert (await reserved(store, key=key)).instance_id == first.instance_id
    clock.advance(1)
    fresh = await reserved(store, key=key)
    assert fresh.instance_id != first.instance_id
    assert (await reserved(store, key=key)).instance_id == fresh.instance_id


async def test_a_refused_request_does_not_use_up_its_key(store: Store) -> None:
    space = await new_workspace(store, Tier.CORE)
    running = [await brought_to(store, AgentState.READY, workspace_id=space) for _ in range(2)]
    key = IdempotencyKey.of("k", "body")
    with pytest.raises(LicenseError):
        await reserved(store, workspace_id=space, key=key)
    await failed(store, running[0])
    assert (await reserved(store, workspace_id=space, key=key)).state is AgentState.INITIALIZING


async def test_a_key_of_one_verb_does_not_answer_another(store: Store) -> None:
    key = IdempotencyKey.of("k", "same")

    def another_verb(tx: Transaction) -> None:
        idempotency.keep_answer(tx, HOME, key, "create", "42")

    await store.run(another_verb)
    with pytest.raises(IdempotencyConflictError, match="the key 'k' was used for create"):
        await reserved(store, key=key)


async def test_a_key_whose_instance_is_gone_begins_anew(store: Store, clock: ManualClock) -> None:
    key = IdempotencyKey.of("k", "body")
    first = await reserved(store, key=key)
    await failed(store, first)
    clock.advance(120)
    await store.run(retention.sweep, RetentionPolicy(finished=timedelta(minutes=1)))
    assert (await reserved(store, key=key)).instance_id != first.instance_id


@pytest.mark.parametrize("key", ["", "k" * 201, "a\0b", "\ud800", "a\nb"])
def test_an_unfit_key_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="idempotency_key must be 1 to 200 printable characters"):
        IdempotencyKey.of(key, "body")


def test_a_body_of_any_text_has_a_fingerprint() -> None:
    assert IdempotencyKey.of("k", "\ud800") != IdempotencyKey.of("k", "\ud801")
    assert len(IdempotencyKey.of("k", "x").fingerprint) == 64


async def test_an_unknown_workspace_has_no_keys(store: Store) -> None:
    with pytest.raises(OstlerError):
        await reserved(store, workspace_id=UUID(int=5), key=IdempotencyKey.of("k", "b"))
    assert await store.read(count("idempotency_keys")) == 0
