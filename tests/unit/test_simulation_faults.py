"""Faults that others made with this contract, each as a test that would find it here."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from ostler.simulation.manager import LifecycleManager
from ostler.simulation.pauses import PauseTracker
from ostler.simulation.state import SimulationState
from ostler.simulation.validator import LifecycleValidator


class Brain:
    def decide(self, _view: Any) -> str:
        return "wait"


@pytest.fixture
def manager() -> LifecycleManager:
    return LifecycleManager()


def crowd(*names: str) -> SimulationState:
    return SimulationState(agents={name: Brain() for name in names})


def restarted(state: SimulationState) -> SimulationState:
    """The same population from its plain fields, as they stand in a file; brains are made anew."""
    saved = json.loads(
        json.dumps(
            {
                "agents": list(state.agents),
                "paused_agents": sorted(state.paused_agents),
                "auto_resume": dict(state.auto_resume),
                "turn": state.turn,
            }
        )
    )
    return SimulationState(**{**saved, "agents": {name: Brain() for name in saved["agents"]}})


# --- one truth ----------------------------------------------------------------------------------


def test_a_paused_agent_that_is_removed_leaves_nothing_behind(manager: LifecycleManager) -> None:
    state = crowd("a", "b")
    manager.pause_agent("a", 5, state)
    manager.remove_agent("a", state)
    assert (set(state.paused_agents), dict(state.auto_resume)) == (set(), {})
    assert manager.check_invariants(state)


@pytest.mark.parametrize("turns", [None, 5])
def test_a_namesake_of_one_who_left_in_a_pause_is_born_active(manager: LifecycleManager, turns: int | None) -> None:
    state = crowd("a", "b")
    manager.pause_agent("a", turns, state)
    manager.remove_agent("a", state)
    assert manager.add_agent("a", Brain(), {}, state) == "a"
    assert "a" in manager.get_active_agents(state)
    assert manager.pause_agent("a", None, state)
    assert [manager.process_auto_resume(state) for _ in range(6)] == [[]] * 6


def test_tracker_and_manager_keep_nothing_that_could_disagree_with_the_state(manager: LifecycleManager) -> None:
    state = crowd("a", "b")
    manager.pause_agent("a", 2, state)
    other = LifecycleManager(pause_tracker=PauseTracker())
    assert not other.pause_agent("a", None, state)
    assert other.process_auto_resume(state) == []
    assert manager.process_auto_resume(state) == ["a"]


def test_one_manager_serves_two_populations_without_mixing_them(manager: LifecycleManager) -> None:
    first, second = crowd("a"), crowd("a")
    manager.pause_agent("a", 1, first)
    assert manager.process_auto_resume(second) == []
    assert "a" in manager.get_active_agents(second)
    assert manager.process_auto_resume(first) == ["a"]


def test_what_is_written_to_the_state_is_what_the_manager_goes_by(manager: LifecycleManager) -> None:
    state = crowd("a", "b")
    state.paused_agents.add("a")
    state.auto_resume["a"] = 1
    assert list(manager.get_active_agents(state)) == ["b"]
    assert manager.process_auto_resume(state) == ["a"]


# --- the countdown that is shown ----------------------------------------------------------------


def test_the_state_shows_the_turns_that_are_really_left(manager: LifecycleManager) -> None:
    state = crowd("a")
    manager.pause_agent("a", 3, state)
    shown = []
    while "a" in state.paused_agents:
        shown.append(state.auto_resume["a"])
        manager.process_auto_resume(state)
    assert shown == [3, 2, 1]
    assert dict(state.auto_resume) == {}


# --- a restart ----------------------------------------------------------------------------------


def test_a_countdown_goes_on_after_a_restart_where_it_stood(manager: LifecycleManager) -> None:
    state = crowd("a", "b", "c")
    manager.pause_agent("a", 4, state)
    manager.pause_agent("b", None, state)
    manager.process_auto_resume(state)
    state.turn = 12

    again = restarted(state)
    assert (again.turn, dict(again.auto_resume), set(again.paused_agents)) == (12, {"a": 3}, {"a", "b"})
    fresh = LifecycleManager()
    assert [fresh.process_auto_resume(again) for _ in range(4)] == [[], [], ["a"], []]
    assert list(fresh.get_active_agents(again)) == ["a", "c"]


def test_a_restart_at_any_turn_changes_nothing_of_what_follows(manager: LifecycleManager) -> None:
    def play(restart_at: int | None) -> list[list[str]]:
        state = crowd(*"abcd")
        for turns, name in enumerate("dcba", start=1):
            manager.pause_agent(name, turns, state)
        history = []
        for turn in range(5):
            if turn == restart_at:
                state = restarted(state)
            history.append(manager.process_auto_resume(state))
        return history

    assert [play(turn) for turn in range(5)] == [play(None)] * 5


# --- brain and state ----------------------------------------------------------------------------


def test_a_new_agent_has_the_brain_that_it_was_given(manager: LifecycleManager) -> None:
    state, brain = crowd("a"), Brain()
    name = manager.add_agent("a", brain, {"coins": 3}, state)
    assert manager.get_active_agents(state)[name] is brain
    assert state.agents[name] is brain
    assert state.states[name] == {"coins": 3}


def test_brain_and_state_go_together(manager: LifecycleManager) -> None:
    state = crowd("a", "b")
    manager.remove_agent("a", state)
    assert list(state.agents) == list(state.states) == ["b"]


def test_two_agents_of_one_first_state_do_not_share_it(manager: LifecycleManager) -> None:
    state, first = crowd(), {"bag": [1]}
    for name in "ab":
        manager.add_agent(name, Brain(), first, state)
    state.states["a"]["bag"].append(2)
    assert (state.states["b"], first) == ({"bag": [1]}, {"bag": [1]})


# --- a refusal that looks like success ----------------------------------------------------------


def test_a_refusal_at_the_cap_can_be_told_from_success(caplog: pytest.LogCaptureFixture) -> None:
    manager, state = LifecycleManager(LifecycleValidator(max_agents=1)), crowd("a")
    assert manager.add_agent("b", Brain(), {}, state) == "b"
    outcome = manager.try_add_agent("b", Brain(), {}, state)
    assert (bool(outcome), outcome.name) == (False, "b")
    assert outcome.reason == "the population is full: 1 of 1 agents"
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_a_name_that_is_there_already_does_not_make_a_refusal_look_like_success() -> None:
    manager, state = LifecycleManager(LifecycleValidator(max_agents=1)), crowd("a")
    brain = state.agents["a"]
    assert manager.add_agent("a", Brain(), {}, state) == "a"
    assert not manager.try_add_agent("a", Brain(), {}, state)
    assert state.agents["a"] is brain


# --- names are labels, numbers are not ----------------------------------------------------------


def test_a_freed_name_is_given_again_but_never_its_number(manager: LifecycleManager) -> None:
    state = crowd("a")
    manager.add_agent("a", Brain(), {}, state)
    first = state.member("a_1").number
    manager.remove_agent("a_1", state)
    assert manager.add_agent("a", Brain(), {}, state) == "a_1"
    assert state.member("a_1").number == first + 1
    assert state.last_number == first + 1


def test_numbers_stay_unique_when_everybody_leaves(manager: LifecycleManager) -> None:
    state, seen = crowd(), []
    for _ in range(10):
        manager.add_agent("a", Brain(), {}, state)
        seen.append(state.member("a").number)
        manager.remove_agent("a", state)
    assert seen == list(range(1, 11))
