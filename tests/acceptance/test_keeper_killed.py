"""`kill -9` of a keeper: nothing survives unseen, every record tells the truth, and who is to come back does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from machine_ground import end_keeper, everyone, keeper_of, kill_keeper_of, lives, swept, until
from promise_ground import Fleet, opened

from ostler import AgentGoneError, AgentInstance, AgentState, AttemptOutcome, RestartPolicy

pytestmark = pytest.mark.anyio

LOST = "the keeper of this home was killed, and with it all its agents; how this one ended is not known"
HOUR = timedelta(hours=1)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with swept(tmp_path / "home") as found:
        yield found


async def populate(fleet: Fleet, count: int, policy: RestartPolicy | None) -> list[AgentInstance]:
    """Every fourth has children that no signal to its process would reach."""
    ones = await fleet.several(count, restart_policy=policy)
    for one in ones[::4]:
        for program in ("daemon", "deaf", "stopped"):
            await fleet.do(one, "raise_one", program=program)
    return ones


def kill_keeper(fleet: Fleet) -> set[int]:
    """All who lived for this home at that moment."""
    family = everyone(fleet.home)
    kill_keeper_of(fleet.home)
    return family


async def test_twenty_agents_of_a_killed_keeper_are_lost_or_come_back(home: Path) -> None:
    async with opened(home) as fleet:
        final, lasting = await asyncio.gather(populate(fleet, 10, None), populate(fleet, 10, RestartPolicy.immediate()))
        keeper = keeper_of(home)
        calls = [fleet.start(one, "ignore") for one in (final[1], lasting[1])]
        await asyncio.gather(*(fleet.do(one, "echo", value=1) for one in (*final[2:], *lasting[2:])))
        family = kill_keeper(fleet)
        assert len(family) > 20 + 2 * 3 * 3
        for call in calls:
            with pytest.raises(AgentGoneError):
                await call
        for one in final:
            failed = await fleet.comes_to(one, AgentState.FAILED)
            assert LOST in (failed.error_message or "")
        for one in lasting:
            await fleet.comes_to(one, AgentState.READY, 2)
        assert {await fleet.outcome(one) for one in (*final, *lasting)} == {(AttemptOutcome.LOST, LOST)}
        assert not [pid for pid in family if lives(pid)]
        told = await asyncio.gather(*(fleet.do(one, "know") for one in lasting))
        assert {one["parent"] for one in told} == {keeper_of(home)}
        assert keeper_of(home) != keeper
        assert [fleet.tree(one, 2) for one in lasting] == [{one["pid"]} for one in told], "and no twin"


async def test_what_a_keeper_left_that_died_alone_is_ended_by_the_next_manager(home: Path) -> None:
    """Nobody was there to see it: first the manager left, then its keeper was killed."""
    async with opened(home, outlive=HOUR) as fleet:
        final, lasting = await populate(fleet, 5, None), await populate(fleet, 5, RestartPolicy.immediate())
        fleet.manager.keep_agents = True
    family = kill_keeper(fleet)
    await until(lambda: not keeper_of(home))
    assert any(lives(pid) for pid in family), "there is something to be ended"
    async with opened(home, outlive=HOUR) as fleet:
        for one in final:
            await fleet.comes_to(one, AgentState.FAILED)
        for one in lasting:
            await fleet.comes_to(one, AgentState.READY, 2)
        assert {(await fleet.outcome(one))[0] for one in (*final, *lasting)} == {AttemptOutcome.LOST}
        assert not [pid for pid in family if lives(pid)]
        assert await fleet.do(lasting[0], "echo", value=1) == 1
    end_keeper(home)


async def test_a_keeper_killed_again_and_again_loses_nobody_and_doubles_nobody(home: Path) -> None:
    policy = RestartPolicy.immediate().evolve(max_retries=10, burst_limit=100)
    async with opened(home) as fleet:
        ones = await populate(fleet, 8, policy)
        for attempt in range(2, 6):
            family = kill_keeper(fleet)
            for one in ones:
                await fleet.comes_to(one, AgentState.READY, attempt)
            assert not [pid for pid in family if lives(pid)]
            assert {one["attempt"] for one in [await fleet.do(one, "know") for one in ones]} == {attempt}
            await fleet.do(ones[0], "raise_one", program="daemon")
