"""Restarts: by the policy and by hand, one for each death, within the plan, and across managers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest
from lifecycle_agents import Actor
from lifecycle_ground import LEVELS, NONE, PROCESS, THREAD, Crew, S, at, do, logged, until

from ostler import (
    AgentErrorEvent,
    AgentExecutionError,
    AgentInitializationError,
    AgentRegistry,
    AgentRestartingEvent,
    AgentStateChangedEvent,
    AttemptOutcome,
    HealthState,
    InvalidOperationError,
    LicenseError,
    ResourceLimits,
    RestartPolicy,
    RestartPolicyType,
    Role,
    Tier,
    WaitKind,
)
from ostler.isolation.base import Exit
from ostler.isolation.registry import IsolationLevels
from ostler.lifecycle.reports import Listener

pytestmark = pytest.mark.anyio

#: After 2 s, then 4 s, then 8 s.
SLOW = RestartPolicy(initial_delay=timedelta(seconds=2), use_jitter=False)
IMMEDIATE = RestartPolicy.immediate()
YEAR = timedelta(days=365)


async def last_move(crew: Crew, agent: object) -> AgentStateChangedEvent:
    return (await crew.events(agent, AgentStateChangedEvent))[-1]  # type: ignore[arg-type]  # a handle


# --- by the policy -----------------------------------------------------------------------------------


@at(*LEVELS)
async def test_an_agent_that_crashes_comes_back_at_once(crew: Crew) -> None:
    agent = await crew.start(restart_policy=IMMEDIATE)
    await crew.crash(agent)
    back = await crew.reaches(agent, S.READY, 2)
    assert (back.restart_count, back.lifetime_restarts) == (1, 1)
    assert (back.error_message, back.terminated_at) == (None, None)
    assert await agent.ask(do("echo", value=1)) == 1
    (told,) = await crew.events(agent, AgentRestartingEvent)
    assert (told.attempt_number, told.max_attempts, told.delay_before_retry) == (1, 3, timedelta(0))
    assert "SystemExit" in (told.reason or "")
    (error,) = await crew.events(agent, AgentErrorEvent)
    assert (error.exception_type, error.is_recoverable) == ("SystemExit", True)
    first, second = await crew.attempts(agent)
    assert (first.outcome, first.is_open, second.is_open) == (AttemptOutcome.ERROR, False, True)
    assert crew.metric("ostler_lifecycle_restarts_count_total") == 1
    assert (await crew.manager.get_statistics()).total_restarts == 1


@pytest.mark.parametrize(
    ("kind", "delays"),
    [
        (RestartPolicyType.EXPONENTIAL, (2, 4, 8)),
        (RestartPolicyType.LINEAR, (2, 4, 6)),
        (RestartPolicyType.IMMEDIATE, (0, 0, 0)),
    ],
    ids=str,
)
async def test_the_delay_is_kept_and_said_until_the_retries_are_spent(
    crew: Crew, kind: RestartPolicyType, delays: tuple[int, ...]
) -> None:
    agent = await crew.start(restart_policy=SLOW.evolve(type=kind))
    for number, delay in enumerate(delays, start=1):
        await crew.crash(agent)
        told = (await crew.events(agent, AgentRestartingEvent))[-1]
        assert (told.attempt_number, told.max_attempts) == (number, 3)
        assert told.delay_before_retry == timedelta(seconds=delay)
        if delay:
            (wait,) = await agent.waits()
            assert (wait.kind, wait.due_at) == (WaitKind.BACKOFF, crew.clock.wall() + timedelta(seconds=delay))
            crew.clock.jump(YEAR)  # type: ignore[attr-defined]  # a manual clock
            crew.advance(delay - 0.1)
            await crew.calm()
            assert await crew.state(agent) is S.FAILED
            crew.clock.jump(-YEAR)  # type: ignore[attr-defined]  # as above
            crew.advance(0.2)
        await crew.reaches(agent, S.READY, number + 1)
    await crew.crash(agent)
    dead = await agent.record()
    assert (dead.state, dead.restart_count) == (S.FAILED, 3)
    assert await agent.waits() == []
    last = await last_move(crew, agent)
    assert last.is_final
    assert "3 of 3 restarts since it was last healthy are spent" in (last.reason or "")
    crew.advance(3600)
    await crew.calm()
    assert crew.stage.said.count("initialize") == 4


async def test_healthy_again_the_retries_are_forgiven_but_a_life_has_a_budget(crew: Crew) -> None:
    agent = await crew.start(restart_policy=IMMEDIATE.evolve(lifetime_limit=1))
    await crew.crash(agent)
    await crew.reaches(agent, S.READY, 2)
    await crew.tick(15)
    healthy = await agent.record()
    assert (healthy.health.state, healthy.restart_count, healthy.lifetime_restarts) == (HealthState.HEALTHY, 0, 1)
    await crew.crash(agent)
    assert await crew.state(agent) is S.FAILED
    assert "1 of 1 restarts of its whole life are spent" in ((await last_move(crew, agent)).reason or "")


async def test_failing_for_too_long_opens_the_circuit_breaker(crew: Crew) -> None:
    policy = SLOW.evolve(circuit_breaker_timeout=timedelta(seconds=5), max_retries=10)
    agent = await crew.start(restart_policy=policy)
    await crew.crash(agent)
    await crew.comes_back(agent, 2, 2)
    crew.advance(4)
    await crew.crash(agent)
    assert await agent.waits() == []
    assert "5 s" in ((await last_move(crew, agent)).reason or "")


async def test_without_a_policy_it_stays_down(crew: Crew) -> None:
    for policy in (None, RestartPolicy.none()):
        agent = await crew.start(restart_policy=policy)
        await crew.crash(agent)
        failed = await agent.record()
        assert failed.state is S.FAILED
        assert "SystemExit" in (failed.error_message or "")
        assert await crew.events(agent, AgentRestartingEvent) == []
        assert (await last_move(crew, agent)).is_final


@at(*LEVELS)
async def test_a_restart_that_fails_is_a_death_like_another(crew: Crew) -> None:
    agent = await crew.start({"bad_attempts": [2, 3]}, restart_policy=IMMEDIATE)
    await crew.crash(agent)
    back = await crew.reaches(agent, S.READY, 4)
    assert back.restart_count == 3
    assert [one.outcome for one in await crew.attempts(agent)] == [AttemptOutcome.ERROR] * 3 + [None]


async def test_an_agent_that_fails_on_error_comes_back_after_one(crew: Crew) -> None:
    agent = await crew.start(about={"fail_on_error": True}, restart_policy=IMMEDIATE)
    with pytest.raises(AgentExecutionError, match="as told"):
        await agent.ask(do("fail"))
    assert (await crew.reaches(agent, S.READY, 2)).restart_count == 1


async def test_the_downtime_is_no_uptime(crew: Crew) -> None:
    agent = await crew.start(restart_policy=SLOW)
    crew.advance(10)
    await crew.crash(agent)
    await crew.comes_back(agent, 2, 2)
    crew.advance(10)
    back = await agent.record()
    assert back.downtime >= timedelta(seconds=2)
    assert back.uptime(crew.clock.wall()) == crew.clock.wall() - back.created_at - back.downtime


# --- one death, one restart --------------------------------------------------------------------------


@at(THREAD, PROCESS)
async def test_many_notices_of_one_death_give_one_restart(crew: Crew) -> None:
    agent = await crew.start(restart_policy=IMMEDIATE)
    killed = Exit(outcome=AttemptOutcome.SIGNAL, detail="killed by signal 9")
    instance = crew.runtime.instances[agent.instance_id]
    listener = Listener(instance, 1)
    for _ in range(3):
        listener.on_exit(1, killed)
    dying = crew.begin(agent.ask(do("exit")))  # reaches attempt 1 or, if that has been given up, attempt 2
    await asyncio.wait([dying])
    for _ in range(3):
        listener.on_exit(1, killed)
    await crew.calm()
    back = await crew.reaches(agent, S.READY)
    assert back.attempt == 1 + back.lifetime_restarts
    assert len(await crew.events(agent, AgentRestartingEvent)) == back.lifetime_restarts
    assert crew.stage.said.count("initialize") == back.attempt


@pytest.mark.parametrize("outcome", AttemptOutcome, ids=str)
@at(NONE)
async def test_how_it_ended_is_told_apart(crew: Crew, outcome: AttemptOutcome) -> None:
    agent = await crew.start(restart_policy=IMMEDIATE)
    instance = crew.runtime.instances[agent.instance_id]
    Listener(instance, 1).on_exit(1, Exit(outcome=outcome, detail=f"made up: {outcome}", code=7))
    await crew.reaches(agent, S.READY, 2)
    first, _ = await crew.attempts(agent)
    assert (first.outcome, first.detail, first.exit_code) == (outcome, f"made up: {outcome}", 7)


@at(PROCESS)
async def test_a_crowd_that_dies_at_once_comes_back_by_turns_the_important_first(crew: Crew) -> None:
    gate = crew.runtime.restart_gate
    agents = [await crew.start(restart_policy=IMMEDIATE, priority="critical" if n == 5 else "low") for n in range(6)]
    gate._at_once = 1  # noqa: SLF001 - so that they queue
    for agent in agents:
        instance = crew.runtime.instances[agent.instance_id]
        Listener(instance, 1).on_exit(1, Exit(outcome=AttemptOutcome.SIGNAL, detail="killed"))
    for agent in agents:
        await crew.reaches(agent, S.READY, 2)
    started = {agent: (await crew.attempts(agent))[1].started_at for agent in agents}
    assert all(started.values())
    assert crew.stage.said.count("attempt 2") == 6


# --- across managers ---------------------------------------------------------------------------------


async def test_a_delay_survives_the_manager(crew: Crew) -> None:
    agent = await crew.start(restart_policy=SLOW.evolve(initial_delay=timedelta(seconds=60)))
    await crew.crash(agent)
    (wait,) = await agent.waits()
    crew.advance(20)
    await crew.close()
    crew.advance(20)
    await crew.open()
    agent = crew.again(agent)
    assert wait.due_at is not None
    left = (wait.due_at - crew.clock.wall()).total_seconds()
    crew.advance(left - 1)
    await crew.calm()
    assert await crew.state(agent) is S.FAILED
    await crew.comes_back(agent, 2, 2)
    assert len(await crew.events(agent, AgentRestartingEvent)) == 1
    assert await agent.waits() == []


@at(THREAD)
async def test_a_restart_without_its_definition_waits_for_it_and_can_be_called_off(crew: Crew) -> None:
    def make() -> Actor:
        return Actor()

    agents = [await crew.start(agent=make, about={"name": "made here"}, restart_policy=SLOW) for _ in range(2)]
    for agent in agents:
        await crew.crash(agent)
    empty = AgentRegistry()
    await crew.close()
    await crew.open(registry=empty)
    waiting, called_off = (crew.again(agent) for agent in agents)
    crew.advance(3600)
    await crew.calm()
    for agent in (waiting, called_off):
        assert await crew.state(agent) is S.FAILED
        assert [one.kind for one in await agent.waits()] == [WaitKind.BACKOFF]
        assert "not registered" in " ".join((await agent.why()).evidence)
    await called_off.stop()
    for _ in range(2):  # the second time must not bring it back twice
        empty.register(make, name="made here")
    await crew.reaches(waiting, S.READY, 2)
    await crew.calm()
    assert await crew.state(called_off) is S.TERMINATED
    assert crew.stage.said.count("initialize") == 3


@at(THREAD)
async def test_an_importable_class_needs_no_registration_to_come_back(crew: Crew) -> None:
    agent = await crew.start(restart_policy=SLOW)
    await crew.crash(agent)
    await crew.close()
    await crew.open(registry=AgentRegistry())
    await crew.comes_back(crew.again(agent), 2, 5)


@at(THREAD)
async def test_a_level_that_is_gone_is_not_restarted_and_stays_in_sight(crew: Crew) -> None:
    agent = await crew.start(restart_policy=SLOW)
    await crew.crash(agent)
    await crew.close()
    await crew.open(levels=IsolationLevels(crew.clock, {}))
    agent = crew.again(agent)
    crew.advance(60)
    await crew.calm()
    assert await crew.state(agent) is S.FAILED
    assert len(await agent.waits()) == 1
    assert "isolation level thread" in " ".join((await agent.why()).evidence)


# --- by hand -----------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_restart_by_hand_stops_in_order_and_spends_nothing(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await crew.start(restart_policy=IMMEDIATE)
    call = await crew.busy(agent)
    back = await agent.restart(reason="a new version")
    assert (back.state, back.attempt) == (S.READY, 2)
    assert (back.restart_count, back.lifetime_restarts) == (0, 0)
    with pytest.raises(Exception, match="was restarted before it answered; ask it again"):
        await call
    assert "shutdown" in crew.stage.said
    first, _ = await crew.attempts(agent)
    assert (first.outcome, first.detail) == (AttemptOutcome.STOPPED, "a new version")
    assert await crew.events(agent, AgentErrorEvent) == []
    assert await crew.events(agent, AgentRestartingEvent) == []
    assert logged(caplog, "crashed") == []
    assert (await crew.moves(agent))[-3:] == [S.FAILED, S.INITIALIZING, S.READY]
    assert "a new version" in next(one.detail or "" for one in await crew.audit() if one.action == "restart")
    crew.advance(3600)
    await crew.calm()
    assert crew.stage.said.count("initialize") == 2


async def test_a_restart_by_hand_keeps_its_place_in_the_plan(crew: Crew) -> None:
    await crew.set_tier(Tier.CORE)
    agents = [await crew.start() for _ in range(2)]
    restarting = [crew.begin(agent.restart()) for agent in agents]
    spawns = [crew.begin(crew.start()) for _ in range(3)]
    assert [one.state for one in await asyncio.gather(*restarting)] == [S.READY, S.READY]
    for spawn in spawns:
        with pytest.raises(LicenseError):
            await spawn


async def test_a_failed_agent_comes_back_by_hand_before_its_time_and_only_once(crew: Crew) -> None:
    agent = await crew.start(restart_policy=SLOW)
    await crew.crash(agent)
    back = await agent.restart()
    assert (back.attempt, back.restart_count) == (2, 0)
    crew.advance(3600)
    await crew.calm()
    assert crew.stage.said.count("initialize") == 2
    assert await agent.waits() == []


async def test_one_that_failed_for_good_comes_back_by_hand_also_under_the_next_manager(crew: Crew) -> None:
    one, two = await crew.start(), await crew.start()
    for agent in (one, two):
        await crew.crash(agent)
    assert (await one.restart()).state is S.READY
    await crew.reopen()
    back = await crew.again(two).restart()
    assert (back.state, back.terminated_at, back.error_message) == (S.READY, None, None)
    assert "restarted by owner" in [entry.detail or "" for entry in await crew.audit() if entry.action == "restart"][-1]


@pytest.mark.parametrize("depth", ["hold", "park"])
async def test_a_suspended_agent_leaves_its_pause(crew: Crew, depth: str) -> None:
    agent = await crew.start()
    await agent.pause(depth, resume_after="1h")
    assert (await agent.restart()).state is S.READY
    assert await agent.waits() == []
    crew.advance(7200)
    await crew.calm()
    assert crew.stage.said.count("initialize") == 2


async def test_a_terminated_agent_does_not_come_back(crew: Crew) -> None:
    agent = await crew.start()
    await agent.stop()
    with pytest.raises(InvalidOperationError, match="is terminated and cannot be restarted; spawn another"):
        await agent.restart()


async def test_a_restart_by_hand_that_fails_says_so_and_goes_by_the_policy(crew: Crew) -> None:
    agent = await crew.start({"bad_attempts": [2]}, restart_policy=SLOW)
    with pytest.raises(AgentInitializationError, match="a bad start"):
        await agent.restart()
    assert await crew.state(agent) is S.FAILED
    await crew.comes_back(agent, 3, 2)


async def test_two_that_restart_at_once_restart_once(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "hang"})
    first = crew.begin(agent.restart())
    await until(lambda: "shutdown" in crew.stage.said)
    with pytest.raises(InvalidOperationError, match="it is ending already"):
        await agent.restart()
    crew.stage.release("stop")
    assert (await first).attempt == 2
    assert crew.stage.said.count("initialize") == 2


async def test_starts_by_hand_are_not_held_up_by_the_burst_window(crew: Crew) -> None:
    agent = await crew.start(restart_policy=SLOW.evolve(max_retries=10, burst_limit=3))
    for number in range(2, 7):
        assert (await agent.restart()).attempt == number
    await crew.crash(agent)
    (wait,) = await agent.waits()
    assert "because the limit is 3 starts in 1 min" in (wait.reason or "")
    await crew.comes_back(agent, 7, 61)


async def test_an_immediate_policy_is_not_delayed_by_the_burst_window(crew: Crew) -> None:
    agent = await crew.start(restart_policy=IMMEDIATE.evolve(max_retries=6, burst_limit=2))
    for number in range(2, 8):
        await crew.crash(agent)
        await crew.reaches(agent, S.READY, number)


# --- the plan ----------------------------------------------------------------------------------------


@at(THREAD)
async def test_a_restart_waits_for_room_in_the_plan(crew: Crew) -> None:
    space = await crew.found_workspace(Tier.WRITER_PRO)
    client = crew.as_principal(Role.ADMIN, workspace=space)
    linear = RestartPolicy(type=RestartPolicyType.LINEAR, initial_delay=timedelta(seconds=10), use_jitter=False)
    request = crew.request(restart_policy=linear, resource_limits=ResourceLimits())
    records = [await client.spawn(request) for _ in range(5)]
    with pytest.raises(LicenseError):
        await client.spawn(request)
    agent = client.handle(records[0].instance_id)
    await crew.crash(agent)
    await client.spawn(request)
    with pytest.raises(LicenseError):
        await agent.restart()
    await crew.tick(15)
    assert await crew.state(agent) is S.FAILED
    assert [one.kind for one in await agent.waits()] == [WaitKind.BACKOFF]
    assert "writer_pro" in " ".join((await agent.why()).evidence)
    await client.terminate(records[1].instance_id)
    await crew.comes_back(agent, 2, 6)
    assert (await client.get_statistics()).active_instances == 5
    assert isinstance(space, UUID)
