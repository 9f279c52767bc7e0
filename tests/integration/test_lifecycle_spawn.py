"""Spawn: what is refused before anything lives, what fails on the way, keys, and what reaches the agent."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from lifecycle_agents import SlowlyMade, Stage, Unmade, greet
from lifecycle_ground import (
    LEVELS,
    NONE,
    PROCESS,
    THREAD,
    Crew,
    S,
    agent_threads,
    at,
    do,
    opened,
    until,
    workdirs,
)

from ostler import (
    AgentErrorEvent,
    AgentHandle,
    AgentInitializationError,
    AgentNotFoundError,
    AgentPriority,
    AgentSpawnedEvent,
    AgentSpawnOptions,
    AttemptOutcome,
    CommandSpec,
    ConflictError,
    Enforcement,
    GetInstancesFilter,
    HealthCheckConfig,
    IdempotencyConflictError,
    InitializationTimeoutError,
    IsolationLevel,
    LicenseError,
    OstlerError,
    ProbeType,
    ResourceLimits,
    RestartPolicy,
    RestartPolicyType,
    Seams,
    SpawnRequest,
    TerminationOptions,
    Tier,
    ValidationError,
)
from ostler.lifecycle.messages import Join
from ostler.store.workspaces import get_definition
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio


def fields(error: ValidationError) -> set[str]:
    return {fault.field for fault in error.faults}  # type: ignore[attr-defined]  # each is a Fault, which has its field


async def failed_one(crew: Crew, why: str, outcome: AttemptOutcome) -> AgentHandle:
    """The one spawn that failed; and nothing else of it but its record."""
    agent = await crew.only()
    record = await agent.record()
    assert record.state is S.FAILED
    assert why in (record.error_message or "")
    (attempt,) = await crew.attempts(agent)
    assert attempt.outcome is outcome
    assert why in (attempt.detail or "")
    assert await agent.waits() == []
    assert (await crew.manager.get_statistics()).active_instances == 0
    assert workdirs(crew.home) == []
    await until(lambda: not agent_threads())
    return agent


# --- refused before anything lives -------------------------------------------------------------------


@at(NONE)
async def test_all_faults_of_a_request_are_told_at_once(crew: Crew) -> None:
    limits = ResourceLimits(max_memory_mb=1, max_concurrent_tasks=1000, execution_timeout=timedelta(0))
    request = crew.request().evolve(
        agent_definition_id=UUID(int=0),
        options=AgentSpawnOptions(
            name="", tags=("not a tag!",), resource_limits=limits, initialization_timeout=timedelta(days=1)
        ),
        context={"a": object()},
    )
    with pytest.raises(ValidationError) as told:
        await crew.manager.spawn(request)
    assert {
        "agent_definition_id",
        "context.a",
        "options.name",
        "options.tags.0",
        "options.initialization_timeout",
        "options.resource_limits.max_memory_mb",
        "options.resource_limits.max_concurrent_tasks",
        "options.resource_limits.execution_timeout",
    } <= fields(told.value)
    assert (await crew.manager.get_statistics()).total_spawned == 0


@pytest.mark.parametrize("value", [None, "x", 5, {}], ids=repr)
@at(NONE)
async def test_what_is_no_request_is_refused(crew: Crew, value: Any) -> None:
    with pytest.raises(ValidationError, match="request must be of type SpawnRequest"):
        await crew.manager.spawn(value)


@at(NONE)
async def test_an_unknown_definition_is_not_found_and_the_nearest_name_is_told(crew: Crew) -> None:
    crew.request()
    with pytest.raises(AgentNotFoundError, match="actor"):
        await crew.manager.spawn(SpawnRequest(agent_definition_id="actr"))
    with pytest.raises(AgentNotFoundError):
        await crew.manager.spawn(SpawnRequest(agent_definition_id=UUID(int=77)))


async def test_a_limit_that_the_level_cannot_hold_is_refused_when_that_is_demanded(crew: Crew) -> None:
    limits = ResourceLimits(max_cpu_percent=50)
    with pytest.raises(ValidationError, match="choose a higher level, or accept less with min_enforcement") as told:
        await crew.start(min_enforcement=Enforcement.ENFORCED, resource_limits=limits)
    assert {"options.resource_limits.max_memory_mb", "options.resource_limits.max_cpu_percent"} <= fields(told.value)
    assert "options.resource_limits.max_concurrent_tasks" not in fields(told.value)
    assert "options.resource_limits.max_tokens_per_minute" not in fields(told.value), "no limit, nothing to hold"


async def test_a_limit_that_the_level_cannot_hold_is_recorded_as_advisory(crew: Crew) -> None:
    held = (await (await crew.start(resource_limits=ResourceLimits(max_cpu_percent=50))).record()).enforcement
    assert held is not None
    assert held["max_memory_mb"] is Enforcement.ADVISORY
    assert held["max_cpu_percent"] is Enforcement.ADVISORY
    assert held["execution_timeout"] is Enforcement.APPROXIMATED
    assert held["max_concurrent_tasks"] is Enforcement.ENFORCED
    assert set(held) == set(ResourceLimits().to_dict())


@at(NONE)
async def test_limits_above_the_machine_are_refused_and_those_above_the_seeds_are_not(crew: Crew) -> None:
    with pytest.raises(ValidationError, match="the memory of this machine") as told:
        await crew.start(resource_limits=ResourceLimits(max_memory_mb=16 * 1024 * 1024, max_cpu_percent=102_400))
    assert fields(told.value) == {
        "options.resource_limits.max_memory_mb",
        "options.resource_limits.max_cpu_percent",
    }
    agent = await crew.start(resource_limits={"max_memory_mb": "9G", "execution_timeout": "7d"})
    assert await crew.state(agent) is S.READY


@at(NONE)
async def test_a_definition_may_ask_for_more_isolation_than_the_spawn(crew: Crew) -> None:
    about = {"min_isolation": THREAD}
    with pytest.raises(ValidationError, match="must be at least thread, which the definition actor asks for"):
        await crew.start(about=about)
    assert await crew.state(await crew.start(about=about, isolation_level=THREAD)) is S.READY


@at(NONE)
async def test_options_are_laid_over_those_of_the_definition_field_by_field(crew: Crew) -> None:
    policy = RestartPolicy.immediate()
    defaults = AgentSpawnOptions(
        isolation_level=NONE,
        resource_limits=ResourceLimits(max_concurrent_tasks=3, max_memory_mb=100),
        restart_policy=policy,
        tags=("from-definition",),
    )
    crew.request(about={"defaults": defaults})
    asked = AgentSpawnOptions(resource_limits=ResourceLimits(max_concurrent_tasks=4), name="ada")
    record = await crew.manager.spawn(
        SpawnRequest(agent_definition_id="actor", options=asked, context={"stage": str(crew.stage.directory)})
    )
    options = record.spawn_options
    assert options is not None
    assert options.resource_limits is not None
    assert (options.resource_limits.max_concurrent_tasks, options.resource_limits.max_memory_mb) == (4, 100)
    assert (options.restart_policy, options.isolation_level, options.name) == (policy, NONE, "ada")
    assert record.tags == ("from-definition",)
    bare = await crew.manager.spawn(
        SpawnRequest(agent_definition_id="actor", context={"stage": str(crew.stage.directory)})
    )
    assert bare.spawn_options == defaults


@pytest.mark.parametrize(
    ("tier", "options", "needs"),
    [
        (Tier.CORE, {"isolation_level": PROCESS}, "process isolation; it needs teams"),
        (Tier.WRITER_PRO, {"isolation_level": PROCESS}, "process isolation; it needs teams"),
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
@at(NONE)
async def test_what_a_plan_does_not_admit_is_named_with_the_plan_that_does(
    crew: Crew, tier: Tier, options: dict[str, Any], needs: str
) -> None:
    await crew.set_tier(tier)
    with pytest.raises(LicenseError, match=f"the {tier} plan does not admit {needs}") as told:
        await crew.start(**options)
    assert told.value.tier == tier
    assert crew.metric("ostler_lifecycle_license_rejections_total") == 1
    assert (await crew.manager.get_statistics()).total_spawned == 0


async def test_commands_and_local_classes_need_the_right_level(crew: Crew) -> None:
    with pytest.raises(ValidationError, match="cannot run a command agent; use process"):
        await crew.start(agent=CommandSpec(argv=("true",)), about={"name": "true"})
    with pytest.raises(OstlerError, match="top of a module"):
        await crew.manager.start(lambda request, context: request, isolation="process")  # noqa: ARG005 - an agent takes both


# --- failed on the way -------------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_failed_initialisation_leaves_nothing_but_its_record(crew: Crew) -> None:
    await crew.set_tier(Tier.TEAMS if crew.level is PROCESS else Tier.CORE)
    for _ in range(3):
        with pytest.raises(AgentInitializationError, match="its initialisation failed: ValueError: not today"):
            await crew.start({"initialize": "fail"})
    assert workdirs(crew.home) == []
    assert agent_threads() == []
    for _ in range(2):
        await crew.start()
    failed = await crew.manager.get_active_instances(GetInstancesFilter(state=S.FAILED))
    assert [one.error_message for one in failed] == ["its initialisation failed: ValueError: not today"] * 3
    assert crew.metric("ostler_lifecycle_spawn_failures_total") == 3
    statistics = await crew.manager.get_statistics()
    assert statistics.total_spawned == 2, "a failed start is no spawn"
    assert len(await crew.events(None, AgentSpawnedEvent)) == 2


@at(*LEVELS)
async def test_a_failed_start_says_why_with_the_trace(crew: Crew) -> None:
    with pytest.raises(AgentInitializationError) as told:
        await crew.start({"initialize": "fail"}, restart_policy=RestartPolicy.immediate())
    assert "not today" in (told.value.stack_trace or "")
    agent = await failed_one(crew, "not today", AttemptOutcome.ERROR)
    (error,) = await crew.events(agent, AgentErrorEvent)
    assert error.exception_type == "ValueError"
    assert "not today" in (error.stack_trace or "")
    assert not error.is_recoverable, "its caller was told, so no policy brings it back"


@at(*LEVELS)
async def test_a_constructor_that_fails_is_a_failed_initialisation(crew: Crew) -> None:
    with pytest.raises(AgentInitializationError, match="cannot be made"):
        await crew.start(agent=Unmade)
    await failed_one(crew, "cannot be made", AttemptOutcome.ERROR)


@at(*LEVELS)
async def test_an_agent_that_exits_while_it_initialises_takes_nothing_along(crew: Crew) -> None:
    with pytest.raises(AgentInitializationError, match="it ended while it was initialising"):
        await crew.start({"initialize": "exit"})
    await failed_one(crew, "SystemExit", AttemptOutcome.ERROR)


async def test_an_error_of_any_length_fails_a_spawn_as_it_should(crew: Crew) -> None:
    with pytest.raises(AgentInitializationError, match="its initialisation failed"):
        await crew.start({"initialize": "long error"})
    await failed_one(crew, "xxxxxxxxxx", AttemptOutcome.ERROR)


@at(*LEVELS)
@pytest.mark.parametrize("quirk", ["hang", "stubborn"])
async def test_an_initialisation_that_takes_too_long_is_ended(crew: Crew, quirk: str) -> None:
    spawning = crew.start({"initialize": quirk}, initialization_timeout=timedelta(seconds=1))
    with pytest.raises(InitializationTimeoutError, match="not ready within 1 s; raise initialization_timeout") as told:
        await crew.passes(spawning, 20)
    assert isinstance(told.value, TimeoutError)
    crew.stage.release()
    await failed_one(crew, "not ready within 1 s", AttemptOutcome.TIMEOUT)


@at(THREAD)
async def test_making_the_agent_counts_as_part_of_its_start(crew: Crew) -> None:
    spawning = crew.start(agent=SlowlyMade, initialization_timeout=timedelta(milliseconds=200))
    with pytest.raises(InitializationTimeoutError):
        await crew.passes(spawning, 10)


# --- callers that give up ----------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_caller_that_gives_up_leaves_nothing(crew: Crew) -> None:
    spawning = crew.begin(crew.start({"initialize": "hang"}))
    await until(lambda: "initialize" in crew.stage.said)
    spawning.cancel()
    await asyncio.wait([spawning])
    assert spawning.cancelled()
    await until(lambda: "cancelled" in crew.stage.said or crew.level is PROCESS)
    await failed_one(crew, "its spawn was called off", AttemptOutcome.STOPPED)


@pytest.mark.parametrize(
    "point",
    [
        "spawn.intent.before",
        "spawn.intent.after",
        "spawn.start.before",
        "spawn.start.after",
        "spawn.ready.before",
        "spawn.ready.after",
    ],
)
@at(*LEVELS)
async def test_a_caller_that_gives_up_at_any_step_leaves_nothing(
    home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel, point: str
) -> None:
    callers: list[asyncio.Task[Any]] = []

    def fault(name: str) -> None:
        if name == point:
            callers[0].cancel()

    async with opened(Crew(home, clock, stage, level), seams=Seams(clock=clock, fault=fault)) as crew:
        # The clock is driven while a real process starts, however long that takes.
        callers.append(crew.begin(crew.start(initialization_timeout=timedelta(minutes=5))))
        await crew.passes(asyncio.wait(callers), 290)
        assert callers[0].cancelled()

        async def closed() -> bool:
            found = await crew.manager.get_statistics()
            return (found.active_instances, found.by_state[S.FAILED] + found.by_state[S.TERMINATED]) == (0, 1)

        await until(closed)
        assert workdirs(home) == []
        await until(lambda: not agent_threads())


# --- the same key ------------------------------------------------------------------------------------


async def test_the_same_key_is_the_same_instance(crew: Crew) -> None:
    request = crew.request()
    first = await crew.manager.spawn(request, idempotency_key="once")
    assert await crew.manager.spawn(request, idempotency_key="once") == first
    assert (await crew.manager.spawn(request, idempotency_key="twice")).instance_id != first.instance_id
    assert crew.stage.said.count("initialize") == 2
    await crew.manager.terminate(first.instance_id)
    late = await crew.manager.spawn(request, idempotency_key="once")
    assert (late.instance_id, late.state) == (first.instance_id, S.TERMINATED)


async def test_the_same_key_at_once_is_one_start(crew: Crew) -> None:
    request = crew.request()
    spawning = [crew.begin(crew.manager.spawn(request, idempotency_key="once")) for _ in range(5)]
    records = await asyncio.gather(*spawning)
    assert {one.instance_id for one in records} == {records[0].instance_id}
    assert {one.state for one in records} == {S.READY}
    assert crew.stage.said.count("initialize") == 1


async def test_the_same_key_with_another_request_is_refused(crew: Crew) -> None:
    await crew.start({"a": 1}, key="once")
    with pytest.raises(IdempotencyConflictError, match="'once' was used with another request"):
        await crew.start({"a": 2}, key="once")
    assert (await crew.manager.get_statistics()).total_spawned == 1


async def test_a_key_is_remembered_by_the_next_manager(crew: Crew) -> None:
    first = await crew.start(key="once")
    await crew.reopen()
    again = await crew.start(key="once")
    assert again.instance_id == first.instance_id
    assert await crew.state(again) is S.TERMINATED
    assert crew.stage.said.count("initialize") == 1
    assert await crew.state(await crew.start(key="another")) is S.READY


async def test_a_start_that_failed_fails_for_every_caller_of_its_key(crew: Crew) -> None:
    async def refusal() -> OstlerError:
        with pytest.raises(OstlerError) as caught:
            await crew.start({"initialize": "fail"}, key="once")
        return caught.value

    errors = list(await asyncio.gather(*(refusal() for _ in range(3))))
    errors.append(await refusal())
    await crew.reopen()
    errors.append(await refusal())
    assert {(type(one), str(one)) for one in errors} == {
        (AgentInitializationError, "its initialisation failed: ValueError: not today")
    }
    assert crew.stage.said.count("initialize") == 1, "the same key is the same instance, also where it failed"


async def test_a_start_that_took_too_long_is_told_as_such_again(crew: Crew) -> None:
    def spawning() -> Any:
        return crew.start({"initialize": "hang"}, key="once", initialization_timeout=timedelta(seconds=5))

    with pytest.raises(InitializationTimeoutError) as first:
        await crew.passes(spawning(), 20)
    with pytest.raises(InitializationTimeoutError) as again:
        await spawning()
    assert str(again.value) == str(first.value)


async def test_one_that_was_terminated_while_it_started_never_became_ready(crew: Crew) -> None:
    first = crew.begin(crew.start({"initialize": "hang"}, key="once"))
    await until(lambda: "initialize" in crew.stage.said)
    second = crew.begin(crew.start({"initialize": "hang"}, key="once"))
    result = await (await crew.only()).stop()
    assert result.success
    for spawning in (first, second):
        with pytest.raises(AgentInitializationError, match="terminated while it was starting"):
            await spawning
    with pytest.raises(AgentInitializationError, match="terminated while it was starting"):
        await crew.start({"initialize": "hang"}, key="once")


async def test_one_that_was_brought_back_by_hand_is_the_answer_to_its_key(crew: Crew) -> None:
    with pytest.raises(AgentInitializationError):
        await crew.start({"bad_attempts": [1]}, key="once")
    failed = await crew.only()
    await failed.restart()
    again = await crew.start({"bad_attempts": [1]}, key="once")
    assert again.instance_id == failed.instance_id
    assert await crew.state(again) is S.READY


@pytest.mark.parametrize("known", [False, True])
async def test_a_caller_that_goes_as_the_answer_comes_leaves_only_what_was_there(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """The reply is given, and its caller is cancelled before it can take it."""
    if known:
        await crew.start(key="once")
    answer = Join.answer
    callers: list[asyncio.Task[Any]] = []

    def and_then_cancelled(join: Join, value: Any) -> None:
        answer(join, value)
        callers[0].cancel()

    monkeypatch.setattr(Join, "answer", and_then_cancelled)
    callers.append(crew.begin(crew.start(key="once")))
    await asyncio.wait(callers)
    assert callers[0].cancelled()
    await crew.reaches(await crew.only(), S.READY if known else S.TERMINATED)


# --- what reaches the agent, and what is written -----------------------------------------------------


@at(*LEVELS)
async def test_name_context_workdir_and_variables_reach_the_agent(crew: Crew, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    agent = await crew.start(
        {"analysisDepth": "deep"},
        name="Code Review",
        env={"OSTLER_TEST_VARIABLE": "here"},
        workdir=str(own),
        resource_limits=ResourceLimits(max_worker_threads=7),
    )
    known = await agent.ask(do("know"))
    assert (known["name"], known["depth"], known["attempt"]) == ("Code Review", "deep", 1)
    assert known["instance_id"] == str(agent.instance_id)
    assert known["env"] == {"OSTLER_TEST_VARIABLE": "here"}
    assert (known["workdir"], known["threads"]) == (str(own), 7)
    if crew.level is PROCESS:
        assert (known["variable"], known["cwd"]) == ("here", str(own))
    await agent.stop()
    assert own.is_dir(), "the instance neither made it nor removes it"


@at(*LEVELS)
async def test_the_workdir_is_a_private_directory_in_the_home_and_kept_with_what_is_in_it(crew: Crew) -> None:
    agent, empty = await crew.start(), await crew.start()
    path = Path((await agent.ask(do("know")))["workdir"])
    assert path == crew.home / "work" / str(agent.instance_id)
    assert path.stat().st_mode & 0o777 == 0o700
    await agent.ask(do("write", name="notes"))
    await empty.ask(do("know"))
    await agent.stop()
    await empty.stop()
    assert workdirs(crew.home) == [str(agent.instance_id)]
    assert (path / "notes").read_text() == "kept"


async def test_a_name_is_made_where_none_is_given_and_tags_are_kept_without_case_and_twins(crew: Crew) -> None:
    first = await (await crew.start(tags=("Code-Review", "code-review", "PR-123"))).record()
    second = await (await crew.start()).record()
    assert first.name is not None
    assert first.name.startswith("actor-")
    assert first.name != second.name
    assert sorted(first.tags) == ["code-review", "pr-123"]


async def test_the_whole_manifest_is_kept_with_the_definition(crew: Crew) -> None:
    for version in ("7", "8"):
        agent = await crew.start(about={"description": "does as told", "version": version})
        record = await agent.record()
        known = await crew.manager.store.read(get_definition, record.definition_id)
        assert known is not None
        assert (known.name, known.kind, known.manifest["version"]) == ("actor", "python", version)
        assert known.source == "lifecycle_agents:Actor"


@at(THREAD)
async def test_each_agent_has_a_thread_of_its_own(crew: Crew) -> None:
    agents = [await crew.start() for _ in range(3)]
    assert len({(await agent.ask(do("know")))["thread"] for agent in agents}) == 3


@at(PROCESS)
async def test_each_agent_has_a_process_of_its_own(crew: Crew) -> None:
    agents = [await crew.start() for _ in range(3)]
    assert len({(await agent.ask(do("know")))["pid"] for agent in agents}) == 3


async def test_ended_instances_stay_readable_also_by_the_next_manager(crew: Crew) -> None:
    agent = await crew.start(name="the first")
    await agent.stop()
    ended = await agent.record()
    assert (ended.state, ended.terminated_at is None) == (S.TERMINATED, False)
    manager = await crew.reopen()
    assert await manager.get_instance(ended.instance_id) == ended
    assert await manager.get_active_instances() == []
    assert await manager.get_active_instances(GetInstancesFilter(include_terminated=True)) == [ended]
    assert await manager.get_instance(UUID(int=5)) is None


async def test_an_instance_is_named_by_its_id_a_part_of_it_or_its_name(crew: Crew) -> None:
    agent = await crew.start(name="ada")
    text = str(agent.instance_id)
    for name in (agent.instance_id, text, text[-8:], "ada"):
        found = await crew.manager.get_instance(name)
        assert found is not None
        assert found.instance_id == agent.instance_id
    await crew.start(name="ada")
    with pytest.raises(OstlerError, match="names 2 instances"):
        await crew.manager.get_instance("ada")


# --- the short way in --------------------------------------------------------------------------------


@at(*LEVELS)
async def test_start_takes_words_as_people_write_them(crew: Crew) -> None:
    manager = crew.manager
    async with manager.start(
        greet,
        name="ada",
        isolation=crew.level.value,
        memory="256M",
        cpu=0.5,
        timeout="30s",
        tasks=2,
        restart="immediate",
    ) as agent:
        assert await agent.ask("you") == "hello you from ada"
        options = (await agent.record()).spawn_options
        assert options is not None
        assert options.resource_limits == ResourceLimits(
            max_memory_mb=256, max_cpu_percent=50, execution_timeout=timedelta(seconds=30), max_concurrent_tasks=2
        )
        assert options.restart_policy == RestartPolicy.immediate()
    ended = await agent.record()
    assert ended.state is S.TERMINATED
    assert (await agent.ended()).state is S.TERMINATED


async def test_start_takes_a_name_a_manifest_and_a_file(crew: Crew, tmp_path: Path) -> None:
    manager = crew.manager
    manifest = manager.registry.register(greet, name="greeter")
    for what in ("greeter", manifest, manifest.id, str(manifest.id)):
        async with manager.start(what, isolation=crew.level.value) as agent:
            assert (await agent.record()).definition_id == manifest.id
    with pytest.raises(AgentNotFoundError, match="greeter"):
        await manager.start("greter")
    with pytest.raises(OstlerError):
        await manager.start(tmp_path / "missing.md")


@at(PROCESS)
async def test_start_takes_a_list_of_words(crew: Crew) -> None:
    async with crew.manager.start(["echo", "{prompt}"], name="echo") as agent:
        answer = await agent.ask("hello")
        assert (answer["exit_code"], answer["output"]) == (0, "hello\n")


async def test_a_block_that_raises_stops_its_agent(crew: Crew) -> None:
    with pytest.raises(KeyError):
        async with crew.manager.start(greet, name="ada", isolation=crew.level.value) as agent:
            raise KeyError("out")
    assert (await agent.record()).state is S.TERMINATED


async def test_another_agent_under_the_same_name_is_refused(crew: Crew) -> None:
    crew.manager.registry.register(greet, name="twice")
    with pytest.raises(ConflictError, match="twice is taken"):
        crew.manager.registry.register(SlowlyMade, name="twice")


# --- many at once ------------------------------------------------------------------------------------

AT_ONCE = 8


@at(PROCESS)
async def test_starts_take_turns_by_priority_and_a_hanging_one_gives_its_turn_up(crew: Crew) -> None:
    gate = crew.runtime.start_gate
    hanging = [crew.begin(crew.start(agent=SlowlyMade)) for _ in range(AT_ONCE)]
    await until(lambda: gate._inside == AT_ONCE)  # noqa: SLF001 - nothing outside tells
    low = crew.begin(crew.start(priority=AgentPriority.LOW))
    await until(lambda: gate.waiting == 1)
    high = crew.begin(crew.start(priority=AgentPriority.CRITICAL))
    await until(lambda: gate.waiting == 2)
    waiting = crew.begin(crew.start(name="the third"))
    await until(lambda: gate.waiting == 3)
    (third,) = await crew.manager.get_active_instances(GetInstancesFilter(name_pattern="the third"))
    assert (await crew.manager.terminate(third.instance_id, TerminationOptions.immediate())).success
    with pytest.raises(AgentInitializationError):
        await waiting
    assert gate.waiting == 2
    crew.advance(0.25)
    await asyncio.gather(high, low)
    records = [await one.record() for one in (high.result(), low.result())]
    begun = [(await crew.attempts(one))[0].started_at for one in (high.result(), low.result())]
    assert [record.state for record in records] == [S.READY, S.READY]
    assert begun[0] is not None
    assert not any(task.done() for task in hanging)
