"""What a sceptical reader once broke. Each of these left an agent stuck, lost or lied about."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import ostler
from ostler.isolation.loopcell import LoopCell
from ostler.lifecycle import open_manager
from ostler.lifecycle.observe import Observation
from ostler.store import Seams
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

NONE, THREAD = ostler.IsolationLevel.NONE, ostler.IsolationLevel.THREAD
LONG = "x" * 5000


class Willing(ostler.Agent):
    """Does what the request says."""

    def initialize(self, context: ostler.AgentContext) -> None:
        self.context = context
        if context.data.get("fails"):
            raise RuntimeError(LONG)

    async def process(self, request: Any) -> Any:
        act = getattr(self, str(request).replace(" ", "_"), None)
        if act is not None:
            await act()
        return request

    async def fail(self) -> None:
        raise RuntimeError(LONG)

    async def two_waits(self) -> None:
        await asyncio.gather(*(self.context.wait_for("human") for _ in range(2)))

    async def wait(self) -> None:
        await self.context.wait_for("human")

    async def wait_for_ever(self) -> None:
        await self.context.wait_for("human", timeout=timedelta.max)

    async def hang(self) -> None:
        self.context.signal("hangs")
        await asyncio.Event().wait()

    async def deaf(self) -> None:
        self.context.signal("deaf now")
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def signals(self) -> None:
        for number in range(20_000):
            self.context.signal(f"s{number}")

    async def tokens(self) -> None:
        for _ in range(20_000):
            self.context.report_tokens(1)

    async def count(self) -> None:
        self.context.report_metric("files read", 3)

    async def shutdown(self) -> None:
        if self.context.data.get("slow"):
            await asyncio.sleep(0.2)


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[ostler.AgentLifecycleManager]:
    async with ostler.open(tmp_path / "home") as opened:
        yield opened


async def spawned(
    manager: ostler.AgentLifecycleManager,
    cls: type[ostler.Agent] = Willing,
    *,
    context: dict[str, Any] | None = None,
    fail_on_error: bool = False,
    **options: Any,
) -> ostler.AgentInstance:
    definition = manager.registry.register(cls, fail_on_error=fail_on_error)
    options.setdefault("isolation_level", NONE)
    chosen = ostler.AgentSpawnOptions(**options)
    return await manager.spawn(ostler.SpawnRequest(agent_definition_id=definition.id, options=chosen, context=context))


async def _turns() -> None:
    """What a moved clock woke gets its turn."""
    for _ in range(20):
        await asyncio.sleep(0)


async def state_of(manager: ostler.AgentLifecycleManager, instance: ostler.AgentInstance) -> ostler.AgentState:
    found = await manager.get_instance(instance.instance_id)
    assert found is not None
    return found.state


async def reached(
    manager: ostler.AgentLifecycleManager, instance: ostler.AgentInstance, state: ostler.AgentState
) -> None:
    """Wait for it, by its events; the time limit of the test bounds the wait."""
    async with manager.observe(instance.instance_id) as seen:
        if await state_of(manager, instance) is state:
            return
        async for event in seen:
            if isinstance(event, ostler.AgentStateChangedEvent) and event.new_state is state:
                return


async def _told(manager: ostler.AgentLifecycleManager, one: ostler.AgentInstance, request: str) -> asyncio.Task[Any]:
    """A request that goes on; the agent has signalled that it is at it."""
    async with manager.observe(one.instance_id) as seen:
        asked = asyncio.create_task(manager.process(one.instance_id, request))
        async for event in seen:
            if isinstance(event, ostler.AgentSignalEvent):
                break
    return asked


async def _failed(manager: ostler.AgentLifecycleManager) -> ostler.AgentInstance:
    """One that failed for good."""
    one = await spawned(manager, fail_on_error=True)
    with pytest.raises(ostler.AgentExecutionError):
        await manager.process(one.instance_id, "fail")
    await reached(manager, one, ostler.AgentState.FAILED)
    return one


async def test_an_error_of_any_length_fails_a_spawn_as_it_should(manager: ostler.AgentLifecycleManager) -> None:
    with pytest.raises(ostler.AgentInitializationError, match="its initialisation failed"):
        await spawned(manager, context={"fails": True})
    statistics = await manager.get_statistics()
    assert (statistics.active_instances, statistics.by_state[ostler.AgentState.FAILED]) == (0, 1)


async def test_an_error_of_any_length_is_a_death_that_is_written(manager: ostler.AgentLifecycleManager) -> None:
    one = await _failed(manager)
    found = await manager.get_instance(one.instance_id)
    assert found is not None
    assert LONG[:1500] in (found.error_message or "")


@pytest.mark.parametrize("reason", [LONG, "a\0b"], ids=["too long", "with a NUL"])
async def test_a_bad_reason_is_refused_before_anything_is_stopped(
    manager: ostler.AgentLifecycleManager, reason: str
) -> None:
    one = await spawned(manager)
    with pytest.raises(ostler.ValidationError, match="reason"):
        await manager.restart(one.instance_id, reason=reason)
    assert await manager.process(one.instance_id, 1) == 1


async def test_a_request_that_was_cut_off_gives_its_place_back(manager: ostler.AgentLifecycleManager) -> None:
    limits = ostler.ResourceLimits(max_concurrent_tasks=1)
    one = await spawned(manager, resource_limits=limits)
    await asyncio.gather(
        manager.restart(one.instance_id), manager.process(one.instance_id, "hang"), return_exceptions=True
    )
    assert await manager.process(one.instance_id, 1) == 1
    held = await manager.suspend(one.instance_id, ostler.SuspendDepth.HOLD)
    assert held.state is ostler.AgentState.SUSPENDED


async def test_a_pause_that_is_over_before_it_has_begun_ends_all_the_same(
    manager: ostler.AgentLifecycleManager,
) -> None:
    one = await spawned(manager, context={"slow": True})
    parked = asyncio.create_task(
        manager.suspend(one.instance_id, ostler.SuspendDepth.PARK, resume_after=timedelta(milliseconds=10))
    )
    await reached(manager, one, ostler.AgentState.SUSPENDED)
    await reached(manager, one, ostler.AgentState.READY)
    await parked
    assert await manager.process(one.instance_id, 1) == 1


async def test_spawns_under_way_when_the_manager_closes_end_with_it(tmp_path: Path) -> None:
    async with ostler.open(tmp_path) as manager:
        spawns = [asyncio.create_task(spawned(manager)) for _ in range(20)]
        await asyncio.sleep(0)
    await asyncio.gather(*spawns, return_exceptions=True)
    async with ostler.open_store(tmp_path) as store:
        assert (await store.statistics()).active_instances == 0
        assert await store.open_attempts() == []


class SlowlyMade(Willing):
    def __init__(self) -> None:
        time.sleep(2)


async def test_making_the_agent_counts_as_part_of_its_start(manager: ostler.AgentLifecycleManager) -> None:
    with pytest.raises(ostler.InitializationTimeoutError):
        await spawned(manager, SlowlyMade, isolation_level=THREAD, initialization_timeout=timedelta(milliseconds=200))


async def test_whoever_observes_and_then_looks_misses_no_move(manager: ostler.AgentLifecycleManager) -> None:
    """A move is durable a moment before its manager hears of it; in that moment it is told no more as news."""
    one = await spawned(manager)
    life = manager._house.lives[one.instance_id]  # noqa: SLF001 - the moment cannot be had from outside
    async with life.lock, manager.observe(one.instance_id):
        moved = await manager.store.commit(
            ostler.MoveInstance(instance_id=one.instance_id, to=ostler.AgentState.PROCESSING)
        )
        assert await state_of(manager, one) is ostler.AgentState.PROCESSING
        life.record = moved


@pytest.mark.parametrize("level", [NONE, THREAD])
async def test_a_request_that_does_not_heed_its_caller_ends_the_agent(
    manager: ostler.AgentLifecycleManager, level: ostler.IsolationLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopCell, "GIVE_UP", timedelta(milliseconds=50))
    one = await spawned(manager, isolation_level=level, restart_policy=ostler.RestartPolicy.immediate())
    asked = await _told(manager, one, "deaf")
    asked.cancel()
    async for event in manager.observe(one.instance_id, after=0):
        if isinstance(event, ostler.AgentStateChangedEvent) and event.attempt == 2:
            break
    await reached(manager, one, ostler.AgentState.READY)
    assert await manager.process(one.instance_id, 1) == 1


async def test_a_hold_waits_for_the_one_that_works_beside_one_that_waits(
    manager: ostler.AgentLifecycleManager,
) -> None:
    one = await spawned(manager)
    waits = asyncio.create_task(manager.process(one.instance_id, "two waits"))
    while len(await manager.get_waits(one.instance_id)) < 2:  # noqa: ASYNC110 - the store has no event for it
        await asyncio.sleep(0.01)
    works = await _told(manager, one, "hang")
    held = asyncio.create_task(manager.suspend(one.instance_id, ostler.SuspendDepth.HOLD))
    done, _ = await asyncio.wait([held], timeout=0.05)
    assert not done
    works.cancel()
    assert (await held).state is ostler.AgentState.SUSPENDED
    await manager.resume(one.instance_id)
    for wait in await manager.get_waits(one.instance_id):
        await manager.answer(wait.wait_id)
    assert await waits == "two waits"


async def test_the_time_of_a_request_stands_still_while_it_waits(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_manager(tmp_path, seams=Seams(clock=clock)) as manager:
        limits = ostler.ResourceLimits(execution_timeout=timedelta(seconds=2))
        one = await spawned(manager, resource_limits=limits)
        asked = asyncio.create_task(manager.process(one.instance_id, "wait"))
        while not (waits := await manager.get_waits(one.instance_id)):  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.01)
        clock.advance(600)
        await _turns()
        await manager.answer(waits[0].wait_id)
        assert await asked == "wait"


async def test_a_wait_without_measure_is_refused_in_the_agents_own_code(
    manager: ostler.AgentLifecycleManager,
) -> None:
    one = await spawned(manager)
    with pytest.raises(ostler.AgentExecutionError, match="at most 3650 days"):
        await manager.process(one.instance_id, "wait for ever")


async def test_a_flood_of_tokens_and_signals_costs_a_bounded_amount(manager: ostler.AgentLifecycleManager) -> None:
    limits = ostler.ResourceLimits(max_tokens_per_minute=1_000_000)
    one = await spawned(manager, resource_limits=limits, isolation_level=THREAD)
    await manager.process(one.instance_id, "tokens")
    asked = asyncio.create_task(manager.process(one.instance_id, "signals"))
    most = 0
    while not asked.done():
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0.001)
    assert most < 200
    assert await asked == "signals"


async def _first_metrics(seen: Observation) -> ostler.AgentMetrics:
    async for event in seen:
        if isinstance(event, ostler.AgentMetricsUpdatedEvent):
            return event.metrics
    raise AssertionError("it ended and told none")


async def test_numbers_of_its_own_are_in_its_metrics(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_manager(tmp_path, seams=Seams(clock=clock)) as manager:
        one = await spawned(manager)
        await manager.process(one.instance_id, "count")
        seen = manager.observe(one.instance_id, ostler.ObservationOptions(include_metrics=True))
        told = asyncio.create_task(_first_metrics(seen))
        while not told.done():
            clock.advance(1)
            await asyncio.sleep(0.01)
        assert (await told).custom == {"files read": 3}


async def test_a_definition_may_be_registered_from_another_thread(tmp_path: Path) -> None:
    async with ostler.open(tmp_path) as manager:
        one = await spawned(manager)
        await manager.suspend(one.instance_id, resume_after=timedelta(milliseconds=10))
    async with ostler.open(tmp_path) as manager:
        while not manager._house.strangers:  # noqa: SLF001, ASYNC110 - nothing outside tells that it is waited for
            await asyncio.sleep(0.01)
        thread = threading.Thread(target=manager.registry.register, args=(Willing,))
        thread.start()
        await reached(manager, one, ostler.AgentState.READY)
        thread.join()


async def test_who_asks_for_an_end_in_time_shares_it_however_late_he_gets_there(
    manager: ostler.AgentLifecycleManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await _failed(manager)
    ended, get = asyncio.Event(), manager.store.get_instance

    async def slow(instance_id: UUID) -> Any:
        if asyncio.current_task() is late:
            await ended.wait()
        return await get(instance_id)

    monkeypatch.setattr(manager.store, "get_instance", slow)
    late = asyncio.create_task(manager.terminate(one.instance_id))
    first = await manager.terminate(one.instance_id)
    ended.set()
    assert await late == first
    with pytest.raises(ostler.InvalidOperationError, match="terminated already"):
        await manager.terminate(one.instance_id)


async def test_two_may_terminate_one_that_failed_for_good(manager: ostler.AgentLifecycleManager) -> None:
    one = await _failed(manager)
    results = await asyncio.gather(*(manager.terminate(one.instance_id) for _ in range(3)))
    assert all(result.success for result in results)


async def test_closing_does_not_wait_for_a_slow_probe(tmp_path: Path) -> None:
    clock, asked = ManualClock(), asyncio.Event()

    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answers, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    check = ostler.HealthCheckConfig(probe=ostler.ProbeType.HTTP, target=f"http://127.0.0.1:{port}/")
    try:
        async with open_manager(tmp_path, seams=Seams(clock=clock)) as manager:
            await spawned(manager, health_check=check)
            while not asked.is_set():
                clock.advance(1)
                await asyncio.sleep(0.01)
    finally:
        server.close()


async def test_an_opening_that_is_called_off_leaves_the_home_free(tmp_path: Path) -> None:
    async def opening() -> None:
        async with ostler.open(tmp_path):
            await asyncio.Event().wait()

    for steps in range(12):
        task = asyncio.create_task(opening())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    async with ostler.open(tmp_path) as manager:
        assert (await manager.get_statistics()).active_instances == 0


async def test_a_step_of_a_stream_that_took_too_long_can_be_taken_again(
    manager: ostler.AgentLifecycleManager,
) -> None:
    one = await spawned(manager)
    stream = manager.observe(one.instance_id)
    for _ in range(3):
        step = asyncio.ensure_future(anext(stream))
        await _turns()
        step.cancel()
        await asyncio.wait([step])
    await manager.terminate(one.instance_id)
    types = [event.event_type async for event in stream if isinstance(event, ostler.AgentEvent)]
    assert types[-1] == "agent_terminated"


DEAF = """
import asyncio, sys
from datetime import timedelta
import ostler

class Deaf(ostler.Agent):
    async def process(self, request):
        began.set()
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

async def main():
    global began
    began = asyncio.Event()
    async with ostler.open(sys.argv[1]) as manager:
        deaf = manager.registry.register(Deaf)
        options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.NONE)
        one = await manager.spawn(ostler.SpawnRequest(agent_definition_id=deaf.id, options=options))
        asked = asyncio.ensure_future(manager.process(one.instance_id, 1))
        await began.wait()
        result = await manager.terminate(one.instance_id, ostler.TerminationOptions.immediate())
        await asyncio.wait([asked])
        print(result.was_graceful, type(asked.exception()).__name__)

asyncio.run(main())
"""


def test_a_task_that_heeds_no_cancellation_does_not_keep_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DEAF, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "False AgentGoneError\n"), done.stderr


async def test_a_live_stream_tells_nothing_of_what_was_done_before_it(manager: ostler.AgentLifecycleManager) -> None:
    one = await spawned(manager)
    for number in range(30):
        await manager.process(one.instance_id, number)
        stream = manager.observe(one.instance_id)
        await manager.suspend(one.instance_id)
        first = await anext(stream)
        assert isinstance(first, ostler.AgentStateChangedEvent)
        assert first.new_state is ostler.AgentState.SUSPENDED
        await stream.aclose()
        await manager.resume(one.instance_id)


async def test_a_restart_while_it_is_being_parked_starts_one_that_lives(
    manager: ostler.AgentLifecycleManager,
) -> None:
    one = await spawned(manager, context={"slow": True})
    parked = asyncio.create_task(manager.suspend(one.instance_id, ostler.SuspendDepth.PARK))
    await reached(manager, one, ostler.AgentState.SUSPENDED)
    await manager.restart(one.instance_id)
    await asyncio.wait([parked])
    assert await manager.process(one.instance_id, 1) == 1


async def test_a_home_that_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    async with ostler.open(tmp_path / "home"):
        pass
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
