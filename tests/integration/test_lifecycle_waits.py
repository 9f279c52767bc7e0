"""What an agent says while it works, and what it waits for."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from lifecycle_ground import Actor, Crew, Stage

from ostler import (
    AgentExecutionError,
    AgentGoneError,
    AgentProgressEvent,
    AgentSignalEvent,
    AgentState,
    InvalidOperationError,
)
from ostler.testing.isolation_suite.ground import until

pytestmark = pytest.mark.anyio

_A = AgentState


# --- what it says ------------------------------------------------------------------------------------


async def test_progress_is_kept_no_more_often_than_it_is_looked_at(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.do(one, "speak", progress=50)

    async def told() -> list[float | None]:
        return [event.fraction for event in await crew.events(one) if isinstance(event, AgentProgressEvent)]

    for _ in range(1000):
        if await told():
            break
        await asyncio.sleep(0.002)
    crew.clock.advance(1)
    for _ in range(1000):
        if (fractions := await told())[-1] == 1.0:
            break
        await asyncio.sleep(0.002)
    assert len(fractions) <= 3, "the latest counts"
    assert fractions[-1] == 1.0


async def test_every_signal_is_kept_in_order(crew: Crew) -> None:
    one = await crew.spawn()
    watching = crew.manager.observe(one.instance_id)
    for name in ("first", "second", "third"):
        await crew.do(one, "speak", signal=name)
    names = []
    async for event in watching:
        if isinstance(event, AgentSignalEvent):
            assert event.payload == {"by": "the agent"}
            names.append(event.name)
        if len(names) == 3:
            break
    await watching.aclose()
    assert names == ["first", "second", "third"]


async def test_tokens_and_counts_are_in_the_metrics_of_the_instance(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.do(one, "speak", tokens=120, metric=7)
    await crew.do(one, "speak", tokens=3)
    with pytest.raises(AgentExecutionError):
        await crew.do(one, "fail")
    for _ in range(1000):
        crew.clock.advance(5)
        await asyncio.sleep(0.002)
        metrics = (await crew.get(one)).metrics
        if metrics is not None:
            break
    assert metrics is not None
    assert metrics.tokens_used == 123
    assert (metrics.completed_tasks, metrics.failed_tasks) == (2, 1)


# --- what it waits for -------------------------------------------------------------------------------


async def test_a_wait_is_seen_and_answered(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "ask")
    wait = await crew.wait_of(one)
    await crew.comes_to(one, _A.WAITING)
    assert wait.reason == "which colour?"
    ended = await crew.manager.answer(wait.wait_id, "done", {"colour": "green"})
    assert ended.outcome == "done"
    assert await call == ["done", {"colour": "green"}]
    assert await crew.manager.get_waits(one.instance_id) == []
    assert await crew.state(one) is _A.WAITING
    moves = [vars(event)["new_state"] for event in await crew.events(one) if event.event_type == "agent_state_changed"]
    assert moves == [_A.READY, _A.PROCESSING, _A.WAITING, _A.PROCESSING, _A.WAITING]


async def test_of_two_answers_one_counts(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "ask")
    wait = await crew.wait_of(one)
    answers = (crew.manager.answer(wait.wait_id, outcome) for outcome in ("yes", "no", "perhaps"))
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert sum(isinstance(outcome, InvalidOperationError) for outcome in outcomes) == 2
    assert (await call)[0] in {"yes", "no", "perhaps"}
    with pytest.raises(InvalidOperationError, match="has ended already"):
        await crew.manager.answer(wait.wait_id)


async def test_a_wait_ends_by_itself_when_its_time_is_over(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "ask", seconds=30)
    wait = await crew.wait_of(one)
    await crew.comes_to(one, _A.WAITING)
    crew.clock.advance(29)
    await asyncio.sleep(0.01)
    assert not call.done()
    crew.clock.advance(1)
    assert await call == ["timeout", None]
    kept = await crew.manager.store.get_wait(wait.wait_id)
    assert kept is not None
    assert kept.outcome == "timeout"


async def test_a_wait_ends_with_the_agent(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "ask")
    wait = await crew.wait_of(one)
    with pytest.raises(AgentGoneError):
        await crew.do(one, "exit")
    with pytest.raises(AgentGoneError):
        await call
    await crew.comes_to(one, _A.FAILED)
    for _ in range(1000):
        kept = await crew.manager.store.get_wait(wait.wait_id)
        if kept is not None and kept.ended_at is not None:
            break
        await asyncio.sleep(0.002)
    assert kept is not None
    assert kept.outcome == "cancelled"
    with pytest.raises(InvalidOperationError, match="has ended already"):
        await crew.manager.answer(wait.wait_id)


async def test_a_wait_ends_with_the_caller(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "ask")
    await crew.wait_of(one)
    call.cancel()
    await asyncio.wait([call])
    for _ in range(1000):
        if not await crew.manager.get_waits(one.instance_id):
            break
        await asyncio.sleep(0.002)
    assert await crew.manager.get_waits(one.instance_id) == []
    assert await crew.do(one, "echo", value=1) == 1


async def test_an_answer_to_a_suspended_agent_is_delivered_when_it_is_resumed(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "ask")
    wait = await crew.wait_of(one)
    await crew.comes_to(one, _A.WAITING)
    await crew.manager.suspend(one.instance_id)
    await crew.manager.answer(wait.wait_id, "go")
    for _ in range(10):
        await asyncio.sleep(0.002)
    assert not call.done()
    assert "answered go" not in crew.stage.said
    assert await crew.state(one) is _A.SUSPENDED
    await crew.manager.resume(one.instance_id)
    assert await call == ["go", None]


@pytest.mark.parametrize("times", [1, 2])
async def test_waits_beside_any_request_do_not_make_it_look_busy(crew: Crew, stage: Stage, times: int) -> None:
    class Patient(Actor):
        async def initialize(self, context: Any) -> None:
            self.tasks = [asyncio.create_task(self.listen(context)) for _ in range(times)]

        async def listen(self, context: Any) -> None:
            await context.wait_for("news")
            self.stage.say("news")

    one = await crew.spawn(agent=type("Patient", (Patient,), {"stage": stage}))
    await crew.wait_of(one)
    await until(lambda: len(crew.manager._house.lives[one.instance_id].waits or ()) == times)  # noqa: SLF001 - the store knows of a wait before the manager does
    assert await crew.state(one) is _A.READY
    await crew.manager.suspend(one.instance_id)
    await crew.manager.resume(one.instance_id)
    for wait in await crew.manager.get_waits(one.instance_id):
        await crew.manager.answer(wait.wait_id)
    await stage.heard("news", times)
    assert await crew.state(one) is _A.READY


async def test_only_what_an_agent_waits_for_can_be_answered(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.manager.suspend(one.instance_id, resume_after=timedelta(minutes=1))
    (pause,) = await crew.manager.get_waits(one.instance_id)
    with pytest.raises(InvalidOperationError, match="resume or restart the instance instead"):
        await crew.manager.answer(pause.wait_id)
    with pytest.raises(InvalidOperationError, match="there is no wait"):
        await crew.manager.answer(one.instance_id)
