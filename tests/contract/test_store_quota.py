"""How many active instances a workspace may have: every plan, restarts, and many callers at once."""

from __future__ import annotations

import asyncio

import pytest
from store_ground import (
    DEFINITION,
    HOME,
    audit_head,
    brought_to,
    current,
    do_nothing,
    entries,
    failed,
    finished,
    moved,
    new_wait,
    new_workspace,
    places_taken,
    ready,
    reserved,
    restarted,
    seen,
)

from ostler.errors import LicenseError, WorkspaceNotFoundError
from ostler.model.instance import AgentInstance
from ostler.model.states import AgentState, Tier
from ostler.model.wait import WaitKind
from ostler.policy.quota import plan as plan_of
from ostler.store import queries, waits, workspaces
from ostler.store.store import Store
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

LIMITED = [(Tier.CORE, 2, Tier.WRITER_PRO), (Tier.WRITER_PRO, 5, Tier.TEAMS), (Tier.TEAMS, 20, Tier.ENTERPRISE)]


async def test_a_full_plan_refuses_by_name_number_and_remedy_and_is_audited(store: Store, clock: ManualClock) -> None:
    for number, (tier, cap, next_tier) in enumerate(LIMITED, 2):
        space = await new_workspace(store, tier, number)
        for _ in range(cap):
            await reserved(store, workspace_id=space)
        acts = await audit_head(store, space)
        with pytest.raises(LicenseError) as refused:
            await reserved(store, workspace_id=space)
        assert f"the {tier} plan admits {cap} active agents and {cap} are active" in str(refused.value)
        assert next_tier.value in str(refused.value)
        (entry,) = await entries(store, space, after=acts.number)
        assert (entry.outcome, entry.subject) == ("LicenseError", f"definition:{DEFINITION}")
        told = await store.read(queries.statistics, space, clock.wall())
        assert (told.active_instances, told.max_concurrent) == (cap, plan_of(tier).max_concurrent)
        await reserved(store)


async def test_the_enterprise_plan_has_no_limit(store: Store, clock: ManualClock) -> None:
    await asyncio.gather(*(reserved(store) for _ in range(50)))
    told = await store.read(queries.statistics, HOME, clock.wall())
    assert (told.active_instances, told.max_concurrent) == (50, None)


async def test_an_end_frees_its_place_exactly_once(store: Store) -> None:
    space = await new_workspace(store, Tier.CORE)
    one, two = [await ready(store, workspace_id=space) for _ in range(2)]
    over = await failed(store, one)
    assert await store.read(places_taken, space) == 1
    await finished(store, over, end=None)
    assert await store.read(places_taken, space) == 1, "a failed one has no place left to give back"
    await finished(store, await moved(store, two, AgentState.TERMINATING))
    assert await store.read(places_taken, space) == 0


async def test_a_restart_takes_a_place_again(store: Store) -> None:
    space = await new_workspace(store, Tier.CORE)
    over = await brought_to(store, AgentState.FAILED, workspace_id=space)
    first = await reserved(store, workspace_id=space)
    await reserved(store, workspace_id=space)
    with pytest.raises(LicenseError, match="admits 2"):
        await restarted(store, over)
    assert await current(store, over) == over
    ended = await failed(store, first)
    assert (await restarted(store, over)).state is AgentState.INITIALIZING
    with pytest.raises(LicenseError):
        await restarted(store, ended)


async def test_a_restart_that_is_refused_keeps_its_wait_and_succeeds_later(store: Store) -> None:
    space = await new_workspace(store, Tier.CORE)
    one = await ready(store, workspace_id=space)
    wait = new_wait(one, kind=WaitKind.BACKOFF)
    over = await failed(store, one, backoff=wait)
    others = [await reserved(store, workspace_id=space) for _ in range(2)]
    with pytest.raises(LicenseError):
        await restarted(store, over, wait.wait_id)
    assert await store.read(waits.all_open_waits) == [wait]
    await failed(store, others[0])
    assert (await restarted(store, over, wait.wait_id)).attempt == 2


async def test_two_hundred_at_once_for_two_places_get_exactly_two(store: Store) -> None:
    space = await new_workspace(store, Tier.CORE)
    answers = await asyncio.gather(*(reserved(store, workspace_id=space) for _ in range(200)), return_exceptions=True)
    assert sum(isinstance(one, AgentInstance) for one in answers) == 2
    assert sum(isinstance(one, LicenseError) for one in answers) == 198
    assert await store.read(places_taken, space) == 2
    refused = [entry for entry in await entries(store, space) if entry.outcome == "LicenseError"]
    assert len(refused) == 198


async def test_a_larger_plan_makes_room_and_a_smaller_one_ends_no_agent(store: Store) -> None:
    space = await new_workspace(store, Tier.CORE)
    lives = [await reserved(store, workspace_id=space) for _ in range(2)]
    small = await store.read(workspaces.require_workspace, space)
    await store.run(workspaces.put_workspace, small.evolve(tier=Tier.WRITER_PRO))
    lives += [await reserved(store, workspace_id=space) for _ in range(3)]
    await store.run(workspaces.put_workspace, small)
    assert await store.read(places_taken, space) == 5
    for one in lives[2:]:
        with pytest.raises(LicenseError, match="are active"):
            await reserved(store, workspace_id=space)
        await failed(store, one)
    with pytest.raises(LicenseError, match="2 are active"):
        await reserved(store, workspace_id=space)


async def test_a_plan_that_is_lowered_beside_a_reservation_fails_no_other_command(store: Store) -> None:
    space = await new_workspace(store, Tier.TEAMS)
    for _ in range(5):
        await reserved(store, workspace_id=space)
    large = await store.read(workspaces.require_workspace, space)
    answers = await asyncio.gather(
        reserved(store, workspace_id=space),
        store.run(workspaces.put_workspace, large.evolve(tier=Tier.CORE)),
        store.run(do_nothing),
        return_exceptions=True,
    )
    assert not [answer for answer in answers if isinstance(answer, BaseException)]
    assert await store.read(places_taken, space) == 6
    with pytest.raises(LicenseError):
        await reserved(store, workspace_id=space)


async def test_there_is_no_place_in_an_unknown_workspace(store: Store, clock: ManualClock) -> None:
    before = await seen(store)
    with pytest.raises(WorkspaceNotFoundError):
        await reserved(store, workspace_id=DEFINITION)
    with pytest.raises(WorkspaceNotFoundError):
        await store.read(queries.statistics, DEFINITION, clock.wall())
    assert await seen(store) == before
