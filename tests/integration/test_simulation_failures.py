"""Agents that do not answer, and turns in which nobody is there to be asked."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest
from simulation_scenes import Diary, Hang, fails, hangs, in_turn, playing

from ostler.errors import InvalidOperationError
from ostler.simulation import AgentView, OnFailure, OnIdle, Performed, TurnReport

pytestmark = pytest.mark.anyio

SOON = timedelta(milliseconds=150)


def done(report: TurnReport) -> list[Performed]:
    """What was done in the turn itself."""
    return [one for one in report.operations if one.cause != "outside"]


# --- those who fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(OnFailure))
@pytest.mark.parametrize("how", ["raises", "raises async", "hangs", "hangs async"])
async def test_one_that_fails_is_dealt_with_and_the_turn_goes_on(how: str, policy: OnFailure) -> None:
    async def fails_async(view: AgentView) -> None:
        fails(view)

    hang = Hang()
    brain: Any = {"raises": fails, "raises async": fails_async, "hangs": hang, "hangs async": hangs}[how]
    other = OnFailure.REMOVE if policy is not OnFailure.REMOVE else OnFailure.KEEP
    late = how.startswith("hangs")
    rules = {"on_timeout": policy, "on_error": other} if late else {"on_error": policy, "on_timeout": other}
    brains = {"ada": lambda _: {"n": 1}, "bad": brain, "cy": lambda _: {"n": 2}}
    async with playing(brains, decision_timeout=SOON if late else timedelta(seconds=30), **rules) as play:
        report = await play.play_turn()
        hang.let_go.set()
        assert dict(report.decisions) == {"ada": {"n": 1}, "cy": {"n": 2}}
        assert play.state.states["cy"] == {"n": 2}
        (failure,) = report.failures.values()
        assert (failure.timed_out, failure.error_type) == (late, "TimeoutError" if late else "ValueError")
        if not late:
            assert "not my day" in failure.message
        assert list(report.failures) == ["bad"]
        became = {OnFailure.PAUSE: "paused", OnFailure.REMOVE: "removed", OnFailure.KEEP: "kept"}[policy]
        assert failure.became == became
        assert ("bad" in play.state.agents) is (policy is not OnFailure.REMOVE)
        assert ("bad" in play.state.paused_agents) is (policy is OnFailure.PAUSE)
        told = [(one.operation.value, one.agent_name, one.cause) for one in done(report)]
        word = {"paused": "pause_agent", "removed": "remove_agent"}.get(became)
        assert told == ([] if word is None else [(word, "bad", "policy")])
        assert play.check_invariants()


async def test_one_that_fails_may_be_asked_again_in_the_same_turn() -> None:
    tries: list[int] = []

    def second_time(view: AgentView) -> int:
        tries.append(view.turn)
        view.pause_agent("ada", 3)
        if len(tries) % 2:
            raise ValueError("not yet")
        return len(tries)

    diary = Diary()
    async with playing({"ada": diary.brain(), "bo": second_time}, retries=1) as play:
        report = await play.play_turn()
        assert (dict(report.decisions), report.failures) == ({"ada": None, "bo": 2}, {})
        assert tries == [1, 1]
        assert diary.asked == [(1, "ada")], "only the one that failed is asked again"
        assert [one.done for one in done(report)] == [True], "the first wish went with the first try"


async def test_one_that_fails_every_time_fails() -> None:
    diary = Diary()
    async with playing({"ada": diary.brain(fails), "bo": diary.brain()}, retries=3, on_error=OnFailure.KEEP) as play:
        report = await play.play_turn()
    assert diary.asked.count((1, "ada")) == 4
    assert report.failures["ada"].became == "kept"


async def test_one_that_was_paused_for_a_failure_may_come_back_by_itself() -> None:
    diary = Diary()
    brains = {"bad": diary.brain(in_turn({1: fails})), "bo": diary.brain()}
    async with playing(brains, failure_pause_turns=2) as play:
        reports = [await play.play_turn() for _ in range(3)]
    assert [list(report.decisions) for report in reports] == [["bo"], ["bo"], ["bad", "bo"]]
    assert reports[2].resumed == ("bad",)


async def test_one_that_thinks_too_long_is_not_heard_later() -> None:
    hang, threads = threading.Event(), list[threading.Thread]()
    errors: list[Exception] = []

    def late(view: AgentView) -> dict[str, int]:
        if view.turn > 1:
            return {"n": 2}
        threads.append(threading.current_thread())
        hang.wait(60)
        try:
            view.remove_agent("bo")
        except InvalidOperationError as error:
            errors.append(error)
        return {"n": 1}

    brains = {"late": late, "bo": lambda _: None}
    async with playing(brains, decision_timeout=SOON, on_timeout=OnFailure.KEEP) as play:
        await play.play_turn()
        hang.set()
        await asyncio.to_thread(threads[0].join, 30)
        assert "not heard" in str(errors[0])
        report = await play.play_turn()
        assert (dict(report.decisions), report.operations) == ({"late": {"n": 2}, "bo": None}, ())


# --- nobody left --------------------------------------------------------------------------------


async def test_a_run_with_nobody_active_ends_when_it_is_told_to() -> None:
    async with playing({"ada": in_turn({2: lambda view: view.remove_agent()})}) as play:
        report = await play.run(5)
        assert (report.turn, report.played, report.ended) == (2, 2, "nobody is active")
        assert not play.state.agents
        assert (await play.run(5)).played == 0
        play.add_agent("bo", lambda _: None, {})
        assert (await play.run(2)).turn == 4


async def test_a_run_does_not_end_when_the_next_count_brings_somebody_back() -> None:
    async with playing({"ada": in_turn({1: lambda view: view.pause_agent(auto_resume_turns=1)})}) as play:
        assert (await play.run(3)).ended is None


async def test_a_run_that_waits_lets_turns_pass_while_a_counter_runs() -> None:
    diary = Diary()
    brain = diary.brain(in_turn({1: lambda view: view.pause_agent(auto_resume_turns=3)}))
    async with playing({"ada": brain}, on_idle=OnIdle.WAIT) as play:
        assert (await play.run(4)).turn == 4
    assert diary.asked == [(1, "ada"), (4, "ada")]


async def test_a_run_may_let_turns_pass_and_end_when_nobody_would_come_back() -> None:
    script = in_turn({1: lambda view: view.pause_agent(auto_resume_turns=3), 4: lambda view: view.pause_agent()})
    async with playing({"ada": script}, on_idle=OnIdle.PASS) as play:
        report = await play.run(9)
    assert (report.turn, report.ended) == (4, "nobody is active")


@pytest.mark.parametrize("how", ["add", "resume"])
async def test_a_run_that_waits_is_woken_from_outside(how: str) -> None:
    async with playing({"ada": in_turn({1: lambda view: view.pause_agent()})}, on_idle=OnIdle.WAIT) as play:
        played = asyncio.Event()
        run = asyncio.create_task(play.run(2, on_turn=lambda _: played.set()))
        await played.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not run.done()
        async with play.between_turns():
            if how == "add":
                play.add_agent("bo", lambda _: None, {})
            else:
                play.resume_agent("ada")
        report = await asyncio.wait_for(run, 10)
        assert (report.turn, report.ended) == (2, None)
