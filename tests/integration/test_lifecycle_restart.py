"""Coming back: by policy, by hand, after a reopen; once for each death, and not for ever."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from lifecycle_aids import Scene, until

from ostler.agents import AgentRegistry
from ostler.errors import AgentInitializationError, InvalidOperationError, LicenseError
from ostler.isolation import Exit, IsolationLevels
from ostler.lifecycle.ear import Ear
from ostler.model import (
    AgentErrorEvent,
    AgentInstance,
    AgentRestartingEvent,
    AgentState,
    AgentStateChangedEvent,
    AttemptOutcome,
    HealthState,
    IsolationLevel,
    Principal,
    RestartPolicy,
    RestartPolicyType,
    Role,
    SuspendDepth,
    Tier,
    WaitKind,
    Workspace,
)
from ostler.store.commands import PutRecord

pytestmark = pytest.mark.anyio

S = AgentState
LEVELS = (IsolationLevel.NONE, IsolationLevel.THREAD)
#: After 4 s, then 8 s, then 16 s.
SLOW = RestartPolicy(initial_delay=timedelta(seconds=2), use_jitter=False)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


def ear(scene: Scene, instance: AgentInstance) -> Ear:
    """By which the level of isolation tells of a death."""
    house = scene.manager._house  # noqa: SLF001 - two notices of one death cannot be made from outside
    return Ear(house, house.lives[instance.instance_id])


# --- by policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
async def test_one_that_crashes_comes_back_at_once(scene: Scene, level: IsolationLevel) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(level, restart_policy=RestartPolicy.immediate())
        await scene.crash(instance)
        back = await scene.reaches(instance, S.READY)
        assert (back.attempt, back.restart_count, back.lifetime_restarts) == (2, 1, 1)
        assert back.error_message is None
        assert back.terminated_at is None
        assert await manager.process(instance.instance_id, "hello") == "hello"
        (told,) = await scene.events(instance, AgentRestartingEvent)
        assert (told.attempt_number, told.max_attempts, told.delay_before_retry) == (1, 3, timedelta(0))
        assert "SystemExit" in told.reason
        (error,) = await scene.events(instance, AgentErrorEvent)
        assert (error.exception_type, error.is_recoverable) == ("SystemExit", True)
        first, second = await scene.attempts(instance)
        assert (first.outcome, first.is_open) == (AttemptOutcome.ERROR, False)
        assert second.is_open


async def test_the_delay_is_kept_and_said(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(restart_policy=SLOW)
        for number, delay in enumerate((4, 8, 16), start=1):
            await scene.crash(instance)
            failed = await scene.reaches(instance, S.FAILED)
            assert failed.terminated_at is not None
            told = (await scene.events(instance, AgentRestartingEvent))[-1]
            assert (told.attempt_number, told.max_attempts) == (number, 3)
            assert told.delay_before_retry == timedelta(seconds=delay)
            (wait,) = await manager.get_waits(instance.instance_id)
            assert (wait.kind, wait.due_at) == (WaitKind.BACKOFF, scene.clock.wall() + timedelta(seconds=delay))
            scene.clock.jump(timedelta(days=365))
            scene.clock.advance(delay - 0.1)
            await scene.calm()
            assert await scene.state(instance) is S.FAILED
            scene.clock.jump(-timedelta(days=365))
            scene.clock.advance(0.2)
            await scene.reaches(instance, S.READY, attempt=number + 1)
        await scene.crash(instance)
        dead = await scene.reaches(instance, S.FAILED)
        assert dead.restart_count == 3
        assert not await manager.get_waits(instance.instance_id)
        last = (await scene.events(instance, AgentStateChangedEvent))[-1]
        assert last.is_final
        assert "3 of 3 restarts since it was last healthy are spent" in last.reason
        scene.clock.advance(3600)
        await scene.calm()
        assert await scene.state(instance) is S.FAILED
        assert scene.stage.starts == [1, 2, 3, 4]


async def test_a_life_has_a_budget(scene: Scene) -> None:
    policy = RestartPolicy.immediate().evolve(lifetime_limit=1)
    async with scene.open():
        instance = await scene.spawn(restart_policy=policy)
        await scene.crash(instance)
        await scene.reaches(instance, S.READY)
        await scene.tick(15)
        healthy = await scene.record(instance)
        assert (healthy.health.state, healthy.restart_count) == (HealthState.HEALTHY, 0)
        await scene.crash(instance)
        await scene.reaches(instance, S.FAILED)
        last = (await scene.events(instance, AgentStateChangedEvent))[-1]
        assert "1 of 1 restarts of its whole life are spent" in last.reason


async def test_without_a_policy_it_stays_down(scene: Scene) -> None:
    async with scene.open():
        one = await scene.spawn()
        two = await scene.spawn(restart_policy=RestartPolicy.none())
        for instance in (one, two):
            await scene.crash(instance)
            assert "SystemExit" in str((await scene.reaches(instance, S.FAILED)).error_message)
            assert not await scene.events(instance, AgentRestartingEvent)


async def test_a_restart_that_fails_is_a_death_like_another(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn(restart_policy=RestartPolicy.immediate())
        scene.stage.bad_starts = 2
        await scene.crash(instance)
        back = await scene.reaches(instance, S.READY)
        assert (back.attempt, back.restart_count) == (4, 3)
        assert [one.outcome for one in await scene.attempts(instance)] == [AttemptOutcome.ERROR] * 3 + [None]


async def test_an_agent_that_fails_on_error_comes_back_after_one(scene: Scene) -> None:
    async with scene.open(fail_on_error=True) as manager:
        instance = await scene.spawn(restart_policy=RestartPolicy.immediate())
        with pytest.raises(Exception, match="it went wrong"):
            await manager.process(instance.instance_id, "err")
        back = await scene.reaches(instance, S.READY, attempt=2)
        assert back.restart_count == 1


# --- one death, one restart --------------------------------------------------------------------------


async def test_many_signals_of_one_death_give_one_restart(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn(restart_policy=RestartPolicy.immediate())
        listener = ear(scene, instance)
        for _ in range(3):
            listener.exited(1, Exit(outcome=AttemptOutcome.SIGNAL, detail="killed by signal 9"))
        await scene.crash_again(instance)
        await scene.reaches(instance, S.READY, attempt=2)
        for _ in range(3):
            listener.exited(1, Exit(outcome=AttemptOutcome.SIGNAL, detail="killed by signal 9"))
        await scene.calm()
        record = await scene.record(instance)
        assert (record.state, record.attempt, record.lifetime_restarts) == (S.READY, 2, 1)
        assert len(await scene.events(instance, AgentRestartingEvent)) == 1
        assert scene.stage.starts == [1, 2]


@pytest.mark.parametrize("outcome", AttemptOutcome)
async def test_how_it_ended_is_told_apart(scene: Scene, outcome: AttemptOutcome) -> None:
    async with scene.open():
        instance = await scene.spawn(restart_policy=RestartPolicy.immediate())
        ear(scene, instance).exited(1, Exit(outcome=outcome, detail=f"made up: {outcome}"))
        await scene.reaches(instance, S.READY, attempt=2)
        first, _ = await scene.attempts(instance)
        assert (first.outcome, first.detail) == (outcome, f"made up: {outcome}")


async def test_a_start_that_took_too_long_and_one_that_raised_are_told_apart(scene: Scene) -> None:
    async with scene.open():
        scene.stage.starting.shut()
        slow = scene.begin(scene.spawn())
        await until(lambda: bool(scene.stage.starts))
        scene.clock.advance(31)
        with pytest.raises(TimeoutError):
            await slow
        (first,) = await scene.attempts(await scene.only())
        assert first.outcome is AttemptOutcome.TIMEOUT


# --- across a reopen ---------------------------------------------------------------------------------


async def test_the_wait_survives_a_reopen(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn(restart_policy=SLOW)
        await scene.crash(instance)
        await scene.reaches(instance, S.FAILED)
        scene.clock.advance(1)
    scene.clock.advance(1)
    async with scene.open() as manager:
        assert await scene.state(instance) is S.FAILED
        scene.clock.advance(1.9)
        await scene.calm()
        assert await scene.state(instance) is S.FAILED
        scene.clock.advance(0.2)
        await scene.reaches(instance, S.READY, attempt=2)
        assert len(await scene.events(instance, AgentRestartingEvent)) == 1
        assert not await manager.get_waits(instance.instance_id)


async def test_a_restart_without_its_definition_waits_for_it(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn(restart_policy=SLOW)
        await scene.crash(instance)
        await scene.reaches(instance, S.FAILED)
    empty = AgentRegistry()
    async with scene.open(registry=empty) as manager:
        scene.clock.advance(3600)
        await scene.calm()
        assert await scene.state(instance) is S.FAILED
        assert [one.kind for one in await manager.get_waits(instance.instance_id)] == [WaitKind.BACKOFF]
        scene.register(empty)
        await scene.reaches(instance, S.READY, attempt=2)
        scene.register(empty)  # again, which must not bring it back twice
        await scene.calm()
        assert scene.stage.starts == [1, 2]


async def test_a_restart_that_waits_for_its_definition_can_be_called_off(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn(restart_policy=SLOW)
        await scene.crash(instance)
        await scene.reaches(instance, S.FAILED)
    empty = AgentRegistry()
    async with scene.open(registry=empty) as manager:
        scene.clock.advance(3600)
        await scene.calm()
        await manager.terminate(instance.instance_id)
        scene.register(empty)
        await scene.calm()
        assert await scene.state(instance) is S.TERMINATED
        assert scene.stage.starts == [1]


# --- by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
async def test_a_living_one_is_stopped_in_order_and_started_again(scene: Scene, level: IsolationLevel) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(level)
        back = await manager.restart(instance.instance_id, reason="a new version")
        assert (back.state, back.attempt, back.lifetime_restarts) == (S.READY, 2, 1)
        assert scene.stage.ends == [1]
        first, _ = await scene.attempts(instance)
        assert (first.outcome, first.detail) == (AttemptOutcome.STOPPED, "a new version")
        (told,) = await scene.events(instance, AgentRestartingEvent)
        assert (told.attempt_number, told.max_attempts, told.reason) == (1, 0, "a new version")
        assert not await scene.events(instance, AgentErrorEvent)
        assert not await manager.get_waits(instance.instance_id)
        scene.clock.advance(3600)
        await scene.calm()
        assert scene.stage.starts == [1, 2]


async def test_a_failed_one_comes_back_by_hand_before_its_time_and_only_once(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(restart_policy=SLOW)
        await scene.crash(instance)
        await scene.reaches(instance, S.FAILED)
        assert (await manager.restart(instance.instance_id)).attempt == 2
        scene.clock.advance(3600)
        await scene.calm()
        assert scene.stage.starts == [1, 2]
        assert len(await scene.events(instance, AgentRestartingEvent)) == 1


async def test_one_that_failed_for_good_comes_back_by_hand_also_after_a_reopen(scene: Scene) -> None:
    async with scene.open() as manager:
        one, two = await scene.spawn(), await scene.spawn()
        for instance in (one, two):
            await scene.crash(instance)
            await scene.reaches(instance, S.FAILED)
        assert (await manager.restart(one.instance_id)).state is S.READY
    async with scene.open() as manager:
        assert (await manager.restart(two.instance_id)).state is S.READY
        (told,) = await scene.events(two, AgentRestartingEvent)
        assert told.reason == "restart asked for by owner"


@pytest.mark.parametrize("depth", [SuspendDepth.HOLD, SuspendDepth.PARK])
async def test_a_suspended_one_leaves_its_pause(scene: Scene, depth: SuspendDepth) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, depth, resume_after=timedelta(hours=1))
        assert (await manager.restart(instance.instance_id)).state is S.READY
        assert not await manager.get_waits(instance.instance_id)
        scene.clock.advance(7200)
        await scene.calm()
        assert scene.stage.starts == [1, 2]


async def test_a_terminated_one_does_not_come_back(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.terminate(instance.instance_id)
        with pytest.raises(InvalidOperationError, match="terminated and cannot be restarted"):
            await manager.restart(instance.instance_id)


async def test_a_restart_by_hand_that_fails_says_so_and_goes_by_the_policy(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(restart_policy=SLOW)
        scene.stage.bad_starts = 1
        with pytest.raises(AgentInitializationError, match="a bad start"):
            await manager.restart(instance.instance_id)
        assert await scene.state(instance) is S.FAILED
        scene.clock.advance(10)
        await scene.reaches(instance, S.READY, attempt=3)


async def test_two_who_restart_at_once_restart_once(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        scene.stage.ending.shut()
        first = scene.begin(manager.restart(instance.instance_id))
        await scene.calm()
        with pytest.raises(InvalidOperationError, match="ending or starting already"):
            await manager.restart(instance.instance_id)
        scene.stage.ending.open()
        assert (await first).attempt == 2
        assert scene.stage.starts == [1, 2]


async def test_terminating_a_failed_one_calls_its_return_off(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(restart_policy=SLOW)
        await scene.crash(instance)
        await scene.reaches(instance, S.FAILED)
        await manager.terminate(instance.instance_id)
        scene.clock.advance(3600)
        await scene.calm()
        assert await scene.state(instance) is S.TERMINATED
        assert not await manager.get_waits(instance.instance_id)


# --- the quota ---------------------------------------------------------------------------------------


async def test_a_restart_waits_for_room_in_the_plan(scene: Scene) -> None:
    space = Workspace(workspace_id=UUID(int=7), name="pro", tier=Tier.WRITER_PRO, created_at=scene.clock.wall())
    who = Principal(
        principal_id=UUID(int=8),
        name="ada",
        workspace_id=space.workspace_id,
        roles=(Role.ADMIN,),
        created_at=scene.clock.wall(),
    )
    linear = RestartPolicy(type=RestartPolicyType.LINEAR, initial_delay=timedelta(seconds=10), use_jitter=False)
    async with scene.open() as manager:
        await manager.store.commit(PutRecord(record=space))
        scene.manager = manager.acting_as(who)
        lives = [await scene.spawn(restart_policy=linear) for _ in range(5)]
        with pytest.raises(LicenseError):
            await scene.spawn()
        await scene.crash(lives[0])
        await scene.reaches(lives[0], S.FAILED)
        await scene.spawn()
        with pytest.raises(LicenseError):
            await scene.manager.restart(lives[0].instance_id)
        scene.clock.advance(10)
        await scene.calm()
        scene.clock.advance(5)
        await scene.calm()
        assert await scene.state(lives[0]) is S.FAILED
        assert [one.kind for one in await scene.manager.get_waits(lives[0].instance_id)] == [WaitKind.BACKOFF]
        await scene.manager.terminate(lives[1].instance_id)
        scene.clock.advance(5)
        await scene.reaches(lives[0], S.READY, attempt=2)
        assert (await scene.manager.get_statistics()).active_instances == 5


async def test_a_level_that_is_gone_is_not_restarted_and_stays_in_sight(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn(IsolationLevel.THREAD, restart_policy=SLOW)
        await scene.crash(instance)
        await scene.reaches(instance, S.FAILED)
    async with scene.open(levels=IsolationLevels(scene.clock, {})) as manager:
        scene.clock.advance(60)
        await scene.calm()
        assert await scene.state(instance) is S.FAILED
        assert await manager.get_waits(instance.instance_id)
