"""Turns in memory: who is asked and heard, what becomes of failures and requests, what breaks a turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pydantic
import pytest
from simulation_scenes import Diary, Doing, Hang, Script, fails, hangs, in_turn, playing, silent

import ostler
from ostler.errors import InvalidOperationError, SimulationError, ValidationError
from ostler.simulation import (
    AgentView,
    Brains,
    Decisions,
    Managed,
    OnFailure,
    OnIdle,
    SimulationOrchestrator,
    SimulationSettings,
    SimulationState,
    TurnReport,
    World,
)

pytestmark = pytest.mark.anyio

SOON = timedelta(milliseconds=250)


def told(report: TurnReport) -> list[tuple[str, str, str | None, bool]]:
    """What agents asked for, and whether it was done."""
    return [
        (one.operation.value.removesuffix("_agent"), one.agent_name, one.by, one.done)
        for one in report.operations
        if one.cause == "agent"
    ]


# --- who is asked ------------------------------------------------------------------------------------


async def test_agents_that_resume_by_themselves_do_so_before_any_is_asked() -> None:
    diary = Diary()
    async with playing({"ada": diary.brain(), "bo": diary.brain(), "cy": diary.brain()}) as play:
        play.pause_agent("ada", 1)
        play.pause_agent("bo", 2)
        play.pause_agent("cy")
        first, second = await play.play_turn(), await play.play_turn()
    assert (first.turn, list(first.resumed), list(first.decisions)) == (1, ["ada"], ["ada"])
    assert (second.turn, list(second.resumed), list(second.decisions)) == (2, ["bo"], ["ada", "bo"])
    assert diary.asked == [(1, "ada"), (2, "ada"), (2, "bo")]


async def test_a_paused_agent_is_never_asked() -> None:
    diary = Diary()
    brains = {"ada": diary.brain(in_turn({6: lambda view: view.pause_agent("bo", 2)})), "bo": diary.brain()}
    async with playing(brains) as play:
        await play.play_turn()
        play.pause_agent("bo")
        for _ in range(3):
            assert list((await play.play_turn()).decisions) == ["ada"]
        play.resume_agent("bo")
        await play.run(4)
        play.state.paused_agents.add("bo")  # written directly, past the manager
        await play.play_turn()
    assert [turn for turn, name in diary.asked if name == "bo"] == [1, 5, 6, 8]


async def test_an_agent_that_joins_is_asked_from_the_next_turn_on() -> None:
    diary = Diary()
    async with playing({"ada": diary.brain(in_turn({1: lambda view: view.add_agent("kid", diary.brain())}))}) as play:
        await play.run(2)
    assert diary.asked == [(1, "ada"), (2, "ada"), (2, "kid")]


async def test_an_agent_with_another_brain_is_asked_by_that() -> None:
    async with playing({"ada": lambda _: 1}) as play:
        assert dict((await play.play_turn()).decisions) == {"ada": 1}
        play.state.agents["ada"] = lambda _: 2
        assert dict((await play.play_turn()).decisions) == {"ada": 2}
        play.state.agents["ada"] = 7
        with pytest.raises(InvalidOperationError, match="the agent of ada is no brain"):
            await play.play_turn()


async def test_decisions_stand_in_the_order_of_joining_whoever_answers_first() -> None:
    """Each waits until the one after it has answered, so they answer in the reverse order."""
    names = [f"agent{number}" for number in range(6)]
    done = {name: threading.Event() for name in [*names, ""]}
    done[""].set()
    after = dict(zip(names, [*names[1:], ""], strict=True))
    order: list[str] = []

    def plain(view: AgentView) -> str:
        assert done[after[view.name]].wait(60)
        order.append(view.name)
        done[view.name].set()
        return view.name

    async def later(view: AgentView) -> str:
        assert await asyncio.to_thread(done[after[view.name]].wait, 30)
        order.append(view.name)
        done[view.name].set()
        return view.name

    async with playing({name: later if place % 2 else plain for place, name in enumerate(names)}) as play:
        report = await play.play_turn()
    assert order == names[::-1]
    assert list(report.decisions.items()) == [(name, name) for name in names]


class Said:
    def decide(self, view: AgentView) -> str:
        return f"{view.name} decides"


class SaidAsync:
    async def decide(self, view: AgentView) -> str:
        return f"{view.name} decides"


class CalledAsync:
    async def __call__(self, view: AgentView) -> str:
        return f"{view.name} decides"


class PlainAgent(ostler.Agent):
    def process(self, request: Any) -> str:
        return f"{request['name']} decides"


class AsyncAgent(ostler.Agent):
    async def process(self, request: Any) -> str:
        return f"{request['name']} decides"


async def test_a_brain_is_any_object_function_or_agent_plain_or_async() -> None:
    some: list[Any] = [Said(), SaidAsync(), CalledAsync(), PlainAgent(), AsyncAgent(), SaidAsync().decide]
    brains = {f"n{place}": brain for place, brain in enumerate([*some, lambda view: f"{view.name} decides"])}
    async with playing(brains) as play:
        report = await play.play_turn()
    assert dict(report.decisions) == {name: f"{name} decides" for name in brains}
    assert not report.failures


async def test_a_plain_brain_that_returns_something_to_await_has_failed() -> None:
    async with playing({"ada": lambda view: SaidAsync().decide(view), "bo": lambda _: 1}) as play:
        report = await play.play_turn()
    assert "async def" in report.failures["ada"].message
    assert dict(report.decisions) == {"bo": 1}


async def test_a_brain_sees_its_world_as_it_was_before_the_turn_and_cannot_change_it() -> None:
    seen: list[Any] = []

    def look(view: AgentView) -> Any:
        with pytest.raises(TypeError):
            view.state["wealth"] = 100
        with pytest.raises(TypeError):
            view.global_state["tax"] = 100
        with pytest.raises(AttributeError, match="the engine changes states"):
            view.state = {}
        seen.append((view.number, view.turn, dict(view.state), view.names, view.parameters["tax"]))
        return {"wealth": view.state.get("wealth", 0) + view.state_of("bo").get("wealth", 0) + 1}

    async with playing({"ada": look, "bo": look}, parameters={"tax": 2}) as play:
        report = await play.run(2)
        assert report.failed == 0
        assert dict(play.state.states) == {"ada": {"wealth": 3}, "bo": {"wealth": 3}}
    assert seen[0] == (1, 1, {}, ("ada", "bo"), 2)
    assert seen[3] == (2, 2, {"wealth": 1}, ("ada", "bo"), 2)


async def test_chance_belongs_to_agent_turn_and_seed() -> None:
    async def drawn(seed: int, *others: str) -> list[list[float]]:
        async with playing({"ada": lambda view: [view.random.random(), view.random.random()]}, seed=seed) as play:
            for name in others:
                play.add_agent(name, lambda view: view.random.random(), {})
            return [(await play.play_turn()).decisions["ada"] for _ in range(3)]

    once = await drawn(1)
    assert len({number for pair in once for number in pair}) == 6
    assert await drawn(1, "bo", "cy") == once
    assert await drawn(2) != once
    world = World(SimulationState(), seed=1)
    assert world.chance("a").random() == world.chance("a").random() != world.chance("b").random()
    assert world.chance("1").random() != world.chance(1).random()


# --- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(OnFailure))
async def test_an_agent_that_raises_or_hangs_is_dealt_with_and_the_turn_goes_on(policy: OnFailure) -> None:
    hang = Hang()
    brains = {"bad": fails, "stuck": hang, "lost": hangs, "fine": lambda _: {"n": 1}}
    chosen = {"on_error": policy, "on_timeout": policy, "decision_timeout": SOON, "failure_pause_turns": 2}
    async with playing(brains, **chosen) as play:
        report = await play.play_turn()
        hang.let_go.set()
        assert list(report.decisions) == ["fine"]
        became = {OnFailure.PAUSE: "paused", OnFailure.REMOVE: "removed", OnFailure.KEEP: "kept"}[policy]
        failures = report.failures
        assert {name: (one.timed_out, one.became) for name, one in failures.items()} == {
            "bad": (False, became),
            "stuck": (True, became),
            "lost": (True, became),
        }
        assert (failures["bad"].error_type, "not my day" in failures["bad"].message) == ("ValueError", True)
        counters = {"bad": 2, "stuck": 2, "lost": 2} if policy is OnFailure.PAUSE else {}
        assert play.state.auto_resume == counters
        assert len(play.state.agents) == (1 if policy is OnFailure.REMOVE else 4)
        causes = [one.cause for one in report.operations if one.cause != "outside"]
        assert causes == ([] if policy is OnFailure.KEEP else ["policy"] * 3)


async def test_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with playing({"bad": fails}) as play:
        caplog.clear()
        await play.play_turn()
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "agent_failed"]
    assert (record.levelname, record.name) == ("WARNING", "ostler.simulation")
    fields = record.fields  # type: ignore[attr-defined]  # ours
    assert list(fields) == ["agent_name", "error_type", "message", "became", "turn"]


async def test_a_brain_that_still_works_on_an_earlier_turn_is_not_asked_and_the_others_do_not_suffer() -> None:
    hang, diary = Hang(), Diary()
    brains = {"stuck": diary.brain(hang.decide), "fine": diary.brain(lambda _: 1)}
    async with playing(brains, decision_timeout=SOON, on_timeout=OnFailure.KEEP) as play:
        assert (await play.play_turn()).failures["stuck"].timed_out
        second = await play.play_turn()
        assert "not asked" in second.failures["stuck"].message
        assert dict(second.decisions) == {"fine": 1}
        hang.let_go.set()
        while (await play.play_turn()).failures:  # noqa: ASYNC110 - it comes back soon
            await asyncio.sleep(0.005)
    assert [name for turn, name in diary.asked if turn == 2] == ["fine"]


async def test_a_brain_of_a_kind_that_still_works_is_replaced_by_a_new_one() -> None:
    made: list[Hang] = []

    class Slow(Hang):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            if len(made) > 1:
                self.let_go.set()

    settings = SimulationSettings(decision_timeout=SOON, on_timeout=OnFailure.KEEP)
    brains = Brains({"slow": Slow})
    async with SimulationOrchestrator(settings=settings, brains=brains) as play:
        play.add_agent("ada", Slow(), {})
        assert (await play.play_turn()).failures["ada"].timed_out
        assert not (await play.play_turn()).failures
        assert play.state.agents["ada"] is made[1]
        made[0].let_go.set()


async def test_what_an_agent_says_after_its_time_out_is_not_heard() -> None:
    hang = Hang()

    def late(view: AgentView) -> None:
        view.pause_agent("bo")
        hang.decide(view)
        view.remove_agent("bo")

    async with playing({"ada": late, "bo": silent}, decision_timeout=SOON, on_timeout=OnFailure.KEEP) as play:
        assert told(await play.play_turn()) == []
        hang.let_go.set()
        await asyncio.sleep(0.05)
        assert "bo" in play.state.agents
        assert told(await play.play_turn()) == [("pause", "bo", "ada", True), ("remove", "bo", "ada", True)]


async def test_a_run_ends_passes_or_waits_when_no_agent_is_active() -> None:
    async def left(on_idle: OnIdle, turns: int | None) -> tuple[int, str | None]:
        async with playing({"ada": silent}, on_idle=on_idle) as play:
            play.pause_agent("ada", turns)
            report = await asyncio.wait_for(play.run(5), 60)
            return report.played, report.ended

    ended = "no agent is active"
    assert await left(OnIdle.END, 1) == (5, None), "the next count brings it back"
    assert await left(OnIdle.END, 2) == (0, ended)
    assert await left(OnIdle.PASS, 3) == (5, None)
    assert await left(OnIdle.PASS, None) == (0, ended)
    assert await left(OnIdle.WAIT, 3) == (5, None)


async def test_a_run_that_waits_is_woken_from_outside_or_by_closing() -> None:
    async with playing({"ada": silent}, on_idle=OnIdle.WAIT) as play:
        play.pause_agent("ada")
        running = asyncio.create_task(play.run(2))
        await asyncio.sleep(0.02)
        assert not running.done()
        await asyncio.to_thread(play.resume_agent, "ada")
        assert (await asyncio.wait_for(running, 60)).played == 2
        play.pause_agent("ada")
        running = asyncio.create_task(play.run(2))
        await asyncio.sleep(0.02)
    with pytest.raises(InvalidOperationError, match="is closed"):
        await asyncio.wait_for(running, 60)


# --- many turns at once ------------------------------------------------------------------------------


async def test_turns_of_plain_brains_are_played_in_one_thread_and_every_report_comes_in_order_to_the_loop() -> None:
    threads: set[int] = set()
    reports: list[TurnReport] = []

    def note(report: TurnReport) -> None:
        assert threading.get_ident() == here
        reports.append(report)
        if report.turn == 3:
            play.pause_agent("bo", 2)  # between two turns

    here = threading.get_ident()
    async with playing({"ada": lambda _: threads.add(threading.get_ident()), "bo": silent}) as play:
        await play.run(100)
        assert len(threads) == 1
        assert here not in threads
        play.state.turn = 0
        report = await play.run(6, on_turn=note)
    assert (report.played, [one.turn for one in reports]) == (6, [1, 2, 3, 4, 5, 6])
    assert [list(one.decisions) for one in reports[2:5]] == [["ada", "bo"], ["ada"], ["ada", "bo"]]


async def test_failures_counters_and_async_brains_in_the_middle_of_many_turns() -> None:
    async def later(view: AgentView) -> None:
        await asyncio.sleep(0)
        if view.turn == 12:
            view.remove_agent()

    scripts = {
        4: lambda view: view.pause_agent("bo", 3),
        5: fails,
        10: lambda view: view.add_agent("kid", later),
        20: lambda view: view.remove_agent("bo"),
    }
    diary = Diary()
    brains = {"ada": diary.brain(in_turn(scripts)), "bo": diary.brain()}
    async with playing(brains, on_error=OnFailure.KEEP) as play:
        report = await play.run(30)
        assert (report.turn, report.played, report.failed) == (30, 30, 1)
        assert "ada in turn 5, kept: ValueError: not my day" in report.first_failures[0]
        assert list(play.state.agents) == ["ada"]
    assert [turn for turn, name in diary.asked if name == "ada"] == list(range(1, 31))
    assert [turn for turn, name in diary.asked if name == "bo"] == [1, 2, 3, 4, *range(7, 21)]


async def test_a_task_that_waits_between_turns_does_not_wait_for_all_turns() -> None:
    async with playing({"ada": silent}) as play:
        running = asyncio.create_task(play.run(2**31))
        for _ in range(3):
            async with play.between_turns():
                assert play.pause_agent("ada", 1)
                before = play.state.turn
            report = await play.play_turn()
            assert report.turn > before
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_many_turns_that_are_cancelled_stand_at_the_last_complete_one() -> None:
    begun = threading.Event()
    async with playing({"ada": lambda _: begun.set()}) as play:
        running = asyncio.create_task(play.run(2**31))
        await asyncio.to_thread(begun.wait, 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        turn = play.state.turn
        with pytest.raises(InvalidOperationError, match=f"and the run stands at turn {turn}"):
            await play.play_turn()


async def test_closing_ends_a_run_of_many_turns() -> None:
    async with playing({"ada": silent}) as play:
        running = asyncio.create_task(play.run(2**31))
        await asyncio.sleep(0)
    with pytest.raises(InvalidOperationError, match="is closed"):
        await asyncio.wait_for(running, 30)


async def test_a_brain_that_hangs_in_the_middle_of_many_turns_costs_its_own_turn() -> None:
    hang = Hang()
    brains: dict[str, Script] = {"ada": in_turn({50: hang.decide}), "bo": lambda view: {"n": view.turn}}
    async with playing(brains, decision_timeout=SOON) as play:
        report = await asyncio.wait_for(play.run(100), 30)
        hang.let_go.set()
        assert (report.turn, report.failed, play.state.states["bo"]) == (100, 1, {"n": 100})
        assert report.first_failures[0].startswith("ada in turn 50, paused: no answer within 0.25 s")


# --- requests ----------------------------------------------------------------------------------------


async def test_agents_let_others_join_leave_pause_and_resume() -> None:
    def rule(view: AgentView) -> None:
        view.add_agent("kid", silent, {"age": 1})
        view.remove_agent("bo")
        view.pause_agent("cy", 2)
        view.resume_agent("dee")

    async with playing({"ada": rule, "bo": silent, "cy": silent, "dee": silent}) as play:
        play.pause_agent("dee")
        report = await play.play_turn()
        assert told(report) == [
            ("add", "kid", "ada", True),
            ("remove", "bo", "ada", True),
            ("pause", "cy", "ada", True),
            ("resume", "dee", "ada", True),
        ]
        assert list(play.state.agents) == ["ada", "cy", "dee", "kid"]
        assert (play.state.auto_resume, play.state.states["kid"]) == ({"cy": 2}, {"age": 1})
        assert play.lifecycle_manager.check_invariants(play.state)


async def test_agents_pause_and_remove_themselves() -> None:
    async with playing({"ada": lambda view: view.remove_agent(), "bo": lambda view: view.pause_agent()}) as play:
        assert told(await play.play_turn()) == [("remove", "ada", "ada", True), ("pause", "bo", "bo", True)]
        assert (list(play.state.agents), play.state.paused_agents) == (["bo"], {"bo"})


async def test_failures_come_first_then_requests_in_the_order_of_joining_and_of_asking() -> None:
    def cy(view: AgentView) -> None:
        view.pause_agent("ada")
        view.add_agent("kid", silent)

    def ada(view: AgentView) -> None:
        view.pause_agent("ada")
        view.resume_agent("ada")
        view.remove_agent("bad")
        view.remove_agent("cy")

    async with playing({"ada": ada, "bad": fails, "cy": cy}, on_error=OnFailure.REMOVE) as play:
        report = await play.play_turn()
    assert told(report) == [
        ("pause", "ada", "ada", True),
        ("resume", "ada", "ada", True),
        ("remove", "bad", "ada", False),
        ("remove", "cy", "ada", True),
        ("pause", "ada", "cy", True),
        ("add", "kid", "cy", True),
    ]
    causes = [one.cause for one in report.operations if one.cause != "outside"]
    assert causes == ["policy", *["agent"] * 6], "an agent that was removed in this turn is heard in it all the same"


async def test_an_agent_that_failed_is_not_heard() -> None:
    def asks_and_fails(view: AgentView) -> None:
        view.remove_agent("bo")
        fails(view)

    async with playing({"ada": asks_and_fails, "bo": silent}, on_error=OnFailure.KEEP) as play:
        assert told(await play.play_turn()) == []
        assert "bo" in play.state.agents


async def test_a_request_is_about_the_number_that_had_the_name_when_it_was_made() -> None:
    def swap(view: AgentView) -> None:
        view.remove_agent("bo")
        view.add_agent("bo", silent)
        view.pause_agent("ghost")
        view.add_agent("kid", silent)
        view.pause_agent("kid")

    async with playing({"ada": swap, "bo": silent, "cy": lambda view: view.pause_agent("bo")}) as play:
        report = await play.play_turn()
        reasons = [one.reason for one in report.operations if not one.done]
        assert reasons == [
            "there is no agent 'ghost'",
            "there was no agent 'kid' when this was asked; ask in the next turn",
            "the agent 'bo' that was meant has left, and another has its name now",
        ]
        assert not play.state.paused_agents


async def test_the_cap_holds_for_requests_too_and_a_place_that_is_left_can_be_taken() -> None:
    def crowd(view: AgentView) -> None:
        for _ in range(3):
            view.add_agent("kid", silent)

    async with playing({"ada": crowd}, max_agents=3) as play:
        report = await play.play_turn()
        assert [one.resolved_name for one in report.operations if one.cause == "agent"] == ["kid", "kid_1", None]
        assert "full" in str(report.operations[-1].reason)
    brains = {"ada": lambda view: view.remove_agent(), "bo": lambda view: view.add_agent("kid", silent)}
    async with playing(brains, max_agents=2) as play:
        await play.play_turn()
        assert list(play.state.agents) == ["bo", "kid"]


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda view: view.pause_agent("bo", 0), "auto_resume_turns"),
        (lambda view: view.resume_agent("bo"), "not paused"),
        (lambda view: view.add_agent("kid", 5), "agent must be an object"),
        (lambda view: view.add_agent("kid"), "agent is missing; give a brain, or a kind of the run's brains (none)"),
        (lambda view: view.add_agent("", silent), "name"),
        (lambda view: view.add_agent(7, silent), "name"),
        (lambda view: view.remove_agent(["bo"]), "name"),
        (lambda view: view.add_agent("kid", silent, {1: 2}), "initial_state"),
        (lambda view: view.add_agent("kid", kind="trader"), "must be one of the brains of the run (none)"),
    ],
)
async def test_a_request_that_cannot_be_done_is_refused_with_a_reason(ask: Script, reason: str) -> None:
    async with playing({"ada": ask, "bo": silent}) as play:
        report = await play.play_turn()
        (refused,) = [one for one in report.operations if one.cause == "agent"]
        assert not refused.done
        assert reason in str(refused.reason)
        assert not report.failures
        assert (list(play.state.agents), len(play.state.paused_agents)) == (["ada", "bo"], 0)


async def test_a_view_that_was_kept_from_an_earlier_turn_is_not_heard() -> None:
    kept: list[AgentView] = []

    def uses(_: AgentView) -> None:
        for other in kept:
            other.remove_agent("ada")

    async with playing({"ada": in_turn({2: uses}), "bo": kept.append, "cy": kept.append}) as play:
        await play.play_turn()
        for view in kept:
            with pytest.raises(InvalidOperationError, match="is over"):
                view.remove_agent("ada")
        play.pause_agent("bo")
        play.remove_agent("cy")
        assert told(await play.play_turn()) == [], "one of them is paused, the other has left"
        assert list(play.state.agents) == ["ada", "bo"]


class Answering(ostler.Agent):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def process(self, request: Any) -> Any:
        assert set(request) == {"name", "number", "turn", "seed", "state", "global_state", "parameters", "names"}
        return self.answer


async def test_an_ostler_agent_may_send_requests_with_its_decision() -> None:
    answer = {
        "decision": {"n": 1},
        "requests": [
            {"operation": "pause_agent", "agent_name": "bo", "auto_resume_turns": 2},
            {"operation": "remove_agent"},
        ],
    }
    async with playing({"ada": Answering(answer), "bo": silent}) as play:
        report = await play.play_turn()
        assert (report.decisions["ada"], play.state.auto_resume) == ({"n": 1}, {"bo": 2})
        assert "ada" not in play.state.agents


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"decision": 1, "requests": 5}, "requests must be a list"),
        ({"requests": [{"operation": "fly", "agent_name": 3}]}, "requests.0.operation must be one of"),
        ({"requests": [{"operation": "remove_agent", "when": 3}]}, "requests.0.when is not a known field"),
        ({"requests": [{"operation": "add_agent", "params": 3}]}, "requests.0.params must be a mapping"),
        ({"requests": [5]}, "requests.0 must be a LifecycleRequest"),
    ],
)
async def test_requests_that_make_no_sense_are_the_failure_of_their_agent(answer: Any, said: str) -> None:
    async with playing({"ada": Answering(answer), "bo": lambda _: {"n": 1}}, on_error=OnFailure.KEEP) as play:
        report = await play.play_turn()
    assert list(report.decisions) == ["bo"]
    assert (report.failures["ada"].error_type, said in report.failures["ada"].message) == ("ValidationError", True)
    assert told(report) == []


# --- from outside ------------------------------------------------------------------------------------


async def pause_between(play: SimulationOrchestrator) -> bool:
    async with play.between_turns():
        with pytest.raises(InvalidOperationError, match="holds the turns back"):
            await play.play_turn()
        return play.pause_agent("bo")


async def test_between_turns_holds_the_next_turn_back() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def think(_: AgentView) -> None:
        begun.set()
        await go.wait()

    async with playing({"ada": think, "bo": silent}) as play:
        turn = asyncio.create_task(play.play_turn())
        await begun.wait()
        waiting = asyncio.create_task(pause_between(play))
        await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        first = await turn
        assert await waiting
        second = await play.play_turn()
    assert [one.operation.value for one in first.operations] == ["add_agent", "add_agent"]
    assert [(one.operation.value, one.agent_name, one.cause) for one in second.operations] == [
        ("pause_agent", "bo", "outside")
    ]


async def test_two_runs_at_once_are_refused() -> None:
    async with playing({"ada": hangs}, decision_timeout=SOON) as play:
        running = asyncio.create_task(play.run(1))
        await asyncio.sleep(0)
        with pytest.raises(InvalidOperationError, match="is being run already"):
            await play.run(1)
        assert (await running).played == 1


# --- engines, and what breaks a turn -----------------------------------------------------------------


def raises(_: SimulationState) -> None:
    raise ZeroDivisionError("by zero")


def exits(_: SimulationState) -> None:
    raise SystemExit(3)


def pauses(state: SimulationState) -> None:
    state.paused_agents.add("ada")


def counts(state: SimulationState) -> None:
    state.auto_resume["ada"] = 3


def removes(state: SimulationState) -> None:
    del state.agents["ada"]


def turns(state: SimulationState) -> None:
    state.turn += 1


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (raises, "the engine failed in turn 1: ZeroDivisionError: by zero"),
        (exits, "the engine failed in turn 1: SystemExit: 3"),
        *(
            (act, "it has changed who takes part, who is paused, or the turn")
            for act in (pauses, counts, removes, turns)
        ),
        (lambda _: 5, "it must return None, or a mapping"),
        (lambda _: {"nobody": "no"}, "it must return None, or a mapping"),
        (lambda _: asyncio.sleep(0), "it must return None, or a mapping"),
    ],
)
async def test_an_engine_that_fails_or_meddles_breaks_the_turn_and_says_so(
    act: Callable[[SimulationState], Any], said: str
) -> None:
    async with playing({"ada": silent}, engine=Doing(act)) as play:
        with pytest.raises(SimulationError, match=said):
            await play.play_turn()
        for again in (play.play_turn(), play.run(1)):
            with pytest.raises(InvalidOperationError, match=r"turn 1 was not completed, and the run stands at turn 0"):
                await again
        with pytest.raises(InvalidOperationError, match="turn 1 was not completed"):
            play.pause_agent("ada")
        assert play.state.turn == 0


class AsyncEngine:
    def __init__(self, act: Callable[[SimulationState], Any]) -> None:
        self.act = act
        self.begun = asyncio.Event()

    async def update(self, state: SimulationState, decisions: Decisions, world: World) -> Any:
        del decisions, world
        self.begun.set()
        await asyncio.sleep(0)
        found = self.act(state)
        return await found if asyncio.isfuture(found) else found


async def test_an_engine_may_be_async() -> None:
    async with playing({"ada": silent}, engine=AsyncEngine(lambda state: state.global_state.update(n=1))) as play:
        await play.play_turn()
        assert play.state.global_state == {"n": 1}

    def cancelled(_: SimulationState) -> None:
        raise asyncio.CancelledError

    for act in (raises, cancelled):
        async with playing({"ada": silent}, engine=AsyncEngine(act)) as play:
            with pytest.raises(SimulationError, match="the engine failed in turn 1"):
                await play.play_turn()


async def test_a_turn_that_is_cancelled_breaks_the_run_and_says_so() -> None:
    engine = AsyncEngine(lambda _: asyncio.get_running_loop().create_future())
    async with playing({"ada": silent}, engine=engine) as play:
        turn = asyncio.create_task(play.play_turn())
        await engine.begun.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        with pytest.raises(InvalidOperationError, match="turn 1 was not completed"):
            await play.play_turn()


async def test_a_plain_engine_does_not_hold_up_the_loop_and_may_take_longer_than_a_brain() -> None:
    async with playing({"ada": silent}, engine=Doing(lambda _: time.sleep(0.5)), decision_timeout=SOON) as play:
        turn = asyncio.create_task(play.play_turn())
        beats = 0
        while not turn.done():
            await asyncio.sleep(0.005)
            beats += 1
        assert not (await turn).failures
    assert beats > 10


async def test_an_engine_says_whose_decision_it_could_not_use() -> None:
    brains: dict[str, Script] = {"ada": lambda view: view.pause_agent("bo"), "bo": lambda _: 2}
    async with playing(brains, engine=Doing(lambda _: {"ada": "too greedy"}), on_error=OnFailure.KEEP) as play:
        report = await play.play_turn()
    assert (list(report.decisions), report.failures["ada"].message) == (["bo"], "too greedy")
    assert told(report) == []


async def test_no_agent_is_heard_once_the_engine_works() -> None:
    views: list[AgentView] = []

    def act(_: SimulationState) -> None:
        with pytest.raises(InvalidOperationError, match="is over"):
            views[0].remove_agent()

    async with playing({"ada": views.append}, engine=Doing(act)) as play:
        assert told(await play.play_turn()) == []


class Purse(pydantic.BaseModel):
    wealth: int = pydantic.Field(0, alias="w")
    tags: set[str] = set()
    secret: int = pydantic.Field(3, exclude=True)


async def test_the_default_engine_merges_mappings_into_states_and_checks_them() -> None:
    given = {"list": [1]}
    async with playing({"ada": lambda _: given, "bo": lambda _: 5}) as play:
        await play.play_turn()
        given["list"].append(2)
        assert dict(play.state.states) == {"ada": {"list": [1]}, "bo": {}}
    scripts: dict[str, Script] = {
        "ada": in_turn({1: lambda _: {"wealth": 4}, 2: lambda _: {"tags": {"x"}}, 3: lambda _: {"wealth": "much"}}),
        "bo": in_turn({3: lambda _: {"tags": 5}}),
    }
    async with playing(scripts, schema=Purse) as play:
        play.state.states["ada"].secret = 9
        await play.run(2)
        purse = play.state.states["ada"]
        assert (purse.wealth, purse.tags, purse.secret) == (4, {"x"}, 9)
        report = await play.play_turn()
        assert "state.wealth does not fit" in report.failures["ada"].message
        assert "state.tags does not fit" in report.failures["bo"].message
        assert play.state.states["ada"].wealth == 4


async def test_an_orchestrator_is_made_of_what_it_needs() -> None:
    for engine in (5, Said(), Doing):
        with pytest.raises(ValidationError, match="engine must be an object with a method `update`"):
            SimulationOrchestrator(engine=engine)
    with pytest.raises(ValidationError, match="concurrency must be 1 to 10000"):
        SimulationOrchestrator(settings=SimulationSettings(concurrency=0))
    async with playing({"ada": Managed(PlainAgent)}) as play:
        with pytest.raises(InvalidOperationError, match="there is no lifecycle manager"):
            await play.play_turn()
