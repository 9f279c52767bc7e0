"""Any row of operations, against a population that is kept in the plainest way: a dict, a set and a dict."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ostler.errors import OstlerError
from ostler.simulation.manager import LifecycleManager
from ostler.simulation.members import Member
from ostler.simulation.state import SimulationState
from ostler.simulation.telling import SimulationLog
from ostler.simulation.validator import LifecycleValidator


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
        resolved, number = name, 0
        while resolved in self.agents:
            number += 1
            resolved = f"{name}_{number}"
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
#: A place in the population stands for whoever is there; most steps should be about somebody.
PLACES = st.integers(100, 130)
SOMEBODY = st.one_of(PLACES, PLACES, PLACES, NAMES)
TURNS = st.one_of(st.integers(1, 4), st.none(), st.integers(1, 4), st.sampled_from([0, -1, True, 1.0, "2", 2**31]))


class Population(RuleBasedStateMachine):
    @initialize(cap=st.sampled_from([1, 2, 5, 25, 1_000]))
    def begin(self, cap: int) -> None:
        self.naive = Naive(cap)
        self.state = SimulationState()
        quiet = logging.getLogger("ostler.simulation.machine")
        quiet.setLevel(logging.CRITICAL)  # refusals come by the thousand
        self.manager = LifecycleManager(LifecycleValidator(max_agents=cap), log=SimulationLog(quiet))
        self.taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.numbers: dict[int, Member] = {}

    # --- the operations -------------------------------------------------------------------------

    @rule(name=NAMES)
    def add(self, name: Any) -> None:
        brain, first = Brain(), {"coins": len(self.numbers)}
        expected = self.naive.add(name, brain, first)
        outcome = self.manager.try_add_agent(name, brain, first, self.state)
        assert (outcome.added, outcome.name) == (expected is not None, name if expected is None else expected)
        assert (outcome.reason is None) == outcome.added
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

    # --- what was handed out --------------------------------------------------------------------

    @rule()
    def take_the_active(self) -> None:
        self.taken.append((self.manager.get_active_agents(self.state), self.naive.active()))

    @rule()
    def look_at_what_was_taken(self) -> None:
        for found, expected in self.taken:
            assert (found, list(found)) == (expected, list(expected))
        self.taken.clear()

    # --- writing through the sights -------------------------------------------------------------

    @rule(name=st.one_of(PLACES, FEW))
    def write_an_agent(self, name: Any) -> None:
        name = self.who(name)
        self.take_the_active()
        if isinstance(name, str) and (name in self.naive.agents or len(self.naive.agents) < self.naive.cap):
            self.naive.agents[name] = self.state.agents[name] = Brain()
            self.naive.states.setdefault(name, {})
            self.note_numbers()

    @rule(name=st.one_of(PLACES, FEW))
    def delete_an_agent(self, name: Any) -> None:
        name = self.who(name)
        assert (self.state.agents.pop(name, None) is not None) is self.naive.remove(name)

    @rule(name=st.one_of(PLACES, FEW))
    def write_a_pause(self, name: Any) -> None:
        name = self.who(name)
        if name in self.naive.agents:
            self.state.paused_agents.add(name)
            self.naive.paused.add(name)
        else:
            with pytest.raises(OstlerError):
                self.state.paused_agents.add(name)

    @rule(name=st.one_of(PLACES, FEW))
    def delete_a_pause(self, name: Any) -> None:
        name = self.who(name)
        self.state.paused_agents.discard(name)
        self.naive.resume(name)

    @rule(name=st.one_of(PLACES, FEW), turns=TURNS)
    def write_a_counter(self, name: Any, turns: Any) -> None:
        name = self.who(name)
        if name in self.naive.paused and good_turns(turns):
            self.naive.counters[name] = self.state.auto_resume[name] = turns
        else:
            with pytest.raises(OstlerError):
                self.state.auto_resume[name] = turns

    @rule(name=st.one_of(PLACES, FEW))
    def delete_a_counter(self, name: Any) -> None:
        name = self.who(name)
        assert self.state.auto_resume.pop(name, None) == self.naive.counters.pop(name, None)

    @rule(names=st.sets(FEW, max_size=3))
    def replace_the_pauses(self, names: set[str]) -> None:
        if names <= self.naive.agents.keys():
            self.state.paused_agents = names
            for name in self.naive.paused - names:
                self.naive.resume(name)
            self.naive.paused |= names
        else:
            with pytest.raises(OstlerError):
                self.state.paused_agents = names

    # --- a restart ------------------------------------------------------------------------------

    @rule()
    def restart_from_the_plain_fields(self) -> None:
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
        assert set(state.paused_agents) == naive.paused
        assert dict(state.auto_resume) == naive.counters
        assert state.active_count == len(naive.active()) == len(state.active_members())

    @invariant()
    def the_five_rules_hold(self) -> None:
        result = self.manager.check_invariants(self.state)
        assert result, result.errors


def test_a_population_behaves_as_a_naive_one_and_keeps_its_rules() -> None:
    run_state_machine_as_test(
        Population,
        settings=settings(
            max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
