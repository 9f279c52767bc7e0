"""The contract of seed 000, a test for each sentence of it, in its order."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import pydantic
import pytest

from ostler.errors import InvalidOperationError, ValidationError
from ostler.simulation import (
    LifecycleManager,
    LifecycleValidator,
    PauseTracker,
    SimulationOrchestrator,
    SimulationSettings,
    SimulationState,
    Verdict,
)

OPERATION, REFUSED = "lifecycle_operation", "lifecycle_validation_failed"
NO_NAMES = ["", "  ", None, 7, "two\nlines", " edge", "x" * 201, ["a"]]
NO_TERMS = [0, -1, 1.0, "2", True, False, 2**31]


class Brain:
    def decide(self, view: Any) -> str:
        return f"{view.name} waits"


class Purse(pydantic.BaseModel):
    coins: int = pydantic.Field(ge=0)
    mood: str = "calm"


@pytest.fixture
def manager() -> LifecycleManager:
    return LifecycleManager()


@pytest.fixture
def state() -> SimulationState:
    """Four agents in turn 7: `a` is active, `b` paused for good, `c` for three turns, `d` for one."""
    return SimulationState(
        agents={name: Brain() for name in "abcd"}, paused_agents={"b", "c", "d"}, auto_resume={"c": 3, "d": 1}, turn=7
    )


Told = Callable[[], list[tuple[int, str, dict[str, Any]]]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.DEBUG, logger="ostler.simulation")

    def events() -> list[tuple[int, str, dict[str, Any]]]:
        found = [(one.levelno, one.event, one.fields) for one in caplog.records]  # type: ignore[attr-defined]  # ours
        caplog.clear()
        return found

    return events


def whole(state: SimulationState) -> Any:
    """All that an operation may change."""
    pauses = set(state.paused_agents), dict(state.auto_resume)
    return dict(state.agents), dict(state.states), pauses, state.turn, state.last_number


def refused(told: Told, operation: str, name: Any, turn: int = 7) -> str:
    """The one warning that was logged; its reason."""
    ((level, event, fields),) = told()
    assert (level, event) == (logging.WARNING, REFUSED)
    assert list(fields) == ["operation", "agent_name", "reason", "turn"]
    assert (fields["operation"], fields["agent_name"], fields["turn"]) == (operation, name, turn)
    return str(fields["reason"])


# --- component, role, dependencies -------------------------------------------------------------------


def test_it_depends_on_a_validator_and_a_pause_tracker_which_may_be_ones_own(state: SimulationState) -> None:
    class Strict(LifecycleValidator):
        def validate_remove(self, name: Any, state: SimulationState) -> Verdict:
            return Verdict("nobody leaves") if name == "a" else super().validate_remove(name, state)

    class Doubling(PauseTracker):
        def pause(self, name: str, turns: int | None, state: SimulationState) -> None:
            super().pause(name, None if turns is None else 2 * turns, state)

    manager = LifecycleManager(Strict(max_agents=4), Doubling())
    assert manager.remove_agent("a", state) is False
    assert manager.pause_agent("a", 3, state) is True
    assert state.auto_resume["a"] == 6
    assert manager.pause_tracker.is_paused("a", state)
    assert vars(manager) == {"validator": manager.validator, "pause_tracker": manager.pause_tracker}


@pytest.mark.parametrize(
    ("method", "parameters", "answer"),
    [
        ("add_agent", ["name", "agent", "initial_state", "state"], "str"),
        ("remove_agent", ["name", "state"], "bool"),
        ("pause_agent", ["name", "auto_resume_turns", "state"], "bool"),
        ("resume_agent", ["name", "state"], "bool"),
        ("get_active_agents", ["state"], "dict[str, Any]"),
        ("process_auto_resume", ["state"], "list[str]"),
    ],
)
def test_the_signatures_are_those_of_the_contract(method: str, parameters: list[str], answer: str) -> None:
    signature = inspect.signature(getattr(LifecycleManager, method))
    assert list(signature.parameters) == ["self", *parameters]
    assert signature.return_annotation == answer


# --- add_agent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NO_NAMES)
def test_add_name_is_non_empty_text(manager: LifecycleManager, state: SimulationState, told: Told, name: Any) -> None:
    before = whole(state)
    assert manager.add_agent(name, Brain(), {}, state) is name
    assert whole(state) == before
    assert refused(told, "add_agent", name).startswith("name must")


@pytest.mark.parametrize("brain", [None, 7, "a brain", Brain, object()])
def test_add_an_invalid_agent_raises_a_validation_error(
    manager: LifecycleManager, state: SimulationState, told: Told, brain: Any
) -> None:
    before = whole(state)
    with pytest.raises(ValidationError, match="agent must be an object with a method `decide`, a function"):
        manager.add_agent("e", brain, {}, state)
    assert whole(state) == before
    assert refused(told, "add_agent", "e").startswith("agent must be")


@pytest.mark.parametrize("first", [None, 7, [("coins", 1)], {"coins": object()}, {1: 2}, {"coins": float("nan")}])
def test_add_initial_state_is_a_valid_dict(manager: LifecycleManager, state: SimulationState, first: Any) -> None:
    before = whole(state)
    with pytest.raises(ValidationError, match="initial_state"):
        manager.add_agent("e", Brain(), first, state)
    assert whole(state) == before


def test_add_initial_state_fits_the_schema_or_every_fault_is_told(manager: LifecycleManager) -> None:
    state = SimulationState(schema=Purse)
    result = manager.try_add_agent("e", None, {"coins": -1, "mood": 3}, state)
    assert [one.field for one in result.faults] == ["agent", "initial_state.coins", "initial_state.mood"]
    assert len(state.agents) == 0
    assert manager.add_agent("e", Brain(), {"coins": 1}, state) == "e"
    assert state.states["e"] == Purse(coins=1)


def test_add_returns_the_resolved_name_which_may_differ(manager: LifecycleManager, state: SimulationState) -> None:
    assert manager.add_agent("e", Brain(), {}, state) == "e"
    assert manager.add_agent("e", Brain(), {}, state) == "e_1"


def test_add_puts_the_agent_into_agents_under_the_resolved_name(
    manager: LifecycleManager, state: SimulationState
) -> None:
    brain, first = Brain(), {"coins": [1]}
    assert manager.add_agent("a", brain, first, state) == "a_1"
    assert state.agents["a_1"] is brain
    assert list(state.agents) == ["a", "b", "c", "d", "a_1"]
    first["coins"].append(2)
    assert state.states["a_1"] == {"coins": [1]}
    assert list(manager.get_active_agents(state)) == ["a", "a_1"]


def test_add_fails_at_twenty_five_agents(manager: LifecycleManager, told: Told) -> None:
    state = SimulationState(agents={f"agent {number}": Brain() for number in range(24)})
    assert manager.try_add_agent("last", Brain(), {}, state)
    told()
    before = whole(state)
    assert manager.add_agent("late", Brain(), {}, state) == "late"
    assert whole(state) == before
    assert refused(told, "add_agent", "late", 0) == "the population is full: 25 of 25 agents"


def test_add_a_taken_name_counts_up_until_it_is_unique(manager: LifecycleManager, state: SimulationState) -> None:
    assert [manager.add_agent("a", Brain(), {}, state) for _ in range(3)] == ["a_1", "a_2", "a_3"]
    assert manager.add_agent("a_1", Brain(), {}, state) == "a_1_1"
    manager.add_agent("b_1", Brain(), {}, state)
    manager.add_agent("b_3", Brain(), {}, state)
    assert [manager.add_agent("b", Brain(), {}, state) for _ in range(2)] == ["b_2", "b_4"]
    manager.remove_agent("a_2", state)
    assert manager.add_agent("a", Brain(), {}, state) == "a_2"


def test_add_a_taken_name_without_room_for_its_number_is_refused(
    manager: LifecycleManager, state: SimulationState
) -> None:
    assert manager.add_agent("x" * 199, Brain(), {}, state) == "x" * 199
    assert "too long for a number behind it" in str(manager.try_add_agent("x" * 199, Brain(), {}, state).reason)


def test_add_logs_an_info_with_the_resolved_name(
    manager: LifecycleManager, state: SimulationState, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    manager.add_agent("a", Brain(), {}, state)
    line = "lifecycle_operation operation=add_agent agent_name=a resolved_name=a_1 turn=7"
    assert caplog.records[0].getMessage() == line
    fields = {"operation": "add_agent", "agent_name": "a", "resolved_name": "a_1", "turn": 7}
    assert told() == [(logging.INFO, OPERATION, fields)]


def test_add_refused_can_be_told_from_success(manager: LifecycleManager, state: SimulationState) -> None:
    added = manager.try_add_agent("a", Brain(), {}, state)
    assert (bool(added), added.added, added.name, added.reason, added.faults) == (True, True, "a_1", None, ())
    full = LifecycleManager(LifecycleValidator(max_agents=5))
    late = full.try_add_agent("a", Brain(), {}, state)
    assert (bool(late), late.name, late.reason) == (False, "a", "the population is full: 5 of 5 agents")
    wrong = manager.try_add_agent("e", 7, {}, state)
    assert (bool(wrong), wrong.name, wrong.reason) == (False, "e", wrong.faults[0].message)


# --- remove_agent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "abcd")
def test_remove_takes_an_agent_out_of_agents_pauses_and_counters(
    manager: LifecycleManager, state: SimulationState, name: str
) -> None:
    assert manager.remove_agent(name, state) is True
    for place in (state.agents, state.states, state.paused_agents, state.auto_resume):
        assert name not in place
    assert len(state.agents) == 3


def test_remove_leaves_nothing_to_a_namesake(manager: LifecycleManager, state: SimulationState) -> None:
    number = state.members["c"].number
    manager.remove_agent("c", state)
    assert manager.add_agent("c", Brain(), {}, state) == "c"
    assert "c" in manager.get_active_agents(state)
    assert state.members["c"].number > number
    assert [manager.process_auto_resume(state) for _ in range(4)] == [["d"], [], [], []]


def test_remove_logs_an_info(manager: LifecycleManager, state: SimulationState, told: Told) -> None:
    manager.remove_agent("c", state)
    fields = {"operation": "remove_agent", "agent_name": "c", "turn": 7}
    assert told() == [(logging.INFO, OPERATION, fields)]


@pytest.mark.parametrize("operation", ["remove_agent", "pause_agent", "resume_agent"])
@pytest.mark.parametrize("name", ["nobody", *NO_NAMES])
def test_remove_pause_and_resume_of_a_non_existent_agent_fail_with_a_warning(
    manager: LifecycleManager, state: SimulationState, told: Told, operation: str, name: Any
) -> None:
    before = whole(state)
    arguments = (name, None, state) if operation == "pause_agent" else (name, state)
    assert getattr(manager, operation)(*arguments) is False
    assert whole(state) == before
    reason = refused(told, operation, name)
    assert reason.startswith("there is no agent 'nobody'" if name == "nobody" else "name must")


# --- pause_agent -------------------------------------------------------------------------------------


def test_pause_adds_the_name_to_the_paused_agents(manager: LifecycleManager, state: SimulationState) -> None:
    assert manager.pause_agent("a", None, state) is True
    assert "a" in state.paused_agents
    assert "a" not in state.auto_resume


@pytest.mark.parametrize("turns", [1, 2, 2**31 - 1])
def test_pause_with_turns_adds_a_counter(manager: LifecycleManager, state: SimulationState, turns: int) -> None:
    assert manager.pause_agent("a", turns, state) is True
    assert "a" in state.paused_agents
    assert state.auto_resume["a"] == turns


@pytest.mark.parametrize("turns", [None, 9])
def test_pause_of_a_paused_agent_fails_and_keeps_its_counter(
    manager: LifecycleManager, state: SimulationState, told: Told, turns: int | None
) -> None:
    before = whole(state)
    assert manager.pause_agent("c", turns, state) is False
    assert whole(state) == before
    assert refused(told, "pause_agent", "c") == "agent 'c' is paused already"


@pytest.mark.parametrize("turns", NO_TERMS)
def test_pause_turns_are_none_or_a_whole_number_from_one(
    manager: LifecycleManager, state: SimulationState, told: Told, turns: Any
) -> None:
    before = whole(state)
    assert manager.pause_agent("a", turns, state) is False
    assert whole(state) == before
    assert refused(told, "pause_agent", "a").startswith("auto_resume_turns must be a whole number from 1 to")


@pytest.mark.parametrize("turns", [None, 2])
def test_pause_logs_an_info_with_its_turns(
    manager: LifecycleManager, state: SimulationState, told: Told, turns: int | None
) -> None:
    manager.pause_agent("a", turns, state)
    fields = {"operation": "pause_agent", "agent_name": "a", "auto_resume_turns": turns, "turn": 7}
    assert told() == [(logging.INFO, OPERATION, fields)]


# --- resume_agent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "bcd")
def test_resume_takes_the_name_out_of_pauses_and_counters(
    manager: LifecycleManager, state: SimulationState, name: str
) -> None:
    assert manager.resume_agent(name, state) is True
    assert name not in state.paused_agents
    assert name not in state.auto_resume
    assert name in manager.get_active_agents(state)


def test_resume_of_an_agent_that_is_not_paused_fails(
    manager: LifecycleManager, state: SimulationState, told: Told
) -> None:
    before = whole(state)
    assert manager.resume_agent("a", state) is False
    assert whole(state) == before
    assert refused(told, "resume_agent", "a") == "agent 'a' is not paused"


def test_resume_logs_an_info(manager: LifecycleManager, state: SimulationState, told: Told) -> None:
    manager.resume_agent("c", state)
    fields = {"operation": "resume_agent", "agent_name": "c", "turn": 7}
    assert told() == [(logging.INFO, OPERATION, fields)]


# --- get_active_agents -------------------------------------------------------------------------------


def test_active_agents_are_a_dict_of_those_not_paused(manager: LifecycleManager, state: SimulationState) -> None:
    manager.resume_agent("c", state)
    active = manager.get_active_agents(state)
    assert active == {name: agent for name, agent in state.agents.items() if name not in state.paused_agents}
    assert (type(active), list(active)) == (dict, ["a", "c"])
    assert manager.get_active_agents(SimulationState()) == {}


def test_active_agents_read_and_nothing_else(manager: LifecycleManager, state: SimulationState, told: Told) -> None:
    before = whole(state)
    manager.get_active_agents(state).clear()
    assert whole(state) == before
    assert told() == []


# --- process_auto_resume -----------------------------------------------------------------------------


def test_auto_resume_takes_one_from_each_counter_and_resumes_at_zero(
    manager: LifecycleManager, state: SimulationState
) -> None:
    assert manager.process_auto_resume(state) == ["d"]
    assert (state.paused_agents, state.auto_resume) == ({"b", "c"}, {"c": 2})
    assert [manager.process_auto_resume(state) for _ in range(3)] == [[], ["c"], []]
    assert (state.paused_agents, state.auto_resume) == ({"b"}, {})
    assert state.turn == 7


def test_auto_resume_names_those_due_together_in_the_order_of_joining(manager: LifecycleManager) -> None:
    state = SimulationState(agents={name: Brain() for name in "cab"})
    for name in "bca":
        manager.pause_agent(name, 1, state)
    assert manager.process_auto_resume(state) == ["c", "a", "b"]


def test_auto_resume_logs_an_info_for_each(manager: LifecycleManager, state: SimulationState, told: Told) -> None:
    manager.process_auto_resume(state)
    fields = {"operation": "resume_agent", "agent_name": "d", "automatic": True, "turn": 7}
    assert told() == [(logging.INFO, OPERATION, fields)]


@pytest.mark.anyio
async def test_auto_resume_is_called_once_at_the_start_of_a_turn() -> None:
    """A pause of n that is asked for in turn t is asked again in turn t + n."""
    asked: list[int] = []

    def brain(view: Any) -> None:
        asked.append(view.turn)
        if view.turn == 1:
            view.pause_agent(auto_resume_turns=2)

    async with SimulationOrchestrator() as orchestrator:
        orchestrator.add_agent("a", brain, {})
        await orchestrator.run(4)
    assert asked == [1, 3, 4]


# --- invariants --------------------------------------------------------------------------------------


def test_invariant_1_names_are_unique(manager: LifecycleManager, state: SimulationState) -> None:
    assert manager.check_invariants(state)
    state.members["z"] = state.members["a"]
    assert str(manager.check_invariants(state).reason).startswith("rule 1: every agent has a name and a number of its")
    with pytest.raises(AttributeError):
        state.members["a"].name = "b"  # type: ignore[misc]  # that it is refused is the point


def test_invariant_2_only_agents_are_paused(manager: LifecycleManager, state: SimulationState) -> None:
    state.paused_agents.add("ghost")
    assert manager.check_invariants(state).reason == "rule 2: only agents are paused; 'ghost' is none"


def test_invariant_3_only_the_paused_have_counters(manager: LifecycleManager, state: SimulationState) -> None:
    state.auto_resume["a"] = 2
    assert manager.check_invariants(state).reason == "rule 3: only paused agents have a counter; 'a' is not paused"


def test_invariant_4_there_are_no_more_than_the_cap(state: SimulationState) -> None:
    manager = LifecycleManager(LifecycleValidator(max_agents=4))
    assert manager.check_invariants(state)
    state.agents["e"] = Brain()
    assert manager.check_invariants(state).reason == "rule 4: there are at most 4 agents; there are 5"


@pytest.mark.parametrize("turns", NO_TERMS)
def test_invariant_5_counters_are_positive(manager: LifecycleManager, state: SimulationState, turns: Any) -> None:
    state.auto_resume["c"] = turns
    reason = "rule 5: a counter is a whole number from 1; that of 'c' is not"
    assert manager.check_invariants(state).reason == reason


def test_all_broken_invariants_are_told_at_once(manager: LifecycleManager, state: SimulationState) -> None:
    state.paused_agents.add("ghost")
    state.auto_resume["a"] = 0
    assert str(manager.check_invariants(state).reason).count("rule ") == 3


@pytest.mark.parametrize("cap", [0, -1, 2.5, "25", None, True])
def test_the_cap_is_a_whole_number_and_25_by_default(cap: Any) -> None:
    assert LifecycleManager().validator.max_agents == SimulationSettings().max_agents == 25
    with pytest.raises(ValidationError, match="max_agents must be a whole number from 1"):
        LifecycleValidator(max_agents=cap)


# --- the state ---------------------------------------------------------------------------------------


def test_paused_agents_and_auto_resume_are_a_plain_set_and_a_plain_dict(state: SimulationState) -> None:
    assert (type(state.paused_agents), type(state.auto_resume)) == (set, dict)
    assert state.agents == dict(state.agents.items())


# --- the orchestrator --------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_orchestrator_delegates_to_its_lifecycle_manager(state: SimulationState) -> None:
    manager = LifecycleManager(LifecycleValidator(max_agents=6))
    async with SimulationOrchestrator(state, lifecycle_manager=manager) as orchestrator:
        assert (orchestrator.lifecycle_manager, orchestrator.state) == (manager, state)
        assert orchestrator.add_agent("a", Brain(), {"coins": 1}) == "a_1"
        assert orchestrator.try_add_agent("e", Brain(), {})
        assert orchestrator.add_agent("late", Brain(), {}) == "late"
        assert "late" not in state.agents
        assert orchestrator.remove_agent("a_1") is True
        assert orchestrator.remove_agent("a_1") is False
        assert orchestrator.pause_agent("a") is True
        assert "a" not in state.auto_resume
        assert orchestrator.resume_agent("a") is True
        assert orchestrator.pause_agent("a", auto_resume_turns=2) is True
        assert state.auto_resume["a"] == 2
        with pytest.raises(ValidationError, match="agent must be"):
            orchestrator.add_agent("f", 7, {})


@pytest.mark.anyio
async def test_the_orchestrator_refuses_operations_in_the_middle_of_a_turn() -> None:
    refusals: list[str] = []

    def brain(view: Any) -> None:
        for act in (
            lambda: orchestrator.add_agent("b", brain, {}),
            lambda: orchestrator.remove_agent(view.name),
            lambda: orchestrator.pause_agent(view.name),
            lambda: orchestrator.resume_agent(view.name),
        ):
            with pytest.raises(InvalidOperationError, match="in the middle of a turn") as raised:
                act()
            refusals.append(str(raised.value))

    async with SimulationOrchestrator() as orchestrator:
        orchestrator.add_agent("a", brain, {})
        await orchestrator.play_turn()
    assert len(refusals) == 4


# --- performance -------------------------------------------------------------------------------------


def timed(act: Callable[[], Any], count: int = 200) -> float:
    """The median, in microseconds: a shared machine is slow now and then."""
    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        act()
        times.append((time.perf_counter_ns() - began) / 1000)
    return sorted(times)[count // 2]


def test_every_operation_takes_less_than_a_millisecond_with_25_agents(manager: LifecycleManager) -> None:
    state = SimulationState(agents={f"agent {number}": Brain() for number in range(24)})

    def all_of_them() -> None:
        name = manager.add_agent("agent 1", Brain(), {"coins": 1}, state)
        manager.pause_agent(name, 1, state)
        manager.resume_agent(name, state)
        manager.pause_agent(name, 3, state)
        manager.get_active_agents(state)
        manager.process_auto_resume(state)
        manager.remove_agent(name, state)

    assert timed(all_of_them) < 1000


def test_add_costs_no_more_with_ten_thousand_collisions() -> None:
    manager = LifecycleManager(LifecycleValidator(max_agents=20_000))

    def population(count: int) -> SimulationState:
        state = SimulationState()
        for _ in range(count):
            manager.add_agent("crow", Brain(), {}, state)
        return state

    def add_and_remove(state: SimulationState) -> Callable[[], Any]:
        return lambda: manager.remove_agent(manager.add_agent("crow", Brain(), {}, state), state)

    few, many = population(1), population(10_000)
    assert timed(add_and_remove(many)) < max(10 * timed(add_and_remove(few)), 100)
    for number in range(1, 9_999, 3):
        manager.remove_agent(f"crow_{number}", many)
    assert manager.add_agent("crow", Brain(), {}, many) == "crow_1"
    assert timed(add_and_remove(many)) < max(10 * timed(add_and_remove(few)), 100)
