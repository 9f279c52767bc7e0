"""Observers: every event once and in order, live and replayed; an end with the instance; slow ones are told."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from lifecycle_ground import LEVELS, THREAD, Crew, S, all_of, at, do, take, until

from ostler import (
    AgentErrorEvent,
    AgentEvent,
    AgentHandle,
    AgentHealthChangedEvent,
    AgentMetricsUpdatedEvent,
    AgentNotFoundError,
    AgentProgressEvent,
    AgentRestartingEvent,
    AgentSignalEvent,
    AgentSpawnedEvent,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    AuthorizationError,
    CursorGoneError,
    Event,
    EventsMissed,
    Observation,
    ObservationOptions,
    Permission,
    RestartPolicy,
    RetentionPolicy,
    Role,
    TerminationOptions,
    ValidationError,
)
from ostler.store.retention import sweep

pytestmark = pytest.mark.anyio

SLOW = RestartPolicy(initial_delay=timedelta(seconds=2), use_jitter=False)
ROOMY = ObservationOptions(buffer_capacity=10_000)


def moves(seen: list[object]) -> list[AgentState]:
    return [one.new_state for one in seen if isinstance(one, AgentStateChangedEvent)]


async def delivered(crew: Crew) -> None:
    """Everything that is committed has gone to the observers."""
    await crew.committed()
    newest = crew.manager.store.newest
    await until(lambda: crew.runtime.fanout.cursor >= newest)


async def chatter(agent: AgentHandle, count: int) -> None:
    await agent.ask(do("speak", signals=count))


async def listens(crew: Crew, stream: Observation) -> None:
    """It has caught up with the log, and is handed every event as it comes."""
    before = len(crew.runtime.fanout)
    reading = asyncio.ensure_future(anext(stream))
    await until(lambda: len(crew.runtime.fanout) > before)
    reading.cancel()
    await asyncio.wait([reading])


def numbers(seen: list[AgentSignalEvent]) -> list[int]:
    return [(one.payload or {})["number"] for one in seen]


# --- what is seen ------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_life_in_order_until_its_end(crew: Crew) -> None:
    agent = await crew.start()
    seen = crew.begin(all_of(agent.events()))
    await agent.ask(do("echo"))
    await agent.pause()
    await agent.resume()
    await agent.stop()
    found = await seen
    assert moves(found) == [S.PROCESSING, S.WAITING, S.SUSPENDED, S.READY, S.TERMINATING, S.TERMINATED]
    assert isinstance(found[-1], AgentTerminatedEvent)
    sequence = [one.sequence for one in found]
    assert sequence == sorted(set(sequence))


async def test_it_listens_from_the_moment_it_is_made(crew: Crew) -> None:
    """Though it is first read when all is over."""
    for _ in range(10):
        agent = await crew.start()
        stream = agent.events()
        await agent.stop()
        found = await all_of(stream)
        assert moves(found) == [S.TERMINATING, S.TERMINATED]
        assert isinstance(found[-1], AgentTerminatedEvent)


async def test_a_live_stream_tells_nothing_of_what_was_done_before_it(crew: Crew) -> None:
    agent = await crew.start()
    for number in range(20):
        await agent.ask(do("echo", value=number))
        stream = agent.events()
        await agent.pause()
        (first,) = await take(stream, 1)
        assert moves([first]) == [S.SUSPENDED]
        await stream.aclose()
        await agent.resume()


async def test_an_observer_that_then_reads_the_record_misses_no_move(crew: Crew) -> None:
    """Its stream holds every move that the record does not show."""
    agent = await crew.start()
    for number in range(20):
        working = crew.begin(agent.ask(do("echo", value=number)))
        stream = agent.events()
        state = await crew.state(agent)
        await working
        await agent.pause()
        seen: list[object] = []
        while not seen or moves(seen)[-1:] != [S.SUSPENDED]:
            seen += await take(stream, 1)
        known = [state, *moves(seen)]
        assert all(later is not before for before, later in pairwise(known[1:]))
        assert known[-1] is S.SUSPENDED
        await stream.aclose()
        await agent.resume()


async def test_one_that_has_ended_has_nothing_more_to_say(crew: Crew) -> None:
    gone, failed = await crew.start(), await crew.start()
    await gone.stop()
    await crew.crash(failed)
    for agent in (gone, failed):
        assert await all_of(agent.events()) == []


@at(*LEVELS)
async def test_from_a_cursor_it_has_the_whole_history(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("echo"))
    stream = agent.events(after=0)
    first = await take(stream, 4)
    assert {type(one) for one in first[:2]} == {AgentSpawnedEvent, AgentStateChangedEvent}
    assert moves(first) == [S.READY, S.PROCESSING, S.WAITING]
    again = agent.events(after=first[1].sequence)
    assert await take(again, 2) == first[2:]
    await agent.stop()
    assert moves(await all_of(stream)) == [S.TERMINATING, S.TERMINATED]
    assert moves(await all_of(again)) == [S.TERMINATING, S.TERMINATED]
    assert len(await all_of(agent.events(after=0))) == 7


@at(THREAD)
async def test_a_young_instance_can_be_read_from_its_beginning_after_retention(crew: Crew) -> None:
    old = await crew.start()
    crew.advance(timedelta(days=31).total_seconds())
    young = await crew.start()
    await young.stop()
    await crew.manager.store.run(sweep, RetentionPolicy())  # or the monitor has, in all that time
    assert moves(await all_of(young.events(after=0))) == [S.READY, S.TERMINATING, S.TERMINATED]
    with pytest.raises(CursorGoneError):
        await take(old.events(after=0), 1)


@at(THREAD)
async def test_a_whole_workspace(crew: Crew) -> None:
    stream = crew.manager.observe()
    one, two = await crew.start(), await crew.start()
    await one.stop()
    await two.stop()
    three = await crew.start()
    seen = await take(stream, 12)
    assert [one.instance_id for one in seen if isinstance(one, AgentSpawnedEvent)] == [
        each.instance_id for each in (one, two, three)
    ]
    assert await take(crew.manager.observe(after=0), 12) == seen
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
@at(THREAD)
async def test_only_what_was_asked_for(crew: Crew, wanted: str, kinds: set[type[AgentEvent]]) -> None:
    names = [name for name in ObservationOptions().to_dict() if name.startswith("include_")]
    options = ObservationOptions(**{name: name == wanted for name in names})
    agent = await crew.start(restart_policy=RestartPolicy.immediate())
    live = agent.events(options=options)
    reading = crew.begin(all_of(live))
    await asyncio.sleep(0)
    await agent.ask(do("speak", signals=2, tokens=5))
    await crew.tick(15)
    await crew.crash(agent)
    await crew.reaches(agent, S.READY, 2)
    await agent.stop()
    assert {type(one) for one in await reading} == kinds - {AgentSpawnedEvent}
    replayed = {type(one) for one in await all_of(agent.events(options=options, after=0))}
    assert replayed == kinds - {AgentMetricsUpdatedEvent}, "metrics are live only"


async def test_progress_is_thinned_out_and_the_latest_counts(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("speak", progress=100))
    await crew.tick(2)
    told = await crew.events(agent, AgentProgressEvent)
    assert len(told) <= 3
    assert (told[-1].fraction, told[-1].message) == (1.0, "step 100")
    await agent.ask(do("speak", progress=50))
    await crew.tick(2)
    told = (await crew.events(agent, AgentProgressEvent))[len(told) :]
    assert len(told) <= 2
    assert told[-1].message == "step 50"
    await agent.ask(do("speak", progress=10))
    # What was not told yet waits for a second that never comes; closing does not wait for it.


# --- when it ends ------------------------------------------------------------------------------------


async def test_a_failure_ends_it_only_when_nothing_follows(crew: Crew) -> None:
    agent = await crew.start(restart_policy=SLOW.evolve(max_retries=1))
    early = agent.events()
    await crew.crash(agent)
    late, history = agent.events(), agent.events(after=0)
    pending = [crew.begin(all_of(one)) for one in (early, late, history)]
    await delivered(crew)
    assert not any(one.done() for one in pending)
    await crew.comes_back(agent, 2, 2)
    await crew.crash(agent)
    ends = [moves(await one) for one in pending]
    back = [S.INITIALIZING, S.READY, S.PROCESSING, S.FAILED]
    assert ends == [[S.PROCESSING, S.FAILED, *back], back, [S.READY, S.PROCESSING, S.FAILED, *back]]


@at(*LEVELS)
async def test_a_restart_by_hand_of_an_instance_that_is_observed_goes_on(crew: Crew) -> None:
    agent = await crew.start()
    stream = agent.events()
    await agent.restart()
    await agent.stop()
    assert moves(await all_of(stream)) == [S.FAILED, S.INITIALIZING, S.READY, S.TERMINATING, S.TERMINATED]


@at(*LEVELS)
async def test_ended_waits_for_the_end_whatever_it_is(crew: Crew) -> None:
    agent = await crew.start(restart_policy=RestartPolicy.immediate().evolve(max_retries=1))
    waiting = crew.begin(agent.ended())
    await crew.crash(agent)
    await crew.reaches(agent, S.READY, 2)
    assert not waiting.done(), "it came back"
    await crew.crash(agent)
    ended = await waiting
    assert (ended.state, ended.attempt) == (S.FAILED, 2)
    assert (await agent.ended()).state is S.FAILED
    other = await crew.start()
    waiting = crew.begin(other.ended())
    await other.stop()
    assert (await waiting).state is S.TERMINATED


async def test_a_failed_instance_with_a_restart_to_come_has_not_ended(crew: Crew) -> None:
    agent = await crew.start(restart_policy=SLOW)
    await crew.crash(agent)
    waiting = crew.begin(agent.ended())
    await delivered(crew)
    await crew.comes_back(agent, 2, 2)
    assert not waiting.done()
    await agent.stop()
    assert (await waiting).state is S.TERMINATED


async def test_closing_the_manager_ends_every_stream(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause()
    streams = [agent.events(), crew.manager.observe(), crew.manager.observe(after=0)]
    reading = [crew.begin(all_of(one)) for one in streams]
    await delivered(crew)
    assert not any(one.done() for one in reading)
    await crew.close()
    for one in reading:
        await one


async def test_the_next_manager_goes_on_from_a_cursor(crew: Crew) -> None:
    agent = await crew.start()
    cursor = (await take(agent.events(after=0), 2))[-1].sequence
    await agent.pause()
    await crew.reopen()
    agent = crew.again(agent)
    stream = agent.events(after=cursor)
    await agent.resume()
    await agent.stop()
    assert moves(await all_of(stream)) == [S.SUSPENDED, S.READY, S.TERMINATING, S.TERMINATED]


# --- those that do not keep up -----------------------------------------------------------------------


@at(THREAD)
async def test_a_slow_observer_loses_the_oldest_and_learns_which(crew: Crew) -> None:
    agent = await crew.start()
    stream = agent.events(options=ObservationOptions(buffer_capacity=5, include_state_changes=False))
    await listens(crew, stream)
    await chatter(agent, 20)
    await delivered(crew)
    gap, *kept = await take(stream, 6)
    assert isinstance(gap, EventsMissed)
    assert (gap.instance_id, gap.count) == (agent.instance_id, 15)
    assert numbers(kept) == [15, 16, 17, 18, 19]
    signals = ObservationOptions(include_state_changes=False)
    missed = await take(agent.events(after=gap.first_sequence - 1, options=signals), 20)
    assert missed[0].sequence == gap.first_sequence
    assert numbers(missed) == list(range(20))
    assert missed[15:] == kept
    await chatter(agent, 1)
    assert numbers(await take(stream, 1)) == [0]
    await stream.aclose()


@at(THREAD)
async def test_an_observer_that_never_reads_is_bounded_and_slows_no_other(crew: Crew) -> None:
    agent = await crew.start()
    idle = agent.events(options=ObservationOptions(buffer_capacity=10, include_state_changes=False))
    busy = agent.events(options=ROOMY.evolve(include_state_changes=False))
    await listens(crew, idle)
    reading = crew.begin(take(busy, 1000))
    await asyncio.gather(*(chatter(agent, 100) for _ in range(10)))
    seen = await reading
    assert not any(isinstance(one, EventsMissed) for one in seen)
    await delivered(crew)
    (gap,) = await take(idle, 1)
    assert isinstance(gap, EventsMissed)
    assert gap.count == 990
    assert crew.metric("ostler_lifecycle_observers_dropped_total") == 990


async def test_an_observer_that_is_dropped_leaves_by_itself(crew: Crew) -> None:
    agent = await crew.start()
    fanout = crew.runtime.fanout
    streams = [agent.events(after=0) for _ in range(5)] + [crew.manager.observe(after=0) for _ in range(5)]
    for stream in streams:
        await take(stream, 2)
        await listens(crew, stream)
    assert len(fanout) == 10
    await streams[0].aclose()
    async with streams[1]:
        pass
    assert len(fanout) == 8
    del streams, stream
    gc.collect()
    assert len(fanout) == 0
    await agent.ask(do("echo"))


async def test_a_step_that_was_cancelled_can_be_taken_again(crew: Crew) -> None:
    agent = await crew.start()
    stream, history = agent.events(), agent.events(after=0)
    seen: list[object] = []
    for one in (stream, history):
        for turns in range(12):  # wherever it is cancelled
            step = asyncio.ensure_future(anext(one))
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])
            if not step.cancelled():
                seen.append(step.result())
    await agent.stop()
    assert moves(await all_of(stream)) == [S.TERMINATING, S.TERMINATED]
    assert moves([*seen, *await all_of(history)]) == [S.READY, S.TERMINATING, S.TERMINATED]
    assert len(crew.runtime.fanout) == 0


@at(THREAD)
async def test_a_replay_goes_live_without_a_gap_or_a_duplicate(crew: Crew) -> None:
    agent = await crew.start()
    writing = [crew.begin(chatter(agent, 200)) for _ in range(8)]
    reading = []
    for _ in range(10):
        reading.append(crew.begin(all_of(agent.events(options=ROOMY, after=0))))
        await chatter(agent, 1)
    await asyncio.gather(*writing)
    await crew.manager.terminate(agent.instance_id, TerminationOptions.immediate())
    log: list[Event] = await crew.events(agent)
    expected = [event.sequence for event in log]
    assert len(expected) > 1600
    for one in reading:
        assert [each.sequence for each in await one] == expected


# --- what is not for everyone ------------------------------------------------------------------------


@at(THREAD)
async def test_what_belongs_to_another_workspace_is_not_there(crew: Crew) -> None:
    agent = await crew.start()
    other = crew.as_principal(Role.ADMIN, workspace=await crew.found_workspace())
    everything = other.observe()
    for after in (None, 0):
        stream = other.observe(agent.instance_id, after=after)
        await agent.ask(do("echo"))
        with pytest.raises(AgentNotFoundError):
            await anext(stream)
        assert await all_of(stream) == []
    own = await other.spawn(crew.request())
    assert {one.instance_id for one in await take(everything, 2)} == {own.instance_id}
    unprivileged = crew.as_principal()
    for refused in (unprivileged.observe(), unprivileged.observe(agent.instance_id)):
        with pytest.raises(AuthorizationError):
            await anext(refused)


@at(THREAD)
async def test_a_step_that_was_cancelled_is_no_way_in(crew: Crew) -> None:
    agent = await crew.start()
    other = crew.as_principal(Role.ADMIN, workspace=await crew.found_workspace())
    for turns in range(12):
        stream = other.observe(agent.instance_id, after=0)
        step = asyncio.ensure_future(anext(stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait([step])
        if step.cancelled():
            with pytest.raises(AgentNotFoundError):
                await anext(stream)


@at(THREAD)
async def test_a_principal_that_may_look_across_sees_what_happens_there(crew: Crew) -> None:
    agent = await crew.start()
    room = await crew.found_workspace()
    auditor = crew.as_principal(Role.ADMIN, workspace=room, permissions=(Permission.WORKSPACES_CROSS,))
    live, history = auditor.observe(agent.instance_id), auditor.observe(agent.instance_id, after=0)
    await agent.stop()
    assert moves(await all_of(live)) == [S.TERMINATING, S.TERMINATED]
    assert moves(await all_of(history)) == [S.READY, S.TERMINATING, S.TERMINATED]


@at(THREAD)
async def test_what_does_not_exist_cannot_be_observed(crew: Crew) -> None:
    with pytest.raises(AgentNotFoundError):
        await anext(crew.manager.observe(uuid4()))
    for after in (-1, True, "1", 1.5):
        with pytest.raises(ValidationError, match="after must be 0 or the number of an event"):
            crew.manager.observe(after=after)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValidationError, match="buffer_capacity"):
        crew.manager.observe(options=ObservationOptions(buffer_capacity=0))
    wrong: tuple[Any, ...] = ("", 5, {}, [])
    for options in wrong:
        with pytest.raises(ValidationError, match="options must be of type ObservationOptions"):
            crew.manager.observe(options=options)
    with pytest.raises(ValidationError):
        await anext(crew.manager.observe(after=10**9))
