"""The state and its sights: three ways to look at one book, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pydantic
import pytest

from ostler.errors import AgentNotFoundError, InvalidOperationError, ValidationError
from ostler.simulation.manager import LifecycleManager
from ostler.simulation.state import SimulationState


class Home(pydantic.BaseModel):
    rooms: int = 1


class Purse(pydantic.BaseModel):
    coins: int = 0
    home: Home = Home()
    things: Any = None


@pytest.fixture
def state() -> SimulationState:
    return SimulationState(agents={"a": len, "b": min, "c": max}, paused_agents=["b", "c"], auto_resume={"c": 2})


def sound(state: SimulationState) -> bool:
    return LifecycleManager().check_invariants(state).is_valid


# --- made from plain fields ---------------------------------------------------------------------


def test_an_empty_state_has_nobody_and_stands_before_its_first_turn() -> None:
    state = SimulationState()
    assert (len(state.agents), len(state.states), state.turn, state.global_state) == (0, 0, 0, {})
    assert (len(state.paused_agents), len(state.auto_resume), state.active_count) == (0, 0, 0)


def test_all_that_does_not_go_together_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as raised:
        SimulationState(
            agents={"a": len, "": len, "b": len},
            paused_agents=["a", "ghost", ""],
            auto_resume={"a": 0, "b": 2, "": 1},
        )
    assert [fault.message for fault in raised.value.faults] == [
        "the name of an agent must not be empty",
        "paused_agents must name only agents, was 'ghost'",
        "auto_resume does not fit: auto_resume.a must be a whole number of turns, 1 to 2147483647, was 0",
        "auto_resume does not fit: 'b' is not paused, so it cannot go on by itself; pause it first",
    ]


def test_fields_of_another_shape_are_told_at_once() -> None:
    given: dict[str, Any] = {"agents": ["a"], "paused_agents": "ab", "auto_resume": 3, "turn": -1}
    with pytest.raises(ValidationError) as raised:
        SimulationState(**given)
    assert [fault.field for fault in raised.value.faults] == ["turn", "agents", "auto_resume", "paused_agents"]  # type: ignore[attr-defined]  # ours


@pytest.mark.parametrize("schema", [dict, 7, Purse()])
def test_a_schema_is_a_model_class(schema: Any) -> None:
    with pytest.raises(ValidationError, match="schema must be a Pydantic model class"):
        SimulationState(schema=schema)


def test_a_schema_that_needs_more_than_nothing_is_told_for_each_agent() -> None:
    class Needs(pydantic.BaseModel):
        coins: int

    with pytest.raises(ValidationError, match=r"agents\.a\.coins does not fit: field required"):
        SimulationState(agents={"a": len}, schema=Needs)


# --- the sights as what they look like ----------------------------------------------------------


def test_the_sights_equal_the_plain_things(state: SimulationState) -> None:
    assert state.agents == {"a": len, "b": min, "c": max}
    assert state.states == {"a": {}, "b": {}, "c": {}}
    assert set(state.paused_agents) == {"b", "c"} == state.paused_agents | {"b"}
    assert state.auto_resume == {"c": 2}
    assert repr(state.agents) == repr({"a": len, "b": min, "c": max})
    assert (repr(state.auto_resume), repr(state.states)) == ("{'c': 2}", "{'a': {}, 'b': {}, 'c': {}}")
    assert eval(repr(state.paused_agents)) == {"b", "c"}  # noqa: S307 - our own text


def test_what_set_operations_give_is_a_set_of_its_own(state: SimulationState) -> None:
    both = state.paused_agents | {"a"}
    assert type(both) is set
    state.resume("b")
    assert both == {"a", "b", "c"}


@pytest.mark.parametrize(
    "look",
    [
        lambda state: state.agents["nobody"],
        lambda state: state.states["nobody"],
        lambda state: state.auto_resume["a"],
        lambda state: state.agents.pop("nobody"),
        lambda state: state.auto_resume.pop("a"),
        lambda state: state.paused_agents.remove("a"),
    ],
)
def test_what_is_not_there_is_a_key_error_as_in_a_dict(
    state: SimulationState, look: Callable[[SimulationState], object]
) -> None:
    with pytest.raises(KeyError):
        look(state)


# --- writing through them -----------------------------------------------------------------------


def test_to_delete_an_agent_is_to_let_it_go_with_its_pause(state: SimulationState) -> None:
    del state.agents["c"]
    assert (set(state.paused_agents), dict(state.auto_resume), list(state.states)) == ({"b"}, {}, ["a", "b"])


def test_another_brain_keeps_state_pause_and_number(state: SimulationState) -> None:
    state.members["c"].room = "warm"
    state.agents["c"] = sum
    member = state.member("c")
    assert (member.agent, member.number, member.room, state.auto_resume["c"]) == (sum, 3, None, 2)
    with pytest.raises(AgentNotFoundError):
        state.exchange("nobody", sum)


def test_a_new_key_is_a_new_agent(state: SimulationState) -> None:
    state.agents["a_1"] = sum
    assert (state.member("a_1").number, state.free_name("a"), state.states["a_1"]) == (4, "a_2", {})


@pytest.mark.parametrize("name", ["", 7, None, "two\nlines", "x" * 201])
def test_what_is_no_name_cannot_be_written_either(state: SimulationState, name: Any) -> None:
    with pytest.raises(ValidationError, match="the name of an agent must"):
        state.agents[name] = sum
    assert list(state.agents) == ["a", "b", "c"]
    assert sound(state)


def test_the_same_name_is_not_let_in_twice(state: SimulationState) -> None:
    with pytest.raises(InvalidOperationError, match="there is an agent 'a' already"):
        state.admit("a", sum, {})


def test_another_state_must_fit_and_is_not_shared(state: SimulationState) -> None:
    bag = {"bag": [1]}
    state.states["a"] = bag
    bag["bag"].append(2)
    assert state.states["a"] == {"bag": [1]}
    with pytest.raises(ValidationError, match=r"states\.a\.bag must be a JSON value"):
        state.states["a"] = {"bag": object()}
    with pytest.raises(AgentNotFoundError, match="there is no agent 'nobody'"):
        state.states["nobody"] = {}


def test_pauses_follow_the_set(state: SimulationState) -> None:
    state.paused_agents.add("a")
    state.paused_agents.add("c")  # is paused already: its term stays
    state.paused_agents.discard("b")
    state.paused_agents.discard("nobody")
    assert (set(state.paused_agents), dict(state.auto_resume)) == ({"a", "c"}, {"c": 2})
    state.paused_agents -= {"c"}
    state.paused_agents |= {"b"}
    assert (set(state.paused_agents), dict(state.auto_resume)) == ({"a", "b"}, {})
    with pytest.raises(AgentNotFoundError, match=r"look at state\.agents"):
        state.paused_agents.add("nobody")


def test_pauses_can_be_replaced_as_a_whole_or_not_at_all(state: SimulationState) -> None:
    with pytest.raises(ValidationError) as raised:
        state.paused_agents = {"a": 1, "x": 2, "y": 3}
    assert len(raised.value.faults) == 2
    assert set(state.paused_agents) == {"b", "c"}
    state.paused_agents = ["a", "c"]
    assert (set(state.paused_agents), dict(state.auto_resume)) == ({"a", "c"}, {"c": 2})


def test_counters_follow_the_mapping(state: SimulationState) -> None:
    state.auto_resume["b"] = 4
    state.auto_resume["c"] += 1
    assert dict(state.auto_resume) == {"b": 4, "c": 3}
    del state.auto_resume["c"]
    assert (set(state.paused_agents), dict(state.auto_resume)) == ({"b", "c"}, {"b": 4})
    for turns in (0, -1, True, 1.5, "3"):
        with pytest.raises(ValidationError, match=r"auto_resume\.b must be a whole number of turns"):
            state.auto_resume["b"] = turns  # type: ignore[assignment]  # the fault
    with pytest.raises(InvalidOperationError, match="'a' is not paused"):
        state.auto_resume["a"] = 1
    assert dict(state.auto_resume) == {"b": 4}


def test_counters_can_be_replaced_as_a_whole_or_not_at_all(state: SimulationState) -> None:
    with pytest.raises(ValidationError) as raised:
        state.auto_resume = {"a": 1, "b": 0}
    assert [fault.message for fault in raised.value.faults] == [
        "auto_resume must name only paused agents, was 'a'",
        "auto_resume.b must be a whole number of turns, 1 to 2147483647, was 0",
    ]
    state.auto_resume = state.auto_resume
    assert dict(state.auto_resume) == {"c": 2}
    state.auto_resume = {"b": 1}
    assert dict(state.auto_resume) == {"b": 1}


@pytest.mark.parametrize("turns", [0, -1, True, "2"])
def test_the_book_itself_refuses_a_term_that_is_none(state: SimulationState, turns: Any) -> None:
    with pytest.raises(ValidationError, match="turns must be a whole number of turns"):
        state.pause("a", turns)
    assert "a" not in state.paused_agents


def test_clearing_a_sight_clears_what_hangs_on_it(state: SimulationState) -> None:
    state.auto_resume.clear()
    assert set(state.paused_agents) == {"b", "c"}
    state.auto_resume["b"] = 2
    state.paused_agents.clear()
    assert dict(state.auto_resume) == {}
    state.agents.clear()
    assert (len(state.agents), sound(state)) == (0, True)


def test_a_hundred_thousand_are_cleared_in_one_walk() -> None:
    """One by one from the front it took minutes; the limit of the test would tell."""
    state = SimulationState()
    for number in range(100_000):
        state.admit(f"a_{number}", len, {})
        state.pause(f"a_{number}", 1 + number % 3)
    state.auto_resume.clear()
    state.paused_agents.clear()
    state.agents.clear()
    assert state.active_agents() == {}


# --- states with a schema -----------------------------------------------------------------------


def test_a_typed_state_is_a_model_of_its_own() -> None:
    manager, state = LifecycleManager(), SimulationState(schema=Purse)
    home, things = Home(rooms=3), [1]
    for name in "ab":
        manager.add_agent(name, len, {"coins": 5, "home": home, "things": things}, state)
    state.states["a"].home.rooms = 4
    state.states["a"].things.append(2)
    assert state.states["b"] == Purse(coins=5, home=Home(rooms=3), things=[1])
    assert (home.rooms, things) == (3, [1])


def test_a_model_may_be_given_as_the_first_state() -> None:
    manager, state = LifecycleManager(), SimulationState(schema=Purse)
    given = Purse(coins=2)
    manager.add_agent("a", len, given, state)  # type: ignore[arg-type]  # a model is as good as its fields
    assert state.states["a"] == given
    assert state.states["a"] is not given


def test_what_cannot_be_copied_cannot_be_a_state() -> None:
    manager, state = LifecycleManager(), SimulationState(schema=Purse)
    outcome = manager.try_add_agent("a", len, {"things": (one for one in "ab")}, state)
    assert outcome.reason == "initial_state cannot be copied: cannot pickle 'generator' object"
