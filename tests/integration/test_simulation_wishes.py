"""What agents ask for themselves: heard at the end of the turn, in a defined order, by the state as it is then."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from simulation_scenes import Diary, Script, fails, in_turn, playing

from ostler.errors import InvalidOperationError
from ostler.simulation import AgentView, Decision, LifecycleRequest, OnFailure, Operation, TurnReport

pytestmark = pytest.mark.anyio


def quiet(_: AgentView) -> None:
    return None


def told(report: TurnReport) -> list[tuple[str, str, str | None, bool]]:
    return [
        (one.operation.value.removesuffix("_agent"), one.agent_name, one.by, one.done)
        for one in report.operations
        if one.cause == "agent"
    ]


async def test_agents_let_others_come_go_pause_and_go_on() -> None:
    def rule(view: AgentView) -> None:
        view.add_agent("kid", quiet, {"age": 1})
        view.remove_agent("bo")
        view.pause_agent("cy", 2)
        view.resume_agent("dee")

    async with playing({"ada": rule, "bo": quiet, "cy": quiet, "dee": quiet}) as play:
        play.pause_agent("dee")
        report = await play.play_turn()
        assert told(report) == [
            ("add", "kid", "ada", True),
            ("remove", "bo", "ada", True),
            ("pause", "cy", "ada", True),
            ("resume", "dee", "ada", True),
        ]
        assert list(play.state.agents) == ["ada", "cy", "dee", "kid"]
        assert (dict(play.state.auto_resume), play.state.states["kid"]) == ({"cy": 2}, {"age": 1})
        assert play.check_invariants()


async def test_agents_pause_and_remove_themselves() -> None:
    async with playing({"ada": lambda view: view.remove_agent(), "bo": lambda view: view.pause_agent()}) as play:
        report = await play.play_turn()
        assert told(report) == [("remove", "ada", "ada", True), ("pause", "bo", "bo", True)]
        assert (list(play.state.agents), list(play.state.paused_agents)) == (["bo"], ["bo"])


async def test_nothing_happens_before_everybody_was_asked() -> None:
    diary = Diary()
    rule: Script = diary.brain(lambda view: view.remove_agent("bo"))
    async with playing({"ada": rule, "bo": diary.brain(lambda view: view.names)}) as play:
        report = await play.play_turn()
        assert (diary.names(1), report.decisions["bo"]) == ({"ada", "bo"}, ("ada", "bo"))
        assert "bo" not in play.state.agents


async def test_wishes_are_done_in_the_order_of_coming_and_then_of_asking() -> None:
    """Failures come first; each wish meets the state as those before it have left it."""

    def cy(view: AgentView) -> None:
        view.pause_agent("ada")
        view.add_agent("kid", quiet)

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
        assert causes == ["policy", *["agent"] * 6], "whoever was removed in this turn is heard in it all the same"


async def test_what_one_that_failed_has_asked_for_is_void() -> None:
    def asks_and_fails(view: AgentView) -> None:
        view.remove_agent("bo")
        fails(view)

    async with playing({"ada": asks_and_fails, "bo": quiet}, on_error=OnFailure.KEEP) as play:
        assert told(await play.play_turn()) == []
        assert "bo" in play.state.agents


async def test_a_wish_about_one_that_left_does_not_hit_its_namesake() -> None:
    def swap(view: AgentView) -> None:
        view.remove_agent("bo")
        view.add_agent("bo", quiet)

    async with playing({"ada": swap, "bo": quiet, "cy": lambda view: view.pause_agent("bo")}) as play:
        report = await play.play_turn()
        assert told(report)[-1] == ("pause", "bo", "cy", False)
        assert "that was meant has left, and another has its name now" in str(report.operations[-1].reason)
        assert list(play.state.agents) == ["ada", "cy", "bo"]


async def test_one_that_is_only_being_asked_for_cannot_be_meant() -> None:
    def hasty(view: AgentView) -> None:
        view.add_agent("kid", quiet)
        view.pause_agent("kid")
        view.pause_agent("ghost")

    async with playing({"ada": hasty}) as play:
        report = await play.play_turn()
    assert told(report)[1:] == [("pause", "kid", "ada", False), ("pause", "ghost", "ada", False)]
    assert [one.reason for one in report.operations[-2:]] == [
        "there was no agent 'kid' when this was asked; ask in the next turn",
        "there is no agent 'ghost'",
    ]


async def test_one_may_bring_a_successor_and_leave_in_one_turn() -> None:
    def hand_over(view: AgentView) -> None:
        view.add_agent(view.name, hand_over, {"generation": view.state.get("generation", 0) + 1})
        view.remove_agent()

    async with playing({"ada": hand_over}) as play:
        names = []
        for _ in range(4):
            await play.play_turn()
            names += list(play.state.agents)
        assert names == ["ada_1", "ada_1_1", "ada_1_1_1", "ada_1_1_1_1"]
        (state,) = play.state.states.values()
        assert state == {"generation": 4}


async def test_the_cap_holds_for_wishes_too_and_each_refusal_is_told() -> None:
    def crowd(view: AgentView) -> None:
        for _ in range(3):
            view.add_agent("kid", quiet)

    async with playing({"ada": crowd}, max_agents=3) as play:
        report = await play.play_turn()
        assert [one.done for one in report.operations if one.cause == "agent"] == [True, True, False]
        assert [one.resolved_name for one in report.operations[-3:]] == ["kid", "kid_1", None]
        assert "full" in str(report.operations[-1].reason)
        assert play.check_invariants()


async def test_a_place_that_is_left_earlier_in_the_order_can_be_taken() -> None:
    brains = {"ada": lambda view: view.remove_agent(), "bo": lambda view: view.add_agent("kid", quiet)}
    async with playing(brains, max_agents=2) as play:
        await play.play_turn()
        assert list(play.state.agents) == ["bo", "kid"]


@pytest.mark.parametrize(
    "answer",
    [
        {"decision": {"n": 1}, "requests": [{"operation": "pause_agent", "agent_name": "bo", "auto_resume_turns": 2}]},
        Decision(
            decision={"n": 1},
            requests=(LifecycleRequest(operation=Operation.PAUSE, agent_name="bo", auto_resume_turns=2),),
        ),
        Decision(
            decision={"n": 1},
            requests=({"operation": "pause_agent", "agent_name": "bo", "auto_resume_turns": 2},),  # type: ignore[arg-type]  # as JSON
        ),
        Decision(
            decision={"n": 1},
            requests=[LifecycleRequest(operation="pause_agent", agent_name="bo", auto_resume_turns=2)],  # type: ignore[arg-type]  # sloppy
        ),
    ],
)
async def test_wishes_may_come_with_the_decision(answer: Any) -> None:
    async with playing({"ada": lambda _: answer, "bo": quiet}) as play:
        report = await play.play_turn()
        assert (report.decisions["ada"], dict(play.state.auto_resume)) == ({"n": 1}, {"bo": 2})
        assert play.state.states["ada"] == {"n": 1}


@pytest.mark.parametrize("answer", [{"requests": 1, "n": 2}, {"decision": 1}, OrderedDict(decision=1, requests=[])])
async def test_what_is_no_envelope_is_a_decision(answer: Any) -> None:
    async with playing({"ada": lambda _: answer, "bo": lambda _: {}}) as play:
        report = await play.play_turn()
        assert (report.decisions["ada"], report.failures) == (answer, {})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"decision": 1, "requests": 5}, "requests must be a list"),
        ({"requests": [{"operation": "fly", "agent_name": 3}]}, "requests.0.operation must be one of"),
        ({"requests": [{"operation": "fly", "agent_name": 3}]}, "requests.0.agent_name must be text"),
        ({"requests": [{"operation": "remove_agent", "agent_name": "bo", "when": 3}]}, "when is not known"),
        (Decision(requests=(5,)), "requests.0 must be a mapping"),  # type: ignore[arg-type]  # on purpose
        (Decision(requests=(LifecycleRequest(operation=Operation.ADD, agent_name=["x"]),)), "agent_name must be text"),  # type: ignore[arg-type]  # on purpose
        (Decision(requests=(LifecycleRequest(operation="fly", agent_name="x"),)), "operation must be one of"),  # type: ignore[arg-type]  # on purpose
        (
            Decision(requests=(LifecycleRequest(operation=Operation.ADD, agent_name="x", kind=[]),)),  # type: ignore[arg-type]  # on purpose
            "kind must be text",
        ),
    ],
)
async def test_wishes_that_make_no_sense_are_the_failure_of_who_asked(answer: Any, said: str) -> None:
    async with playing({"ada": lambda _: answer, "bo": lambda _: {"n": 1}}, on_error=OnFailure.KEEP) as play:
        report = await play.play_turn()
        assert list(report.decisions) == ["bo"]
        assert (report.failures["ada"].error_type, said in report.failures["ada"].message) == ("ValidationError", True)
        assert told(report) == []


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (lambda view: view.pause_agent("bo", 0), "auto_resume_turns"),
        (lambda view: view.resume_agent("bo"), "not paused"),
        (lambda view: view.add_agent("kid", 5), "agent must be an object"),
        (lambda view: view.add_agent("", quiet), "name"),
        (lambda view: view.add_agent(7, quiet), "name"),
        (lambda view: view.add_agent("kid", quiet, {1: 2}), "initial_state"),
        (lambda view: view.add_agent("kid", kind="trader"), "must be one of the run's brains (none)"),
        (lambda view: view.add_agent("kid", kind=[]), "must be one of the run's brains (none)"),
    ],
)
async def test_wishes_that_cannot_be_done_are_refused_with_a_reason(wish: Script, reason: str) -> None:
    async with playing({"ada": wish, "bo": quiet}) as play:
        report = await play.play_turn()
        (refused,) = [one for one in report.operations if one.cause == "agent"]
        assert not refused.done
        assert reason in str(refused.reason)
        assert not report.failures
        assert (list(play.state.agents), len(play.state.paused_agents)) == (["ada", "bo"], 0)


async def test_a_view_that_was_kept_is_not_a_way_to_be_heard_when_nobody_asks() -> None:
    kept: list[AgentView] = []

    def uses(_: AgentView) -> None:
        for other in kept:
            other.remove_agent("ada")

    brains = {"ada": in_turn({2: uses}), "bo": kept.append, "cy": kept.append}
    async with playing(brains) as play:
        await play.play_turn()
        for view in kept:
            with pytest.raises(InvalidOperationError, match="is over"):
                view.remove_agent("ada")
        play.pause_agent("bo")
        play.remove_agent("cy")
        report = await play.play_turn()
        assert told(report) == [], "one of them is paused, the other has left"
        assert list(play.state.agents) == ["ada", "bo"]
