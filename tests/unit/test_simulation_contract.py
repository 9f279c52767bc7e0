"""The contract of `LifecycleManager`, method by method: what each needs, does, answers, refuses and logs."""

from __future__ import annotations

import logging
from typing import Any

import pydantic
import pytest

from ostler.errors import ValidationError
from ostler.simulation.manager import LifecycleManager
from ostler.simulation.state import SimulationState


class Brain:
    def decide(self, view: Any) -> str:
        return f"{view.name} waits"


class Purse(pydantic.BaseModel):
    coins: int = pydantic.Field(ge=0)
    mood: str = "calm"


Told = list[tuple[int, str, dict[str, Any]]]
OPERATION, REFUSED = "lifecycle_operation", "lifecycle_validation_failed"
NO_NAMES = ["", "  ", None, 7, "two\nlines", " edge", "x" * 201, ["a"]]
NO_TERMS = [0, -1, 1.0, "2", True, False, 2**31]


@pytest.fixture
def manager() -> LifecycleManager:
    return LifecycleManager()


@pytest.fixture
def state() -> SimulationState:
    """Four agents in turn 7: `a` is active, `b` paused for good, `c` for three turns, `d` for one."""
    return SimulationState(
        agents={name: Brain() for name in "abcd"},
        paused_agents={"b", "c", "d"},
        auto_resume={"c": 3, "d": 1},
        turn=7,
    )


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="ostler.simulation")
    return caplog


def events(caplog: pytest.LogCaptureFixture) -> Told:
    return [(one.levelno, one.event, one.fields) for one in caplog.records]  # type: ignore[attr-defined]  # ours


def whole(state: SimulationState) -> Any:
    """All that an operation may change."""
    counters = dict(state.auto_resume)
    return dict(state.agents), dict(state.states), set(state.paused_agents), counters, state.turn, state.last_number


# --- add_agent ----------------------------------------------------------------------------------


def test_add_answers_the_name_and_puts_the_brain_into_the_agents(
    manager: LifecycleManager, state: SimulationState
) -> None:
    brain = Brain()
    assert manager.add_agent("e", brain, {"coins": 1}, state) == "e"
    assert state.agents["e"] is brain
    assert state.states["e"] == {"coins": 1}
    assert list(state.agents) == ["a", "b", "c", "d", "e"]


def test_an_added_agent_is_active(manager: LifecycleManager, state: SimulationState) -> None:
    manager.add_agent("e", Brain(), {}, state)
    assert list(manager.get_active_agents(state)) == ["a", "e"]
    assert "e" not in state.paused_agents
    assert "e" not in state.auto_resume


def test_add_under_a_taken_name_counts_up(manager: LifecycleManager, state: SimulationState) -> None:
    assert [manager.add_agent("a", Brain(), {}, state) for _ in range(3)] == ["a_1", "a_2", "a_3"]
    assert manager.add_agent("a_1", Brain(), {}, state) == "a_1_1"


def test_add_passes_over_numbers_that_others_chose(manager: LifecycleManager, state: SimulationState) -> None:
    manager.add_agent("a_1", Brain(), {}, state)
    manager.add_agent("a_3", Brain(), {}, state)
    assert [manager.add_agent("a", Brain(), {}, state) for _ in range(2)] == ["a_2", "a_4"]


def test_add_logs_the_name_that_was_asked_for_and_the_one_that_was_given(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture
) -> None:
    manager.add_agent("a", Brain(), {}, state)
    fields = {"operation": "add_agent", "agent_name": "a", "resolved_name": "a_1", "turn": 7}
    assert events(told) == [(logging.INFO, OPERATION, fields)]
    assert told.records[0].getMessage() == (
        "lifecycle_operation operation=add_agent agent_name=a resolved_name=a_1 turn=7"
    )


def test_the_twenty_sixth_is_refused(manager: LifecycleManager, told: pytest.LogCaptureFixture) -> None:
    state = SimulationState(agents={f"agent {number}": Brain() for number in range(24)})
    assert manager.try_add_agent("last", Brain(), {}, state)
    before = whole(state)
    told.clear()
    assert manager.add_agent("late", Brain(), {}, state) == "late"
    assert whole(state) == before
    reason = "the population is full: 25 of 25 agents"
    fields = {"operation": "add_agent", "agent_name": "late", "reason": reason, "turn": 0}
    assert events(told) == [(logging.WARNING, REFUSED, fields)]


@pytest.mark.parametrize("name", NO_NAMES)
def test_add_refuses_what_is_no_name_and_gives_it_back(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture, name: Any
) -> None:
    before = whole(state)
    assert manager.add_agent(name, Brain(), {}, state) is name
    assert whole(state) == before
    ((level, event, fields),) = events(told)
    assert (level, event, fields["agent_name"]) == (logging.WARNING, REFUSED, name)
    assert fields["reason"].startswith("name must")


def test_add_refuses_a_name_that_has_no_room_for_its_number(manager: LifecycleManager, state: SimulationState) -> None:
    longest = "x" * 200
    assert manager.add_agent(longest, Brain(), {}, state) == longest
    outcome = manager.try_add_agent(longest, Brain(), {}, state)
    assert outcome.reason == "name is taken, and too long for a number behind it (200 characters in all)"
    assert manager.add_agent("y" * 198, Brain(), {}, state) == "y" * 198
    assert manager.add_agent("y" * 198, Brain(), {}, state) == "y" * 198 + "_1"


@pytest.mark.parametrize("brain", [None, 7, "a brain", Brain, object()])
def test_add_raises_for_what_is_no_brain(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture, brain: Any
) -> None:
    before = whole(state)
    with pytest.raises(ValidationError, match="agent must be an object with a method `decide`, a function"):
        manager.add_agent("e", brain, {}, state)
    assert whole(state) == before
    assert [(level, event) for level, event, _ in events(told)] == [(logging.WARNING, REFUSED)]


def test_add_raises_with_every_fault_of_brain_and_state(manager: LifecycleManager) -> None:
    state = SimulationState(schema=Purse)
    with pytest.raises(ValidationError) as raised:
        manager.add_agent("e", None, {"coins": -1, "mood": 3}, state)
    assert [fault.field for fault in raised.value.faults] == ["agent", "initial_state.coins", "initial_state.mood"]  # type: ignore[attr-defined]  # ours
    assert len(state.agents) == 0


@pytest.mark.parametrize("first", [None, 7, [("coins", 1)], {"coins": object()}, {1: 2}, {"coins": float("nan")}])
def test_add_raises_for_a_first_state_that_is_none(
    manager: LifecycleManager, state: SimulationState, first: Any
) -> None:
    before = whole(state)
    with pytest.raises(ValidationError, match="initial_state"):
        manager.add_agent("e", Brain(), first, state)
    assert whole(state) == before


def test_try_add_says_whether_it_is_in_under_which_name_and_why_not(
    manager: LifecycleManager, state: SimulationState
) -> None:
    added = manager.try_add_agent("a", Brain(), {}, state)
    assert (bool(added), added.added, added.name, added.reason, added.faults) == (True, True, "a_1", None, ())
    refused = manager.try_add_agent("e", 7, {}, state)
    assert (bool(refused), refused.added, refused.name) == (False, False, "e")
    assert refused.reason == refused.faults[0].message


# --- remove_agent -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "abcd")
def test_remove_takes_an_agent_out_of_all_three(manager: LifecycleManager, state: SimulationState, name: str) -> None:
    assert manager.remove_agent(name, state) is True
    assert name not in state.agents
    assert name not in state.states
    assert name not in state.paused_agents
    assert name not in state.auto_resume
    assert len(state.agents) == 3


def test_the_last_agent_may_be_removed(manager: LifecycleManager) -> None:
    state = SimulationState(agents={"a": Brain()})
    assert manager.remove_agent("a", state)
    assert dict(state.agents) == {}


def test_remove_logs_what_it_did(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture
) -> None:
    manager.remove_agent("c", state)
    fields = {"operation": "remove_agent", "agent_name": "c", "turn": 7}
    assert events(told) == [(logging.INFO, OPERATION, fields)]


# --- pause_agent --------------------------------------------------------------------------------


def test_pause_without_a_term_lasts(manager: LifecycleManager, state: SimulationState) -> None:
    assert manager.pause_agent("a", None, state) is True
    assert "a" in state.paused_agents
    assert "a" not in state.auto_resume


@pytest.mark.parametrize("turns", [1, 2, 2**31 - 1])
def test_pause_with_a_term_writes_it_down(manager: LifecycleManager, state: SimulationState, turns: int) -> None:
    assert manager.pause_agent("a", turns, state) is True
    assert "a" in state.paused_agents
    assert state.auto_resume["a"] == turns
    assert "a" in state.agents


@pytest.mark.parametrize("turns", [None, 2])
def test_pause_logs_the_term(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture, turns: int | None
) -> None:
    manager.pause_agent("a", turns, state)
    fields = {"operation": "pause_agent", "agent_name": "a", "auto_resume_turns": turns, "turn": 7}
    assert events(told) == [(logging.INFO, OPERATION, fields)]


@pytest.mark.parametrize("turns", NO_TERMS)
def test_pause_refuses_what_is_no_term(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture, turns: Any
) -> None:
    before = whole(state)
    assert manager.pause_agent("a", turns, state) is False
    assert whole(state) == before
    ((level, event, fields),) = events(told)
    assert (level, event) == (logging.WARNING, REFUSED)
    assert fields["reason"].startswith("auto_resume_turns must be a whole number of turns, 1 to")


@pytest.mark.parametrize("turns", [None, 9])
def test_pause_of_a_paused_agent_keeps_its_term(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture, turns: int | None
) -> None:
    before = whole(state)
    assert manager.pause_agent("c", turns, state) is False
    assert whole(state) == before
    reason = "agent 'c' is paused already"
    fields = {"operation": "pause_agent", "agent_name": "c", "reason": reason, "turn": 7}
    assert events(told) == [(logging.WARNING, REFUSED, fields)]


# --- resume_agent -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "bcd")
def test_resume_takes_an_agent_out_of_pauses_and_counters(
    manager: LifecycleManager, state: SimulationState, name: str
) -> None:
    assert manager.resume_agent(name, state) is True
    assert name not in state.paused_agents
    assert name not in state.auto_resume
    assert name in manager.get_active_agents(state)


def test_resume_logs_what_it_did(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture
) -> None:
    manager.resume_agent("c", state)
    fields = {"operation": "resume_agent", "agent_name": "c", "turn": 7}
    assert events(told) == [(logging.INFO, OPERATION, fields)]


def test_resume_of_an_active_agent_is_refused(
    manager: LifecycleManager, state: SimulationState, told: pytest.LogCaptureFixture
) -> None:
    before = whole(state)
    assert manager.resume_agent("a", state) is False
    assert whole(state) == before
    reason = "agent 'a' is not paused"
    fields = {"operation": "resume_agent", "agent_name": "a", "reason": reason, "turn": 7}
    assert events(told) == [(logging.WARNING, REFUSED, fields)]


# --- remove, pause and resume of nobody ---------------------------------------------------------


def _act(manager: LifecycleManager, operation: str, name: Any, state: SimulationState) -> Any:
    arguments = (name, None, state) if operation == "pause_agent" else (name, state)
    return getattr(manager, operation)(*arguments)


@pytest.mark.parametrize("operation", ["remove_agent", "pause_agent", "resume_agent"])
@pytest.mark.parametrize("name", ["nobody", *NO_NAMES])
def test_nobody_can_be_removed_paused_or_resumed(
    told: pytest.LogCaptureFixture, state: SimulationState, operation: str, name: Any
) -> None:
    before = whole(state)
    assert _act(LifecycleManager(), operation, name, state) is False
    assert whole(state) == before
    ((level, event, fields),) = events(told)
    assert (level, event) == (logging.WARNING, REFUSED)
    assert list(fields) == ["operation", "agent_name", "reason", "turn"]
    assert (fields["operation"], fields["agent_name"], fields["turn"]) == (operation, name, 7)
    assert fields["reason"].startswith("there is no agent 'nobody'" if name == "nobody" else "name must")
