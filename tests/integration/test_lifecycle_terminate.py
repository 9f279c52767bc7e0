"""The end: asked for in order, bounded by time, forced where it must be, and told as it was."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from lifecycle_ground import Crew, Stage, agent_threads, opened

from ostler import (
    AgentGoneError,
    AgentInitializationError,
    AgentInstance,
    AgentNotFoundError,
    AgentState,
    AgentTerminatedEvent,
    InvalidOperationError,
    IsolationLevel,
    RestartPolicy,
    RestartPolicyType,
    SuspendDepth,
    TerminationOptions,
    ValidationError,
)
from ostler.testing.clock import ManualClock
from ostler.testing.isolation_suite.ground import passing

pytestmark = pytest.mark.anyio

_A = AgentState
QUICK = TerminationOptions(graceful_timeout=timedelta(seconds=1))
LATER = RestartPolicy(type=RestartPolicyType.LINEAR, initial_delay=timedelta(minutes=1), use_jitter=False)


async def told(crew: Crew, one: AgentInstance) -> AgentTerminatedEvent:
    (event,) = [event for event in await crew.events(one) if isinstance(event, AgentTerminatedEvent)]
    return event


# --- in order ----------------------------------------------------------------------------------------


async def test_hooks_in_reverse_then_the_final_state_then_shutdown(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.do(one, "hook", hooks={"first": None, "second": None, "third": None})
    result = await crew.manager.terminate(one.instance_id, TerminationOptions(persist_final_state=True))
    assert crew.stage.said == ["initialize", "hook third", "hook second", "hook first", "final_state", "shutdown"]
    assert result.was_graceful
    assert (await told(crew, one)).was_graceful


async def test_outstanding_work_is_cancelled_before_the_hooks(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.do(one, "hook", hooks={"hook": None})
    call = crew.start(one, "hang")
    await crew.stage.heard("began")
    result = await crew.manager.terminate(one.instance_id)
    assert result.was_graceful
    with pytest.raises(AgentGoneError, match="ended before it had answered"):
        await call
    assert crew.stage.said[-3:] == ["cancelled", "hook hook", "shutdown"]


async def test_what_it_waits_for_ends_with_it(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "ask")
    wait = await crew.wait_of(one)
    assert (await crew.manager.terminate(one.instance_id)).was_graceful
    with pytest.raises(AgentGoneError):
        await call
    for _ in range(1000):
        if not await crew.manager.get_waits(one.instance_id):
            break
        await asyncio.sleep(0.002)
    ended = await crew.manager.store.get_wait(wait.wait_id)
    assert ended is not None
    assert ended.outcome == "cancelled"


async def test_the_final_state_is_kept_only_when_asked_for(
    home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel
) -> None:
    async with opened(home, clock) as manager:
        crew = Crew(manager, clock, stage, level)
        silent, kept = await crew.spawn(), await crew.spawn()
        await manager.terminate(silent.instance_id)
        assert "final_state" not in stage.said
        result = await manager.terminate(kept.instance_id, TerminationOptions(persist_final_state=True))
        assert result.final_instance is not None
        assert result.final_instance.final_state == {"said": 4}
    async with opened(home, clock) as manager:
        for one, left in ((silent, None), (kept, {"said": 4})):
            record = await manager.get_instance(one.instance_id)
            assert record is not None
            assert record.final_state == left


async def test_the_reason_is_told(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.manager.terminate(one.instance_id, TerminationOptions(reason="the day is over"))
    event = await told(crew, one)
    assert event.reason == "the day is over"
    assert event.final_state is _A.TERMINATED


# --- what does not go well ---------------------------------------------------------------------------


async def test_a_hook_that_fails_stops_neither_the_others_nor_the_shutdown(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.do(one, "hook", hooks={"first": None, "second": "fail"})
    result = await crew.manager.terminate(one.instance_id)
    assert crew.stage.said[-3:] == ["hook second", "hook first", "shutdown"]
    assert result.success
    assert not result.was_graceful
    assert result.error_message == "clean-up second failed: ValueError: dirty"
    assert await crew.state(one) is _A.TERMINATED


@pytest.mark.parametrize("quirk", ["hang", "stubborn"])
async def test_each_hook_has_a_time_of_its_own(crew: Crew, quirk: str) -> None:
    one = await crew.spawn()
    await crew.do(one, "hook", hooks={"first": None, "second": quirk})
    result = await passing(crew.clock, crew.manager.terminate(one.instance_id), 20)
    assert [word for word in crew.stage.said if word != "cancelled"][-3:] == ["hook second", "hook first", "shutdown"]
    assert not result.was_graceful
    assert "clean-up second took longer than 1 s" in (result.error_message or "")


async def test_a_shutdown_that_fails_is_not_graceful(crew: Crew) -> None:
    one = await crew.spawn({"shutdown": "fail"})
    result = await crew.manager.terminate(one.instance_id)
    assert result.success
    assert not result.was_graceful
    assert "shutdown failed: ValueError: it will not close" in (result.error_message or "")
    assert not (await told(crew, one)).was_graceful
    assert crew.counted("ostler_lifecycle_terminate_forced_total") == 1


@pytest.mark.parametrize("quirk", ["hang", "stubborn"])
async def test_a_shutdown_that_does_not_end_is_forced(crew: Crew, quirk: str) -> None:
    one = await crew.spawn({"shutdown": quirk})
    result = await passing(crew.clock, crew.manager.terminate(one.instance_id, QUICK), 20)
    assert result.success
    assert not result.was_graceful
    assert "it did not shut down within 1 s" in (result.error_message or "")
    assert await crew.state(one) is _A.TERMINATED


async def test_work_that_does_not_heed_its_cancellation_is_forced(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "stubborn")
    await crew.stage.heard("began")
    result = await passing(crew.clock, crew.manager.terminate(one.instance_id, QUICK), 20)
    assert result.success
    assert not result.was_graceful
    with pytest.raises(AgentGoneError):
        await call
    assert await crew.state(one) is _A.TERMINATED


async def test_without_force_it_stays_terminating_and_a_second_call_ends_it(crew: Crew) -> None:
    one = await crew.spawn({"shutdown": "hang"})
    patient = QUICK.evolve(force_if_timeout=False)
    result = await passing(crew.clock, crew.manager.terminate(one.instance_id, patient), 20)
    assert not result.success
    assert not result.was_graceful
    assert "left terminating; terminate it again to force it" in (result.error_message or "")
    assert result.final_instance is not None
    assert result.final_instance.state is _A.TERMINATING
    assert await crew.state(one) is _A.TERMINATING
    assert (await crew.manager.get_statistics()).active_instances == 1
    with pytest.raises(InvalidOperationError, match="is terminating and takes no request; spawn another"):
        await crew.do(one, "echo")
    second = await passing(crew.clock, crew.manager.terminate(one.instance_id, QUICK), 20)
    assert second.success
    assert not second.was_graceful, "its shutdown was broken off"
    assert await crew.state(one) is _A.TERMINATED


async def test_immediate_asks_nobody(crew: Crew) -> None:
    one = await crew.spawn({"shutdown": "stubborn"})
    await crew.do(one, "hook", hooks={"hook": None})
    result = await crew.manager.terminate(one.instance_id, TerminationOptions.immediate())
    assert result.success
    assert not result.was_graceful
    assert crew.stage.said == ["initialize"]
    assert (await told(crew, one)).reason == "Immediate termination requested"
    assert agent_threads() == []


async def test_options_out_of_range_end_nothing(crew: Crew) -> None:
    one = await crew.spawn()
    for grace in (timedelta(milliseconds=1), timedelta(hours=1), timedelta(seconds=-1)):
        with pytest.raises(ValidationError, match="graceful_timeout must be"):
            await crew.manager.terminate(one.instance_id, TerminationOptions(graceful_timeout=grace))
    assert await crew.state(one) is _A.READY


# --- at any time -------------------------------------------------------------------------------------


async def test_many_at_once_share_one_end(crew: Crew) -> None:
    one = await crew.spawn()
    results = await asyncio.gather(*(crew.manager.terminate(one.instance_id) for _ in range(5)))
    assert {result.success for result in results} == {True}
    assert len({result.to_json() for result in results}) == 1
    assert crew.stage.said.count("shutdown") == 1
    assert (await crew.manager.get_statistics()).total_terminated == 1
    await told(crew, one)


async def test_the_least_patient_counts(crew: Crew) -> None:
    one = await crew.spawn({"shutdown": "hang"})
    patient = asyncio.ensure_future(crew.manager.terminate(one.instance_id))
    await crew.stage.heard("shutdown")
    hasty = await passing(crew.clock, crew.manager.terminate(one.instance_id, TerminationOptions.immediate()), 3)
    assert hasty.success
    assert not hasty.was_graceful
    assert await patient == hasty
    assert await crew.state(one) is _A.TERMINATED


async def test_an_end_goes_on_without_whoever_asked(crew: Crew) -> None:
    one = await crew.spawn({"shutdown": "hang"})
    ending = asyncio.ensure_future(crew.manager.terminate(one.instance_id))
    await crew.stage.heard("shutdown")
    ending.cancel()
    await asyncio.wait([ending])
    assert ending.cancelled()
    crew.stage.let_go.set()
    await crew.comes_to(one, _A.TERMINATED)
    assert (await told(crew, one)).was_graceful


async def test_what_is_terminated_cannot_be_terminated(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.manager.terminate(one.instance_id)
    with pytest.raises(InvalidOperationError, match="is terminated already") as refused:
        await crew.manager.terminate(one.instance_id)
    assert refused.value.current == _A.TERMINATED
    with pytest.raises(AgentNotFoundError, match="there is no instance"):
        await crew.manager.terminate(one.definition_id)


async def test_while_it_initialises(crew: Crew) -> None:
    spawning = asyncio.ensure_future(crew.spawn({"initialize": "hang"}))
    await crew.stage.heard("initialize")
    (one,) = await crew.manager.get_active_instances()
    assert one.state is _A.INITIALIZING
    result = await crew.manager.terminate(one.instance_id)
    assert result.success
    with pytest.raises(AgentInitializationError, match="it was terminated while it was starting"):
        await spawning
    assert await crew.state(one) is _A.TERMINATED
    assert agent_threads() == []
    assert (await crew.manager.get_statistics()).active_instances == 0


@pytest.mark.parametrize("depth", [SuspendDepth.HOLD, SuspendDepth.PARK])
async def test_while_it_is_suspended(crew: Crew, depth: SuspendDepth) -> None:
    one = await crew.spawn()
    await crew.manager.suspend(one.instance_id, depth, resume_after=timedelta(minutes=1))
    result = await crew.manager.terminate(one.instance_id)
    assert result.success
    assert result.was_graceful
    assert await crew.manager.get_waits(one.instance_id) == []
    crew.clock.advance(120)
    await asyncio.sleep(0.02)
    assert await crew.state(one) is _A.TERMINATED
    assert crew.stage.said == ["initialize", "shutdown"]


async def test_a_restart_that_was_pending_is_called_off(crew: Crew) -> None:
    one = await crew.spawn(restart_policy=LATER)
    with pytest.raises(AgentGoneError):
        await crew.do(one, "exit")
    await crew.comes_to(one, _A.FAILED)
    assert len(await crew.manager.get_waits(one.instance_id)) == 1
    result = await crew.manager.terminate(one.instance_id)
    assert result.success
    assert await crew.manager.get_waits(one.instance_id) == []
    crew.clock.advance(300)
    await asyncio.sleep(0.02)
    assert await crew.state(one) is _A.TERMINATED
    assert crew.stage.said.count("initialize") == 1


async def test_one_that_failed_for_good_can_be_put_away(crew: Crew) -> None:
    one = await crew.spawn()
    with pytest.raises(AgentGoneError):
        await crew.do(one, "exit")
    await crew.comes_to(one, _A.FAILED)
    result = await crew.manager.terminate(one.instance_id)
    assert result.success
    assert not result.was_graceful, "it died, whatever was done with it later"
    assert not (await told(crew, one)).was_graceful
    with pytest.raises(InvalidOperationError, match="is terminated already"):
        await crew.manager.terminate(one.instance_id)


# --- closing -----------------------------------------------------------------------------------------


async def test_closing_the_manager_ends_all_in_order(
    home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel
) -> None:
    async with opened(home, clock) as manager:
        crew = Crew(manager, clock, stage, level)
        idle, busy, waits, held = [await crew.spawn() for _ in range(4)]
        calls = [crew.start(busy, "hang"), crew.start(waits, "ask")]
        await stage.heard("began")
        await crew.wait_of(waits)
        await manager.suspend(held.instance_id)
    for call in calls:
        with pytest.raises(AgentGoneError):
            await call
    assert stage.said.count("shutdown") == 4
    assert agent_threads() == []
    with pytest.raises(InvalidOperationError, match=r"closed|closing"):
        await manager.terminate(idle.instance_id)
    async with opened(home, clock) as manager:
        crew = Crew(manager, clock, stage, level)
        for one in (idle, busy, waits):
            assert await crew.state(one) is _A.TERMINATED
            event = await told(crew, one)
            assert event.was_graceful
            assert event.reason == "the manager was closed"
        assert await crew.state(held) is _A.SUSPENDED


async def test_closing_the_manager_forces_what_will_not_end(
    home: Path, clock: ManualClock, stage: Stage, level: IsolationLevel
) -> None:
    async with opened(home, clock) as manager:
        crew = Crew(manager, clock, stage, level)
        one = await crew.spawn({"shutdown": "stubborn"})
    stage.let_go.set()
    async with opened(home, clock) as manager:
        record = await manager.get_instance(one.instance_id)
        assert record is not None
        assert record.state is _A.TERMINATED
        assert not (await told(Crew(manager, clock, stage, level), one)).was_graceful
