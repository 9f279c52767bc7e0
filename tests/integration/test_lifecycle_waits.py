"""Waits of an agent: seen in the log, in `why` and over all instances; answered once; ended by time, call and agent."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from lifecycle_ground import LEVELS, NONE, THREAD, Crew, S, at, do, until

from ostler import (
    AgentExecutionError,
    AgentGoneError,
    AgentHandle,
    AgentWaitEndedEvent,
    AgentWaitOpenedEvent,
    InvalidOperationError,
    NotFoundError,
    ResourceLimits,
    ValidationError,
    Wait,
    WaitKind,
)
from ostler.model.access import Permission
from ostler.store.waits import get_wait

pytestmark = pytest.mark.anyio


async def asking(crew: Crew, **more: Any) -> tuple[AgentHandle, asyncio.Task[Any], Wait]:
    agent = await crew.start()
    call = crew.begin(agent.ask(do("ask", **more)))
    return agent, call, await crew.wait_of(agent)


async def row(crew: Crew, wait: Wait) -> Wait:
    found = await crew.manager.store.read(get_wait, wait.wait_id)
    assert found is not None
    return found


async def ended(crew: Crew, wait: Wait) -> Wait:
    async def over() -> bool:
        return (await row(crew, wait)).ended_at is not None

    await until(over, "the wait goes on")
    return await row(crew, wait)


@at(*LEVELS)
async def test_a_wait_is_an_event_in_why_and_in_the_list_and_is_answered_by_another_client(crew: Crew) -> None:
    agent, call, wait = await asking(crew)
    await crew.reaches(agent, S.WAITING)
    assert (wait.reason, wait.kind) == ("which colour?", WaitKind.HUMAN)
    (opened,) = await crew.events(agent, AgentWaitOpenedEvent)
    assert (opened.wait_id, opened.kind, opened.reason) == (wait.wait_id, WaitKind.HUMAN, "which colour?")
    why = await agent.why()
    assert "which colour?" in " ".join([why.verdict, *why.evidence])
    crew.advance(1)
    other, _, second = await asking(crew, reason="how many?")
    assert [one.wait_id for one in await crew.manager.open_waits()] == [wait.wait_id, second.wait_id]
    assert [one.wait_id for one in await other.waits()] == [second.wait_id]
    reader = crew.as_principal(permissions=(Permission.AGENTS_READ,))
    assert await reader.open_waits() == [], "of agents that others own"
    # Another client of the same manager.
    client = crew.manager.acting_as(crew.manager.principal, correlation_id="from afar")
    answered = await client.answer(wait.wait_id, "done", {"colour": "green"})
    assert answered.outcome == "done"
    assert await call == ["done", {"colour": "green"}]
    assert [one.wait_id for one in await crew.manager.open_waits()] == [second.wait_id]
    (told,) = await crew.events(agent, AgentWaitEndedEvent)
    assert (told.wait_id, told.outcome, told.correlation_id) == (wait.wait_id, "done", "from afar")
    assert await crew.moves(agent) == [S.READY, S.PROCESSING, S.WAITING, S.PROCESSING, S.WAITING]


@at(*LEVELS)
async def test_of_two_answers_one_counts(crew: Crew) -> None:
    agent, call, wait = await asking(crew)
    answers = (crew.manager.answer(wait.wait_id, outcome) for outcome in ("yes", "no", "perhaps"))
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert sum(isinstance(outcome, InvalidOperationError) for outcome in outcomes) == 2
    (said,) = [outcome.outcome for outcome in outcomes if isinstance(outcome, Wait)]
    assert (await call)[0] == said
    with pytest.raises(InvalidOperationError, match="has ended already"):
        await crew.manager.answer(wait.wait_id)
    assert [event.outcome for event in await crew.events(agent, AgentWaitEndedEvent)] == [said]


@at(*LEVELS)
async def test_a_wait_ends_by_itself_when_its_time_is_over(crew: Crew) -> None:
    _, call, wait = await asking(crew, seconds=30)
    crew.advance(29)
    await crew.calm()
    assert not call.done()
    crew.advance(1)
    assert await call == ["timeout", None]
    assert (await row(crew, wait)).outcome == "timeout"


@at(*LEVELS)
async def test_a_wait_ends_with_its_agent_and_cannot_be_answered_then(crew: Crew) -> None:
    agent, call, wait = await asking(crew)
    await crew.crash(agent)
    with pytest.raises(AgentGoneError):
        await call
    assert (await row(crew, wait)).outcome == "the agent has ended"
    with pytest.raises(InvalidOperationError, match="has ended already"):
        await crew.manager.answer(wait.wait_id)
    assert await agent.waits() == []


@at(*LEVELS)
async def test_a_wait_ends_with_its_caller(crew: Crew) -> None:
    agent, call, wait = await asking(crew)
    call.cancel()
    await asyncio.wait([call])
    assert (await ended(crew, wait)).outcome == "cancelled"
    assert await agent.ask(do("echo", value=1)) == 1


async def test_a_wait_ends_with_its_termination(crew: Crew) -> None:
    agent, call, wait = await asking(crew)
    await agent.stop()
    with pytest.raises(AgentGoneError):
        await call
    assert (await row(crew, wait)).outcome in {"cancelled", "terminated"}
    assert await crew.manager.open_waits() == []


@at(*LEVELS)
async def test_the_time_of_a_request_stands_still_while_it_waits(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ResourceLimits(execution_timeout=timedelta(seconds=2)))
    call = crew.begin(agent.ask(do("ask")))
    wait = await crew.wait_of(agent)
    crew.advance(600)
    await crew.calm()
    await crew.manager.answer(wait.wait_id)
    assert await call == ["done", None]


async def test_waits_beside_any_request_do_not_make_the_agent_look_busy(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("ask_beside"))
    wait = await crew.wait_of(agent)
    await until(lambda: bool(crew.runtime.instances[agent.instance_id].waits))
    assert await crew.state(agent) is S.WAITING, "it has worked, and works no more"
    for depth in ("hold",):
        await agent.pause(depth)
        await agent.resume()
    assert await crew.state(agent) is S.READY
    await crew.manager.answer(wait.wait_id)
    await until(lambda: "beside done" in crew.stage.said)
    assert await crew.state(agent) is S.READY


@at(NONE)
async def test_only_what_an_agent_waits_for_can_be_answered(crew: Crew) -> None:
    agent = await crew.start(restart_policy="linear")
    await agent.pause(resume_after=60)
    (pause,) = await agent.waits()
    with pytest.raises(InvalidOperationError, match="resume or restart the instance instead"):
        await crew.manager.answer(pause.wait_id)
    await agent.resume()
    await crew.crash(agent)
    (backoff,) = await agent.waits()
    with pytest.raises(InvalidOperationError, match="resume or restart the instance instead"):
        await crew.manager.answer(backoff.wait_id)
    for unknown in (agent.instance_id, uuid4(), str(uuid4())):
        with pytest.raises(NotFoundError, match="there is no wait"):
            await crew.manager.answer(unknown)


@at(NONE)
async def test_an_answer_is_a_word_and_none_that_only_a_clock_says(crew: Crew) -> None:
    _, _, wait = await asking(crew)
    wrong: Any
    for wrong in (None, "", "  ", 5, "timeout", "a" * 100_000):
        with pytest.raises(ValidationError, match="outcome"):
            await crew.manager.answer(wait.wait_id, wrong)
    for wrong in ("", [], 5, {"a": object()}):
        with pytest.raises(ValidationError, match="answer"):
            await crew.manager.answer(wait.wait_id, "approved", wrong)
    for wrong in (None, 5, "x", []):
        with pytest.raises(ValidationError, match="wait_id must be a UUID"):
            await crew.manager.answer(wrong)
    assert (await crew.manager.answer(str(wait.wait_id), "approved")).outcome == "approved"


@at(THREAD)
async def test_a_wait_without_measure_is_refused_in_the_agents_own_code(crew: Crew) -> None:
    agent = await crew.start()
    with pytest.raises(AgentExecutionError, match="at most 3650 days"):
        await agent.ask(do("ask_for_ever"))


@at(THREAD)
async def test_the_kind_of_a_wait_is_kept_and_no_agent_can_make_one_of_ours(crew: Crew) -> None:
    for word, kind in (("approval", WaitKind.HUMAN), ("ci", WaitKind.CI), ("news", WaitKind.AGENT)):
        _, _, wait = await asking(crew, kind=word)
        assert wait.kind is kind
        assert (wait.detail or {})["kind"] == word
    _, _, wait = await asking(crew, kind="backoff")
    assert wait.kind is WaitKind.AGENT
    assert isinstance(wait.wait_id, UUID)
