"""The scenarios and criteria that the lifecycle was asked for, each under the name it was given."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest
from lifecycle_ground import LEVELS, Crew, agent_threads, logged

from ostler import (
    AgentNotFoundError,
    AgentSpawnedEvent,
    AgentSpawnOptions,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    AuthorizationError,
    GetInstancesFilter,
    InvalidOperationError,
    IsolationLevel,
    LicenseError,
    ResourceLimits,
    Role,
    SpawnRequest,
    TerminationOptions,
    Tier,
)
from ostler.model.events import EventsMissed
from ostler.testing.isolation_suite.ground import passing

pytestmark = pytest.mark.anyio

_A = AgentState


@pytest.fixture(params=[*LEVELS, IsolationLevel.PROCESS], ids=str)
def level(request: pytest.FixtureRequest) -> IsolationLevel:
    found: IsolationLevel = request.param
    return found


def p95(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(len(seconds) * 0.95) - 1]


async def test_spawn_valid_request_creates_instance(crew: Crew) -> None:
    limits = ResourceLimits(max_memory_mb=256)
    one = await crew.spawn(name="Code Review Agent", resource_limits=limits)
    assert one.state is _A.READY
    assert one.is_active
    assert one.name == "Code Review Agent"
    assert one.spawn_options is not None
    assert one.spawn_options.resource_limits == limits
    assert await crew.manager.get_instance(one.instance_id) == one
    assert await crew.manager.get_active_instances() == [one]
    assert crew.stage.said == ["initialize"]


async def test_spawn_invalid_definition_throws_not_found(crew: Crew) -> None:
    with pytest.raises(AgentNotFoundError, match="no agent with the id"):
        await crew.manager.spawn(SpawnRequest(agent_definition_id=uuid4()))
    assert await crew.manager.get_active_instances(GetInstancesFilter(include_terminated=True)) == []


def _plan(crew: Crew) -> tuple[Tier, int]:
    """The smallest plan that admits the level, and how many agents it admits."""
    return (Tier.TEAMS, 20) if crew.level is IsolationLevel.PROCESS else (Tier.CORE, 2)


async def test_spawn_license_limit_exceeded_throws_license_exception(crew: Crew) -> None:
    tier, most = _plan(crew)
    await crew.set_tier(tier)
    first, *others = [await crew.spawn() for _ in range(most)]
    sentence = f"the {tier} plan admits {most} active agents and {most} are active; terminate one"
    with pytest.raises(LicenseError, match=sentence) as no:
        await crew.spawn()
    assert (no.value.tier, no.value.current, no.value.maximum) == (tier, most, most)
    await crew.manager.terminate(first.instance_id)
    last = await crew.spawn()
    active = await crew.manager.get_active_instances()
    assert {one.instance_id for one in active} == {one.instance_id for one in (*others, last)}


async def test_terminate_graceful_shutdown_releases_resources(crew: Crew) -> None:
    one = await crew.spawn()
    path = (await crew.do(one, "know"))["workspace"]
    result = await crew.manager.terminate(one.instance_id)
    assert result.success
    assert result.was_graceful
    assert result.error_message is None
    assert result.final_instance == await crew.get(one)
    assert await crew.state(one) is _A.TERMINATED
    assert agent_threads() == []
    assert path.endswith(str(one.instance_id))
    assert not await asyncio.to_thread(Path(path).exists)
    assert (await crew.manager.get_statistics()).active_instances == 0


async def test_terminate_timeout_force_forcibly_terminates(crew: Crew) -> None:
    one = await crew.spawn({"shutdown": "hang"})
    options = TerminationOptions(graceful_timeout=timedelta(seconds=1))
    result = await passing(crew.clock, crew.manager.terminate(one.instance_id, options), 10)
    assert result.success
    assert not result.was_graceful
    assert result.duration >= timedelta(seconds=1)
    assert await crew.state(one) is _A.TERMINATED


async def test_spawn_full_lifecycle_completes_successfully(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ostler.lifecycle")
    one = await crew.spawn()
    assert await crew.do(one, "echo", value={"hello": "Ada"}) == {"hello": "Ada"}
    assert (await crew.manager.terminate(one.instance_id)).was_graceful
    assert (await crew.get(one)).state is _A.TERMINATED
    told = [event.new_state for event in await crew.events(one) if isinstance(event, AgentStateChangedEvent)]
    assert told == [_A.READY, _A.PROCESSING, _A.WAITING, _A.TERMINATING, _A.TERMINATED]
    changes = logged(caplog, "state_changed")
    assert [(change["from_state"], change["to_state"]) for change in changes] == [
        (_A.INITIALIZING, _A.READY),
        (_A.READY, _A.PROCESSING),
        (_A.PROCESSING, _A.WAITING),
        (_A.WAITING, _A.TERMINATING),
        (_A.TERMINATING, _A.TERMINATED),
    ]


async def test_observe_state_changes_streams_events(crew: Crew) -> None:
    watching = crew.manager.observe()
    one = await crew.spawn()
    seen = []
    async for event in crew.manager.observe(one.instance_id, after=0):
        assert not isinstance(event, EventsMissed)
        seen.append(event)
        if isinstance(event, AgentStateChangedEvent) and event.previous_state is _A.INITIALIZING:
            await crew.do(one, "echo")
            await crew.manager.suspend(one.instance_id)
            await crew.manager.resume(one.instance_id)
            await crew.manager.terminate(one.instance_id)
    assert isinstance(seen[0], AgentSpawnedEvent)
    assert isinstance(seen[-1], AgentTerminatedEvent)
    assert seen[-1].was_graceful
    moves = [(event.previous_state, event.new_state) for event in seen if isinstance(event, AgentStateChangedEvent)]
    path = [_A.INITIALIZING, _A.READY, _A.PROCESSING, _A.WAITING, _A.SUSPENDED, _A.READY, _A.TERMINATING, _A.TERMINATED]
    assert moves == list(pairwise(path))
    assert [event.sequence for event in seen] == sorted({event.sequence for event in seen})
    live = [await anext(watching) for _ in seen]
    await watching.aclose()
    assert live == seen


async def test_concurrent_spawns_enforces_limit(crew: Crew) -> None:
    tier, most = _plan(crew)
    await crew.set_tier(tier)
    request = crew.request()
    outcomes = await asyncio.gather(*(crew.manager.spawn(request) for _ in range(most + 3)), return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, LicenseError)]
    assert len(refused) == 3
    for one in refused:
        assert f"the {tier} plan admits {most} active agents and {most} are active" in str(one)
        assert (one.tier, one.current, one.maximum) == (tier, most, most)
    active = await crew.manager.get_active_instances()
    assert len(active) == most
    assert {one.state for one in active} == {_A.READY}
    everything = await crew.manager.get_active_instances(GetInstancesFilter(include_terminated=True))
    assert len(everything) == most, "what is refused leaves no record"
    assert crew.counted("ostler_lifecycle_license_rejections_total") == 3


@pytest.mark.parametrize("level", [IsolationLevel.NONE], ids=str)
async def test_query_1000_instances_under_100ms(crew: Crew) -> None:
    request = crew.request()
    options = request.options or AgentSpawnOptions()
    for batch in range(10):
        tagged = request.evolve(options=options.evolve(tags=(f"batch-{batch}",)))
        await asyncio.gather(*(crew.manager.spawn(tagged) for _ in range(100)))
    filters = (
        (GetInstancesFilter(), 100),
        (GetInstancesFilter(tag="BATCH-3"), 100),
        (GetInstancesFilter(state=_A.READY, name_pattern="actor*"), 100),
        (GetInstancesFilter(definition_id=request.agent_definition_id, limit=50, offset=500), 50),
    )
    for wanted, count in filters:
        took = []
        for _ in range(100):
            began = time.perf_counter()
            assert len(await crew.manager.get_active_instances(wanted)) == count
            took.append(time.perf_counter() - began)
        assert p95(took) < 0.1, wanted
    everything = await crew.manager.get_active_instances(GetInstancesFilter(limit=1000))
    assert len({one.instance_id for one in everything}) == 1000


async def test_spawn_under_2_seconds(crew: Crew) -> None:
    request = crew.request()
    took = []
    for _ in range(100):
        began = time.perf_counter()
        one = await crew.manager.spawn(request)
        took.append(time.perf_counter() - began)
        assert one.state is _A.READY
    assert p95(took) < 2


# --- criteria that are no scenario -------------------------------------------------------------------


async def test_get_active_instances_returns_all_instances_matching_filter(crew: Crew) -> None:
    review = await crew.spawn(tags=("Review",), name="review of 123")
    other = await crew.spawn(tags=("other",))
    ended = await crew.spawn(tags=("review",))
    await crew.manager.terminate(ended.instance_id)

    async def found(**wanted: object) -> set[object]:
        matching = await crew.manager.get_active_instances(GetInstancesFilter(**wanted))  # type: ignore[arg-type]  # whatever filter is asked
        return {one.instance_id for one in matching}

    assert await found() == {review.instance_id, other.instance_id}
    assert await found(tag="REVIEW") == {review.instance_id}
    assert await found(tag="review", include_terminated=True) == {review.instance_id, ended.instance_id}
    assert await found(state=_A.TERMINATED) == {ended.instance_id}
    assert await found(name_pattern="*OF 1*") == {review.instance_id}
    assert await found(definition_id=uuid4()) == set()


@pytest.mark.parametrize("level", [IsolationLevel.CONTAINER], ids=str)
async def test_container_isolation_requires_enterprise_tier(crew: Crew) -> None:
    for tier in (Tier.CORE, Tier.WRITER_PRO, Tier.TEAMS):
        await crew.set_tier(tier)
        with pytest.raises(LicenseError, match=f"the {tier} plan does not admit container isolation; it needs enterp"):
            await crew.spawn()
    await crew.set_tier(Tier.ENTERPRISE)
    with pytest.raises(InvalidOperationError, match="isolation level container is not part of this version"):
        await crew.spawn()
    assert await crew.manager.get_active_instances(GetInstancesFilter(include_terminated=True)) == []


async def test_unauthorized_users_cannot_spawn_agents(crew: Crew) -> None:
    request = crew.request()
    for roles in ((), (Role.VIEWER,), (Role.REVIEWER,), (Role.AGENT,)):
        somebody = await crew.as_somebody(*roles)
        with pytest.raises(AuthorizationError, match=r"somebody does not have the permission agents\.spawn"):
            await somebody.spawn(request)
    assert crew.stage.said == []
    assert (await (await crew.as_somebody(Role.OPERATOR)).spawn(request)).state is _A.READY
