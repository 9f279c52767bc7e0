"""Pauses: at three depths, with an end of their own, and across the end of the manager."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lifecycle_aids import HOUR, Scene, until

from ostler.agents import AgentRegistry
from ostler.errors import (
    AgentGoneError,
    AgentInitializationError,
    InvalidOperationError,
    ValidationError,
)
from ostler.isolation import Verb
from ostler.model import (
    AgentAttemptStartedEvent,
    AgentState,
    AttemptOutcome,
    IsolationLevel,
    ResourceLimits,
    RestartPolicy,
    SuspendDepth,
    WaitKind,
)

pytestmark = pytest.mark.anyio

S = AgentState
LEVELS = (IsolationLevel.NONE, IsolationLevel.THREAD)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


# --- hold --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
async def test_a_hold_waits_for_the_end_of_the_turn_and_takes_no_more(scene: Scene, level: IsolationLevel) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(level, resource_limits=ResourceLimits(max_concurrent_tasks=1))
        call = await scene.busy(instance)
        queued = scene.begin(manager.process(instance.instance_id, "later"))
        hold = scene.begin(manager.suspend(instance.instance_id, SuspendDepth.HOLD))
        await scene.calm()
        assert not hold.done()
        assert await scene.state(instance) is S.PROCESSING
        with pytest.raises(InvalidOperationError, match="being suspended; resume it first"):
            await manager.process(instance.instance_id, "more")
        with pytest.raises(InvalidOperationError, match="being suspended already"):
            await manager.suspend(instance.instance_id, SuspendDepth.HOLD)
        scene.stage.gate.open()
        assert await call == "block"
        with pytest.raises(InvalidOperationError, match="resume it first"):
            await queued
        assert (await hold).state is S.SUSPENDED
        assert (await manager.resume(instance.instance_id)).state is S.READY
        assert await manager.process(instance.instance_id, "more") == "more"
        assert scene.stage.begun == ["block", "more"]
        assert scene.stage.starts == [1]


async def test_a_hold_that_is_called_off_lets_the_agent_go_on(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        call = await scene.busy(instance)
        hold = scene.begin(manager.suspend(instance.instance_id, SuspendDepth.HOLD))
        await scene.calm()
        hold.cancel()
        await scene.calm()
        assert await manager.process(instance.instance_id, "more") == "more"
        scene.stage.gate.open()
        assert await call == "block"
        await scene.reaches(instance, S.WAITING)


async def test_one_that_dies_while_it_is_being_held_is_failed_not_suspended(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        call = await scene.busy(instance)
        hold = scene.begin(manager.suspend(instance.instance_id, SuspendDepth.HOLD))
        await scene.calm()
        cell = manager._house.lives[instance.instance_id].cell  # noqa: SLF001 - nobody may ask it any more
        assert cell is not None
        scene.begin(cell.call(Verb.PROCESS, "crash"))
        with pytest.raises(InvalidOperationError, match="ended before it could be suspended"):
            await hold
        with pytest.raises(AgentGoneError):
            await call
        await scene.reaches(instance, S.FAILED)


async def test_an_answer_during_a_hold_is_kept_for_the_resume(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        call = scene.begin(manager.process(instance.instance_id, "wait"))
        await scene.reaches(instance, S.WAITING)
        await manager.suspend(instance.instance_id)
        asked = next(one for one in await manager.get_waits(instance.instance_id) if one.kind is WaitKind.AGENT)
        await manager.answer(asked.wait_id, "go on")
        await scene.calm()
        assert not call.done()
        assert await scene.state(instance) is S.SUSPENDED
        await manager.resume(instance.instance_id)
        assert await call == "go on"
        await scene.reaches(instance, S.WAITING)


# --- park --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
async def test_a_parked_one_keeps_record_and_files_and_starts_fresh(scene: Scene, level: IsolationLevel) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(level)
        await manager.process(instance.instance_id, "write")
        parked = await manager.suspend(instance.instance_id, SuspendDepth.PARK)
        assert (parked.state, parked.attempt) == (S.SUSPENDED, 1)
        assert scene.stage.ends == [1]
        (first,) = await scene.attempts(instance)
        assert (first.outcome, first.detail) == (AttemptOutcome.STOPPED, "parked")
        work = scene.home / "work" / str(instance.instance_id) / "work.txt"
        assert work.read_text() == "done"
        back = await manager.resume(instance.instance_id)
        assert (back.state, back.attempt, back.restart_count) == (S.READY, 2, 0)
        assert scene.stage.starts == [1, 2]
        assert work.exists()
        assert await manager.process(instance.instance_id, "hello") == "hello"
        assert len(await scene.events(instance, AgentAttemptStartedEvent)) == 1
        assert not await manager.get_waits(instance.instance_id)


async def test_parking_waits_for_every_request_also_for_one_that_waits(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        call = scene.begin(manager.process(instance.instance_id, "wait"))
        await scene.reaches(instance, S.WAITING)
        park = scene.begin(manager.suspend(instance.instance_id, SuspendDepth.PARK))
        await scene.calm()
        assert not park.done()
        (asked,) = await manager.get_waits(instance.instance_id)
        await manager.answer(asked.wait_id)
        assert await call == "done"
        assert (await park).state is S.SUSPENDED


async def test_a_parked_one_whose_fresh_start_fails_goes_by_its_policy(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(restart_policy=RestartPolicy.immediate())
        await manager.suspend(instance.instance_id, SuspendDepth.PARK)
        scene.stage.bad_starts = 1
        with pytest.raises(AgentInitializationError, match="a bad start"):
            await manager.resume(instance.instance_id)
        back = await scene.reaches(instance, S.READY)
        assert (back.attempt, back.restart_count) == (3, 1)
        assert not await manager.get_waits(instance.instance_id)


async def test_a_parked_one_can_be_restarted_and_ended(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, SuspendDepth.PARK)
        back = await manager.restart(instance.instance_id)
        assert (back.state, back.attempt) == (S.READY, 2)
        await manager.suspend(instance.instance_id, SuspendDepth.PARK)
        result = await manager.terminate(instance.instance_id)
        assert result.success
        assert await scene.state(instance) is S.TERMINATED
        assert [one.outcome for one in await scene.attempts(instance)] == [AttemptOutcome.STOPPED] * 2
        assert not await manager.get_waits(instance.instance_id)


async def test_two_who_resume_at_once_start_it_once(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, SuspendDepth.PARK)
        scene.stage.starting.shut()
        first = scene.begin(manager.resume(instance.instance_id))
        await until(lambda: scene.stage.starts == [1, 2])
        with pytest.raises(InvalidOperationError):
            await manager.resume(instance.instance_id)
        scene.stage.starting.open()
        assert (await first).state is S.READY
        assert scene.stage.starts == [1, 2]


# --- pauses that end by themselves -------------------------------------------------------------------


@pytest.mark.parametrize("after", [timedelta(0), timedelta(seconds=-1), timedelta(days=366)])
async def test_a_pause_must_have_a_length(scene: Scene, after: timedelta) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        with pytest.raises(ValidationError, match="resume_after"):
            await manager.suspend(instance.instance_id, resume_after=after)
        assert await scene.state(instance) is S.READY


@pytest.mark.parametrize(("depth", "attempt"), [(SuspendDepth.HOLD, 1), (SuspendDepth.PARK, 2)])
async def test_a_pause_ends_by_the_clock_and_no_jump_changes_that(
    scene: Scene, depth: SuspendDepth, attempt: int
) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, depth, resume_after=HOUR)
        scene.clock.jump(timedelta(days=365))
        await scene.tick(1800, step=30)
        assert await scene.state(instance) is S.SUSPENDED
        scene.clock.jump(-2 * timedelta(days=365))
        await scene.tick(1770, step=30)
        assert await scene.state(instance) is S.SUSPENDED
        await scene.tick(30, step=30)
        await scene.reaches(instance, S.READY, attempt=attempt)
        assert not await manager.get_waits(instance.instance_id)


async def test_a_resume_by_hand_calls_the_other_off(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, resume_after=HOUR)
        await manager.resume(instance.instance_id)
        await manager.suspend(instance.instance_id, resume_after=3 * HOUR)
        scene.clock.advance(2 * HOUR.total_seconds())
        await scene.calm()
        assert await scene.state(instance) is S.SUSPENDED


async def test_a_pause_survives_the_manager(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, resume_after=HOUR)
    scene.clock.advance(1800)
    async with scene.open() as manager:
        assert await scene.state(instance) is S.SUSPENDED
        await scene.tick(1770, step=30)
        assert await scene.state(instance) is S.SUSPENDED
        await scene.tick(30, step=30)
        await scene.reaches(instance, S.READY, attempt=2)
        assert await manager.process(instance.instance_id, "hello") == "hello"


async def test_a_pause_that_ended_meanwhile_ends_at_the_next_opening(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, resume_after=HOUR)
    scene.clock.advance(2 * HOUR.total_seconds())
    async with scene.open():
        await scene.reaches(instance, S.READY, attempt=2)


async def test_a_clock_that_was_set_back_meanwhile_does_not_lengthen_a_pause(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, resume_after=HOUR)
    scene.clock.jump(-timedelta(days=365))
    async with scene.open():
        await scene.tick(3600, step=60)
        await scene.reaches(instance, S.READY, attempt=2)


async def test_a_pause_without_its_definition_waits_for_it(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, resume_after=HOUR)
    scene.clock.advance(2 * HOUR.total_seconds())
    empty = AgentRegistry()
    async with scene.open(registry=empty):
        await scene.calm()
        assert await scene.state(instance) is S.SUSPENDED
        scene.register(empty)
        await scene.reaches(instance, S.READY, attempt=2)


# --- the end of the manager --------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("depth", [SuspendDepth.HOLD, SuspendDepth.PARK])
async def test_suspended_ones_are_parked_when_the_manager_closes(
    scene: Scene, level: IsolationLevel, depth: SuspendDepth
) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(level)
        other = await scene.spawn(level)
        await manager.suspend(instance.instance_id, depth)
    assert scene.stage.ends[0] == 1
    async with scene.open() as manager:
        assert await scene.state(instance) is S.SUSPENDED
        assert await scene.state(other) is S.TERMINATED
        (first,) = await scene.attempts(instance)
        assert (first.outcome, first.is_open) == (AttemptOutcome.STOPPED, False)
        back = await manager.resume(instance.instance_id)
        assert (back.state, back.attempt) == (S.READY, 2)


async def test_one_that_is_held_while_it_waits_is_still_suspended_after_a_close(scene: Scene) -> None:
    """Its request is cut off and told so; its pause is kept all the same."""
    async with scene.open() as manager:
        instance = await scene.spawn(restart_policy=RestartPolicy.immediate())
        call = scene.begin(manager.process(instance.instance_id, "wait"))
        await scene.reaches(instance, S.WAITING)
        await manager.suspend(instance.instance_id)
    with pytest.raises(AgentGoneError):
        await call
    async with scene.open() as manager:
        assert await scene.state(instance) is S.SUSPENDED
        assert [one.kind for one in await manager.get_waits(instance.instance_id)] == [WaitKind.RESUME]
        back = await manager.resume(instance.instance_id)
        assert (back.state, back.attempt) == (S.READY, 2)


async def test_a_parked_one_of_an_earlier_manager_can_be_restarted_and_terminated(scene: Scene) -> None:
    async with scene.open() as manager:
        one, two = await scene.spawn(), await scene.spawn()
        for each in (one, two):
            await manager.suspend(each.instance_id)
    async with scene.open() as manager:
        assert (await manager.restart(one.instance_id)).state is S.READY
        assert (await manager.terminate(two.instance_id)).success
        for each in (one, two):
            assert not await manager.get_waits(each.instance_id)
        assert await manager.process(one.instance_id, "hello") == "hello"
