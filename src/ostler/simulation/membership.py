"""`LifecycleManager`: who joins, leaves, pauses and resumes (seed 000), with its validator and its pause tracker."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ostler.errors import ValidationError
from ostler.model.text import MAX_NAME
from ostler.model.types import MAX_COUNT
from ostler.model.validation import Fault, fault, shown
from ostler.simulation.brains import brain_faults
from ostler.simulation.state import SimulationState, label_faults, term_faults
from ostler.telemetry.log import text

DEFAULT_MAX_AGENTS = 25
_log = logging.getLogger("ostler.simulation")


def log_event(level: int, event: str, **fields: Any) -> None:
    """One record of the log: `record.event` and `record.fields` for programs, a line for people."""
    if _log.isEnabledFor(level):
        line = " ".join(f"{name}={text(value)}" for name, value in fields.items())
        _log.log(level, "%s %s", event, line, extra={"event": event, "fields": fields})


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an operation is allowed; true when it is, else `reason` says why not."""

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None


_ALLOWED = Verdict()


class LifecycleValidator:
    """Reads the state and changes nothing. Override a method to forbid more."""

    def __init__(self, max_agents: int = DEFAULT_MAX_AGENTS) -> None:
        if type(max_agents) is not int or not 1 <= max_agents <= MAX_COUNT:
            raise fault("max_agents", f"must be a whole number from 1 to {MAX_COUNT}", max_agents)
        self.max_agents = max_agents

    def validate_add(self, name: Any, state: SimulationState) -> Verdict:
        if reason := _first(label_faults("name", name)):
            return Verdict(reason)
        count = len(state.members)
        if count >= self.max_agents:
            return Verdict(f"the population is full: {count} of {self.max_agents} agents")
        if name in state.members and len(state.free_name(name)) > MAX_NAME:
            return Verdict(f"the name is taken, and too long for a number behind it ({MAX_NAME} characters in all)")
        return _ALLOWED

    def validate_remove(self, name: Any, state: SimulationState) -> Verdict:
        return _takes_part(name, state)

    def validate_pause(self, name: Any, auto_resume_turns: Any, state: SimulationState) -> Verdict:
        verdict = _takes_part(name, state)
        if not verdict:
            return verdict
        if name in state.paused_agents:
            return Verdict(f"agent {shown(name)} is paused already")
        if auto_resume_turns is not None and (reason := _first(term_faults("auto_resume_turns", auto_resume_turns))):
            return Verdict(reason)
        return _ALLOWED

    def validate_resume(self, name: Any, state: SimulationState) -> Verdict:
        verdict = _takes_part(name, state)
        if verdict and name not in state.paused_agents:
            return Verdict(f"agent {shown(name)} is not paused")
        return verdict


def _takes_part(name: Any, state: SimulationState) -> Verdict:
    """What is no text names no agent."""
    if isinstance(name, str) and name in state.members:
        return _ALLOWED
    return Verdict(_first(label_faults("name", name)) or f"there is no agent {shown(name)}")


def _first(faults: Iterator[Fault]) -> str | None:
    fault = next(faults, None)
    return None if fault is None else fault.message


class PauseTracker:
    """Writes the pauses of the state that it is given and keeps none itself. Override it to count differently."""

    def pause(self, name: str, turns: int | None, state: SimulationState) -> None:
        state.paused_agents.add(name)
        if turns is not None:
            state.auto_resume[name] = turns

    def resume(self, name: str, state: SimulationState) -> None:
        state.paused_agents.discard(name)
        state.auto_resume.pop(name, None)

    def is_paused(self, name: str, state: SimulationState) -> bool:
        return name in state.paused_agents

    def count_down(self, state: SimulationState) -> list[str]:
        """One turn less for every counter; the agents that resume now, in the order of joining."""
        counters, members = state.auto_resume, state.members
        due = [name for name, left in counters.items() if left <= 1]
        for name in counters:
            counters[name] -= 1
        due.sort(key=lambda name: members[name].number if name in members else 0)
        for name in due:
            self.resume(name, state)
        return due


@dataclass(frozen=True, kw_only=True, slots=True)
class AddResult:
    """What became of an addition; true when the agent takes part."""

    added: bool
    #: The name that it got; where it was not added, the name as given.
    name: str
    reason: str | None = None
    #: Everything that is wrong with the brain or the first state.
    faults: tuple[Fault, ...] = ()

    def __bool__(self) -> bool:
        return self.added


class LifecycleManager:
    """Keeps nothing. Each method is one step under `state.lock`: it keeps all rules, or changes nothing."""

    def __init__(self, validator: LifecycleValidator | None = None, pause_tracker: PauseTracker | None = None) -> None:
        self.validator = validator or LifecycleValidator()
        self.pause_tracker = pause_tracker or PauseTracker()

    def add_agent(self, name: str, agent: Any, initial_state: Mapping[str, Any], state: SimulationState) -> str:
        """The name under which the agent takes part; refused by a rule, the name as given (see `try_add_agent`).

        Raises `ValidationError` with every fault of the brain and of the first state.
        """
        result = self.try_add_agent(name, agent, initial_state, state)
        if result.faults:
            raise ValidationError(result.faults)
        return result.name

    def try_add_agent(
        self, name: str, agent: Any, initial_state: Mapping[str, Any], state: SimulationState
    ) -> AddResult:
        """The same; never raises, and says why an agent was not added."""
        with state.lock:
            verdict = self.validator.validate_add(name, state)
            if not verdict:
                return self._not_added(name, verdict.reason, state)
            made, faults = state.form.make(initial_state)
            faults = (*brain_faults(agent), *faults)
            if faults:
                return self._not_added(name, "; ".join(fault.message for fault in faults), state, faults)
            resolved = state.free_name(name)
            state.admit(resolved, agent, made)
            self._done("add_agent", name, state, resolved_name=resolved)
            return AddResult(added=True, name=resolved)

    def remove_agent(self, name: str, state: SimulationState) -> bool:
        with state.lock:
            if not self._allowed("remove_agent", name, self.validator.validate_remove(name, state), state):
                return False
            state.dismiss(name)
            self._done("remove_agent", name, state)
            return True

    def pause_agent(self, name: str, auto_resume_turns: int | None, state: SimulationState) -> bool:
        """The agent is not asked until it is resumed, or until `process_auto_resume` was called so many times."""
        with state.lock:
            verdict = self.validator.validate_pause(name, auto_resume_turns, state)
            if not self._allowed("pause_agent", name, verdict, state):
                return False
            self.pause_tracker.pause(name, auto_resume_turns, state)
            self._done("pause_agent", name, state, auto_resume_turns=auto_resume_turns)
            return True

    def resume_agent(self, name: str, state: SimulationState) -> bool:
        with state.lock:
            if not self._allowed("resume_agent", name, self.validator.validate_resume(name, state), state):
                return False
            self.pause_tracker.resume(name, state)
            self._done("resume_agent", name, state)
            return True

    def get_active_agents(self, state: SimulationState) -> dict[str, Any]:
        """The agents that are not paused, in the order of joining."""
        with state.lock:
            return {member.name: member.agent for member in state.active_members()}

    def process_auto_resume(self, state: SimulationState) -> list[str]:
        """Called once at the start of a turn: one turn less for every counter; the agents that resume now."""
        if not state.auto_resume:
            return []
        with state.lock:
            resumed = self.pause_tracker.count_down(state)
            for name in resumed:
                self._done("resume_agent", name, state, automatic=True)
            return resumed

    def check_invariants(self, state: SimulationState) -> Verdict:
        """Whether the five rules hold; the reason names each rule that is broken, and by whom."""
        with state.lock:
            broken = list(_broken_rules(state, self.validator.max_agents))
        return Verdict("; ".join(broken) or None)

    def log_refusal(self, operation: str, name: Any, reason: str | None, state: SimulationState) -> None:
        fields = {"operation": operation, "agent_name": name, "reason": reason, "turn": state.turn}
        log_event(logging.WARNING, "lifecycle_validation_failed", **fields)

    def _done(self, operation: str, name: str, state: SimulationState, **more: Any) -> None:
        log_event(logging.INFO, "lifecycle_operation", operation=operation, agent_name=name, **more, turn=state.turn)

    def _allowed(self, operation: str, name: str, verdict: Verdict, state: SimulationState) -> bool:
        if not verdict:
            self.log_refusal(operation, name, verdict.reason, state)
        return bool(verdict)

    def _not_added(
        self, name: str, reason: str | None, state: SimulationState, faults: tuple[Fault, ...] = ()
    ) -> AddResult:
        self.log_refusal("add_agent", name, reason, state)
        return AddResult(added=False, name=name, reason=reason, faults=faults)


def _broken_rules(state: SimulationState, max_agents: int) -> Iterator[str]:
    misnamed = [name for name, member in state.members.items() if member.name != name]
    numbers = {member.number for member in state.members.values()}
    if misnamed or len(numbers) != len(state.members):
        yield f"rule 1: every agent has a name and a number of its own; {_listed(misnamed) or 'a number is used twice'}"
    if strangers := state.paused_agents - state.members.keys():
        yield f"rule 2: only agents are paused; {_listed(strangers)} is none"
    if strangers := state.auto_resume.keys() - state.paused_agents:
        yield f"rule 3: only paused agents have a counter; {_listed(strangers)} is not paused"
    if len(state.members) > max_agents:
        yield f"rule 4: there are at most {max_agents} agents; there are {len(state.members)}"
    if wrong := [name for name, turns in state.auto_resume.items() if any(term_faults("", turns))]:
        yield f"rule 5: a counter is a whole number from 1; that of {_listed(wrong)} is not"


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(shown, names))[:5])
