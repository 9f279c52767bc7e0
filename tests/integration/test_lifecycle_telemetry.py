"""What is counted and told: statistics, metrics under the seed's names, the eight log templates, logs, settings."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

import pytest
from lifecycle_ground import LEVELS, NONE, PROCESS, THREAD, Crew, S, at, do, logged

from ostler import (
    AgentExecutionError,
    AgentInitializationError,
    AgentNotFoundError,
    AgentState,
    CommandSpec,
    HealthState,
    LicenseError,
    LifecycleSettings,
    PromptBy,
    RestartPolicy,
    SpawnRequest,
    TerminationOptions,
    Tier,
    ValidationError,
)

pytestmark = pytest.mark.anyio

QUICK = TerminationOptions(graceful_timeout=timedelta(seconds=1))


# --- statistics and metrics --------------------------------------------------------------------------


async def test_statistics_have_every_state_and_every_health_as_a_key(crew: Crew) -> None:
    await crew.set_tier(Tier.TEAMS)
    _ready, suspended, ended, failed = [await crew.start() for _ in range(4)]
    await suspended.pause()
    crew.advance(10)
    await ended.stop()
    await crew.crash(failed)
    told = await crew.manager.get_statistics()
    assert set(told.by_state) == set(AgentState)
    assert set(told.by_health) == set(HealthState)
    assert told.active_instances == 2
    assert {state: count for state, count in told.by_state.items() if count} == {
        S.READY: 1,
        S.SUSPENDED: 1,
        S.TERMINATED: 1,
        S.FAILED: 1,
    }
    assert (told.max_concurrent, told.total_spawned, told.total_terminated, told.total_restarts) == (20, 4, 1, 0)
    assert told.average_uptime >= timedelta(seconds=10)
    await failed.restart()
    told = await crew.manager.get_statistics()
    assert (told.active_instances, told.total_restarts) == (3, 1)
    await crew.set_tier(Tier.ENTERPRISE)
    assert (await crew.manager.get_statistics()).max_concurrent is None


NAMES = (
    "ostler_lifecycle_instances_active",
    'ostler_lifecycle_instances_by_state{state="ready"}',
    'ostler_lifecycle_instances_by_state{state="terminated"}',
    'ostler_lifecycle_instances_by_state{state="failed"}',
    "ostler_lifecycle_spawn_duration_seconds_count",
    "ostler_lifecycle_spawn_count_total",
    "ostler_lifecycle_spawn_failures_total",
    "ostler_lifecycle_terminate_duration_seconds_count",
    "ostler_lifecycle_terminate_count_total",
    "ostler_lifecycle_terminate_forced_total",
    "ostler_lifecycle_restarts_count_total",
    "ostler_lifecycle_license_rejections_total",
)


async def test_metrics_under_the_names_of_the_seed(crew: Crew) -> None:
    agents = [await crew.start() for _ in range(3)]
    with pytest.raises(AgentInitializationError):
        await crew.start({"initialize": "fail"})
    with pytest.raises(AgentNotFoundError):
        await crew.manager.spawn(SpawnRequest(agent_definition_id="unknown"))
    with pytest.raises(ValidationError):
        await crew.manager.spawn("malformed")  # type: ignore[arg-type]  # wrong on purpose
    await crew.set_tier(Tier.CORE)
    with pytest.raises(LicenseError):
        await crew.start()
    await agents[0].stop()
    await crew.manager.terminate(agents[1].instance_id, TerminationOptions.immediate())
    await agents[2].restart()
    await crew.tick(6)  # gauges are read from the store every few seconds
    spawns = (3, 7, 4)  # ready, asked for, failed
    assert [crew.metric(name) for name in NAMES] == [1, 1, 2, 1, *spawns, 2, 2, 1, 1, 1]
    for state in AgentState:
        crew.metric(f'ostler_lifecycle_instances_by_state{{state="{state}"}}')


async def test_gauges_are_there_from_the_beginning_and_after_a_reopen(crew: Crew) -> None:
    agent = await crew.start()
    await crew.crash(agent)
    await crew.reopen()
    assert crew.metric('ostler_lifecycle_instances_by_state{state="failed"}') == 1
    assert crew.metric("ostler_lifecycle_instances_active") == 0


async def test_terminations_of_failed_and_parked_instances_are_counted(crew: Crew) -> None:
    failed, parked = await crew.start(), await crew.start()
    await crew.crash(failed)
    await parked.pause("park")
    for agent in (failed, parked):
        await agent.stop()
    assert crew.metric("ostler_lifecycle_terminate_count_total") == 2
    assert crew.metric("ostler_lifecycle_terminate_forced_total") == 0


# --- the log of the lifecycle ------------------------------------------------------------------------


@at(*LEVELS)
async def test_the_story_of_a_life_in_the_log(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ostler.lifecycle")
    agent = await crew.start()
    crew.advance(5)
    await agent.stop()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "ostler.lifecycle"]
    who = f"InstanceId: {agent.instance_id}"
    definition = (await agent.record()).definition_id
    assert lines[0][0] == "DEBUG"
    assert lines[0][1].startswith(f"[LCM] Spawn request received. DefinitionId: {definition}, Options: {{")
    assert lines[1:] == [
        ("INFO", f"[LCM] Agent state changed. {who}, From: initializing, To: ready"),
        ("INFO", f"[LCM] Agent spawned. {who}, DefinitionId: {definition}, Isolation: {crew.level}"),
        ("INFO", f"[LCM] Agent state changed. {who}, From: ready, To: terminating"),
        ("INFO", f"[LCM] Agent state changed. {who}, From: terminating, To: terminated"),
        ("INFO", f"[LCM] Agent terminated. {who}, WasGraceful: true, Uptime: 5 s"),
    ]


@at(*LEVELS)
async def test_every_move_is_logged(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ostler.lifecycle")
    agent = await crew.start(restart_policy=RestartPolicy.immediate())
    await agent.ask(do("echo"))
    await agent.pause("hold")
    await agent.resume()
    await agent.pause("park")
    await agent.resume()
    await agent.restart()
    await crew.crash(agent)
    await crew.reaches(agent, S.READY, 4)
    await agent.stop()
    logged_moves = [one["to_state"] for one in logged(caplog, "state_changed")]
    assert logged_moves == await crew.moves(agent)


@at(THREAD)
async def test_what_goes_wrong_in_the_log(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ostler.lifecycle")
    with pytest.raises(AgentInitializationError):
        await crew.start({"initialize": "fail"})
    crashed = await crew.start()
    await crew.crash(crashed)
    slow = await crew.start({"shutdown": "hang"})
    await crew.passes(crew.manager.terminate(slow.instance_id, QUICK), 10)
    await crew.set_tier(Tier.CORE)
    await crew.start()
    await crew.start()
    with pytest.raises(LicenseError):
        await crew.start()
    lines = "\n".join(f"{record.levelname} {record.getMessage()}" for record in caplog.records)
    assert "ERROR [LCM] Agent initialization failed. InstanceId: " in lines
    assert "Error: its initialisation failed: ValueError: not today" in lines
    assert f"ERROR [LCM] Agent crashed. InstanceId: {crashed.instance_id}, Error: SystemExit: 3, StackTrace: " in lines
    assert f"WARNING [LCM] Graceful shutdown timeout. InstanceId: {slow.instance_id}, Forcing termination." in lines
    assert "WARNING [LCM] Spawn rejected: concurrent limit exceeded. Current: 2, Max: 2" in lines
    assert all("\n" not in record.getMessage() for record in caplog.records)


async def test_the_termination_of_a_failed_instance_is_in_the_log_too(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ostler.lifecycle")
    gone = await crew.start()
    pending = await crew.start(restart_policy=RestartPolicy(initial_delay=timedelta(minutes=1)))
    for agent in (gone, pending):
        await crew.crash(agent)
        await agent.stop()
    assert [one["instance_id"] for one in logged(caplog, "terminated")] == [gone.instance_id, pending.instance_id]


# --- the log of an agent -----------------------------------------------------------------------------


@at(PROCESS)
async def test_what_an_agent_writes_is_in_its_log_with_its_attempt(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("log", value="first"))
    with pytest.raises(AgentExecutionError):
        await agent.ask(do("fail", text="a failed request"))
    await agent.restart()
    await agent.ask(do("log", value="second"))
    following = crew.begin(_read(crew, agent, follow=True))
    await agent.ask(do("log", value="third"))
    await agent.stop()
    lines = await _read(crew, agent)
    text = "\n".join(line for _, line in lines)
    for word in ("first", "second", "third", "noted first", "a failed request"):
        assert word in text
    noted = next(line for _, line in lines if "noted first" in line)
    assert "INFO" in noted, "time, level and name are with it"
    assert {attempt for attempt, line in lines if line == "first"} == {1}
    assert {attempt for attempt, line in lines if line == "third"} == {2}
    assert [line for _, line in await _read(crew, agent, attempt=1) if line == "second"] == []
    assert (await following)[-1] == lines[-1]


async def _read(crew: Crew, agent: object, **more: object) -> list[tuple[int, str]]:
    handle = crew.manager.handle(agent.instance_id)  # type: ignore[attr-defined]  # a handle
    found = handle.log(**more)  # type: ignore[arg-type]  # as they are given
    if more.get("follow"):
        return await crew.passes(_all(found), 60)
    return await _all(found)


async def _all(stream: object) -> list[tuple[int, str]]:
    return [(line.attempt, line.text) async for line in stream]  # type: ignore[attr-defined]  # an async iterator


@at(PROCESS)
async def test_who_follows_a_log_is_woken_by_the_end_of_the_agent(crew: Crew) -> None:
    """Without the time of the next look, which does not pass here."""
    agent = await crew.start()
    await agent.ask(do("log", value="first"))
    following = crew.begin(_all(agent.log(follow=True)))
    await crew.calm()
    await crew.passes(agent.stop(), 60)
    before = crew.clock.mono()
    assert (1, "first") in await asyncio.wait_for(following, 60)
    assert crew.clock.mono() == before


@at(PROCESS)
async def test_what_a_command_writes_is_in_its_log(crew: Crew) -> None:
    spec = CommandSpec(argv=("sh", "-c", "cat; echo oops >&2"), prompt_by=PromptBy.STDIN)
    agent = await crew.start(agent=spec, about={"name": "cat"})
    await agent.ask("one\n")
    await agent.ask("two\n")
    assert [line for _, line in await _read(crew, agent)] == ["one", "oops", "two", "oops"]


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_ttl": timedelta(0)},
        {"tick": "never"},
        {"hold_timeout": timedelta(days=2)},
        {"restarts_at_once": 0},
        {"outlive": timedelta(days=8)},
        {"close_grace": timedelta(seconds=-1)},
        {"queue_per_slot": -1},
    ],
    ids=lambda one: next(iter(one)),
)
@at(NONE)
async def test_settings_out_of_range_are_refused_before_anything_is_opened(
    crew: Crew, wrong: dict[str, object]
) -> None:
    await crew.close()
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        await crew.open(settings=LifecycleSettings(**wrong))  # type: ignore[arg-type]  # wrong on purpose
    await crew.open()


@at(NONE)
async def test_settings_are_taken_as_people_write_them(crew: Crew) -> None:
    settings = LifecycleSettings(hold_timeout="30s", outlive="1h", close_grace=5)  # type: ignore[arg-type]  # words
    await crew.reopen(settings=settings)
    chosen = crew.runtime.settings
    assert (chosen.hold_timeout, chosen.outlive, chosen.close_grace) == (
        timedelta(seconds=30),
        timedelta(hours=1),
        timedelta(seconds=5),
    )


@at(NONE)
async def test_what_was_kept_long_enough_is_removed(crew: Crew) -> None:
    agent = await crew.start()
    await agent.stop()
    await crew.tick(1200, step=600)
    assert await crew.manager.get_instance(agent.instance_id) is not None
    crew.advance(timedelta(days=1).total_seconds())
    async with asyncio.timeout(30):
        while await crew.manager.get_instance(agent.instance_id) is not None:
            await crew.tick(1200, step=600)
    assert await crew.events(None) != [], "the history outlives the record"
    assert await crew.audit() != []
