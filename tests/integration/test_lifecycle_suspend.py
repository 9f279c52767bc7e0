"""Suspension: hold finishes the work, freeze stops it where it is, park ends the process; pauses that end by time."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from lifecycle_agents import Actor
from lifecycle_ground import HOUR, LEVELS, NONE, PROCESS, THREAD, Crew, S, at, do, until

from ostler import (
    AgentErrorEvent,
    AgentGoneError,
    AgentInitializationError,
    AgentRegistry,
    AttemptOutcome,
    CommandSpec,
    DeadlineError,
    ExecutionTimeoutError,
    InvalidOperationError,
    LifecycleSettings,
    RequestState,
    ResourceLimits,
    RestartPolicy,
    SuspendDepth,
    ValidationError,
    WaitKind,
)
from ostler.isolation.base import Verb

pytestmark = pytest.mark.anyio

YEAR = timedelta(days=365)
DEPTHS = pytest.mark.parametrize("depth", list(SuspendDepth), ids=str)


# --- hold --------------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_hold_waits_for_the_end_of_the_work_and_takes_no_more(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ResourceLimits(max_concurrent_tasks=1))
    call = await crew.busy(agent)
    queued = crew.begin(agent.ask(do("echo", value="later")))
    holding = crew.begin(agent.pause("hold"))
    await crew.calm()
    assert not holding.done()
    with pytest.raises(InvalidOperationError, match="it is being suspended; resume it first"):
        await agent.ask(do("echo"))
    with pytest.raises(InvalidOperationError, match="cannot be suspended"):
        await agent.pause()
    crew.stage.release("work")
    assert await call == "let go"
    assert (await holding).state is S.SUSPENDED
    assert not queued.done(), "it was taken before, and waits for the resume"
    assert (await agent.resume()).state is S.READY
    assert await queued == "later"
    assert await agent.ask(do("echo", value=1)) == 1
    assert (await agent.record()).attempt == 1


async def test_a_hold_that_is_called_off_lets_the_agent_go_on(crew: Crew) -> None:
    agent = await crew.start()
    call = await crew.busy(agent)
    holding = crew.begin(agent.pause())
    await crew.calm()
    holding.cancel()
    await asyncio.wait([holding])
    assert holding.cancelled()
    assert await agent.ask(do("echo", value=1)) == 1
    again = crew.begin(agent.pause())
    await crew.calm()
    await agent.resume()
    with pytest.raises(InvalidOperationError, match="it was resumed first"):
        await again
    crew.stage.release("work")
    assert await call == "let go"
    assert await crew.state(agent) is S.WAITING


@pytest.mark.parametrize("depth", ["hold", "park"])
async def test_suspend_has_a_time_limit_and_the_agent_goes_on_after_it(crew: Crew, depth: str) -> None:
    agent = await crew.start(resource_limits=ResourceLimits(execution_timeout=HOUR))
    call = await crew.busy(agent)
    holding = crew.begin(agent.pause(depth))
    await crew.calm()
    crew.advance(299)
    await crew.calm()
    assert not holding.done()
    crew.advance(1)
    with pytest.raises(DeadlineError, match="did not finish its work within 5 min; it goes on") as told:
        await holding
    assert isinstance(told.value, TimeoutError)
    with pytest.raises(DeadlineError, match="within 2 s"):
        await crew.passes(crew.manager.suspend(agent.instance_id, depth, timeout="2s"), 5)
    assert await agent.ask(do("echo", value=1)) == 1
    crew.stage.release("work")
    assert await call == "let go"


async def test_the_time_limit_of_a_hold_is_a_setting(crew: Crew) -> None:
    await crew.reopen(settings=LifecycleSettings(hold_timeout=timedelta(seconds=3)))
    agent = await crew.start()
    await crew.busy(agent)
    with pytest.raises(DeadlineError, match="within 3 s"):
        await crew.passes(agent.pause(), 5)


@at(*LEVELS)
async def test_an_agent_that_dies_while_it_is_being_held_is_failed_not_suspended(crew: Crew) -> None:
    agent = await crew.start()
    call = await crew.busy(agent)
    holding = crew.begin(agent.pause())
    await crew.calm()
    cell = crew.runtime.instances[agent.instance_id].cell
    crew.begin(cell.call(Verb.PROCESS, do("exit")))  # the manager takes no request now
    with pytest.raises(InvalidOperationError, match="cannot be suspended; it ended first"):
        await holding
    with pytest.raises(AgentGoneError):
        await call
    await crew.reaches(agent, S.FAILED)


async def test_a_hold_waits_for_the_request_that_works_beside_those_that_wait(crew: Crew) -> None:
    agent = await crew.start()
    waiting = crew.begin(agent.ask(do("ask_often", times=2)))

    async def both() -> bool:
        return len(await agent.waits()) == 2

    await until(both)
    works = await crew.busy(agent)
    holding = crew.begin(agent.pause())
    await crew.calm()
    assert not holding.done()
    works.cancel()
    assert (await holding).state is S.SUSPENDED
    for wait in await agent.waits():
        if wait.kind is not WaitKind.RESUME:
            await crew.manager.answer(wait.wait_id)
    await crew.calm()
    assert not waiting.done()
    await agent.resume()
    assert await waiting == ["done", "done"]


@at(*LEVELS)
async def test_an_answer_during_a_hold_is_kept_for_the_resume(crew: Crew) -> None:
    agent = await crew.start()
    call = crew.begin(agent.ask(do("ask")))
    wait = await crew.wait_of(agent)
    await agent.pause()
    assert (await crew.manager.answer(wait.wait_id, "go")).outcome == "go"
    await crew.calm()
    assert not call.done()
    assert await crew.state(agent) is S.SUSPENDED
    await agent.resume()
    assert await call == ["go", None]


async def test_what_is_not_suspended_cannot_be_resumed_nor_what_is_suspended_again(crew: Crew) -> None:
    agent = await crew.start()
    with pytest.raises(InvalidOperationError, match="only a suspended one can be resumed"):
        await agent.resume()
    await agent.pause()
    with pytest.raises(InvalidOperationError, match="it is suspended already; resume it first"):
        await agent.pause("hold")
    await agent.stop()
    for verb in (agent.resume, agent.pause):
        with pytest.raises(InvalidOperationError, match="is terminated"):
            await verb()
    with pytest.raises(ValidationError, match="depth must be one of hold, freeze, park"):
        await agent.pause("deep")


# --- park --------------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_parked_agent_keeps_record_and_files_and_starts_fresh(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("write", name="notes"))
    parked = await agent.pause("park")
    assert (parked.state, parked.attempt) == (S.SUSPENDED, 1)
    assert "shutdown" in crew.stage.said
    (first,) = await crew.attempts(agent)
    assert (first.outcome, first.is_open) == (AttemptOutcome.STOPPED, False)
    notes = crew.home / "work" / str(agent.instance_id) / "notes"
    assert notes.read_text() == "kept"
    back = await agent.resume()
    assert (back.state, back.attempt, back.restart_count) == (S.READY, 2, 0)
    assert notes.exists()
    assert await agent.ask(do("echo", value=1)) == 1
    assert await agent.waits() == []


@at(*LEVELS)
async def test_a_held_agent_may_be_parked(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause("hold", resume_after=HOUR)
    parked = await agent.pause("park")
    assert (parked.state, (await crew.attempts(agent))[0].is_open) == (S.SUSPENDED, False)
    assert [wait.due_at for wait in await agent.waits()] == [None], "the deeper one replaces it"
    assert (await agent.resume()).attempt == 2


async def test_parking_waits_for_every_request_also_for_one_that_waits(crew: Crew) -> None:
    agent = await crew.start()
    call = crew.begin(agent.ask(do("ask")))
    wait = await crew.wait_of(agent)
    parking = crew.begin(agent.pause("park"))
    await crew.calm()
    assert not parking.done()
    await crew.manager.answer(wait.wait_id)
    assert await call == ["done", None]
    assert (await parking).state is S.SUSPENDED


async def test_a_parked_agent_whose_fresh_start_fails_goes_by_its_policy(crew: Crew) -> None:
    agent = await crew.start({"bad_attempts": [2]}, restart_policy=RestartPolicy.immediate())
    await agent.pause("park")
    with pytest.raises(AgentInitializationError, match="a bad start"):
        await agent.resume()
    back = await crew.reaches(agent, S.READY, 3)
    assert back.restart_count == 1
    assert await agent.waits() == []


async def test_a_parked_agent_can_be_restarted_and_terminated(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause("park")
    back = await agent.restart()
    assert (back.state, back.attempt) == (S.READY, 2)
    await agent.pause("park")
    assert (await agent.stop()).success
    assert [one.outcome for one in await crew.attempts(agent)] == [AttemptOutcome.STOPPED] * 2
    assert await agent.waits() == []


async def test_two_that_resume_at_once_start_it_once(crew: Crew) -> None:
    agent = await crew.start({"slow_attempts": [2]})
    await agent.pause("park")
    first = crew.begin(agent.resume())
    await until(lambda: "attempt 2" in crew.stage.said)
    with pytest.raises(InvalidOperationError):
        await agent.resume()
    crew.stage.release("start")
    assert (await first).state is S.READY
    assert crew.stage.said.count("initialize") == 2


@at(*LEVELS)
async def test_resume_and_restart_while_it_is_being_parked(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "hang"})
    for verb in (agent.resume, agent.restart):
        parking = crew.begin(agent.pause("park"))
        before = crew.stage.said.count("shutdown")
        await until(lambda before=before: crew.stage.said.count("shutdown") > before)  # type: ignore[misc]  # bound now
        back: asyncio.Task[Any] = crew.begin(verb())
        await crew.passes(asyncio.wait([parking, back]), 60)
        assert back.result().state is S.READY
        assert await agent.ask(do("echo", value=1)) == 1
    assert (await agent.record()).attempt == 3


# --- freeze ------------------------------------------------------------------------------------------


async def test_a_level_that_cannot_freeze_says_so(crew: Crew) -> None:
    agent = await crew.start()
    await crew.busy(agent)
    with pytest.raises(InvalidOperationError, match=f"lives at level {crew.level}, which cannot freeze; use hold"):
        await agent.pause("freeze")
    await crew.reaches(agent, S.PROCESSING)


@at(PROCESS)
async def test_a_frozen_agent_thaws_where_it_was_and_its_time_stood_still(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ResourceLimits(execution_timeout=timedelta(seconds=60)))
    call = await crew.busy(agent)
    crew.advance(40)
    assert (await agent.pause("freeze")).state is S.SUSPENDED
    crew.advance(1000)
    await crew.calm()
    assert not call.done()
    with pytest.raises(InvalidOperationError, match="resume it first"):
        await agent.ask(do("echo"))
    assert (await agent.resume()).state is S.PROCESSING
    crew.advance(15)
    await crew.calm()
    assert not call.done()
    crew.advance(6)
    with pytest.raises(ExecutionTimeoutError):
        await call
    assert (await agent.record()).attempt == 1


@at(PROCESS)
async def test_an_agent_that_is_frozen_at_rest_thaws_to_ready(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause("freeze", resume_after=HOUR)
    crew.advance(HOUR.total_seconds())
    await crew.reaches(agent, S.READY, 1)
    assert await agent.ask(do("echo", value=1)) == 1


@at(PROCESS)
async def test_a_frozen_agent_can_be_parked_restarted_and_terminated(crew: Crew) -> None:
    agent = await crew.start()
    for verb in ("park", "restart", "stop"):
        call = await crew.busy(agent)
        await agent.pause("freeze")
        if verb == "park":
            await agent.pause("park")
            await agent.resume()
        else:
            await getattr(agent, verb)()
        with pytest.raises(AgentGoneError):
            await call
    assert await crew.state(agent) is S.TERMINATED
    assert await agent.waits() == []
    assert [one.outcome for one in await crew.attempts(agent)] == [AttemptOutcome.STOPPED] * 3


@at(PROCESS)
async def test_a_caller_that_gives_up_a_frozen_request_does_not_cost_the_agent(crew: Crew) -> None:
    agent = await crew.start()
    given_up, late = await crew.busy(agent, id="r-1"), await crew.busy(agent, timeout=30)
    await agent.pause("freeze")
    given_up.cancel()
    await asyncio.wait([given_up])
    assert given_up.cancelled()
    with pytest.raises(ExecutionTimeoutError, match="30 s"):
        await crew.passes(late, 40)
    crew.advance(60)
    await crew.calm()
    await agent.resume()
    await until(lambda: crew.stage.said.count("cancelled") == 2)
    assert await agent.ask(do("echo", value=1)) == 1
    assert (await agent.record()).attempt == 1

    async def is_cancelled() -> bool:
        return [row.state for row in await agent.requests()] == [RequestState.CANCELLED]

    await until(is_cancelled)  # written when the agent has stopped it, for which nobody waits any more


@at(PROCESS)
async def test_freeze_resume_and_terminate_of_a_command_under_load(crew: Crew) -> None:
    """Runs begin and end all the time; none of the verbs fails, and no request is lost but by the end."""
    spec = CommandSpec(argv=("sh", "-c", "sleep 0.01; echo {prompt}"))
    agent = await crew.start(
        agent=spec, about={"name": "brief"}, resource_limits=ResourceLimits(max_concurrent_tasks=3)
    )
    stopped = asyncio.Event()
    answers: list[str] = []

    async def load(number: int) -> None:
        round_ = 0
        while not stopped.is_set():
            try:
                answer = await agent.ask(f"{number}-{round_}", id=f"{number}-{round_}")
            except InvalidOperationError as error:
                assert "resume it first" in str(error), error  # noqa: PT017 - it goes on after a look
                await asyncio.sleep(0.005)
                continue
            assert answer["output"] == f"{number}-{round_}\n"
            answers.append(answer["output"])
            round_ += 1

    callers = [crew.begin(load(number)) for number in range(3)]
    for _ in range(12):
        count = len(answers)
        await until(lambda count=count: len(answers) >= count + 2)  # type: ignore[misc]  # bound now
        assert (await agent.pause("freeze")).state is S.SUSPENDED
        assert (await agent.resume()).state in {S.READY, S.PROCESSING}
    stopped.set()
    await asyncio.gather(*callers)
    await agent.ask("0-0", id="0-0")
    crew.begin(agent.ask("last"))
    await agent.pause("freeze")
    result = await crew.passes(agent.stop(), 30)
    assert result.success
    assert await crew.state(agent) is S.TERMINATED
    assert await crew.events(agent, AgentErrorEvent) == []


# --- pauses that end by themselves -------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, -1, "soon", timedelta(0)], ids=repr)
@at(NONE)
async def test_a_pause_must_have_a_length(crew: Crew, after: Any) -> None:
    agent = await crew.start()
    with pytest.raises(ValidationError, match="resume_after"):
        await agent.pause(resume_after=after)
    assert await crew.state(agent) is S.READY


@pytest.mark.parametrize(("depth", "attempt"), [("hold", 1), ("park", 2)])
async def test_a_pause_ends_by_the_clock_and_no_jump_changes_that(crew: Crew, depth: str, attempt: int) -> None:
    agent = await crew.start()
    await agent.pause(depth, resume_after="1h")
    crew.clock.jump(YEAR)  # type: ignore[attr-defined]  # a manual one
    await crew.tick(1800, step=60)
    assert await crew.state(agent) is S.SUSPENDED
    crew.clock.jump(-2 * YEAR)  # type: ignore[attr-defined]  # as above
    await crew.tick(1740, step=60)
    assert await crew.state(agent) is S.SUSPENDED
    await crew.passes(crew.reaches(agent, S.READY, attempt), 120, step=1)
    assert await agent.waits() == []


async def test_a_resume_by_hand_calls_the_other_off(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause(resume_after=HOUR)
    await agent.resume()
    await agent.pause(resume_after=3 * HOUR)
    crew.advance(2 * HOUR.total_seconds())
    await crew.calm()
    assert await crew.state(agent) is S.SUSPENDED


async def test_a_pause_survives_the_manager(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause(resume_after=HOUR)
    await crew.close()
    crew.advance(1800)
    await crew.open()
    agent = crew.again(agent)
    await crew.tick(1740, step=60)
    assert await crew.state(agent) is S.SUSPENDED
    await crew.passes(crew.reaches(agent, S.READY, 2), 120, step=1)
    assert await agent.ask(do("echo", value=1)) == 1


async def test_a_pause_that_ended_meanwhile_ends_at_the_next_opening(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause(resume_after=HOUR)
    await crew.close()
    crew.advance(2 * HOUR.total_seconds())
    await crew.open()
    await crew.reaches(crew.again(agent), S.READY, 2)


async def test_a_clock_that_was_set_back_meanwhile_does_not_lengthen_a_pause(crew: Crew) -> None:
    agent = await crew.start()
    await agent.pause(resume_after=HOUR)
    await crew.close()
    crew.clock.jump(-YEAR)  # type: ignore[attr-defined]  # a manual one
    await crew.open()
    await crew.tick(3540, step=60)
    await crew.passes(crew.reaches(crew.again(agent), S.READY, 2), 120, step=1)


async def test_a_pause_that_is_over_before_it_has_begun_ends_all_the_same(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "hang"})
    parking = crew.begin(agent.pause("park", resume_after=1))
    await until(lambda: "shutdown" in crew.stage.said)
    crew.advance(2)
    crew.stage.release("stop")
    await parking
    await crew.reaches(agent, S.READY, 2)
    assert await agent.ask(do("echo", value=1)) == 1


@at(THREAD)
async def test_a_pause_without_its_definition_waits_for_it(crew: Crew) -> None:
    def make() -> Actor:
        return Actor()

    agent = await crew.start(agent=make, about={"name": "made here"})
    await agent.pause(resume_after=HOUR)
    await crew.close()
    crew.advance(2 * HOUR.total_seconds())
    empty = AgentRegistry()
    await crew.open(registry=empty)
    agent = crew.again(agent)
    await crew.calm()
    assert await crew.state(agent) is S.SUSPENDED
    why = await agent.why()
    assert "made here" in " ".join([why.verdict, *why.evidence, *why.what_would_change_it])
    await asyncio.to_thread(empty.register, make, name="made here")
    await crew.reaches(agent, S.READY, 2)


# --- the end of the manager --------------------------------------------------------------------------


@DEPTHS
@at(*LEVELS)
async def test_suspended_agents_are_parked_when_the_manager_closes(crew: Crew, depth: SuspendDepth) -> None:
    if depth is SuspendDepth.FREEZE and crew.level is not PROCESS:
        return
    agent, other = await crew.start(), await crew.start()
    await agent.pause(depth)
    await crew.reopen()
    agent, other = crew.again(agent), crew.again(other)
    assert [await crew.state(one) for one in (agent, other)] == [S.SUSPENDED, S.TERMINATED]
    (first,) = await crew.attempts(agent)
    assert (first.outcome, first.is_open) == (AttemptOutcome.STOPPED, False)
    assert (await agent.why()).verdict.startswith("it is parked")
    back = await agent.resume()
    assert (back.state, back.attempt) == (S.READY, 2)


@pytest.mark.parametrize("depth", ["hold", "freeze"])
@at(THREAD, PROCESS)
async def test_an_agent_that_is_suspended_in_mid_work_is_still_suspended_after_a_close(crew: Crew, depth: str) -> None:
    """Its request is cut off and told so; its pause is kept all the same."""
    if depth == "freeze" and crew.level is not PROCESS:
        return
    agent = await crew.start(restart_policy=RestartPolicy.immediate())
    if depth == "hold":
        call = crew.begin(agent.ask(do("ask")))
        await crew.wait_of(agent)
    else:
        call = await crew.busy(agent)
    await agent.pause(depth)
    await crew.reopen()
    with pytest.raises(AgentGoneError):
        await call
    agent = crew.again(agent)
    assert await crew.state(agent) is S.SUSPENDED
    assert [one.kind for one in await agent.waits()] == [WaitKind.RESUME]
    back = await agent.resume()
    assert (back.state, back.attempt) == (S.READY, 2)


async def test_a_parked_agent_of_an_earlier_manager_can_be_restarted_and_terminated(crew: Crew) -> None:
    one, two = await crew.start(), await crew.start()
    for each in (one, two):
        await each.pause()
    await crew.reopen()
    one, two = crew.again(one), crew.again(two)
    assert (await one.restart()).state is S.READY
    assert (await two.stop()).success
    for each in (one, two):
        assert await each.waits() == []
    assert await one.ask(do("echo", value=1)) == 1
