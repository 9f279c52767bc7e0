"""`SimulationState`: one truth behind its mappings, and states that share nothing with what was given."""

from __future__ import annotations

import threading
from typing import Any

import pydantic
import pytest

from ostler.errors import AgentNotFoundError, InvalidOperationError, ValidationError
from ostler.simulation import LifecycleManager, SimulationState


class Brain:
    def decide(self, _: Any) -> None:
        """Only who it is matters here."""


class Purse(pydantic.BaseModel):
    coins: int = 0
    goods: list[Any] = []


A, B = Brain(), Brain()


def state() -> SimulationState:
    return SimulationState(agents={"a": A, "b": B}, paused_agents=["b"], auto_resume={"b": 2}, turn=3)


def test_an_empty_state_stands_before_its_first_turn() -> None:
    empty = SimulationState()
    assert (dict(empty.agents), empty.paused_agents, empty.auto_resume) == ({}, set(), {})
    assert (empty.turn, empty.global_state, empty.last_number) == (0, {}, 0)


def test_all_that_does_not_go_together_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        SimulationState(agents={"a": A, " b": B}, paused_agents={"c"}, auto_resume={"a": 2, "c": 0})
    assert str(caught.value).split("; ", 1)[0] == "name must not begin or end with a space, was ' b'"
    fields = sorted(one.field for one in caught.value.faults)  # type: ignore[attr-defined]  # a Fault
    assert fields == ["auto_resume", "auto_resume", "auto_resume.c", "name", "paused_agents"]
    with pytest.raises(ValidationError) as caught:
        SimulationState(agents=[A], paused_agents="a", auto_resume=3, turn=-1)  # type: ignore[arg-type]  # on purpose
    fields = [one.field for one in caught.value.faults]  # type: ignore[attr-defined]  # a Fault
    assert fields == ["agents", "auto_resume", "paused_agents", "turn"]
    for schema in (dict, Purse(), "Purse"):
        with pytest.raises(ValidationError, match="schema must be a Pydantic model class"):
            SimulationState(schema=schema)


def test_agents_and_states_are_mappings_over_the_members() -> None:
    one = state()
    assert one.agents == {"a": A, "b": B}
    assert one.states == {"a": {}, "b": {}}
    assert ("a" in one.agents, "x" in one.states, len(one.states)) == (True, False, 2)
    one.agents["a"] = B
    one.agents["c"] = A
    one.states["c"] = {"n": 1}
    assert [(member.name, member.number) for member in one.members.values()] == [("a", 1), ("b", 2), ("c", 3)]
    assert one.member("c").state == {"n": 1}
    del one.agents["b"]
    assert (one.paused_agents, one.auto_resume, list(one.agents)) == (set(), {}, ["a", "c"])
    with pytest.raises(KeyError):
        del one.agents["b"]
    with pytest.raises(KeyError):
        one.states["b"] = {}
    with pytest.raises(ValidationError, match="name must be text"):
        one.agents[7] = A  # type: ignore[index]  # on purpose
    with pytest.raises(ValidationError, match=r"states.a must be a mapping"):
        one.states["a"] = 7
    with pytest.raises(InvalidOperationError, match="remove the agent"):
        del one.states["a"]
    with pytest.raises(AgentNotFoundError, match="there is no agent 'x'"):
        one.member("x")
    with pytest.raises(InvalidOperationError, match="there is an agent 'a' already"):
        one.admit("a", A, {})
    assert repr(one.states) == "{'a': {}, 'c': {'n': 1}}"


@pytest.mark.parametrize("schema", [None, Purse])
def test_first_states_are_copied_and_shared_by_no_two_agents(schema: Any) -> None:
    one, manager, given = SimulationState(schema=schema), LifecycleManager(), {"coins": 1, "goods": [[1]]}
    for _ in range(2):
        manager.add_agent("a", A, given, one)
    given["goods"][0].append(2)  # type: ignore[index]  # a list
    first, second = one.states.values()
    assert first == second
    for own in (first, second):
        goods = own.goods if schema else own["goods"]
        assert goods == [[1]]
    (first.goods if schema else first["goods"])[0].append(3)
    assert first != second


def test_a_model_may_be_given_as_a_first_state_and_what_cannot_be_copied_not() -> None:
    one, manager = SimulationState(schema=Purse), LifecycleManager()
    manager.add_agent("a", A, Purse(coins=2), one)  # type: ignore[arg-type]  # a model is a mapping of its fields
    assert one.states["a"] == Purse(coins=2)
    result = manager.try_add_agent("b", A, {"goods": [threading.Lock()]}, one)
    assert "initial_state cannot be copied" in str(result.reason)
    plain = SimulationState()
    manager.add_agent("a", A, Purse(coins=2), plain)  # type: ignore[arg-type]  # as above
    assert plain.states["a"] == {"coins": 2, "goods": []}


def test_a_plain_first_state_is_what_json_gives_back_or_refused() -> None:
    one, manager = SimulationState(), LifecycleManager()
    for value in ((1, 2), {1: 2}, {"x"}, float("inf"), "\ud800", object(), "x" * 1_100_000):
        assert not manager.try_add_agent("a", A, {"x": value}, one), value
    assert manager.try_add_agent("a", A, {"x": [None, True, 1, 0.1, "ü\0", {"y": []}]}, one)


def test_a_class_validator_that_raises_is_told_with_the_field() -> None:
    class Odd(pydantic.BaseModel):
        @pydantic.model_validator(mode="after")
        def odd(self) -> Odd:
            raise RuntimeError("odd")

    with pytest.raises(ValidationError, match="initial_state cannot be copied: RuntimeError: odd"):
        LifecycleManager().add_agent("a", A, {}, SimulationState(schema=Odd))
