"""Requests: answered, refused, and bounded in number and time."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest
from lifecycle_ground import Actor, Crew

from ostler import (
    Agent,
    AgentBusyError,
    AgentErrorEvent,
    AgentExecutionError,
    AgentGoneError,
    AgentInstance,
    AgentRestartingEvent,
    AgentState,
    AttemptOutcome,
    ExecutionTimeoutError,
    InvalidOperationError,
    IsolationLevel,
    ResourceLimits,
    RestartPolicy,
)
from ostler.testing.isolation_suite.ground import passing, until

pytestmark = pytest.mark.anyio

THREAD = pytest.mark.parametrize("level", [IsolationLevel.THREAD], ids=str)
ONE_AT_A_TIME = ResourceLimits(max_concurrent_tasks=1)
ONE_SECOND = ResourceLimits(execution_timeout=timedelta(seconds=1))

_A = AgentState


# --- results and errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, "", "text", [1, 2], {"a": {"b": [None]}}, b"bytes"])
async def test_a_result_comes_back_as_the_agent_gave_it(crew: Crew, value: Any) -> None:
    one = await crew.spawn()
    assert await crew.do(one, "echo", value=value) == value
    assert await crew.state(one) is _A.WAITING


async def test_an_error_of_the_agent_is_typed_and_the_agent_goes_on(crew: Crew) -> None:
    one = await crew.spawn()
    with pytest.raises(AgentExecutionError, match="ValueError: as told") as told:
        await crew.do(one, "fail")
    assert told.value.exception_type == "ValueError"
    assert told.value.stack_trace is not None
    assert "lifecycle_ground.py" in told.value.stack_trace
    (event,) = [event for event in await crew.events(one) if isinstance(event, AgentErrorEvent)]
    assert event.is_recoverable
    assert event.exception_type == "ValueError"
    assert event.stack_trace == told.value.stack_trace
    assert await crew.do(one, "echo", value=1) == 1
    assert crew.counted("ostler_lifecycle_process_failures_total") == 1


async def test_an_error_ends_the_agent_where_its_definition_says_so(crew: Crew) -> None:
    one = await crew.spawn(about={"fail_on_error": True})
    with pytest.raises(AgentExecutionError, match="as told"):
        await crew.do(one, "fail")
    failed = await crew.comes_to(one, _A.FAILED)
    assert "as told" in (failed.error_message or "")
    (event,) = [event for event in await crew.events(one) if isinstance(event, AgentErrorEvent)]
    assert not event.is_recoverable
    with pytest.raises(InvalidOperationError, match="is failed and takes no request; restart it, or look at why"):
        await crew.do(one, "echo")


async def test_plain_methods_work_like_async_ones(crew: Crew) -> None:
    class Plain(Agent):
        def initialize(self, context: Any) -> None:
            self.name = context.name

        def process(self, request: Any) -> Any:
            if request == "fail":
                raise KeyError("plain")
            return self.name, threading.get_ident()

    one = await crew.spawn(agent=Plain, name="plain")
    name, thread = await crew.manager.process(one.instance_id, "who")
    assert name == "plain"
    assert (thread == threading.get_ident()) == (crew.level is IsolationLevel.NONE)
    with pytest.raises(AgentExecutionError, match="KeyError: 'plain'"):
        await crew.manager.process(one.instance_id, "fail")
    assert (await crew.manager.terminate(one.instance_id)).was_graceful


@THREAD
async def test_an_agent_that_blocks_blocks_nobody_else(crew: Crew) -> None:
    blocked, other = await crew.spawn(), await crew.spawn()
    blocking = crew.start(blocked, "block")
    await crew.stage.heard("began")
    assert await crew.do(other, "echo", value=1) == 1
    third = await crew.spawn()
    assert await crew.do(third, "echo", value=2) == 2
    assert (await crew.manager.terminate(other.instance_id)).was_graceful
    assert not blocking.done()
    crew.stage.let_go.set()
    assert await blocking == "let go"


async def test_an_agent_that_exits_is_gone_and_its_record_says_why(crew: Crew) -> None:
    one = await crew.spawn()
    bystander = crew.start(one, "hang")
    await crew.stage.heard("began")
    with pytest.raises(AgentGoneError, match="SystemExit"):
        await crew.do(one, "exit")
    with pytest.raises(AgentGoneError):
        await bystander
    failed = await crew.comes_to(one, _A.FAILED)
    assert "SystemExit: 3" in (failed.error_message or "")
    (attempt,) = await crew.manager.store.list_attempts(one.instance_id)
    assert attempt.outcome is AttemptOutcome.ERROR
    other = await crew.spawn()
    assert await crew.do(other, "echo", value=1) == 1, "the program lives on"


async def test_an_agent_that_exits_comes_back_where_its_policy_says_so(crew: Crew) -> None:
    one = await crew.spawn(restart_policy=RestartPolicy.immediate())
    with pytest.raises(AgentGoneError):
        await crew.do(one, "exit")
    back = await crew.comes_to(one, _A.READY)
    assert (back.attempt, back.restart_count) == (2, 1)
    assert (await crew.do(one, "know"))["attempt"] == 2
    restarts = [event for event in await crew.events(one) if isinstance(event, AgentRestartingEvent)]
    assert [(event.attempt_number, event.max_attempts) for event in restarts] == [(1, 3)]


# --- how many ----------------------------------------------------------------------------------------


async def test_calls_overlap_and_the_state_follows_the_last(crew: Crew) -> None:
    one = await crew.spawn()
    assert await crew.state(one) is _A.READY
    calls = [crew.start(one, "hang") for _ in range(3)]
    await crew.stage.heard("began", times=3)
    assert await crew.state(one) is _A.PROCESSING
    assert await crew.do(one, "echo", value=1) == 1
    assert await crew.state(one) is _A.PROCESSING, "three are still at it"
    crew.stage.let_go.set()
    assert await asyncio.gather(*calls) == ["let go"] * 3
    assert await crew.state(one) is _A.WAITING


async def test_no_more_than_max_concurrent_tasks_at_a_time(crew: Crew) -> None:
    one = await crew.spawn(resource_limits=ResourceLimits(max_concurrent_tasks=2))
    calls = [crew.start(one, "hang") for _ in range(5)]
    await crew.stage.heard("began", times=2)
    with pytest.raises(AgentBusyError, match="2 requests are being processed and 3 wait"):
        await crew.do(one, "echo", wait=False)
    assert crew.stage.said.count("began") == 2
    crew.stage.let_go.set()
    assert await asyncio.gather(*calls) == ["let go"] * 5


async def test_a_queue_that_is_full_pushes_back(crew: Crew) -> None:
    one = await crew.spawn(resource_limits=ONE_AT_A_TIME)
    calls = [crew.start(one, "hang") for _ in range(11)]
    await crew.stage.heard("began")
    with pytest.raises(AgentBusyError, match="1 requests are being processed and 10 wait, which is all it accepts"):
        await crew.do(one, "echo")
    calls[5].cancel()
    await asyncio.wait([calls[5]])
    last = crew.start(one, "echo", value="in the place of the one that left")
    crew.stage.let_go.set()
    assert await last == "in the place of the one that left"
    await asyncio.wait(calls)
    assert [call.cancelled() for call in calls] == [number == 5 for number in range(11)]


async def test_who_waits_in_the_queue_is_served_in_order(crew: Crew) -> None:
    class Slow(Actor):
        async def process(self, request: Any) -> Any:
            self.stage.say(f"served {request}")
            await asyncio.sleep(0)

    kind = type("Slow", (Slow,), {"stage": crew.stage})
    one = await crew.spawn(agent=kind, resource_limits=ONE_AT_A_TIME)
    await asyncio.gather(*(crew.manager.process(one.instance_id, number) for number in range(8)))
    assert [word for word in crew.stage.said if "served" in word] == [f"served {number}" for number in range(8)]


async def test_who_waits_in_the_queue_is_told_when_the_agent_ends(crew: Crew) -> None:
    one = await crew.spawn(resource_limits=ONE_AT_A_TIME)
    calls = [crew.start(one, "hang") for _ in range(3)]
    await crew.stage.heard("began")
    await crew.manager.terminate(one.instance_id)
    for call in calls:
        with pytest.raises(AgentGoneError):
            await call
    assert crew.stage.said.count("began") == 1


async def test_a_caller_who_gives_up_stops_the_work(crew: Crew) -> None:
    one = await crew.spawn(resource_limits=ONE_AT_A_TIME)
    call = crew.start(one, "hang")
    await crew.stage.heard("began")
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert "cancelled" in crew.stage.said
    assert await crew.state(one) is _A.WAITING
    assert await crew.do(one, "echo", value=1) == 1, "its place is free again"


# --- how long ----------------------------------------------------------------------------------------


async def test_a_request_that_takes_too_long_is_cancelled_and_the_agent_goes_on(crew: Crew) -> None:
    one = await crew.spawn(resource_limits=ONE_SECOND)
    call = crew.start(one, "hang")
    await crew.stage.heard("began")
    with pytest.raises(ExecutionTimeoutError, match="the request ran longer than 1 s and was cancelled") as told:
        await passing(crew.clock, call, 5)
    assert isinstance(told.value, TimeoutError)
    assert "cancelled" in crew.stage.said
    assert await crew.state(one) is _A.WAITING
    assert await crew.do(one, "echo", value=1) == 1
    assert crew.counted("ostler_lifecycle_process_timeouts_total") == 1


async def test_a_request_that_does_not_heed_its_cancellation_ends_the_agent(crew: Crew) -> None:
    one = await crew.spawn(resource_limits=ONE_SECOND, restart_policy=RestartPolicy.immediate())
    call = crew.start(one, "stubborn")
    await crew.stage.heard("began")
    with pytest.raises(ExecutionTimeoutError, match="did not heed its cancellation; the agent was ended"):
        await passing(crew.clock, call, 20)
    for _ in range(40):  # the time that forcing takes
        crew.clock.advance(0.1)
        await asyncio.sleep(0.005)
    back = await crew.comes_to(one, _A.READY)
    assert back.attempt == 2
    first, _second = await crew.manager.store.list_attempts(one.instance_id)
    assert first.outcome is AttemptOutcome.TIMEOUT
    assert await crew.do(one, "echo", value=1) == 1


async def test_an_answer_in_time_is_not_called_late(crew: Crew) -> None:
    one = await crew.spawn(resource_limits=ONE_SECOND)
    call = crew.start(one, "hang")
    await crew.stage.heard("began")
    crew.clock.advance(0.9)
    crew.stage.let_go.set()
    assert await call == "let go"
    crew.clock.advance(60)
    assert await crew.do(one, "echo", value=1) == 1


async def test_tokens_beyond_the_limit_of_a_minute_make_the_next_request_wait(crew: Crew) -> None:
    one = await crew.spawn(resource_limits=ResourceLimits(max_tokens_per_minute=1000))
    await crew.do(one, "speak", tokens=400)
    crew.clock.advance(20)
    await crew.do(one, "speak", tokens=700)
    waiting = crew.start(one, "echo", value="at last")
    await until(lambda: crew.manager._house.lives[one.instance_id].calls != {})  # noqa: SLF001 - it is under way
    crew.clock.advance(39)
    await asyncio.sleep(0.02)
    assert not waiting.done()
    crew.clock.advance(1)
    assert await waiting == "at last"


async def closed_states(crew: Crew) -> list[tuple[AgentInstance, str]]:
    suspended, ended = await crew.spawn(), await crew.spawn()
    await crew.manager.suspend(suspended.instance_id)
    await crew.manager.terminate(ended.instance_id)
    return [(suspended, "is suspended and takes no request; resume it"), (ended, "is terminated and takes no request")]


async def test_what_cannot_take_a_request_says_so_and_what_to_do(crew: Crew) -> None:
    for one, why in await closed_states(crew):
        with pytest.raises(InvalidOperationError, match=why) as told:
            await crew.do(one, "echo")
        assert told.value.wanted == _A.PROCESSING
