"""A spawn: what it refuses, what it records, what it hands to the agent, and what a failed one leaves: nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from lifecycle_ground import LEVELS, Actor, Crew, Stage, agent_threads, opened

from ostler import (
    AgentInitializationError,
    AgentInstance,
    AgentPriority,
    AgentSpawnOptions,
    AgentState,
    AttemptOutcome,
    Enforcement,
    GetInstancesFilter,
    HealthCheckConfig,
    IdempotencyConflictError,
    InitializationTimeoutError,
    IsolationLevel,
    LicenseError,
    ProbeType,
    ResourceLimits,
    RestartPolicy,
    RestartPolicyType,
    Seams,
    SpawnRequest,
    Tier,
    ValidationError,
)
from ostler.testing.clock import ManualClock
from ostler.testing.isolation_suite.ground import passing

pytestmark = pytest.mark.anyio

NONE = pytest.mark.parametrize("level", [IsolationLevel.NONE], ids=str)
THREAD = pytest.mark.parametrize("level", [IsolationLevel.THREAD], ids=str)


async def failed_one(crew: Crew, why: str, outcome: AttemptOutcome) -> AgentInstance:
    """The record of the one spawn that failed; and nothing else of it."""
    (record,) = await crew.manager.get_active_instances(GetInstancesFilter(include_terminated=True))
    assert record.state is AgentState.FAILED
    assert why in (record.error_message or "")
    (attempt,) = await crew.manager.store.list_attempts(record.instance_id)
    assert attempt.outcome is outcome
    assert why in (attempt.detail or "")
    assert agent_threads() == []
    assert await crew.manager.get_waits(record.instance_id) == []
    assert (await crew.manager.get_statistics()).active_instances == 0
    return record


def rooms(home: Path) -> list[str]:
    work = home / "work"
    return [one.name for one in work.iterdir()] if work.exists() else []


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# --- refused before anything lives -------------------------------------------------------------------


async def test_all_faults_of_a_request_are_told_at_once(crew: Crew) -> None:
    limits = ResourceLimits(max_memory_mb=1, max_concurrent_tasks=1000, execution_timeout=timedelta(0))
    request = crew.request(
        name="", tags=("not a tag!",), resource_limits=limits, initialization_timeout=timedelta(days=1)
    ).evolve(agent_definition_id=UUID(int=0))
    with pytest.raises(ValidationError) as told:
        await crew.manager.spawn(request)
    fields = {fault.field for fault in told.value.faults}  # type: ignore[attr-defined]  # each is a Fault, which has its field
    assert {"agent_definition_id", "options.name", "options.tags.0", "options.initialization_timeout"} <= fields
    assert {
        "options.resource_limits.max_memory_mb",
        "options.resource_limits.max_concurrent_tasks",
        "options.resource_limits.execution_timeout",
    } <= fields
    assert (await crew.manager.get_statistics()).total_spawned == 0


async def test_a_limit_that_the_level_cannot_hold_is_refused_when_that_is_demanded(crew: Crew) -> None:
    limits = ResourceLimits(max_cpu_percent=50)
    with pytest.raises(ValidationError, match="choose a higher level, or accept less with min_enforcement") as told:
        await crew.spawn(min_enforcement=Enforcement.ENFORCED, resource_limits=limits)
    fields = {fault.field for fault in told.value.faults}  # type: ignore[attr-defined]  # each is a Fault, which has its field
    assert "options.resource_limits.max_memory_mb" in fields
    assert "options.resource_limits.max_cpu_percent" in fields
    assert "options.resource_limits.max_concurrent_tasks" not in fields
    assert "options.resource_limits.max_tokens_per_minute" not in fields, "no limit, nothing to hold"
    assert (await crew.manager.get_statistics()).total_spawned == 0


async def test_a_limit_that_the_level_cannot_hold_is_recorded_as_advisory(crew: Crew) -> None:
    held = (await crew.spawn(resource_limits=ResourceLimits(max_cpu_percent=50))).enforcement
    assert held is not None
    assert held["max_memory_mb"] is Enforcement.ADVISORY
    assert held["max_cpu_percent"] is Enforcement.ADVISORY
    assert held["execution_timeout"] is Enforcement.APPROXIMATED
    assert held["max_concurrent_tasks"] is Enforcement.ENFORCED
    assert set(held) == set(vars(ResourceLimits()))


@NONE
async def test_a_definition_may_ask_for_more_isolation_than_the_spawn(crew: Crew) -> None:
    with pytest.raises(ValidationError, match="must be at least thread, which the definition actor asks for"):
        await crew.spawn(about={"min_isolation": IsolationLevel.THREAD})
    one = await crew.spawn(about={"min_isolation": IsolationLevel.THREAD}, isolation_level=IsolationLevel.THREAD)
    assert one.state is AgentState.READY


@NONE
async def test_what_the_spawn_leaves_open_is_as_the_definition_has_it(crew: Crew) -> None:
    limits = ResourceLimits(max_concurrent_tasks=3)
    policy = RestartPolicy.immediate()
    defaults = AgentSpawnOptions(isolation_level=IsolationLevel.NONE, resource_limits=limits, restart_policy=policy)
    own = ResourceLimits(max_concurrent_tasks=4)
    options = (await crew.spawn(about={"defaults": defaults}, resource_limits=own)).spawn_options
    assert options is not None
    assert options.resource_limits == own
    assert options.restart_policy == policy
    known = crew.manager.registry.find("actor")
    bare = await crew.manager.spawn(SpawnRequest(agent_definition_id=known.id))
    assert bare.spawn_options == defaults


@pytest.mark.parametrize(
    ("tier", "options", "needs"),
    [
        (Tier.CORE, {"isolation_level": IsolationLevel.PROCESS}, "process isolation; it needs teams"),
        (Tier.WRITER_PRO, {"isolation_level": IsolationLevel.PROCESS}, "process isolation; it needs teams"),
        (Tier.TEAMS, {"isolation_level": IsolationLevel.CONTAINER}, "container isolation; it needs enterprise"),
        (
            Tier.CORE,
            {"restart_policy": RestartPolicy(type=RestartPolicyType.LINEAR)},
            "the linear restart policy; it needs writer_pro",
        ),
        (Tier.WRITER_PRO, {"restart_policy": RestartPolicy()}, "the exponential restart policy; it needs teams"),
        (
            Tier.CORE,
            {"health_check": HealthCheckConfig(probe=ProbeType.CUSTOM)},
            "the custom health check; it needs writer_pro",
        ),
        (Tier.TEAMS, {"priority": AgentPriority.HIGH}, "high priority; it needs enterprise"),
    ],
)
@NONE
async def test_what_a_plan_does_not_admit_is_named_with_the_plan_that_does(
    crew: Crew, tier: Tier, options: dict[str, Any], needs: str
) -> None:
    await crew.set_tier(tier)
    with pytest.raises(LicenseError, match=f"the {tier} plan does not admit {needs}") as told:
        await crew.spawn(**options)
    assert told.value.tier == tier
    assert crew.counted("ostler_lifecycle_license_rejections_total") == 1
    assert (await crew.manager.get_statistics()).total_spawned == 0


# --- failed on the way -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [*LEVELS, IsolationLevel.PROCESS], ids=str)
async def test_a_failed_initialisation_leaves_nothing_but_its_record(crew: Crew, home: Path) -> None:
    await crew.set_tier(Tier.TEAMS if crew.level is IsolationLevel.PROCESS else Tier.CORE)
    for _ in range(3):
        with pytest.raises(AgentInitializationError, match="its initialisation failed: ValueError: not today"):
            await crew.spawn({"initialize": "fail"})
    assert rooms(home) == []
    assert agent_threads() == []
    for _ in range(2):
        await crew.spawn()
    failed = await crew.manager.get_active_instances(GetInstancesFilter(state=AgentState.FAILED))
    assert [one.error_message for one in failed] == ["its initialisation failed: ValueError: not today"] * 3
    assert crew.counted("ostler_lifecycle_spawn_failures_total") == 3


async def test_a_failed_start_says_why_with_the_trace(crew: Crew) -> None:
    with pytest.raises(AgentInitializationError):
        await crew.spawn({"initialize": "fail"}, restart_policy=RestartPolicy.immediate())
    record = await failed_one(crew, "not today", AttemptOutcome.ERROR)
    (error,) = [vars(event) for event in await crew.events(record) if event.event_type == "agent_error"]
    assert error["exception_type"] == "ValueError"
    assert "not today" in error["stack_trace"]
    assert not error["is_recoverable"], "whoever spawns is told, so no policy brings it back"


async def test_a_constructor_that_fails_is_a_failed_initialisation(crew: Crew) -> None:
    class Unmade(Actor):
        def __init__(self) -> None:
            raise ValueError("cannot be made")

    with pytest.raises(AgentInitializationError, match="cannot be made"):
        await crew.spawn(agent=Unmade)
    await failed_one(crew, "cannot be made", AttemptOutcome.ERROR)


async def test_an_agent_that_exits_while_it_initialises_takes_nothing_along(crew: Crew) -> None:
    with pytest.raises(AgentInitializationError, match="it ended while it was initialising"):
        await crew.spawn({"initialize": "exit"})
    await failed_one(crew, "SystemExit", AttemptOutcome.ERROR)


@pytest.mark.parametrize("quirk", ["hang", "stubborn"])
async def test_an_initialisation_that_takes_too_long_is_ended(crew: Crew, home: Path, quirk: str) -> None:
    spawning = crew.spawn({"initialize": quirk}, initialization_timeout=timedelta(seconds=1))
    with pytest.raises(InitializationTimeoutError, match="not ready within 1 s; raise initialization_timeout") as told:
        await passing(crew.clock, spawning, 20)
    assert isinstance(told.value, TimeoutError)
    crew.stage.let_go.set()
    for _ in range(1000):
        if not agent_threads():
            break
        await asyncio.sleep(0.002)
    await failed_one(crew, "not ready within 1 s", AttemptOutcome.TIMEOUT)
    assert rooms(home) == []


async def test_a_caller_who_gives_up_leaves_nothing(crew: Crew, home: Path) -> None:
    spawning = asyncio.ensure_future(crew.spawn({"initialize": "hang"}))
    await crew.stage.heard("initialize")
    spawning.cancel()
    await asyncio.wait([spawning])
    assert spawning.cancelled()
    assert "cancelled" in crew.stage.said
    await failed_one(crew, "its start was called off", AttemptOutcome.STOPPED)
    assert rooms(home) == []


@pytest.mark.parametrize(
    "point",
    ["spawn.intent.before", "spawn.intent.after", "spawn.start.before", "spawn.start.after", "spawn.ready.before"],
)
async def test_a_caller_who_gives_up_at_any_step_leaves_nothing(
    home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel, point: str
) -> None:
    callers: list[asyncio.Task[AgentInstance]] = []

    def fault(name: str) -> None:
        if name == point:
            callers[0].cancel()

    async with opened(home, clock, seams=Seams(clock=clock, fault=fault)) as manager:
        crew = Crew(manager, clock, stage, level)
        callers.append(asyncio.ensure_future(crew.spawn()))
        await asyncio.wait(callers)
        assert callers[0].cancelled()
        for _ in range(1000):  # what was on the way to the store is given back behind its back
            if (statistics := await manager.get_statistics()).total_spawned and not statistics.active_instances:
                break
            await asyncio.sleep(0.002)
        assert (statistics.total_spawned, statistics.active_instances) == (1, 0)
        assert agent_threads() == []
        assert rooms(home) == []


async def test_a_caller_who_gives_up_in_the_last_moment_leaves_nothing(
    home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel
) -> None:
    """It is ready, and nobody will ever know its id."""
    callers: list[asyncio.Task[AgentInstance]] = []

    def fault(name: str) -> None:
        if name == "spawn.ready.after":
            callers[0].cancel()

    async with opened(home, clock, seams=Seams(clock=clock, fault=fault)) as manager:
        crew = Crew(manager, clock, stage, level)
        callers.append(asyncio.ensure_future(crew.spawn()))
        await asyncio.wait(callers)
        assert callers[0].cancelled()
        await failed_one(crew, "its start was called off", AttemptOutcome.STOPPED)


# --- the same key ------------------------------------------------------------------------------------


async def test_the_same_key_is_the_same_instance(crew: Crew) -> None:
    request = crew.request()
    first = await crew.manager.spawn(request, idempotency_key="once")
    again = await crew.manager.spawn(request, idempotency_key="once")
    assert again == first
    assert (await crew.manager.spawn(request, idempotency_key="twice")).instance_id != first.instance_id
    assert crew.stage.said.count("initialize") == 2
    await crew.manager.terminate(first.instance_id)
    late = await crew.manager.spawn(request, idempotency_key="once")
    assert late.instance_id == first.instance_id
    assert late.state is AgentState.TERMINATED


async def test_the_same_key_at_once_is_one_start(crew: Crew) -> None:
    request = crew.request()
    spawning = [asyncio.ensure_future(crew.manager.spawn(request, idempotency_key="once")) for _ in range(5)]
    instances = await asyncio.gather(*spawning)
    assert {one.instance_id for one in instances} == {instances[0].instance_id}
    assert {one.state for one in instances} == {AgentState.READY}
    assert crew.stage.said.count("initialize") == 1
    assert (await crew.manager.get_statistics()).total_spawned == 1


async def test_the_same_key_with_another_request_is_refused(crew: Crew) -> None:
    await crew.manager.spawn(crew.request({"a": 1}), idempotency_key="once")
    with pytest.raises(IdempotencyConflictError, match="'once' was already used with another request"):
        await crew.manager.spawn(crew.request({"a": 2}), idempotency_key="once")
    assert (await crew.manager.get_statistics()).total_spawned == 1


async def test_a_key_is_remembered_when_the_manager_is_opened_again(
    home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel
) -> None:
    async with opened(home, clock) as manager:
        first = await manager.spawn(Crew(manager, clock, stage, level).request(), idempotency_key="once")
    async with opened(home, clock) as manager:
        request = Crew(manager, clock, stage, level).request()
        again = await manager.spawn(request, idempotency_key="once")
        assert again.instance_id == first.instance_id
        assert again.state is AgentState.TERMINATED
        assert stage.said.count("initialize") == 1
        later = await manager.spawn(request, idempotency_key="another")
        assert later.state is AgentState.READY


# --- what reaches the agent, and what is written -----------------------------------------------------


async def test_name_and_context_reach_the_agent_whatever_the_case_of_the_keys(crew: Crew) -> None:
    one = await crew.spawn({"analysisDepth": "deep"}, name="Code Review")
    known = await crew.do(one, "know")
    assert known["name"] == "Code Review"
    assert known["depth"] == "deep"
    assert known["attempt"] == 1
    assert known["instance_id"] == str(one.instance_id)


async def test_a_name_is_made_where_none_is_given(crew: Crew) -> None:
    first, second = await crew.spawn(), await crew.spawn()
    assert first.name is not None
    assert first.name.startswith("actor-")
    assert first.name != second.name
    assert (await crew.do(first, "know"))["name"] == first.name


async def test_tags_are_kept_without_case_and_twins(crew: Crew) -> None:
    one = await crew.spawn(tags=("Code-Review", "code-review", "PR-123"))
    assert sorted(one.tags) == ["code-review", "pr-123"]


async def test_the_workspace_is_a_private_directory_in_the_home(crew: Crew, home: Path) -> None:
    one = await crew.spawn()
    assert rooms(home) == [], "made when it is asked for"
    path = Path((await crew.do(one, "know"))["workspace"])
    assert path == home / "work" / str(one.instance_id)
    assert mode(path) == 0o700
    (path / "notes").write_text("kept")
    await crew.manager.terminate(one.instance_id)
    assert (path / "notes").read_text() == "kept", "what an agent has written is not thrown away with it"


async def test_the_definition_is_written_into_the_store(crew: Crew) -> None:
    one = await crew.spawn(about={"description": "does as told", "version": "7"})
    known = await crew.manager.store.get_definition(one.definition_id)
    assert known is not None
    assert known.name == "actor"
    assert known.kind == "python"
    assert known.manifest["version"] == "7"
    await crew.spawn(about={"description": "does as told", "version": "8"})
    known = await crew.manager.store.get_definition(one.definition_id)
    assert known is not None
    assert known.manifest["version"] == "8"


@THREAD
async def test_each_agent_has_a_thread_of_its_own(crew: Crew) -> None:
    ones = [await crew.spawn() for _ in range(3)]
    threads = {(await crew.do(one, "know"))["thread"] for one in ones}
    assert len(threads) == 3


async def test_ended_instances_stay_readable_also_later(
    home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel
) -> None:
    async with opened(home, clock) as manager:
        crew = Crew(manager, clock, stage, level)
        one = await crew.spawn(name="the first")
        await manager.terminate(one.instance_id)
        ended = await manager.get_instance(one.instance_id)
    async with opened(home, clock) as manager:
        assert ended is not None
        assert ended.state is AgentState.TERMINATED
        assert ended.terminated_at is not None
        assert await manager.get_instance(one.instance_id) == ended
        assert await manager.get_active_instances() == []
        assert await manager.get_active_instances(GetInstancesFilter(include_terminated=True)) == [ended]
        assert await manager.get_instance(UUID(int=5)) is None
