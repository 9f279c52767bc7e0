"""The five rules under any row of operations: against a naive population, and from several threads."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ostler.simulation import LifecycleManager, LifecycleValidator, Member, SimulationState


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Refusals come by the thousand."""
    logger = logging.getLogger("ostler.simulation")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


class Naive:
    """The contract word for word; slow, and obviously right."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.agents: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.paused: set[str] = set()
        self.counters: dict[str, int] = {}

    def add(self, name: Any, agent: Any, first: Any) -> str | None:
        if not good_name(name) or len(self.agents) >= self.cap:
            return None
        resolved = name if name not in self.agents else counted_up(name, self.agents)
        self.agents[resolved], self.states[resolved] = agent, first
        return str(resolved)

    def remove(self, name: Any) -> bool:
        if not good_name(name) or name not in self.agents:
            return False
        del self.agents[name], self.states[name]
        self.paused.discard(name)
        self.counters.pop(name, None)
        return True

    def pause(self, name: Any, turns: Any) -> bool:
        known = good_name(name) and name in self.agents and name not in self.paused
        if not known or not (turns is None or good_turns(turns)):
            return False
        self.paused.add(name)
        if turns is not None:
            self.counters[name] = turns
        return True

    def resume(self, name: Any) -> bool:
        if not good_name(name) or name not in self.paused:
            return False
        self.paused.remove(name)
        self.counters.pop(name, None)
        return True

    def active(self) -> dict[str, Any]:
        return {name: agent for name, agent in self.agents.items() if name not in self.paused}

    def count_down(self) -> list[str]:
        self.counters = {name: left - 1 for name, left in self.counters.items()}
        due = [name for name in self.agents if self.counters.get(name) == 0]
        for name in due:
            self.resume(name)
        return due


def counted_up(name: str, taken: Any) -> str:
    """The rule as it is written down: one number after the other."""
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def good_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and name == name.strip()


def good_turns(turns: Any) -> bool:
    return type(turns) is int and 1 <= turns < 2**31


class Brain:
    def decide(self, _view: Any) -> None:
        """Only who it is matters here."""


FEW = st.sampled_from(["a", "b", "a_1", "a_2", "a_3", "b_1", "a_1_1", "a_01"])
BAD = st.sampled_from(["", " ", None, 3, "a\n", " a", "x" * 201])
NAMES = st.one_of(FEW, FEW, FEW, FEW, BAD)
#: A place in the population stands for whoever is there; most steps should be about an agent.
PLACES = st.integers(100, 130)
SOMEBODY = st.one_of(PLACES, PLACES, PLACES, NAMES)
TURNS = st.one_of(st.integers(1, 4), st.none(), st.integers(1, 4), st.sampled_from([0, -1, True, 1.0, "2", 2**31]))


class Population(RuleBasedStateMachine):
    @initialize(cap=st.sampled_from([1, 2, 5, 25, 1_000]))
    def begin(self, cap: int) -> None:
        self.naive = Naive(cap)
        self.state = SimulationState()
        self.manager = LifecycleManager(LifecycleValidator(max_agents=cap))
        self.numbers: dict[int, Member] = {}

    @rule(name=NAMES)
    def add(self, name: Any) -> None:
        brain, first = Brain(), {"coins": len(self.numbers)}
        expected = self.naive.add(name, brain, first)
        result = self.manager.try_add_agent(name, brain, first, self.state)
        assert (result.added, result.name) == (expected is not None, name if expected is None else expected)
        assert (result.reason is None) == result.added
        self.note_numbers()

    @rule(name=FEW, count=st.integers(1, 6))
    def add_several_of_one_name(self, name: str, count: int) -> None:
        for _ in range(count):
            brain = Brain()
            expected = self.naive.add(name, brain, {})
            assert self.manager.add_agent(name, brain, {}, self.state) == (expected or name)
        self.note_numbers()

    def who(self, drawn: Any) -> Any:
        names = list(self.naive.agents)
        return names[drawn % len(names)] if names and isinstance(drawn, int) and drawn >= 100 else drawn

    @rule(name=SOMEBODY)
    def remove(self, name: Any) -> None:
        name = self.who(name)
        assert self.manager.remove_agent(name, self.state) is self.naive.remove(name)

    @rule(name=SOMEBODY, turns=TURNS)
    def pause(self, name: Any, turns: Any) -> None:
        name = self.who(name)
        assert self.manager.pause_agent(name, turns, self.state) is self.naive.pause(name, turns)

    @rule(turns=st.integers(1, 3), backwards=st.booleans())
    def pause_everybody(self, turns: int, backwards: bool) -> None:
        active = self.manager.get_active_agents(self.state)
        for name in reversed(active) if backwards else active:
            self.pause(name, turns)

    @rule(name=SOMEBODY)
    def resume(self, name: Any) -> None:
        name = self.who(name)
        assert self.manager.resume_agent(name, self.state) is self.naive.resume(name)

    @rule(count=st.integers(1, 4))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.state.turn += 1
            assert self.manager.process_auto_resume(self.state) == self.naive.count_down()

    # --- writing through the mappings -----------------------------------------------------------

    @rule(name=st.one_of(PLACES, FEW))
    def write_an_agent(self, name: Any) -> None:
        name = self.who(name)
        if isinstance(name, str) and (name in self.naive.agents or len(self.naive.agents) < self.naive.cap):
            self.naive.agents[name] = self.state.agents[name] = Brain()
            self.naive.states.setdefault(name, {})
            self.note_numbers()

    @rule(name=st.one_of(PLACES, FEW))
    def delete_an_agent(self, name: Any) -> None:
        name = self.who(name)
        assert (self.state.agents.pop(name, None) is not None) is self.naive.remove(name)

    @rule()
    def begin_again_from_the_plain_fields(self) -> None:
        kept = dict(self.state.states)
        self.state = SimulationState(
            agents=dict(self.state.agents),
            paused_agents=list(self.state.paused_agents),
            auto_resume=dict(self.state.auto_resume),
            turn=self.state.turn,
        )
        for name, one in kept.items():
            self.state.states[name] = one
        self.numbers.clear()
        self.note_numbers()

    # --- what always holds ----------------------------------------------------------------------

    def note_numbers(self) -> None:
        """A number is given once, and never again after its agent left."""
        for member in self.state.members.values():
            assert self.numbers.setdefault(member.number, member) is member
        assert max(self.numbers, default=0) == self.state.last_number

    @invariant()
    def both_are_the_same(self) -> None:
        state, naive = self.state, self.naive
        assert list(state.agents.items()) == list(naive.agents.items())
        assert list(state.states.items()) == list(naive.states.items())
        assert state.paused_agents == naive.paused
        assert state.auto_resume == naive.counters
        active = self.manager.get_active_agents(state)
        assert (active, list(active)) == (naive.active(), list(naive.active()))

    @invariant()
    def the_five_rules_hold(self) -> None:
        verdict = self.manager.check_invariants(self.state)
        assert verdict, verdict.reason


def test_a_population_behaves_as_a_naive_one_and_keeps_its_rules() -> None:
    run_state_machine_as_test(
        Population,
        settings=settings(
            max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )


def _disturb(seed: int, manager: LifecycleManager, state: SimulationState, steps: int, broken: list[str]) -> None:
    chance = random.Random(seed)
    for _ in range(steps):
        name = chance.choice("abcdef") + chance.choice(["", "_1", "_2"])
        match chance.randrange(6):
            case 0 | 1:
                manager.try_add_agent(name, Brain(), {"by": seed}, state)
            case 2:
                manager.remove_agent(name, state)
            case 3:
                manager.pause_agent(name, chance.choice([None, 1, 2, 3, 0]), state)
            case 4:
                manager.resume_agent(name, state)
            case _:
                manager.process_auto_resume(state)
                manager.get_active_agents(state)
        verdict = manager.check_invariants(state)
        if not verdict:
            broken.append(str(verdict.reason))


def _in_threads(steps: int, seeds: range) -> None:
    manager, state = LifecycleManager(LifecycleValidator(max_agents=9)), SimulationState()
    broken: list[str] = []
    threads = [threading.Thread(target=_disturb, args=(seed, manager, state, steps, broken)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not broken
    assert manager.check_invariants(state)


def test_the_rules_hold_when_several_threads_change_one_population() -> None:
    for first in range(0, 40, 8):
        _in_threads(400, range(first, first + 8))


@pytest.mark.torture
def test_the_rules_hold_when_many_threads_change_one_population_for_long() -> None:
    for first in range(0, 1600, 16):
        _in_threads(3000, range(first, first + 16))


# --- names -------------------------------------------------------------------------------------------

_SUFFIX = st.one_of(st.integers(0, 7).map(str), st.sampled_from(["01", "1_1", "²", "x", "", "-1", "9" * 15, "9" * 16]))
_NAMES = st.one_of(
    st.sampled_from(["a", "b", "a_", "_a", "_"]), st.tuples(st.sampled_from("ab"), _SUFFIX).map("_".join)
)


@settings(max_examples=200)
@given(st.lists(_NAMES, max_size=60))
def test_the_lowest_free_number_is_the_one_that_counting_up_would_find(names: list[str]) -> None:
    state = SimulationState()
    for name in names:  # a name that is there leaves, one that is not joins
        if name in state.members:
            state.dismiss(name)
        else:
            state.admit(name, Brain(), {})
        for base in ("a", "b", "a_1"):
            expected = counted_up(base, state.members) if base in state.members else base
            assert state.free_name(base) == expected


def test_ten_thousand_agents_of_one_name_join_without_counting_up_each_time() -> None:
    class Counted(dict[str, Member]):
        looked = 0

        def __contains__(self, name: object) -> bool:
            self.looked += 1
            return super().__contains__(name)

    state, manager = SimulationState(), LifecycleManager(LifecycleValidator(max_agents=20_000))
    state.members = counted = Counted()
    for _ in range(10_000):
        manager.add_agent("a", Brain(), {}, state)
    assert counted.looked < 100_000
