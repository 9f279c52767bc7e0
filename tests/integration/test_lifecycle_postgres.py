"""The same lifecycle over PostgreSQL: whole lives, requests, waits, pauses, one owner, and adoption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lifecycle_agents import Stage
from lifecycle_ground import PROCESS, THREAD, Crew, S, all_of, at, do, opened, take

import ostler
from ostler import (
    HOME_WORKSPACE_ID,
    AgentStateChangedEvent,
    IdempotencyConflictError,
    InvalidOperationError,
    IsolationLevel,
    LeaseHeldError,
    LicenseError,
    Tier,
)
from ostler.isolation.base import Site
from ostler.isolation.registry import IsolationLevels
from ostler.store.audit import verify
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio


@pytest.fixture
async def crew(
    postgres_address: str, home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel
) -> AsyncIterator[Crew]:
    crew = Crew(home, clock, stage, level)
    crew.where = postgres_address
    async with opened(crew, levels=levels(crew)):
        yield crew


def levels(crew: Crew) -> IsolationLevels:
    """Processes are kept in a directory, wherever the record is."""
    return IsolationLevels(crew.clock, site=Site(directory=crew.home))


@at(THREAD, PROCESS)
async def test_a_whole_life(crew: Crew) -> None:
    agent = await crew.start(name="ada", tags=("one", "two"), restart_policy="immediate")
    stream = agent.events(after=0)
    assert await agent.ask(do("count"), id="r-1") == 1
    assert await agent.ask(do("count"), id="r-1") == 1
    with pytest.raises(IdempotencyConflictError):
        await agent.ask(do("echo"), id="r-1")
    call = crew.begin(agent.ask(do("ask")))
    wait = await crew.wait_of(agent)
    await crew.manager.answer(wait.wait_id, "go", {"deep": [1, None, "ü"]})
    assert await call == ["go", {"deep": [1, None, "ü"]}]
    await agent.ask(do("speak", signals=20, tokens=5))
    await agent.pause("hold")
    await agent.resume()
    await crew.crash(agent)
    await crew.reaches(agent, S.READY, 2)
    assert (await agent.restart()).attempt == 3
    await agent.pause("park")
    assert (await agent.resume()).attempt == 4
    result = await agent.stop(reason="done", keep_state=True)
    assert result.was_graceful
    seen = await all_of(stream)
    states = [event.new_state for event in seen if isinstance(event, AgentStateChangedEvent)]
    assert states == await crew.moves(agent)
    assert states[-1] is S.TERMINATED
    assert [event.sequence for event in seen] == sorted({event.sequence for event in seen})
    report = await crew.manager.store.read(verify, HOME_WORKSPACE_ID)
    assert report.is_sound, report.faults
    assert (await crew.manager.get_statistics()).total_restarts == 2


@at(THREAD)
async def test_a_pause_outlives_the_manager(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause(resume_after="1h")
    await crew.close()
    await crew.open(levels=levels(crew))
    agent = crew.again(agent)
    assert await crew.state(agent) is S.SUSPENDED
    resumed = await agent.resume()
    assert (resumed.state, resumed.attempt) == (S.READY, 2)
    assert await agent.ask(do("echo", value=1)) == 1


@at(THREAD)
async def test_two_managers_cannot_own_one_store(crew: Crew) -> None:
    with pytest.raises(LeaseHeldError):
        async with ostler.open(crew.where, seams=ostler.Seams(clock=crew.clock)):
            pytest.fail("two owners")


@at(THREAD)
async def test_of_many_spawns_at_once_the_plan_admits_as_many_as_it_says(crew: Crew) -> None:
    await crew.set_tier(Tier.CORE)
    spawns = await asyncio.gather(*(crew.start() for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(one, LicenseError) for one in spawns) == 3


@at(PROCESS)
async def test_an_agent_is_adopted_with_its_request(crew: Crew) -> None:
    agent = await crew.start()
    await crew.busy(agent, id="r-1")
    await crew.reaches(agent, S.PROCESSING)
    await crew.close(keep=True)
    await crew.open(levels=levels(crew))
    agent = crew.again(agent)
    joined = crew.begin(agent.ask(do("hang"), id="r-1"))
    await crew.calm()
    crew.stage.release("work")
    assert await joined == "let go"
    assert crew.stage.said.count("began") == 1
    with pytest.raises(InvalidOperationError):
        await agent.resume()
    assert (await take(agent.events(after=0), 1))[0].instance_id == agent.instance_id
