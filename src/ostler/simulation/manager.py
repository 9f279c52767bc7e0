"""`LifecycleManager`: who joins, leaves, pauses and goes on. Every operation either holds all rules or does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostler.errors import ValidationError
from ostler.model import Fault, ValidationResult
from ostler.simulation.brains import brain_faults
from ostler.simulation.invariants import broken_invariants
from ostler.simulation.pauses import PauseTracker
from ostler.simulation.requests import Operation
from ostler.simulation.state import SimulationState
from ostler.simulation.telling import SimulationLog
from ostler.simulation.validator import LifecycleValidator, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class AddOutcome:
    """What came of an addition; true when the agent is in."""

    added: bool
    #: The name it has now; when it is not in, the one that was asked for.
    name: str
    reason: str | None = None
    #: What was wrong with the brain or its first state, all of it.
    faults: tuple[Fault, ...] = ()

    def __bool__(self) -> bool:
        return self.added


class LifecycleManager:
    """Keeps nothing: whatever it knows stands in the state that it is given."""

    def __init__(
        self,
        validator: LifecycleValidator | None = None,
        pause_tracker: PauseTracker | None = None,
        *,
        log: SimulationLog | None = None,
    ) -> None:
        self.validator = validator or LifecycleValidator()
        self.pause_tracker = pause_tracker or PauseTracker()
        self.log = log or SimulationLog()

    def add_agent(self, name: str, agent: Any, initial_state: Mapping[str, Any], state: SimulationState) -> str:
        """The name under which it is in. Refused by the rules, it is not, and the answer is the name that was asked
        for; `try_add_agent` tells the two apart. A brain that is none or a state that does not fit raises.
        """
        outcome = self.try_add_agent(name, agent, initial_state, state)
        if outcome.faults:
            raise ValidationError(outcome.faults)
        return outcome.name

    def try_add_agent(
        self, name: str, agent: Any, initial_state: Mapping[str, Any], state: SimulationState
    ) -> AddOutcome:
        """The same, and says whether it is in, under which name, and if not, why not. Raises nothing of its own."""
        verdict = self.validator.validate_add(name, state)
        if not verdict:
            return self._not_added(name, verdict.reason, state)
        made, faults = state.form.make(initial_state)
        faults = (*brain_faults(agent), *faults)
        if faults:
            return self._not_added(name, "; ".join(fault.message for fault in faults), state, faults)
        resolved = state.free_name(name)
        state.admit(resolved, agent, made)
        self.log.info(
            "lifecycle_operation",
            operation=Operation.ADD.value,
            agent_name=name,
            resolved_name=resolved,
            turn=state.turn,
        )
        return AddOutcome(added=True, name=resolved)

    def remove_agent(self, name: str, state: SimulationState) -> bool:
        """Out of the agents, the pauses and the counters together."""
        if not self._allowed(Operation.REMOVE, name, self.validator.validate_remove(name, state), state):
            return False
        state.dismiss(name)
        self._done(Operation.REMOVE, name, state)
        return True

    def pause_agent(self, name: str, auto_resume_turns: int | None, state: SimulationState) -> bool:
        """Not asked any more, until it is resumed or `process_auto_resume` was called so many times."""
        verdict = self.validator.validate_pause(name, auto_resume_turns, state)
        if not self._allowed(Operation.PAUSE, name, verdict, state):
            return False
        self.pause_tracker.pause(name, auto_resume_turns, state)
        self.log.info(
            "lifecycle_operation",
            operation=Operation.PAUSE.value,
            agent_name=name,
            auto_resume_turns=auto_resume_turns,
            turn=state.turn,
        )
        return True

    def resume_agent(self, name: str, state: SimulationState) -> bool:
        if not self._allowed(Operation.RESUME, name, self.validator.validate_resume(name, state), state):
            return False
        self.pause_tracker.resume(name, state)
        self._done(Operation.RESUME, name, state)
        return True

    def get_active_agents(self, state: SimulationState) -> dict[str, Any]:
        """Everybody who is not paused, in the order of coming; the dict is the caller's own."""
        return state.active_agents()

    def process_auto_resume(self, state: SimulationState) -> list[str]:
        """Once per turn, at its start: one turn less for each counter, and who has none left goes on."""
        resumed = self.pause_tracker.count_down(state)
        for name in resumed:
            self._done(Operation.RESUME, name, state, automatic=True)
        return resumed

    def check_invariants(self, state: SimulationState) -> ValidationResult:
        """Whether the five rules hold; what is broken, if not."""
        return ValidationResult.failure(broken_invariants(state, self.validator.max_agents))

    def _done(self, operation: Operation, name: str, state: SimulationState, **more: Any) -> None:
        self.log.info("lifecycle_operation", operation=operation.value, agent_name=name, **more, turn=state.turn)

    def _allowed(self, operation: Operation, name: str, verdict: Verdict, state: SimulationState) -> bool:
        if not verdict:
            self.tell_refused(operation, name, verdict.reason, state)
        return verdict.is_valid

    def tell_refused(self, operation: Operation, name: str, reason: str | None, state: SimulationState) -> None:
        """Into the log."""
        self.log.warning(
            "lifecycle_validation_failed",
            operation=operation.value,
            agent_name=name,
            reason=reason,
            turn=state.turn,
        )

    def _not_added(
        self, name: str, reason: str | None, state: SimulationState, faults: tuple[Fault, ...] = ()
    ) -> AddOutcome:
        self.tell_refused(Operation.ADD, name, reason, state)
        return AddOutcome(added=False, name=name, reason=reason, faults=faults)
