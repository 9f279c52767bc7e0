"""Looking at agents as they live: in order, complete, bounded, and never in anybody's way."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lifecycle_aids import Scene, all_of, delivered, moves, take

from ostler.errors import CursorGoneError
from ostler.model import (
    AgentErrorEvent,
    AgentEvent,
    AgentHealthChangedEvent,
    AgentInstance,
    AgentMetricsUpdatedEvent,
    AgentProgressEvent,
    AgentRestartingEvent,
    AgentSignalEvent,
    AgentSpawnedEvent,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    EventsMissed,
    IsolationLevel,
    ObservationOptions,
    RestartPolicy,
    TerminationOptions,
)
from ostler.store.base import EventPage
from ostler.store.commands import ReportSignal

pytestmark = pytest.mark.anyio

S = AgentState
AT_ONCE = TerminationOptions.immediate()
SLOW = RestartPolicy(initial_delay=timedelta(seconds=2), use_jitter=False)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


async def chatter(scene: Scene, instance: AgentInstance, count: int) -> None:
    for number in range(count):
        await scene.manager.store.commit(
            ReportSignal(instance_id=instance.instance_id, attempt=1, name="count", payload={"number": number})
        )


# --- what is seen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [IsolationLevel.NONE, IsolationLevel.THREAD])
async def test_a_life_in_order_until_its_end(scene: Scene, level: IsolationLevel) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(level)
        await delivered(scene)
        stream = manager.observe(instance.instance_id)
        seen = scene.begin(all_of(stream))
        await manager.process(instance.instance_id, "hello")
        await manager.suspend(instance.instance_id)
        await manager.resume(instance.instance_id)
        await manager.terminate(instance.instance_id)
        found = await seen
        assert moves(found) == [S.PROCESSING, S.WAITING, S.SUSPENDED, S.READY, S.TERMINATING, S.TERMINATED]
        assert isinstance(found[-1], AgentTerminatedEvent)
        numbers = [one.sequence for one in found]
        assert numbers == sorted(set(numbers))


async def test_it_listens_from_the_moment_it_is_made(scene: Scene) -> None:
    """Though it is first asked when all is over."""
    async with scene.open() as manager:
        for _ in range(20):
            instance = await scene.spawn()
            await delivered(scene)
            stream = manager.observe(instance.instance_id)
            await manager.terminate(instance.instance_id)
            found = await all_of(stream)
            assert moves(found) == [S.TERMINATING, S.TERMINATED]
            assert isinstance(found[-1], AgentTerminatedEvent)


async def test_one_that_has_ended_has_nothing_more_to_say(scene: Scene) -> None:
    async with scene.open() as manager:
        gone, failed = await scene.spawn(), await scene.spawn()
        await manager.terminate(gone.instance_id)
        await scene.crash(failed)
        await scene.reaches(failed, S.FAILED)
        await delivered(scene)
        for instance in (gone, failed):
            assert await all_of(manager.observe(instance.instance_id)) == []


async def test_a_young_one_can_be_read_from_its_beginning_after_retention_took_what_was_before(scene: Scene) -> None:
    async with scene.open() as manager:
        old = await scene.spawn()
        scene.clock.advance(timedelta(days=31).total_seconds())
        young = await scene.spawn()
        await manager.terminate(young.instance_id)
        await manager.store.sweep()  # or the watch has, in all that time
        seen = await all_of(manager.observe(young.instance_id, after=0))
        assert moves(seen) == [S.READY, S.TERMINATING, S.TERMINATED]
        with pytest.raises(CursorGoneError):
            await all_of(manager.observe(old.instance_id, after=0))


async def test_from_a_cursor_it_has_the_whole_history(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.process(instance.instance_id, "hello")
        stream = manager.observe(instance.instance_id, after=0)
        first = await take(stream, 4)
        assert isinstance(first[0], AgentSpawnedEvent)
        assert moves(first) == [S.READY, S.PROCESSING, S.WAITING]
        again = manager.observe(instance.instance_id, after=first[1].sequence)
        assert (await take(again, 2)) == first[2:]
        await manager.terminate(instance.instance_id)
        assert moves(await all_of(stream)) == [S.TERMINATING, S.TERMINATED]
        assert moves(await all_of(again)) == [S.TERMINATING, S.TERMINATED]
        assert len(await all_of(manager.observe(instance.instance_id, after=0))) == 7


async def test_a_whole_workspace(scene: Scene) -> None:
    async with scene.open() as manager:
        stream = manager.observe()
        one, two = await scene.spawn(), await scene.spawn()
        await manager.terminate(one.instance_id)
        await manager.terminate(two.instance_id)
        three = await scene.spawn()
        seen = await take(stream, 12)
        assert [one.instance_id for one in seen if isinstance(one, AgentSpawnedEvent)] == [
            each.instance_id for each in (one, two, three)
        ]
        assert (await take(manager.observe(after=0), 12)) == seen
        await stream.aclose()
        assert await all_of(stream) == []


@pytest.mark.parametrize(
    ("wanted", "kinds"),
    [
        ("include_state_changes", {AgentSpawnedEvent, AgentStateChangedEvent, AgentTerminatedEvent}),
        ("include_errors", {AgentErrorEvent}),
        ("include_restarts", {AgentRestartingEvent}),
        ("include_reports", {AgentSignalEvent}),
        ("include_health_checks", {AgentHealthChangedEvent}),
        ("include_metrics", {AgentMetricsUpdatedEvent}),
    ],
)
async def test_only_what_was_asked_for(scene: Scene, wanted: str, kinds: set[type[AgentEvent]]) -> None:
    names = [
        "include_state_changes",
        "include_health_checks",
        "include_metrics",
        "include_errors",
        "include_restarts",
        "include_reports",
    ]
    options = ObservationOptions(**{name: name == wanted for name in names})
    async with scene.open() as manager:
        instance = await scene.spawn(restart_policy=RestartPolicy.immediate())
        await delivered(scene)
        live = manager.observe(instance.instance_id, options)
        await manager.process(instance.instance_id, {"signals": 2})
        await manager.process(instance.instance_id, {"tokens": 5})
        await scene.tick(15)
        await scene.crash(instance)
        await scene.reaches(instance, S.READY, attempt=2)
        await manager.terminate(instance.instance_id)
        assert {type(one) for one in await all_of(live)} == kinds - {AgentSpawnedEvent}
        assert {type(one) for one in await all_of(manager.observe(instance.instance_id, options, after=0))} == kinds


async def test_progress_is_thinned_out_and_holds_no_close_up(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        stream = manager.observe(instance.instance_id, ObservationOptions(include_state_changes=False))
        await manager.process(instance.instance_id, {"reports": 100})
        assert (await take(stream, 1))[0].message == "step 99"
        await manager.process(instance.instance_id, {"reports": 50})
        scene.clock.advance(0.9)
        await scene.calm()
        assert len(await scene.events(instance, AgentProgressEvent)) == 1
        scene.clock.advance(0.2)
        assert (await take(stream, 1))[0].message == "step 49"
        await manager.process(instance.instance_id, {"reports": 10})
    # What was not told yet waits for a second that never comes; leaving did not wait for it.


# --- when it ends ------------------------------------------------------------------------------------


async def test_a_failure_ends_it_only_when_nothing_follows(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(restart_policy=SLOW.evolve(max_retries=1))
        await delivered(scene)
        early = manager.observe(instance.instance_id)
        await scene.crash(instance)
        await scene.reaches(instance, S.FAILED)
        await delivered(scene)
        late, history = manager.observe(instance.instance_id), manager.observe(instance.instance_id, after=0)
        pending = [scene.begin(all_of(one)) for one in (early, late, history)]
        await delivered(scene)
        await scene.calm()
        assert not any(one.done() for one in pending)
        scene.clock.advance(5)
        await scene.reaches(instance, S.READY, attempt=2)
        await scene.crash(instance)
        ends = [moves(await one) for one in pending]
        back = [S.INITIALIZING, S.READY, S.PROCESSING, S.FAILED]
        assert ends == [[S.PROCESSING, S.FAILED, *back], back, [S.READY, S.PROCESSING, S.FAILED, *back]]


async def test_a_restart_by_hand_of_one_that_is_watched_goes_on(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await delivered(scene)
        stream = manager.observe(instance.instance_id)
        await manager.restart(instance.instance_id)
        await manager.terminate(instance.instance_id)
        assert moves(await all_of(stream)) == [S.FAILED, S.INITIALIZING, S.READY, S.TERMINATING, S.TERMINATED]


async def test_closing_the_manager_ends_every_stream(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id)
        streams = [manager.observe(instance.instance_id), manager.observe(), manager.observe(after=0)]
        reading = [scene.begin(all_of(one)) for one in streams]
        await delivered(scene)
        await scene.calm()
        assert not any(one.done() for one in reading)
    for one in reading:
        await one


async def test_a_reopened_manager_goes_on_from_a_cursor(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        cursor = (await take(manager.observe(instance.instance_id, after=0), 2))[-1].sequence
        await manager.suspend(instance.instance_id)
    async with scene.open() as manager:
        stream = manager.observe(instance.instance_id, after=cursor)
        await manager.resume(instance.instance_id)
        await manager.terminate(instance.instance_id)
        assert moves(await all_of(stream)) == [S.SUSPENDED, S.READY, S.TERMINATING, S.TERMINATED]


# --- those who do not keep up ------------------------------------------------------------------------


async def test_a_slow_one_loses_the_oldest_and_learns_which(scene: Scene) -> None:
    options = ObservationOptions(buffer_capacity=5)
    async with scene.open() as manager:
        instance = await scene.spawn()
        await delivered(scene)
        stream = manager.observe(instance.instance_id, options)
        await chatter(scene, instance, 20)
        await delivered(scene)
        gap, *kept = await take(stream, 6)
        assert isinstance(gap, EventsMissed)
        assert (gap.instance_id, gap.count) == (instance.instance_id, 15)
        assert [one.payload["number"] for one in kept] == [15, 16, 17, 18, 19]
        missed = await take(manager.observe(instance.instance_id, after=gap.resume_after), 20)
        assert missed[0].sequence == gap.first_sequence
        assert [one.payload["number"] for one in missed] == list(range(20))
        assert missed[15:] == kept
        await chatter(scene, instance, 1)
        (after,) = await take(stream, 1)
        assert isinstance(after, AgentSignalEvent)


async def test_one_that_never_reads_is_bounded_and_slows_nobody(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await delivered(scene)
        idle = manager.observe(instance.instance_id, ObservationOptions(buffer_capacity=10))
        busy = manager.observe(instance.instance_id, ObservationOptions(buffer_capacity=10_000))
        reading = scene.begin(take(busy, 1000))
        await asyncio.gather(*(chatter(scene, instance, 100) for _ in range(10)))
        seen = await reading
        assert not any(isinstance(one, EventsMissed) for one in seen)
        await delivered(scene)
        buffer = idle._buffer  # noqa: SLF001 - how much is held back is told to nobody
        assert (len(buffer._events), buffer.missed) == (10, 990)  # noqa: SLF001 - how much is held back is told to nobody
        assert "lifecycle_observers_dropped" in manager.metrics()


async def test_an_observer_that_is_let_go_leaves_by_itself(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        fanout = manager._fanout  # noqa: SLF001 - how many watch is told to nobody
        streams = [manager.observe(instance.instance_id) for _ in range(10)] + [manager.observe() for _ in range(10)]
        assert fanout.watching == 20
        await streams[0].aclose()
        async with streams[1]:
            pass
        assert fanout.watching == 18
        del streams
        gc.collect()
        assert fanout.watching == 0
        await manager.process(instance.instance_id, "hello")
        await delivered(scene)
        assert not fanout._watchers  # noqa: SLF001 - nor is a place kept for it


async def test_a_step_that_was_cancelled_can_be_taken_again(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await delivered(scene)
        stream, history = manager.observe(instance.instance_id), manager.observe(instance.instance_id, after=0)
        for one in (stream, history):
            for turns in range(12):  # wherever it is cancelled
                step = asyncio.ensure_future(take(one, 100))
                for _ in range(turns):
                    await asyncio.sleep(0)
                step.cancel()
                await asyncio.wait([step])
        await manager.terminate(instance.instance_id)
        assert moves(await all_of(stream)) == [S.TERMINATING, S.TERMINATED]
        assert moves(await all_of(history))[-2:] == [S.TERMINATING, S.TERMINATED]
        assert manager._fanout.watching == 0  # noqa: SLF001 - how many watch is told to nobody


async def test_one_that_catches_up_misses_nothing_and_sees_nothing_twice(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        options = ObservationOptions(buffer_capacity=10_000)
        writing = [scene.begin(chatter(scene, instance, 200)) for _ in range(10)]
        watching = []
        for _ in range(10):
            watching.append(scene.begin(all_of(manager.observe(instance.instance_id, options, after=0))))
            await chatter(scene, instance, 1)
        await asyncio.gather(*writing)
        await manager.terminate(instance.instance_id, AT_ONCE)
        expected = await scene.events_all(instance)
        assert len(expected) > 2000
        for one in watching:
            assert [each.sequence for each in await one] == expected


# --- what it costs -----------------------------------------------------------------------------------


async def test_without_anybody_who_looks_the_log_is_not_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene.open() as manager:
        store, pages = manager.store, 0
        read = store.read_page

        async def counted(*words: Any, **more: Any) -> EventPage:
            nonlocal pages
            pages += 1
            return await read(*words, **more)

        monkeypatch.setattr(store, "read_page", counted)
        instance = await scene.spawn()
        await chatter(scene, instance, 20)
        await delivered(scene)
        assert pages == 0
        async with manager.observe(instance.instance_id) as stream:
            await chatter(scene, instance, 2)
            seen = await take(stream, 2)
        assert [one.payload for one in seen if isinstance(one, AgentSignalEvent)] == [{"number": 0}, {"number": 1}]
        assert pages > 0
