"""The task that owns an instance: the races between its messages, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from simulated_isolation import SimulatedIsolation
from virtual_ground import SETTINGS, BadStart, SlowEnd, SlowStart, Worker, World, request_for, virtual

from ostler.agents import AgentRegistry, Signal
from ostler.errors import (
    AgentBusyError,
    AgentGoneError,
    AgentInitializationError,
    AgentNotFoundError,
    DeadlineError,
    ExecutionTimeoutError,
    InvalidOperationError,
    OstlerError,
    StaleWriterError,
    StoreFullError,
)
from ostler.isolation.base import Cell, Exit, StartPlan
from ostler.lifecycle.job import JOB_ID
from ostler.lifecycle.messages import Exited, Probed, Withdraw
from ostler.lifecycle.operations import sweep
from ostler.lifecycle.phases import Adopting, Backoff, Leaving, Pausing, Serving
from ostler.model.attempt import AttemptOutcome, RequestState
from ostler.model.events import AgentSignalEvent
from ostler.model.spawn import RestartPolicy, TerminationOptions
from ostler.model.states import AgentState, SuspendDepth
from ostler.model.wait import WaitKind
from ostler.store import requests, waits
from ostler.testing.simulated import InlineStore

IMMEDIATE = TerminationOptions.immediate()
LATER = RestartPolicy.from_dict({"type": "linear", "initial_delay": "5s"})


def begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def outcome(task: asyncio.Task[Any]) -> Any:
    """What it came to: its result, or its error."""
    await asyncio.wait([task])
    return asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def grace(seconds: float, **more: Any) -> TerminationOptions:
    return TerminationOptions(graceful_timeout=timedelta(seconds=seconds), **more)


# --- spawn -------------------------------------------------------------------------------------------


@virtual
async def test_a_life(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        assert await manager.process(ada, 1) == 1
        await asyncio.sleep(1)
        assert world.record(ada).state is AgentState.WAITING
        result = await manager.terminate(ada)
        assert result.success
        assert result.was_graceful
        assert world.states(ada) == ["ready", "processing", "waiting", "terminating", "terminated"]
        assert not world.machine.living()


@virtual
async def test_terminate_while_starting_undoes_the_start(world: World) -> None:
    async with world.open() as manager:
        spawning = begin(world.spawn(SlowStart))
        await world.until(lambda: bool(world.runtime.instances) and bool(world.machine.living()))
        (ada,) = world.runtime.instances
        result = await manager.terminate(ada)
        assert result.success
        with pytest.raises(AgentInitializationError):
            await spawning
        assert not world.machine.living()
        assert world.record(ada).state is AgentState.TERMINATED


@virtual
async def test_terminate_at_the_very_moment_of_ready(world: World) -> None:
    async with world.open() as manager:
        for step in range(60):
            spawning = begin(world.spawn())
            await world.until(lambda: bool(world.runtime.instances))
            (ada,) = world.runtime.instances
            await asyncio.sleep(0.0003 * step)
            assert (await manager.terminate(ada)).success
            spawned = await outcome(spawning)
            assert spawned == ada or isinstance(spawned, AgentInitializationError), spawned
            assert world.record(ada).state is AgentState.TERMINATED
            assert not world.machine.living()
            await world.until(lambda: not world.runtime.instances)


@virtual
async def test_a_spawn_withdrawn_at_any_step_leaves_only_its_record(world: World) -> None:
    async with world.open() as manager:
        known: set[UUID] = set()
        for step in range(120):
            spawning = begin(world.spawn())
            await asyncio.sleep(0.0002 * step)
            spawning.cancel()
            await asyncio.wait([spawning])
            if not spawning.cancelled():
                await manager.terminate(spawning.result())
            await world.until(lambda: not world.runtime.instances)
            assert not world.machine.living(), step
            fresh = [one for one in await manager.get_active_instances() if one.instance_id not in known]
            assert not fresh, (step, fresh)


@virtual
async def test_a_spawn_that_is_cancelled_twice_leaves_only_its_record(world: World) -> None:
    async with world.open() as manager:
        for step in range(40):
            spawning = begin(world.spawn())
            await asyncio.sleep(0.0005 * step)
            spawning.cancel()
            await turns(step % 4)
            spawning.cancel()
            await asyncio.wait([spawning])
            if not spawning.cancelled():
                await manager.terminate(spawning.result())
            await asyncio.sleep(5)
            assert not world.machine.living(), step
            assert not await manager.get_active_instances(), step


@virtual
async def test_two_callers_with_one_key_share_the_start_and_one_may_go(world: World) -> None:
    async with world.open() as manager:
        one, two = begin(world.spawn(SlowStart, key="k")), begin(world.spawn(SlowStart, key="k"))
        await asyncio.sleep(0.05)
        one.cancel()
        await asyncio.wait([one])
        ada = await two
        assert await manager.process(ada, 1) == 1
        assert world.record(ada).attempt == 1


@virtual
async def test_a_caller_that_has_joined_keeps_the_instance_when_the_first_caller_goes(world: World) -> None:
    async with world.open():
        ada = await world.spawn(key="k")
        actor = world.actor(ada)
        phase = actor.phase
        assert isinstance(phase, Serving)
        (first,) = phase.spawned_by
        assert await world.spawn(key="k") == ada
        withdrawal = Withdraw(of=first)
        actor.post(withdrawal)  # its caller was cancelled while the reply was on its way
        await withdrawal.done
        await asyncio.sleep(20)
        assert world.record(ada).state is AgentState.READY


@virtual
async def test_a_failed_start_is_told_to_every_caller_of_its_key(world: World) -> None:
    async with world.open():
        together = await asyncio.gather(
            world.spawn(BadStart, key="k"), world.spawn(BadStart, key="k"), return_exceptions=True
        )
        assert [type(one) for one in together] == [AgentInitializationError] * 2
        with pytest.raises(AgentInitializationError) as later:
            await world.spawn(BadStart, key="k")
        assert "no" in str(later.value)
        assert len(world.runtime.instances) == 0
        assert not world.machine.living()


@virtual
async def test_a_start_that_is_terminated_twice_is_undone_before_it_is_terminated(world: World) -> None:
    async with world.open() as manager:
        world.machine.misfortune.stop_is_slow = 1.0
        spawning = begin(world.spawn(SlowStart))
        await world.until(lambda: bool(world.machine.living()))
        (ada,) = world.runtime.instances
        ends = [begin(manager.terminate(ada)), begin(manager.terminate(ada))]
        await asyncio.sleep(0.01)
        ends.append(begin(manager.terminate(ada, IMMEDIATE)))
        results = await asyncio.gather(*ends)
        assert all(one.success for one in results)
        assert not world.machine.living()
        with pytest.raises(AgentInitializationError):
            await spawning


@virtual
async def test_a_start_whose_agent_does_not_die_stays_until_it_does(world: World) -> None:
    """The undo of a start may find what the end of an attempt may find: a process that no signal ends."""
    async with world.open() as manager:
        spawning = begin(world.spawn(SlowStart))
        await world.until(lambda: any(agent.works for agent in world.machine.living()))
        (ada,) = world.runtime.instances
        world.agent(ada).unkillable_until = world.clock.mono() + 30
        result = await manager.terminate(ada)
        assert not result.success
        assert world.record(ada).state is AgentState.TERMINATING
        await asyncio.sleep(60)
        assert world.record(ada).state is AgentState.TERMINATED
        assert not world.machine.living()
        with pytest.raises(OstlerError):
            await spawning


@virtual
async def test_a_start_that_the_level_cannot_undo_stays_until_it_can(world: World) -> None:
    """It is called off before the level has returned its cell."""
    async with world.open() as manager:
        world.level.pause = lambda: world.clock.sleep(1)  # type: ignore[method-assign]  # the start takes its time
        spawning = begin(world.spawn())
        await world.until(lambda: bool(world.machine.living()))
        (ada,) = world.runtime.instances
        world.agent(ada).unkillable_until = world.clock.mono() + 30
        assert world.actor(ada).cell is None
        result = await manager.terminate(ada)
        assert not result.success
        assert "process 42 does not die" in (result.error_message or "")
        assert world.record(ada).state is AgentState.TERMINATING
        await asyncio.sleep(60)
        assert world.record(ada).state is AgentState.TERMINATED
        assert not world.machine.living()
        with pytest.raises(OstlerError):
            await spawning


@virtual
async def test_a_start_that_is_late_and_cannot_be_undone_is_still_called_late(world: World) -> None:
    async with world.open():
        world.level.pause = lambda: world.clock.sleep(5)  # type: ignore[method-assign]  # the start takes its time
        spawning = begin(world.spawn(initialization_timeout=timedelta(seconds=1)))
        await world.until(lambda: bool(world.machine.living()))
        (ada,) = world.runtime.instances
        world.agent(ada).unkillable_until = world.clock.mono() + 30
        with pytest.raises(OstlerError, match="process 42 does not die"):
            await spawning
        await asyncio.sleep(60)
        assert world.record(ada).state is AgentState.FAILED
        (attempt,) = world.attempts(ada)
        assert attempt.outcome is AttemptOutcome.TIMEOUT
        assert not world.machine.living()


@virtual
async def test_a_spawn_on_a_full_disk_leaves_nothing_alive(world: World) -> None:
    async with world.open():
        spawning = begin(world.spawn(SlowStart))
        await world.until(lambda: bool(world.machine.living()))
        (ada,) = world.runtime.instances
        world.fill_disk()
        await asyncio.sleep(1)
        assert not world.machine.living()
        with pytest.raises(StoreFullError):
            await spawning
        world.free_disk()
        await world.until(lambda: not world.runtime.instances)
        assert world.record(ada).state is AgentState.FAILED


# --- requests ----------------------------------------------------------------------------------------


@virtual
async def test_slots_are_first_come_first_served_and_a_full_queue_is_busy(world: World) -> None:
    world.settings = world.settings.evolve(queue_per_slot=2)
    async with world.open() as manager:
        ada = await world.spawn(tasks=2)
        work = [begin(manager.process(ada, {"id": n, "work": 0.03, "answer": n})) for n in range(7)]
        await asyncio.sleep(0.02)
        assert len(world.actor(ada).calls) == 2
        assert len(world.actor(ada).backlog) == 4
        results = await asyncio.gather(*work, return_exceptions=True)
        assert results[:6] == [0, 1, 2, 3, 4, 5]
        assert isinstance(results[6], AgentBusyError)
        assert world.executions == [0, 1, 2, 3, 4, 5]
        with pytest.raises(AgentBusyError):
            await asyncio.gather(*(manager.process(ada, {"work": 1}, wait=False) for _ in range(3)))


@virtual
async def test_without_a_queue_a_request_beyond_the_slots_is_refused_at_once(world: World) -> None:
    world.settings = world.settings.evolve(queue_per_slot=0)
    async with world.open() as manager:
        ada = await world.spawn(tasks=1)
        working = begin(manager.process(ada, {"work": 1, "answer": 1}))
        await world.until(lambda: len(world.executions) == 1)
        with pytest.raises(AgentBusyError):
            await manager.process(ada, 2)
        assert await working == 1
        assert await manager.process(ada, 3) == 3


@virtual
async def test_a_caller_that_goes_as_its_slot_comes_passes_it_on(world: World) -> None:
    async with world.open() as manager:
        for step in range(12):
            ada = await world.spawn(tasks=1)
            first = begin(manager.process(ada, {"work": 0.1, "answer": 1}))
            second, third = (begin(manager.process(ada, {"work": 0.1, "answer": n})) for n in (2, 3))
            await first
            await turns(step)
            second.cancel()
            assert await third == 3
            assert not world.actor(ada).calls
            assert not world.actor(ada).backlog


@virtual
@pytest.mark.parametrize("seed", range(5))
async def test_no_slot_is_lost_or_made_up(world: World, seed: int) -> None:
    chance = random.Random(seed)
    async with world.open() as manager:
        at_work: list[int] = []

        class Counted(Worker):
            now = 0

            async def process(self, request: Any) -> Any:
                self.now += 1
                at_work.append(self.now)
                try:
                    return await super().process(request)
                finally:
                    self.now -= 1

        ada = await world.spawn(Counted, tasks=3)
        asked: list[asyncio.Task[Any]] = []
        for _ in range(100):
            if chance.random() < 0.5:
                work = {"work": chance.choice((0.01, 0.1)), "fail": chance.random() < 0.2}
                asked.append(begin(manager.process(ada, work)))
            elif asked:
                chance.choice(asked).cancel()
            await asyncio.sleep(chance.choice((0, 0, 0.01, 0.05)))
        await asyncio.wait(asked)
        began = world.clock.mono()
        await asyncio.gather(*(manager.process(ada, {"work": 1}) for _ in range(3)))
        assert world.clock.mono() - began < 2, "all three slots are free"
        assert max(at_work) == 3


@virtual
async def test_a_cancelled_caller_cancels_its_request_and_no_other(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(tasks=1)
        running, queued = begin(manager.process(ada, {"work": 9})), begin(manager.process(ada, {"id": 2, "answer": 2}))
        third = begin(manager.process(ada, {"id": 3, "answer": 3}))
        await asyncio.sleep(0.1)
        queued.cancel()
        running.cancel()
        await asyncio.wait([running, queued])
        assert running.cancelled()
        assert queued.cancelled()
        assert await third == 3
        assert world.executions == [None, 3]


@virtual
async def test_one_of_two_callers_of_a_request_may_go(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        one, two = (begin(manager.process(ada, {"id": 1, "work": 2}, request_id="r")) for _ in range(2))
        await asyncio.sleep(1)
        one.cancel()
        await asyncio.wait([one])
        assert await two is None
        assert world.executions == [1]


@virtual
async def test_a_request_that_ignores_its_time_limit_costs_the_attempt(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(timeout=2)
        with pytest.raises(ExecutionTimeoutError):
            await manager.process(ada, {"work": 9})
        assert world.record(ada).attempt == 1
        world.machine.misfortune.ignores_cancel = 1.0
        with pytest.raises(AgentGoneError):
            await manager.process(ada, {"work": 1e6})
        assert AgentState.FAILED in world.states(ada), "the record said so before the caller was told"
        world.machine.misfortune.ignores_cancel = 0.0
        assert await manager.process(ada, 3) == 3
        assert world.record(ada).attempt == 2


@virtual
async def test_a_request_during_a_restart_waits_for_it(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(restart_policy=LATER)
        world.agent(ada).die()
        await world.until(lambda: isinstance(world.actor(ada).phase, Backoff))
        asked = world.clock.mono()
        assert await manager.process(ada, 9) == 9
        assert world.clock.mono() - asked > 3
        world.agent(ada).die()
        await world.until(lambda: isinstance(world.actor(ada).phase, Backoff))
        with pytest.raises(ExecutionTimeoutError):
            await manager.process(ada, 9, timeout=1)


@virtual
async def test_a_request_waits_for_the_end_of_an_attempt_no_longer_than_its_own_time(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        restarting = begin(manager.restart(ada))
        await world.until(lambda: isinstance(world.actor(ada).phase, Leaving))
        asked = world.clock.mono()
        with pytest.raises(ExecutionTimeoutError):
            await manager.process(ada, 9, timeout=1)
        assert world.clock.mono() - asked < 1.5
        await restarting


@virtual
async def test_a_queued_request_of_a_held_instance_fails_when_its_own_time_is_over(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(tasks=1)
        running = begin(manager.process(ada, {"ask": timedelta(hours=1)}))
        await world.until(lambda: bool(world.actor(ada).waits))
        queued = begin(manager.process(ada, {"id": 2}, timeout=30))
        await asyncio.sleep(1)
        await manager.suspend(ada)
        with pytest.raises(ExecutionTimeoutError):
            await queued
        await manager.resume(ada)
        (wait,) = await manager.open_waits(ada)
        await manager.answer(wait.wait_id, "approved")
        assert await running == "approved"


@virtual
async def test_a_request_queued_over_a_restart_is_found_again_by_the_next_manager(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(restart_policy=LATER, timeout=100)
        world.agent(ada).die()
        await world.until(lambda: isinstance(world.actor(ada).phase, Backoff))
        asking = begin(manager.process(ada, {"id": 1, "work": 60, "answer": "once"}, request_id="r", timeout=100))
        await world.until(lambda: world.executions == [1])
        await asyncio.sleep(1)
        manager.keep_agents = True
    with pytest.raises(OstlerError):
        await asking
    async with world.open() as manager:
        answer = await manager.process(ada, {"id": 1, "work": 60, "answer": "once"}, request_id="r", timeout=100)
        assert answer == "once"
        assert world.executions == [1], "it was joined, not begun again"


@virtual
async def test_a_request_id_is_answered_from_its_row_in_every_phase(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()

        async def again() -> Any:
            return await manager.process(ada, {"id": 1, "answer": 7}, request_id="r")

        assert await again() == 7
        for depth in SuspendDepth:
            await manager.suspend(ada, depth)
            assert await again() == 7
            await manager.resume(ada)
            assert await again() == 7
        world.agent(ada).die()
        assert await again() == 7
        await world.until(lambda: world.record(ada).state is AgentState.READY)
        await manager.terminate(ada)
        assert await again() == 7
        assert world.executions == [1]


@virtual
async def test_an_answer_that_a_full_disk_refused_is_written_when_there_is_room(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        asking = begin(manager.process(ada, {"id": 1, "work": 1, "answer": 7}, request_id="r"))
        await world.until(lambda: world.executions == [1])
        world.fill_disk()
        assert await asking == 7
        await asyncio.sleep(10)
        world.free_disk()
        await asyncio.sleep(5)
        row = requests.get_request(world.database.reader, ada, "r")
        assert row is not None
        assert row.state is RequestState.DONE
        assert await manager.process(ada, {"id": 1, "work": 1, "answer": 7}, request_id="r") == 7
        assert world.executions == [1]
        await asyncio.sleep(1)
        assert not world.agent(ada).works, "the agent was told that its answer is kept"


@virtual
@pytest.mark.parametrize("ending", ["terminate", "die", "park", "restart"])
async def test_an_answer_that_a_full_disk_refused_is_written_before_its_attempt_ends(world: World, ending: str) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        asking = begin(manager.process(ada, {"id": 1, "work": 1, "answer": 7}, request_id="r"))
        await world.until(lambda: world.executions == [1])
        world.fill_disk()
        assert await asking == 7
        match ending:
            case "terminate":
                begin(manager.terminate(ada))
            case "park":
                begin(manager.suspend(ada, "park"))
            case "restart":
                begin(manager.restart(ada))
            case _:
                world.agent(ada).die()
        await asyncio.sleep(0.5)
        world.free_disk()
        await asyncio.sleep(30)
        assert await manager.process(ada, {"id": 1, "work": 1, "answer": 7}, request_id="r") == 7
        assert world.executions == [1]


@virtual
async def test_a_signal_is_never_durable_after_the_answer_that_followed_it(world: World) -> None:
    """The commit of the signals fails, the commit of the answer succeeds: then the answer waits for its signals."""
    async with world.open() as manager:
        ada = await world.spawn(timeout=1000)
        other = begin(manager.process(ada, {"work": 500}))  # so that no move depends on the answer
        await asyncio.sleep(1)
        world.delay = 0.02
        for lost in range(1, 4):
            world.lose_commit(lost)
            request_id = f"r{lost}"
            await manager.process(ada, {"id": lost, "say": 2, "work": 0.003}, request_id=request_id)
            row = requests.get_request(world.database.reader, ada, request_id)
            said = [one for one in world.of_kind(ada, AgentSignalEvent) if one.payload == {"id": lost}]
            assert row is None or row.state is not RequestState.DONE or len(said) == 2, lost
            await asyncio.sleep(5)
            row = requests.get_request(world.database.reader, ada, request_id)
            said = [one.name for one in world.of_kind(ada, AgentSignalEvent) if one.payload == {"id": lost}]
            assert row is not None
            assert row.state is RequestState.DONE
            assert said == ["said-0", "said-1"], lost
        other.cancel()


@virtual
@pytest.mark.parametrize("lost", range(1, 5))
async def test_all_that_an_agent_said_is_durable_before_its_end_is(world: World, lost: int) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        asking = begin(manager.process(ada, {"id": 1, "say": 3, "work": 50}))
        await world.until(lambda: bool(world.executions))
        world.lose_commit(lost)
        await manager.terminate(ada, IMMEDIATE)
        await asyncio.sleep(10)
        assert world.record(ada).state is AgentState.TERMINATED
        assert len(world.of_kind(ada, AgentSignalEvent)) == 3
        with pytest.raises(AgentGoneError):
            await asking


@virtual
async def test_a_signal_that_cannot_be_written_takes_no_other_with_it(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        for payload in ({"n": 1}, {"n": object()}, {"n": 3}):
            world.agent(ada).say(Signal(name="said", payload=payload))
        await asyncio.sleep(1)
        assert [one.payload for one in world.of_kind(ada, AgentSignalEvent)] == [{"n": 1}, {"n": 3}]
        assert not world.agent(ada).unacked
        assert await manager.process(ada, 1) == 1


# --- deaths and restarts -----------------------------------------------------------------------------


class Reporting(Worker):
    async def process(self, request: Any) -> Any:
        assert self.context is not None
        for fraction in (0.1, 0.2):  # the second is written a second later
            self.context.report(fraction)
        return await super().process(request)


@virtual
async def test_progress_that_is_due_while_a_restart_is_written_does_not_cost_the_next_attempt(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(Reporting)
        await manager.process(ada, {})
        restarting = begin(manager.restart(ada))
        await world.until(lambda: isinstance(world.actor(ada).phase, Leaving))
        world.delay = 5.0
        await world.until(lambda: world.record(ada).attempt == 2)
        world.delay = 0.001
        await restarting
        assert world.record(ada).state is AgentState.READY
        assert await manager.process(ada, {"answer": 1}) == 1


@virtual
async def test_many_notices_of_one_death_are_one_restart(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        work = [begin(manager.process(ada, {"work": 50})) for _ in range(2)]
        await world.until(lambda: len(world.executions) == 2)
        actor, agent = world.actor(ada), world.agent(ada)
        agent.die(Exit(outcome=AttemptOutcome.SIGNAL, detail="signal 9", signal=9))
        lost = Exit(outcome=AttemptOutcome.LOST, detail="lost")
        actor.post(Exited(attempt=1, how=lost))
        actor.post(Probed(attempt=1, gone=lost))
        for one in await asyncio.gather(*work, return_exceptions=True):
            assert isinstance(one, AgentGoneError)
            assert "signal 9" in str(one)
        assert world.record(ada).state is not AgentState.WAITING
        await asyncio.sleep(10)
        assert world.record(ada).attempt == 2
        assert world.record(ada).lifetime_restarts == 1
        actor.post(Exited(attempt=1, how=lost))  # late, of an earlier attempt
        await asyncio.sleep(10)
        assert world.record(ada).attempt == 2
        assert world.attempts(ada)[0].exit_signal == 9


@virtual
async def test_an_agent_that_dies_while_it_is_being_held_or_is_frozen_is_restarted(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        working = begin(manager.process(ada, {"work": 50}))
        await world.until(lambda: len(world.executions) == 1)
        holding = begin(manager.suspend(ada))
        await world.until(lambda: isinstance(world.actor(ada).phase, Pausing))
        world.agent(ada).die()
        with pytest.raises(InvalidOperationError):
            await holding
        with pytest.raises(AgentGoneError):
            await working
        await world.until(lambda: world.record(ada).state is AgentState.READY)
        assert world.record(ada).attempt == 2
        working = begin(manager.process(ada, {"work": 50}))
        await world.until(lambda: len(world.executions) == 2)
        await manager.suspend(ada, "freeze")
        world.agent(ada).die()
        with pytest.raises(AgentGoneError):
            await working
        await world.until(lambda: world.record(ada).attempt == 3)
        await world.until(lambda: world.record(ada).state is AgentState.READY)
        assert not waits.open_waits(world.database.reader, instance_id=ada)


@virtual
async def test_a_restart_by_hand_spends_no_retry_and_ends_the_calls(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        working = begin(manager.process(ada, {"work": 50}))
        await world.until(lambda: len(world.executions) == 1)
        record = await manager.restart(ada)
        assert (record.attempt, record.state, record.restart_count) == (2, AgentState.READY, 0)
        with pytest.raises(AgentGoneError):
            await working
        assert await manager.process(ada, 1) == 1


@virtual
async def test_a_death_on_a_full_disk_is_written_when_there_is_room(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        working = begin(manager.process(ada, {"work": 50}))
        await world.until(lambda: len(world.executions) == 1)
        world.fill_disk()
        world.agent(ada).die()
        with pytest.raises(AgentGoneError, match="could not be recorded yet"):
            await working
        with pytest.raises(AgentGoneError, match="could not be recorded yet"):
            await manager.process(ada, 1)
        await asyncio.sleep(10)
        assert isinstance(world.actor(ada).phase, Leaving)
        world.free_disk()
        await world.until(lambda: world.record(ada).attempt == 2)
        await world.until(lambda: world.record(ada).state is AgentState.READY)


# --- suspend -----------------------------------------------------------------------------------------


@virtual
async def test_hold_freeze_and_park(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(timeout=5)
        working = begin(manager.process(ada, {"work": 3}))
        await world.until(lambda: len(world.executions) == 1)
        assert (await manager.suspend(ada)).state is AgentState.SUSPENDED
        assert working.done(), "a hold waits for the work"
        with pytest.raises(InvalidOperationError):
            await manager.process(ada, 1)
        assert (await manager.resume(ada)).state is AgentState.READY
        working = begin(manager.process(ada, {"work": 3, "answer": 5}))
        await world.until(lambda: len(world.executions) == 2)
        await manager.suspend(ada, "freeze")
        await asyncio.sleep(100)
        assert not working.done(), "its time stands still"
        assert (await manager.resume(ada)).state is AgentState.PROCESSING
        assert await working == 5
        assert (await manager.suspend(ada, "park")).attempt == 1
        assert not world.machine.living()
        assert (await manager.resume(ada)).attempt == 2
        assert await manager.process(ada, 1) == 1


@virtual
async def test_a_pause_that_is_over_when_the_machine_wakes_ends_within_a_minute(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        await manager.suspend(ada, resume_after="1h")
        world.clock.suspend_machine(7200)
        await world.until(lambda: world.record(ada).state is AgentState.READY, seconds=61)


@virtual
async def test_a_hold_that_takes_too_long_is_given_up(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        working = begin(manager.process(ada, {"work": 20, "answer": 5}))
        await world.until(lambda: len(world.executions) == 1)
        with pytest.raises(DeadlineError):
            await manager.suspend(ada, timeout=2)
        assert await working == 5
        assert world.record(ada).state is AgentState.WAITING


@virtual
async def test_a_hold_whose_caller_goes_is_dropped(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        working = begin(manager.process(ada, {"work": 20, "answer": 5}))
        await world.until(lambda: len(world.executions) == 1)
        holding = begin(manager.suspend(ada))
        await world.until(lambda: isinstance(world.actor(ada).phase, Pausing))
        holding.cancel()
        await asyncio.wait([holding])
        assert isinstance(world.actor(ada).phase, Serving)
        assert await working == 5
        assert await manager.process(ada, 1) == 1


@virtual
async def test_of_two_resumptions_one_starts_a_parked_instance(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        await manager.suspend(ada, "park")
        both = await asyncio.gather(manager.resume(ada), manager.resume(ada), return_exceptions=True)
        assert sum(isinstance(one, InvalidOperationError) for one in both) == 1, both
        assert world.record(ada).attempt == 2


@virtual
async def test_a_frozen_agent_outlives_a_caller_that_goes(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        working = begin(manager.process(ada, {"id": 1, "work": 5}, request_id="r"))
        await world.until(lambda: world.executions == [1])
        await manager.suspend(ada, "freeze")
        working.cancel()
        await asyncio.wait([working], timeout=1)
        assert working.cancelled()
        await asyncio.sleep(60)
        assert world.record(ada).state is AgentState.SUSPENDED
        assert world.record(ada).attempt == 1
        await manager.resume(ada)
        await asyncio.sleep(1)
        assert not world.agent(ada).works, "its work was cancelled when it could hear of it"
        row = requests.get_request(world.database.reader, ada, "r")
        assert row is not None
        assert row.state is RequestState.CANCELLED
        assert await manager.process(ada, 1) == 1


@virtual
async def test_a_thaw_of_an_earlier_attempt_that_fails_late_costs_nothing(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        await manager.suspend(ada, "freeze")
        cell = world.actor(ada).cell
        assert cell is not None

        async def thaw() -> None:
            await asyncio.sleep(20)
            raise InvalidOperationError("too late")

        cell.thaw = thaw  # type: ignore[method-assign]
        await manager.resume(ada)
        await manager.restart(ada)
        await asyncio.sleep(60)
        assert world.record(ada).attempt == 2
        assert world.record(ada).state is AgentState.READY


@virtual
async def test_a_freeze_that_hangs_does_not_hold_up_the_end(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        cell = world.actor(ada).cell
        assert cell is not None

        async def freeze() -> None:
            await asyncio.sleep(1e5)

        cell.freeze = freeze  # type: ignore[method-assign]
        freezing = begin(manager.suspend(ada, "freeze"))
        await world.until(lambda: isinstance(world.actor(ada).phase, Pausing))
        task = world.actor(ada).task
        assert task is not None
        assert (await manager.terminate(ada)).success
        with pytest.raises(InvalidOperationError):
            await freezing
        await asyncio.sleep(10)
        assert task.done()


@virtual
async def test_a_freeze_that_raises_anything_leaves_the_agent_serving(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        cell = world.actor(ada).cell
        assert cell is not None

        async def freeze() -> None:
            raise OSError(5, "no such cgroup")

        cell.freeze = freeze  # type: ignore[method-assign]
        with pytest.raises(InvalidOperationError):
            await manager.suspend(ada, "freeze")
        assert await manager.process(ada, 1) == 1
        assert world.record(ada).attempt == 1


@virtual
async def test_a_resumption_that_meets_a_park_under_way_comes_after_it(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        parking = begin(manager.suspend(ada, "park"))
        await world.until(lambda: isinstance(world.actor(ada).phase, Leaving))
        resuming = begin(manager.resume(ada))
        assert (await parking).state is AgentState.SUSPENDED
        assert (await resuming).state is AgentState.READY
        assert world.record(ada).attempt == 2


@virtual
@pytest.mark.parametrize("instead", ["restart", "terminate"])
async def test_a_resumption_that_waits_for_a_park_is_answered_when_another_verb_replaces_it(
    world: World, instead: str
) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        parking = begin(manager.suspend(ada, "park"))
        await world.until(lambda: isinstance(world.actor(ada).phase, Leaving))
        resuming = begin(manager.resume(ada))
        await asyncio.sleep(0.1)
        await (manager.restart(ada) if instead == "restart" else manager.terminate(ada))
        assert isinstance(await outcome(parking), InvalidOperationError)
        assert isinstance(await outcome(resuming), InvalidOperationError)


@virtual
async def test_a_parked_instance_waits_for_its_definition(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        await manager.suspend(ada, "park", resume_after=60)
    world.registry = AgentRegistry()
    async with world.open() as manager:
        with pytest.raises(AgentNotFoundError):
            await manager.resume(ada)
        await asyncio.sleep(100)
        assert world.record(ada).state is AgentState.SUSPENDED
        world.worker = world.register(Worker)
        await world.until(lambda: world.record(ada).state is AgentState.READY)


# --- terminate ---------------------------------------------------------------------------------------


@virtual
async def test_terminations_are_shared_and_the_least_patient_decides(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        began = world.clock.mono()
        patient = begin(manager.terminate(ada, grace(40)))
        await asyncio.sleep(1)
        hasty = begin(manager.terminate(ada, IMMEDIATE))
        one, two = await asyncio.gather(patient, hasty)
        assert one == two
        assert one.success
        assert not one.was_graceful
        assert world.clock.mono() - began < 8


@virtual
async def test_a_termination_without_force_stays_until_one_with_force(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        first = await manager.terminate(ada, grace(1, force_if_timeout=False))
        assert not first.success
        assert world.record(ada).state is AgentState.TERMINATING
        assert world.machine.living()
        second = await manager.terminate(ada, IMMEDIATE)
        assert second.success
        assert not second.was_graceful


@virtual
async def test_an_agent_that_was_not_forced_and_ends_by_itself_is_terminated(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        assert not (await manager.terminate(ada, grace(1, force_if_timeout=False))).success
        await asyncio.sleep(5)
        world.agent(ada).die()
        await asyncio.sleep(1)
        assert world.record(ada).state is AgentState.TERMINATED


@virtual
async def test_an_intent_that_a_full_disk_refused_is_written_when_there_is_room(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        world.fill_disk()
        assert not (await manager.terminate(ada, grace(1, force_if_timeout=False))).success
        assert world.record(ada).state is AgentState.READY
        world.free_disk()
        await asyncio.sleep(5)
        assert world.record(ada).state is AgentState.TERMINATING
        assert world.acts(ada) == ["spawn", "terminate"]
        assert (await manager.terminate(ada, IMMEDIATE)).success
        assert world.acts(ada) == ["spawn", "terminate"]


@virtual
async def test_what_does_not_die_is_tried_again(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        world.agent(ada).unkillable_until = world.clock.mono() + 20
        first = await manager.terminate(ada)
        assert not first.success
        assert "process 42" in (first.error_message or "")
        assert "process 42" in repr(await manager.why(ada))
        await asyncio.sleep(30)
        assert world.record(ada).state is AgentState.TERMINATED


@virtual
async def test_a_failed_and_a_parked_instance_can_be_terminated(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(restart_policy=LATER)
        world.agent(ada).die()
        await world.until(lambda: isinstance(world.actor(ada).phase, Backoff))
        queued = begin(manager.process(ada, 1))
        await asyncio.sleep(0.1)
        assert (await manager.terminate(ada)).success
        with pytest.raises(AgentGoneError):
            await queued
        bob = await world.spawn()
        await manager.suspend(bob, "park")
        assert (await manager.terminate(bob)).success
        assert not waits.open_waits(world.database.reader)


@virtual
async def test_terminate_on_a_full_disk_ends_the_agent_and_says_so(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        assert await manager.process(ada, 1) == 1
        world.fill_disk()
        assert await manager.process(ada, 2) == 2, "the work is done, whatever the disk says"
        result = await manager.terminate(ada)
        assert result.success
        assert "recorded" in (result.error_message or "")
        assert not world.machine.living()
        world.free_disk()
        await asyncio.sleep(5)
        assert world.record(ada).state is AgentState.TERMINATED
        assert world.acts(ada) == ["spawn", "terminate"], "the act is told once, with who asked for it"


@virtual
@pytest.mark.parametrize("before", ["park", "restart", "die"])
async def test_a_termination_that_meets_an_unwritten_end_is_carried_out(world: World, before: str) -> None:
    """Nothing lives any more, the end could not be written, and then a termination arrives."""
    async with world.open() as manager:
        ada = await world.spawn()
        match before:
            case "park":
                first = begin(manager.suspend(ada, "park"))
                await world.until(lambda: isinstance(world.actor(ada).phase, Leaving))
            case "restart":
                first = begin(manager.restart(ada))
                await world.until(lambda: isinstance(world.actor(ada).phase, Leaving))
            case _:
                first = begin(asyncio.sleep(0))
                world.agent(ada).die()
        world.fill_disk()
        await asyncio.sleep(10)
        phase = world.actor(ada).phase
        assert isinstance(phase, Leaving)
        assert phase.empty
        ending = begin(manager.terminate(ada))
        await asyncio.sleep(1)
        world.free_disk()
        assert (await ending).success
        await asyncio.sleep(5)
        assert world.record(ada).state is AgentState.TERMINATED
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(60)
        assert not world.machine.living()
        assert world.record(ada).state is AgentState.TERMINATED


# --- waits -------------------------------------------------------------------------------------------


@virtual
async def test_a_wait_is_answered_once_and_its_time_stands_still(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(timeout=5)
        asking = begin(manager.process(ada, {"id": 1, "ask": None}, request_id="r"))
        await world.until(lambda: bool(world.actor(ada).waits))
        await asyncio.sleep(60)
        assert world.record(ada).state is AgentState.WAITING
        (wait,) = await manager.open_waits(ada)
        both = await asyncio.gather(
            manager.answer(wait.wait_id, "yes"), manager.answer(wait.wait_id, "no"), return_exceptions=True
        )
        assert sum(isinstance(one, InvalidOperationError) for one in both) == 1
        assert await asking == "yes"


@virtual
@pytest.mark.parametrize("depth", ["hold", "freeze"])
async def test_a_wait_answered_during_a_suspension_is_delivered_on_resume(world: World, depth: str) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        asking = begin(manager.process(ada, {"ask": None}))
        await world.until(lambda: bool(world.actor(ada).waits))
        await manager.suspend(ada, depth)
        (wait,) = [one for one in await manager.open_waits(ada) if one.kind is WaitKind.HUMAN]
        await manager.answer(wait.wait_id, "yes")
        await asyncio.sleep(60)
        assert not asking.done()
        assert world.record(ada).state is AgentState.SUSPENDED
        await manager.resume(ada)
        assert await asking == "yes"


@virtual
async def test_a_wait_that_times_out_ends_once(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        assert await manager.process(ada, {"ask": timedelta(seconds=3)}) == "timeout"
        assert not await manager.open_waits(ada)


@virtual
async def test_a_wait_ends_with_its_caller(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        asking = begin(manager.process(ada, {"ask": None}))
        await world.until(lambda: bool(world.actor(ada).waits))
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(1)
        assert not await manager.open_waits(ada)
        assert world.record(ada).state is AgentState.WAITING


# --- managers ----------------------------------------------------------------------------------------


@virtual
async def test_a_detached_agent_is_adopted_with_its_work(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(timeout=200)
        named = begin(manager.process(ada, {"id": 7, "work": 80, "answer": "seven"}, request_id="r7", timeout=200))
        asking = begin(manager.process(ada, {"id": 8, "ask": None}, request_id="r8"))
        await world.until(lambda: bool(world.actor(ada).waits))
        manager.keep_agents = True
    for one in (named, asking):
        with pytest.raises(AgentGoneError):
            await one
    assert world.machine.living()
    async with world.open() as manager:
        queued = begin(manager.process(ada, 4))
        (wait,) = await manager.open_waits(ada)
        await manager.answer(wait.wait_id, "yes")
        assert await manager.process(ada, {"id": 8, "ask": None}, request_id="r8") == "yes"
        again = {"id": 7, "work": 80, "answer": "seven"}
        assert await manager.process(ada, again, request_id="r7", timeout=200) == "seven"
        assert await queued == 4
        assert world.executions == [7, 8, None]
        assert world.record(ada).attempt == 1


@virtual
async def test_what_cannot_be_adopted_yet_is_not_swept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the exit of another agent is recorded, and then forgotten."""
    async with world.open() as manager:
        dead, living = await world.spawn(), await world.spawn()
        manager.keep_agents = True
    agent, adopt, is_silent = world.agent(living), SimulatedIsolation.adopt, True
    world.agent(dead).die()

    async def adopt_some(level: SimulatedIsolation, handle: Any, plan: StartPlan, listener: Any) -> Cell | Exit:
        if is_silent and plan.instance_id == living:
            raise InvalidOperationError("the keeper does not say what became of it")
        return await adopt(level, handle, plan, listener)

    monkeypatch.setattr(SimulatedIsolation, "adopt", adopt_some)
    async with world.open() as manager:
        await world.until(lambda: world.record(dead).attempt == 2)
        await sweep(world.runtime)
        assert not agent.dead
        assert (dead, 1) not in world.machine.agents
        is_silent = False
        await world.until(lambda: not manager.unrecovered())
        assert world.agent(living) is agent
        assert await manager.process(living, {"answer": 1}) == 1
        assert world.machine.hits["swept"] == 0


@virtual
async def test_a_job_whose_end_a_full_disk_refused_is_terminated_by_the_next_manager(world: World) -> None:
    world.delay = 0.05
    async with world.open() as manager:
        ada = (await manager.spawn(request_for(world.worker).evolve(job={"request": {"answer": 1}}))).instance_id
        await world.until(lambda: job_row(world, ada) is RequestState.DONE)
        world.fill_disk()
        await world.until(lambda: not world.machine.living())
    world.free_disk()
    assert world.record(ada).state is AgentState.WAITING
    await asyncio.sleep(SETTINGS.lease_ttl.total_seconds())  # the full disk kept the lease, too
    async with world.open():
        await world.until(lambda: world.record(ada).state is AgentState.TERMINATED)
    assert [act for act in world.acts(ada) if act == "terminate"] == ["terminate"]


def job_row(world: World, instance_id: UUID) -> RequestState | None:
    row = requests.get_request(world.database.reader, instance_id, JOB_ID)
    return None if row is None else row.state


@virtual
async def test_requests_wait_for_an_adopted_agent_no_longer_than_their_own_time(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn()
        manager.keep_agents = True
    world.machine.misfortune.report_is_late = 1.0
    async with world.open() as manager:
        await world.until(lambda: isinstance(world.actor(ada).phase, Adopting))
        began = world.clock.mono()
        for request_id in (None, "r"):
            with pytest.raises(ExecutionTimeoutError):
                await manager.process(ada, {"id": 1, "answer": 1}, request_id=request_id, timeout=0.2)
        assert world.clock.mono() - began < 0.5
        assert await manager.process(ada, {"id": 1, "answer": 1}, request_id="r") == 1
        await asyncio.sleep(40)
        assert world.executions == [1]


@virtual
@pytest.mark.parametrize("doing", ["suspend", "restart", "park"])
async def test_a_verb_in_flight_does_not_hurt_what_a_closing_manager_leaves(world: World, doing: str) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        working = begin(manager.process(ada, {"id": 1, "work": 60}))
        await world.until(lambda: world.executions == [1])
        acts = {
            "suspend": lambda: manager.suspend(ada),
            "restart": lambda: manager.restart(ada),
            "park": lambda: manager.suspend(ada, "park"),
        }
        doomed = begin(acts[doing]())
        await asyncio.sleep(1)
        manager.keep_agents = True
        closing = world.clock.mono()
    assert world.clock.mono() - closing < 30
    for result in (await outcome(doomed), await outcome(working)):
        assert isinstance(result, OstlerError) or result.attempt == 2, result
    record = world.record(ada)
    assert record.state in {AgentState.PROCESSING, AgentState.WAITING, AgentState.READY}, record.state
    assert world.machine.living(ada)
    async with world.open() as manager:
        assert await manager.process(ada, 1, timeout=100) == 1


@virtual
async def test_a_park_under_way_is_finished_by_a_manager_that_closes_and_keeps(world: World) -> None:
    async with world.open() as manager:
        ada = await world.spawn(SlowEnd)
        parking = begin(manager.suspend(ada, "park"))
        await world.until(lambda: isinstance(world.actor(ada).phase, Leaving))
        manager.keep_agents = True
        began = world.clock.mono()
    assert world.clock.mono() - began < 20
    await asyncio.gather(parking, return_exceptions=True)
    assert world.record(ada).state is AgentState.SUSPENDED
    assert not world.machine.living()


@virtual
@pytest.mark.parametrize("when", ["starting", "serving", "leaving", "frozen"])
async def test_a_manager_that_loses_its_lease_lets_go_and_refuses(world: World, when: str) -> None:
    async with world.open() as manager:
        if when == "starting":
            work = begin(world.spawn(SlowStart))
            await world.until(lambda: bool(world.machine.living()))
        else:
            ada = await world.spawn(SlowEnd)
            if when == "frozen":
                await manager.suspend(ada, "freeze")
            work = begin(manager.terminate(ada) if when == "leaving" else manager.process(ada, {"work": 100}))
            await asyncio.sleep(0.1)
        async with InlineStore(world.database) as store:
            await store.take_lease("other", ttl=timedelta(hours=1), steal=True)
            await asyncio.sleep(700)
            result = await outcome(work)
            assert isinstance(result, OstlerError), result
            assert type(result).__name__ != "ActorEndedError"
            with pytest.raises(StaleWriterError):
                await manager.get_active_instances()
            assert not world.runtime.instances
            await store.release_lease()


@virtual
async def test_a_bug_in_a_handler_ends_one_instance_only(world: World) -> None:
    def broken(name: str) -> None:
        if name == "restart.decide.after":
            raise RuntimeError("a bug")

    world.fault = broken
    async with world.open() as manager:
        ada, bob = await world.spawn(), await world.spawn()
        working = begin(manager.process(ada, {"work": 50}))
        await world.until(lambda: len(world.executions) == 1)
        world.agent(ada).die()
        with pytest.raises(AgentGoneError):
            await working
        await asyncio.sleep(10)
        assert world.record(ada).state is AgentState.FAILED
        assert await manager.process(bob, 1) == 1
        assert ada not in world.runtime.instances
