"""The contract of `LifecycleManager`, second part: its shape, who is active, who goes on, and what always holds."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

from ostler.errors import ValidationError
from ostler.simulation.manager import LifecycleManager
from ostler.simulation.pauses import PauseTracker
from ostler.simulation.state import SimulationState
from ostler.simulation.validator import DEFAULT_MAX_AGENTS, LifecycleValidator, Verdict

A, B, C, D = (lambda _view: None for _ in range(4))


@pytest.fixture
def manager() -> LifecycleManager:
    return LifecycleManager()


@pytest.fixture
def state() -> SimulationState:
    """Four agents in turn 7: `a` is active, `b` paused for good, `c` for two turns, `d` for one."""
    return SimulationState(
        agents={"a": A, "b": B, "c": C, "d": D}, paused_agents={"b", "c", "d"}, auto_resume={"c": 2, "d": 1}, turn=7
    )


# --- the shape ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("add_agent", ["name", "agent", "initial_state", "state"]),
        ("remove_agent", ["name", "state"]),
        ("pause_agent", ["name", "auto_resume_turns", "state"]),
        ("resume_agent", ["name", "state"]),
        ("get_active_agents", ["state"]),
        ("process_auto_resume", ["state"]),
    ],
)
def test_the_parameters_have_the_names_and_the_order_of_the_contract(method: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(LifecycleManager, method)).parameters) == ["self", *parameters]


def test_validator_and_tracker_may_be_ones_own(state: SimulationState) -> None:
    class Strict(LifecycleValidator):
        def validate_remove(self, name: Any, state: SimulationState) -> Verdict:
            return Verdict("nobody leaves") if name == "a" else super().validate_remove(name, state)

    class Doubling(PauseTracker):
        def pause(self, name: str, auto_resume_turns: int | None, state: SimulationState) -> None:
            super().pause(name, None if auto_resume_turns is None else 2 * auto_resume_turns, state)

    manager = LifecycleManager(Strict(max_agents=4), Doubling())
    assert manager.remove_agent("a", state) is False
    assert manager.pause_agent("a", 3, state) is True
    assert state.auto_resume["a"] == 6
    assert manager.pause_tracker.turns_left("a", state) == 6
    assert manager.pause_tracker.is_paused("a", state)


# --- get_active_agents --------------------------------------------------------------------------


def test_active_are_those_that_are_not_paused(manager: LifecycleManager, state: SimulationState) -> None:
    state.resume("c")
    by_the_rule = {name: agent for name, agent in state.agents.items() if name not in state.paused_agents}
    active = manager.get_active_agents(state)
    assert active == by_the_rule == {"a": A, "c": C}
    assert list(active) == ["a", "c"]
    assert isinstance(active, dict)


def test_looking_at_the_active_changes_and_logs_nothing(
    manager: LifecycleManager, state: SimulationState, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ostler.simulation")
    assert manager.get_active_agents(state) == {"a": A}
    assert set(state.paused_agents) == {"b", "c", "d"}
    assert dict(state.auto_resume) == {"c": 2, "d": 1}
    assert caplog.records == []


def test_what_is_done_to_the_answer_is_not_done_to_the_state(manager: LifecycleManager, state: SimulationState) -> None:
    active = manager.get_active_agents(state)
    active.clear()
    active["x"] = A
    assert manager.get_active_agents(state) == {"a": A}
    assert list(state.agents) == ["a", "b", "c", "d"]


def test_all_may_be_paused_and_there_may_be_nobody(manager: LifecycleManager, state: SimulationState) -> None:
    state.pause("a", None)
    assert manager.get_active_agents(state) == {}
    assert manager.get_active_agents(SimulationState()) == {}


# --- process_auto_resume ------------------------------------------------------------------------


def test_each_turn_takes_one_from_every_counter(manager: LifecycleManager, state: SimulationState) -> None:
    assert manager.process_auto_resume(state) == ["d"]
    assert (set(state.paused_agents), dict(state.auto_resume)) == ({"b", "c"}, {"c": 1})
    assert manager.process_auto_resume(state) == ["c"]
    assert (set(state.paused_agents), dict(state.auto_resume)) == ({"b"}, {})
    assert manager.process_auto_resume(state) == []
    assert list(manager.get_active_agents(state)) == ["a", "c", "d"]


def test_an_agent_without_a_term_is_never_resumed(manager: LifecycleManager, state: SimulationState) -> None:
    for _ in range(100):
        manager.process_auto_resume(state)
    assert set(state.paused_agents) == {"b"}


def test_a_term_begins_when_the_pause_does(manager: LifecycleManager, state: SimulationState) -> None:
    manager.process_auto_resume(state)
    manager.pause_agent("a", 2, state)
    assert [manager.process_auto_resume(state) for _ in range(2)] == [["c"], ["a"]]


def test_those_due_together_are_told_in_the_order_of_coming(manager: LifecycleManager) -> None:
    state = SimulationState(agents=dict.fromkeys("cab", A))
    for name in "bca":
        manager.pause_agent(name, 1, state)
    assert manager.process_auto_resume(state) == ["c", "a", "b"]


def test_one_who_was_resumed_or_removed_is_not_resumed_again(manager: LifecycleManager, state: SimulationState) -> None:
    manager.resume_agent("d", state)
    manager.remove_agent("c", state)
    assert [manager.process_auto_resume(state) for _ in range(3)] == [[], [], []]


def test_each_auto_resume_is_logged(
    manager: LifecycleManager, state: SimulationState, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ostler.simulation")
    manager.process_auto_resume(state)
    (record,) = caplog.records
    assert (record.levelno, record.event) == (logging.INFO, "lifecycle_operation")  # type: ignore[attr-defined]  # ours
    fields = {"operation": "resume_agent", "agent_name": "d", "automatic": True, "turn": 7}
    assert record.fields == fields  # type: ignore[attr-defined]  # ours


def test_a_turn_without_counters_does_nothing(manager: LifecycleManager) -> None:
    assert manager.process_auto_resume(SimulationState()) == []


def test_the_manager_leaves_the_turn_to_its_caller(manager: LifecycleManager, state: SimulationState) -> None:
    manager.process_auto_resume(state)
    assert state.turn == 7


# --- the five invariants ------------------------------------------------------------------------


def test_a_sound_state_is_called_sound(manager: LifecycleManager, state: SimulationState) -> None:
    assert manager.check_invariants(state).is_valid
    assert manager.check_invariants(SimulationState()).is_valid


def broken(manager: LifecycleManager, state: SimulationState) -> list[str]:
    result = manager.check_invariants(state)
    assert not result.is_valid
    return list(result.errors)


def test_one_names_are_unique(manager: LifecycleManager, state: SimulationState) -> None:
    with pytest.raises(AttributeError, match="given once"):
        state.members["a"].name = "b"
    object.__setattr__(state.members["a"], "name", "b")
    assert broken(manager, state) == ["agents must have names and numbers of their own"]
    object.__setattr__(state.members["a"], "name", "a")
    object.__setattr__(state.members["a"], "number", 2)
    assert broken(manager, state) == ["agents must have names and numbers of their own"]


def test_two_only_agents_are_paused(manager: LifecycleManager, state: SimulationState) -> None:
    state.paused.add("ghost")
    assert broken(manager, state) == ["paused_agents must name only agents, was 'ghost'"]


def test_three_only_the_paused_have_counters(manager: LifecycleManager, state: SimulationState) -> None:
    state.countdown.begin("a", 2)
    assert broken(manager, state) == ["auto_resume must name only paused agents, was 'a'"]


def test_four_there_are_no_more_than_the_cap(state: SimulationState) -> None:
    manager = LifecycleManager(LifecycleValidator(max_agents=3))
    assert broken(manager, state) == ["agents must be at most 3, was 4"]
    assert LifecycleManager(LifecycleValidator(max_agents=4)).check_invariants(state)


def test_five_counters_are_at_least_one(manager: LifecycleManager, state: SimulationState) -> None:
    state.countdown.tick += 1
    (said,) = broken(manager, state)
    assert said == "auto_resume must count down to one: the counter of 'd' is 0, and must be at least 1"


def test_all_that_is_broken_is_told_at_once(manager: LifecycleManager, state: SimulationState) -> None:
    state.paused.add("ghost")
    state.countdown.begin("a", 2)
    assert len(broken(manager, state)) == 2


# --- the cap ------------------------------------------------------------------------------------


def test_the_cap_is_twenty_five_if_nothing_is_said() -> None:
    assert LifecycleManager().validator.max_agents == DEFAULT_MAX_AGENTS == 25


@pytest.mark.parametrize("cap", [0, -1, 2.5, "25", None, True])
def test_a_cap_is_a_whole_number_from_one(cap: Any) -> None:
    with pytest.raises(ValidationError, match="max_agents must be a whole number from 1"):
        LifecycleValidator(max_agents=cap)


def test_a_place_that_was_left_can_be_taken(state: SimulationState) -> None:
    manager = LifecycleManager(LifecycleValidator(max_agents=4))
    assert not manager.try_add_agent("e", A, {}, state)
    manager.remove_agent("b", state)
    assert manager.try_add_agent("e", A, {}, state)
