"""Requests: results and errors, slots and queues, limits of time and tokens, and ids that are answered once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from lifecycle_agents import Plain
from lifecycle_ground import LEVELS, NONE, PROCESS, THREAD, Crew, S, at, do, until

from ostler import (
    HOME_WORKSPACE_ID,
    AgentBusyError,
    AgentErrorEvent,
    AgentExecutionError,
    AgentGoneError,
    AgentHandle,
    AgentRestartingEvent,
    AttemptOutcome,
    ExecutionTimeoutError,
    IdempotencyConflictError,
    InvalidOperationError,
    RequestState,
    ResourceLimits,
    RestartPolicy,
    RestartPolicyType,
    Tier,
    ValidationError,
)

pytestmark = pytest.mark.anyio

ONE_AT_A_TIME = ResourceLimits(max_concurrent_tasks=1)
ONE_SECOND = ResourceLimits(execution_timeout=timedelta(seconds=1))
IN_TEN_SECONDS = RestartPolicy(type=RestartPolicyType.LINEAR, initial_delay=timedelta(seconds=10), use_jitter=False)


# --- results and errors ------------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_result_comes_back_as_the_agent_gave_it(crew: Crew) -> None:
    agent = await crew.start()
    for value in (None, 0, "", "text", [1, 2], {"a": {"b": [None]}}):
        assert await agent.ask(do("echo", value=value)) == value
        assert await crew.state(agent) is S.WAITING
    record = await agent.record()
    assert record.metrics is not None
    assert record.metrics.completed_tasks == 6


@at(*LEVELS)
async def test_an_error_of_the_agent_is_typed_and_the_agent_goes_on(crew: Crew) -> None:
    agent = await crew.start()
    with pytest.raises(AgentExecutionError, match="ValueError: as told") as told:
        await agent.ask(do("fail"))
    assert told.value.exception_type == "ValueError"
    assert "lifecycle_agents.py" in (told.value.stack_trace or "")
    (event,) = await crew.events(agent, AgentErrorEvent)
    assert event.is_recoverable
    assert (event.exception_type, event.stack_trace) == ("ValueError", told.value.stack_trace)
    assert await agent.ask(do("echo", value=1)) == 1
    assert crew.metric("ostler_lifecycle_process_failures_total") == 1


async def test_an_error_ends_the_agent_where_its_definition_says_so(crew: Crew) -> None:
    agent = await crew.start(about={"fail_on_error": True})
    with pytest.raises(AgentExecutionError, match="as told"):
        await agent.ask(do("fail"))
    failed = await crew.reaches(agent, S.FAILED)
    assert "as told" in (failed.error_message or "")
    (event,) = await crew.events(agent, AgentErrorEvent)
    assert not event.is_recoverable
    with pytest.raises(InvalidOperationError, match="is failed and cannot be asked; restart it, or look at why"):
        await agent.ask(do("echo"))


async def test_an_error_of_any_length_is_a_death_that_is_written(crew: Crew) -> None:
    agent = await crew.start(about={"fail_on_error": True})
    with pytest.raises(AgentExecutionError):
        await agent.ask(do("fail", text="x" * 200_000))
    failed = await crew.reaches(agent, S.FAILED)
    assert "x" * 1500 in (failed.error_message or "")


@at(*LEVELS)
async def test_plain_methods_work_like_async_ones(crew: Crew) -> None:
    agent = await crew.start(agent=Plain)
    crew.stage.release("work")
    assert await agent.ask("who") == ["plain", "who"]
    assert (await agent.stop()).was_graceful


@at(THREAD, PROCESS)
async def test_an_agent_that_blocks_blocks_no_other(crew: Crew) -> None:
    blocked, other = await crew.start(), await crew.start()
    blocking = await crew.busy(blocked, "block")
    assert await other.ask(do("echo", value=1)) == 1
    third = await crew.start()
    assert await third.ask(do("echo", value=2)) == 2
    assert (await other.stop()).was_graceful
    assert not blocking.done()
    crew.stage.release("work")
    assert await blocking == "let go"


@at(*LEVELS)
async def test_after_agent_gone_the_record_says_already_what_happened(crew: Crew) -> None:
    agent = await crew.start()
    bystander = await crew.busy(agent)
    with pytest.raises(AgentGoneError, match="SystemExit"):
        await agent.ask(do("exit"))
    failed = await agent.record()
    assert failed.state is S.FAILED
    assert "SystemExit: 3" in (failed.error_message or "")
    why = await agent.why()
    assert "SystemExit: 3" in " ".join([why.verdict, *why.evidence])
    with pytest.raises(AgentGoneError):
        await bystander
    (attempt,) = await crew.attempts(agent)
    assert attempt.outcome is AttemptOutcome.ERROR
    assert (await crew.events(agent, AgentErrorEvent))[-1].error_message == failed.error_message
    other = await crew.start()
    assert await other.ask(do("echo", value=1)) == 1, "the program lives on"


@at(PROCESS)
async def test_the_exit_code_and_the_signal_are_in_the_attempt(crew: Crew) -> None:
    agent = await crew.start(restart_policy="immediate")
    with pytest.raises(AgentGoneError):
        await agent.ask(do("kill"))
    await crew.comes_back(agent, 2)
    killed, _ = await crew.attempts(agent)
    assert (killed.outcome, killed.exit_signal) == (AttemptOutcome.SIGNAL, 9)


@at(*LEVELS)
async def test_an_agent_that_exits_comes_back_where_its_policy_says_so(crew: Crew) -> None:
    agent = await crew.start(restart_policy=RestartPolicy.immediate())
    await crew.crash(agent)
    back = await crew.reaches(agent, S.READY, 2)
    assert back.restart_count == 1
    assert (await agent.ask(do("know")))["attempt"] == 2
    restarts = await crew.events(agent, AgentRestartingEvent)
    assert [(event.attempt_number, event.max_attempts) for event in restarts] == [(1, 3)]


# --- how many ----------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_requests_overlap_and_the_state_follows_the_last(crew: Crew) -> None:
    agent = await crew.start()
    assert await crew.state(agent) is S.READY
    calls = [await crew.busy(agent) for _ in range(3)]
    await crew.reaches(agent, S.PROCESSING)
    assert await agent.ask(do("echo", value=1)) == 1
    assert await crew.state(agent) is S.PROCESSING, "three are still at it"
    crew.stage.release("work")
    assert await asyncio.gather(*calls) == ["let go"] * 3
    assert await crew.state(agent) is S.WAITING
    assert await crew.moves(agent) == [S.READY, S.PROCESSING, S.WAITING]


async def test_no_more_than_max_concurrent_tasks_at_a_time(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ResourceLimits(max_concurrent_tasks=2))
    calls = [crew.begin(agent.ask(do("hang"))) for _ in range(5)]
    await until(lambda: crew.stage.said.count("began") == 2)
    with pytest.raises(AgentBusyError, match="is busy with 2 requests"):
        await agent.ask(do("echo"), wait=False)
    assert crew.stage.said.count("began") == 2
    crew.stage.release("work")
    assert await asyncio.gather(*calls) == ["let go"] * 5


async def test_a_queue_that_is_full_pushes_back(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_AT_A_TIME)
    calls = [crew.begin(agent.ask(do("hang"))) for _ in range(11)]
    await until(lambda: "began" in crew.stage.said)
    with pytest.raises(AgentBusyError, match="has 10 requests waiting; try again later"):
        await agent.ask(do("echo"))
    calls[5].cancel()
    await asyncio.wait([calls[5]])
    last = crew.begin(agent.ask(do("echo", value="in the place of the one that left")))
    crew.stage.release("work")
    assert await last == "in the place of the one that left"
    await asyncio.wait(calls)
    assert [call.cancelled() for call in calls] == [number == 5 for number in range(11)]


@at(*LEVELS)
async def test_requests_are_served_in_their_order(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_AT_A_TIME)
    await asyncio.gather(*(agent.ask(do("count", what=number)) for number in range(8)))
    assert [word for word in crew.stage.said if "executed" in word] == [f"executed {number}" for number in range(8)]


async def test_requests_in_the_queue_are_told_when_the_agent_ends(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_AT_A_TIME)
    calls = [crew.begin(agent.ask(do("hang"))) for _ in range(3)]
    await until(lambda: "began" in crew.stage.said)
    await agent.stop()
    for call in calls:
        with pytest.raises(AgentGoneError):
            await call
    assert crew.stage.said.count("began") == 1


@at(*LEVELS)
async def test_a_caller_that_gives_up_stops_the_work(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_AT_A_TIME)
    call = await crew.busy(agent)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert "cancelled" in crew.stage.said, "the caller goes when the work has stopped"
    assert await agent.ask(do("echo", value=1)) == 1, "its place is free again"
    assert await crew.state(agent) is S.WAITING


async def test_a_request_beside_a_restart_never_costs_a_slot(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_AT_A_TIME)
    hanging = crew.begin(agent.ask(do("hang")))
    restarting = crew.begin(agent.restart())
    await restarting
    assert await crew.passes(agent.ask(do("echo", value=1)), 2) == 1 if hanging.done() else True
    crew.stage.release("work")
    await asyncio.wait([hanging])
    assert await agent.ask(do("echo", value=1)) == 1
    assert (await agent.pause()).state is S.SUSPENDED


# --- how long ----------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_request_that_takes_too_long_is_cancelled_and_the_agent_goes_on(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_SECOND)
    call = await crew.busy(agent)
    with pytest.raises(ExecutionTimeoutError, match=r"the request ran longer than its time \(1 s\)") as told:
        await crew.passes(call, 5)
    assert isinstance(told.value, TimeoutError)
    assert "cancelled" in crew.stage.said
    assert await agent.ask(do("echo", value=1)) == 1
    assert crew.metric("ostler_lifecycle_process_timeouts_total") == 1


async def test_the_time_of_a_caller_bounds_its_request_and_its_waiting(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_AT_A_TIME)
    call = await crew.busy(agent, timeout="3s")
    queued = crew.begin(agent.ask(do("echo"), timeout=2))
    with pytest.raises(ExecutionTimeoutError, match=r"did not answer the request in time \(2 s\)"):
        await crew.passes(queued, 5)
    with pytest.raises(ExecutionTimeoutError, match=r"longer than its time \(3 s\)"):
        await crew.passes(call, 5)
    assert await agent.ask(do("echo", value=1), timeout=1) == 1
    for wrong in (0, -1, "soon", timedelta(0)):
        with pytest.raises(ValidationError, match="timeout"):
            await agent.ask(do("echo"), timeout=wrong)


@at(*LEVELS)
async def test_a_request_that_ignores_its_cancellation_costs_the_attempt(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_SECOND, restart_policy=RestartPolicy.immediate())
    call = await crew.busy(agent, "stubborn")
    with pytest.raises(AgentGoneError, match="ran longer than 1 s and ignored its cancellation"):
        await crew.passes(call, 20)
    await crew.comes_back(agent, 2)
    first, _second = await crew.attempts(agent)
    assert first.outcome is AttemptOutcome.TIMEOUT
    assert await agent.ask(do("echo", value=1)) == 1


@at(*LEVELS)
async def test_a_request_that_ignores_the_end_of_its_caller_costs_the_attempt(crew: Crew) -> None:
    agent = await crew.start(restart_policy=RestartPolicy.immediate())
    call = await crew.busy(agent, "stubborn")
    call.cancel()
    await crew.passes(asyncio.wait([call]), 20)
    assert call.cancelled()
    await crew.comes_back(agent, 2)
    assert await agent.ask(do("echo", value=1)) == 1


async def test_an_answer_in_time_is_not_called_late(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_SECOND)
    call = await crew.busy(agent)
    crew.advance(0.9)
    crew.stage.release("work")
    assert await call == "let go"
    crew.advance(60)
    assert await agent.ask(do("echo", value=1)) == 1


@pytest.mark.parametrize("whose", ["instance", "workspace"])
async def test_tokens_beyond_the_limit_of_a_minute_make_the_next_request_wait(crew: Crew, whose: str) -> None:
    if whose == "workspace":
        await crew.set_tier(Tier.ENTERPRISE, HOME_WORKSPACE_ID, max_tokens_per_minute=1000)
    agent = await crew.start(resource_limits=ResourceLimits(max_tokens_per_minute=1000 * (whose == "instance")))
    await agent.ask(do("speak", tokens=400))
    crew.advance(20)
    await agent.ask(do("speak", tokens=700))
    waiting = crew.begin(agent.ask(do("echo", value="at last")))
    await until(lambda: bool(crew.runtime.instances[agent.instance_id].backlog))
    crew.advance(39)
    await crew.calm()
    assert not waiting.done()
    crew.advance(1)
    assert await waiting == "at last"
    record = await agent.record()
    assert record.metrics is not None
    assert record.metrics.tokens_used == 1100


async def test_what_cannot_take_a_request_says_so_and_what_to_do(crew: Crew) -> None:
    suspended, ended = await crew.start(), await crew.start()
    await suspended.pause()
    await ended.stop()
    for agent, why in (
        (suspended, "is suspended and cannot be asked; resume it first"),
        (ended, "is terminated and cannot be asked; spawn another"),
    ):
        with pytest.raises(InvalidOperationError, match=why) as told:
            await agent.ask(do("echo"))
        assert told.value.current == await crew.state(agent)


# --- ids -----------------------------------------------------------------------------------------------


async def executed(agent: AgentHandle, request_id: str, what: str = "") -> int:
    found = await agent.ask(do("count", what=what), id=request_id)
    assert isinstance(found, int)
    return found


@at(*LEVELS)
async def test_an_id_is_answered_once(crew: Crew) -> None:
    agent = await crew.start()
    assert [await executed(agent, "r-1") for _ in range(3)] == [1, 1, 1]
    assert await executed(agent, "r-2") == 2
    rows = await agent.requests()
    assert [(row.request_id, row.state, row.answer) for row in rows] == [
        ("r-2", RequestState.DONE, "2"),
        ("r-1", RequestState.DONE, "1"),
    ]
    await agent.ask(do("echo"))
    assert len(await agent.requests()) == 2, "without an id nothing is kept"


@at(*LEVELS)
async def test_an_id_is_answered_in_every_phase_and_by_the_next_manager(crew: Crew) -> None:
    agent = await crew.start(restart_policy=IN_TEN_SECONDS)
    assert await executed(agent, "r-1") == 1
    await agent.restart()
    assert await executed(agent, "r-1") == 1
    for depth in ("hold", "park"):
        await agent.pause(depth)
        assert await executed(agent, "r-1") == 1
        await agent.resume()
    await crew.crash(agent)
    assert await crew.state(agent) is S.FAILED
    assert await executed(agent, "r-1") == 1
    await crew.comes_back(agent, (await agent.record()).attempt + 1, 10)
    await agent.stop()
    assert await executed(agent, "r-1") == 1
    await crew.reopen()
    assert await executed(crew.again(agent), "r-1") == 1
    with pytest.raises(InvalidOperationError, match="is terminated"):
        await executed(crew.again(agent), "r-2")


@at(*LEVELS)
async def test_an_id_that_is_asked_again_meanwhile_is_joined(crew: Crew) -> None:
    agent = await crew.start()
    first = await crew.busy(agent, id="r-1")
    others = [crew.begin(agent.ask(do("hang"), id="r-1")) for _ in range(3)]
    await crew.calm()
    others[0].cancel()
    first.cancel()
    await asyncio.wait([first, others[0]])
    crew.stage.release("work")
    assert await asyncio.gather(*others[1:]) == ["let go"] * 2
    assert crew.stage.said.count("began") == 1
    assert "cancelled" not in crew.stage.said, "callers are left"


@at(*LEVELS)
async def test_the_time_of_one_caller_bounds_no_other_of_the_same_id(crew: Crew) -> None:
    agent = await crew.start()
    brief = await crew.busy(agent, id="r-1", timeout=2)
    joined = crew.begin(agent.ask(do("hang"), id="r-1", timeout=4))
    patient = crew.begin(agent.ask(do("hang"), id="r-1"))
    for call, limit in ((brief, "2 s"), (joined, "4 s")):
        with pytest.raises(ExecutionTimeoutError, match=limit):
            await crew.passes(call, 5)
    crew.stage.release("work")
    assert await patient == "let go"
    assert crew.stage.said.count("began") == 1


@at(*LEVELS)
async def test_the_time_of_a_caller_goes_on_while_its_request_waits_for_an_answer(crew: Crew) -> None:
    agent = await crew.start()
    call = crew.begin(agent.ask(do("ask"), timeout=2))
    await crew.wait_of(agent)
    with pytest.raises(ExecutionTimeoutError, match="2 s"):
        await crew.passes(call, 5)
    await until(lambda: not crew.runtime.instances[agent.instance_id].waits)
    await crew.committed()
    assert await agent.waits() == []


async def test_with_its_last_caller_an_id_is_cancelled_and_begins_again(crew: Crew) -> None:
    agent = await crew.start()
    calls = [await crew.busy(agent, id="r-1"), crew.begin(agent.ask(do("hang"), id="r-1"))]
    await crew.calm()
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert "cancelled" in crew.stage.said
    assert [row.state for row in await agent.requests()] == [RequestState.CANCELLED]
    crew.stage.release("work")
    assert await agent.ask(do("hang"), id="r-1") == "let go"
    assert [(row.state, row.tries) for row in await agent.requests()] == [(RequestState.DONE, 2)]


async def test_the_same_id_with_another_input_is_refused(crew: Crew) -> None:
    agent = await crew.start()
    hanging = await crew.busy(agent, id="r-1")
    for _ in range(2):
        with pytest.raises(IdempotencyConflictError, match="'r-1' was used with another request; use a new id"):
            await agent.ask(do("echo"), id="r-1")
        crew.stage.release("work")
        await asyncio.wait([hanging])
    await agent.stop()
    with pytest.raises(IdempotencyConflictError):
        await agent.ask(do("echo"), id="r-1")


async def test_a_failed_id_begins_again(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ONE_SECOND)
    for _ in range(2):
        with pytest.raises(AgentExecutionError, match="as told"):
            await agent.ask(do("fail"), id="r-1")
    assert len(await crew.events(agent, AgentErrorEvent)) == 2
    with pytest.raises(ExecutionTimeoutError):
        await crew.passes(await crew.busy(agent, id="r-2"), 5)
    crew.stage.release("work")
    assert await agent.ask(do("hang"), id="r-2") == "let go"
    found = {row.request_id: (row.state, row.tries, row.error) for row in await agent.requests()}
    assert found["r-1"][:2] == (RequestState.FAILED, 2)
    assert "as told" in (found["r-1"][2] or "")
    assert found["r-2"] == (RequestState.DONE, 2, None)


@at(THREAD, PROCESS)
async def test_an_answer_that_is_too_large_is_delivered_and_not_kept(crew: Crew) -> None:
    agent = await crew.start()
    large = do("echo", value="x" * 1_100_000)
    assert len(await agent.ask(large, id="r-1")) == 1_100_000
    with pytest.raises(InvalidOperationError, match="was answered, but the answer is not kept: it was larger than"):
        await agent.ask(large, id="r-1")


@at(NONE)
async def test_an_answer_that_is_no_json_is_delivered_and_not_kept(crew: Crew) -> None:
    async def bytes_for(request: Any) -> bytes:
        return bytes(request)

    agent = await crew.manager.start(bytes_for, isolation="none")
    assert await agent.ask(3, id="r-1") == b"\0\0\0"
    with pytest.raises(InvalidOperationError, match="the answer is not kept: it is no JSON"):
        await agent.ask(3, id="r-1")
    with pytest.raises(ValidationError, match="must be JSON to have an id"):
        await agent.ask(b"x", id="r-2")


async def test_what_is_no_id_is_refused(crew: Crew) -> None:
    agent = await crew.start()
    for wrong in ("", "a\nb", "x" * 201):
        with pytest.raises(ValidationError, match="request_id must be 1 to 200 printable characters"):
            await agent.ask(do("echo"), id=wrong)
    with pytest.raises(ValidationError, match="retries needs a request_id"):
        await agent.ask(do("echo"), retries=1)


@at(*LEVELS)
async def test_retries_ask_again_when_the_agent_ends_first(crew: Crew) -> None:
    agent = await crew.start({"dies_at": [1, 2]}, restart_policy=RestartPolicy.immediate())
    assert await agent.ask(do("survive"), id="r-1", retries=2) == "survived at 3"
    assert [(row.state, row.tries) for row in await agent.requests()] == [(RequestState.DONE, 3)]
    other = await crew.start({"dies_at": [1, 2]}, restart_policy=RestartPolicy.immediate())
    with pytest.raises(AgentGoneError):
        await other.ask(do("survive"), id="r-1", retries=1)
    assert [(row.state, row.tries) for row in await other.requests()] == [(RequestState.LOST, 2)]


# --- beside a restart ----------------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_request_to_an_agent_whose_restart_is_pending_waits_for_it(crew: Crew) -> None:
    agent = await crew.start(restart_policy=IN_TEN_SECONDS)
    await crew.crash(agent)
    waiting = crew.begin(agent.ask(do("know")))
    brief = crew.begin(agent.ask(do("know"), timeout=3))
    with pytest.raises(ExecutionTimeoutError, match="did not answer the request in time"):
        await crew.passes(brief, 5)
    assert not waiting.done()
    assert (await crew.passes(waiting, 15))["attempt"] == 2


async def test_a_queued_request_outlives_the_attempt_and_fails_when_the_restart_is_given_up(crew: Crew) -> None:
    policy = IN_TEN_SECONDS.evolve(max_retries=1)
    agent = await crew.start(resource_limits=ONE_AT_A_TIME, restart_policy=policy)
    crew.begin(agent.ask(do("hang")))
    await until(lambda: "began" in crew.stage.said)
    queued = crew.begin(agent.ask(do("exit")))
    later = crew.begin(agent.ask(do("know"), id="r-1"))
    last = crew.begin(agent.ask(do("exit")))
    beyond = crew.begin(agent.ask(do("know")))
    await crew.calm()
    await agent.restart()
    with pytest.raises(AgentGoneError):
        await queued
    assert (await crew.passes(later, 15))["attempt"] == 3
    for call in (last, beyond):
        with pytest.raises(AgentGoneError, match="SystemExit"):
            await crew.passes(call, 15)
    assert await crew.state(agent) is S.FAILED


async def test_a_request_to_a_starting_agent_waits_for_it(crew: Crew) -> None:
    agent = await crew.start({"slow_attempts": [2]})
    restarting = crew.begin(agent.restart())
    await until(lambda: "attempt 2" in crew.stage.said)
    waiting = crew.begin(agent.ask(do("know")))
    await crew.calm()
    crew.stage.release("start")
    await restarting
    assert (await waiting)["attempt"] == 2
