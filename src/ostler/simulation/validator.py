"""Whether an operation may be done: a yes, or a no with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostler.errors import ValidationError
from ostler.model import Fault, shown
from ostler.model.record import MAX_COUNT
from ostler.model.text import MAX_NAME
from ostler.simulation.book import label_faults, turns_faults
from ostler.simulation.state import SimulationState

DEFAULT_MAX_AGENTS = 25


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of the validator; true when the operation may be done."""

    reason: str | None = None

    @property
    def is_valid(self) -> bool:
        return self.reason is None

    def __bool__(self) -> bool:
        return self.reason is None


_YES = Verdict()


class LifecycleValidator:
    """Looks and changes nothing. Override a method to forbid more."""

    def __init__(self, max_agents: Any = DEFAULT_MAX_AGENTS) -> None:
        if isinstance(max_agents, bool) or not isinstance(max_agents, int) or not 1 <= max_agents <= MAX_COUNT:
            bound = f"must be a whole number from 1 to {MAX_COUNT}"
            raise ValidationError([Fault(field="max_agents", bound=bound, value=shown(max_agents))])
        self.max_agents: int = max_agents

    def validate_add(self, name: Any, state: SimulationState) -> Verdict:
        wrong = _name_reason(name)
        if wrong is not None:
            return Verdict(wrong)
        if len(state.members) >= self.max_agents:
            return Verdict(f"the population is full: {len(state.members)} of {self.max_agents} agents")
        if name in state.members and len(state.free_name(name)) > MAX_NAME:
            return Verdict(f"name is taken, and too long for a number behind it ({MAX_NAME} characters in all)")
        return _YES

    def validate_remove(self, name: Any, state: SimulationState) -> Verdict:
        return _known(name, state)

    def validate_pause(self, name: Any, auto_resume_turns: Any, state: SimulationState) -> Verdict:
        known = _known(name, state)
        if not known:
            return known
        if name in state.paused:
            return Verdict(f"agent {shown(name)} is paused already")
        if auto_resume_turns is not None:
            for fault in turns_faults("auto_resume_turns", auto_resume_turns):
                return Verdict(fault.message)
        return _YES

    def validate_resume(self, name: Any, state: SimulationState) -> Verdict:
        known = _known(name, state)
        if known and name not in state.paused:
            return Verdict(f"agent {shown(name)} is not paused")
        return known


def _known(name: Any, state: SimulationState) -> Verdict:
    if isinstance(name, str) and name in state.members:
        return _YES
    return Verdict(_name_reason(name) or f"there is no agent {shown(name)}")


def _name_reason(name: Any) -> str | None:
    fault = next(label_faults("name", name), None)
    return None if fault is None else fault.message
