"""The end of a turn, and what is reported of it: failures first, then what agents asked for, one after the other.

The order is fixed: failures in the order of joining; then requests by who asked in the order of joining, and of each
agent in the order of asking. Each is checked against what the earlier ones left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostler.errors import ValidationError
from ostler.model.simulation import OnFailure, SimulationSettings
from ostler.model.validation import Fault, fault, shown
from ostler.simulation.asking import Failed
from ostler.simulation.brains import Brains
from ostler.simulation.lifecycle import AddResult, LifecycleManager, tell
from ostler.simulation.schema import StateForm, UnkeepableError
from ostler.simulation.state import Member, SimulationState
from ostler.simulation.view import AgentView, Decisions, LifecycleRequest, Operation

_BECAME = {OnFailure.PAUSE: "paused", OnFailure.REMOVE: "removed", OnFailure.KEEP: "kept"}
#: Failures that a report tells in words; more are only counted.
_MAX_TOLD = 5


# --- reports -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An agent that gave no answer, and what became of it: paused, removed or kept."""

    timed_out: bool
    error_type: str
    message: str
    became: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Performed:
    """An operation that was asked for, and whether it was done."""

    operation: Operation
    agent_name: str
    #: "outside", "policy" (for a failure) or "agent".
    cause: str = "outside"
    #: The agent that asked.
    by: str | None = None
    done: bool = True
    reason: str | None = None
    #: Of an addition: the name that it got, how its brain is made again, and its first state as JSON.
    resolved_name: str | None = None
    kind: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    initial_state: Any = None
    #: Of a pause.
    auto_resume_turns: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Without what says nothing."""
        found: dict[str, Any] = {"operation": self.operation.value, "agent_name": self.agent_name, "cause": self.cause}
        if self.by is not None:
            found["by"] = self.by
        if not self.done:
            return {**found, "done": False, "reason": self.reason}
        if self.operation is Operation.ADD:
            found |= {"resolved_name": self.resolved_name, "kind": self.kind, "params": dict(self.params)}
            found["initial_state"] = self.initial_state
        if self.operation is Operation.PAUSE:
            found["auto_resume_turns"] = self.auto_resume_turns
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReport:
    turn: int
    #: The agents that resumed by themselves at the start.
    resumed: Sequence[str] = ()
    decisions: Decisions = field(default_factory=Decisions)
    failures: Mapping[str, Failure] = field(default_factory=dict)
    #: In the order in which they were done; those from outside before the turn come first.
    operations: Sequence[Performed] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    #: The last complete turn.
    turn: int
    #: The turns that this call has played.
    played: int
    #: Why the run is over; None when more turns can be played.
    ended: str | None = None
    #: How often an agent failed, and the first few in words.
    failed: int = 0
    first_failures: tuple[str, ...] = ()


class Tally:
    """Counts failures over the turns of one call of `run`."""

    def __init__(self) -> None:
        self._failed = 0
        self._first: list[str] = []

    def count(self, report: TurnReport) -> None:
        self._failed += len(report.failures)
        for name, one in report.failures.items():
            if len(self._first) < _MAX_TOLD:
                self._first.append(f"{name} in turn {report.turn}, {one.became}: {one.message}")

    def report(self, *, turn: int, played: int, ended: str | None) -> RunReport:
        first = tuple(self._first)
        return RunReport(turn=turn, played=played, ended=ended, failed=self._failed, first_failures=first)


# --- operations --------------------------------------------------------------------------------------

_PLAIN = StateForm()


class Operations:
    """The four operations as a run does them: by the lifecycle manager, and reported."""

    def __init__(self, manager: LifecycleManager, state: SimulationState, brains: Brains, *, kept: bool) -> None:
        self.manager = manager
        self.state = state
        self.brains = brains
        #: Only brains that can be made again may join, and states that can be written.
        self._kept = kept

    def add(self, request: LifecycleRequest, **by: Any) -> tuple[Performed, AddResult]:
        name, kind, params, agent = request.agent_name, request.kind, request.params, request.agent
        try:
            if kind is None and agent is not None:
                kind, params = self.brains.kind_of(agent)
            if self._kept:
                params = self._keepable(kind, params, request.initial_state, agent)
            if kind is not None and (agent is None or self._kept):
                agent = self.brains.make(kind, params)  # as a resumed run makes it
            if agent is None:
                raise fault("agent", f"is missing; give a brain, or a kind of the run's brains ({self.brains.known})")
        except ValidationError as error:
            faults = tuple(one for one in error.faults if isinstance(one, Fault))
            refused = AddResult(added=False, name=name, reason=str(error), faults=faults)
            return self.refused(Operation.ADD, name, str(error), **by), refused
        result = self.manager.try_add_agent(name, agent, request.initial_state, self.state)
        if not result:
            return _told(Operation.ADD, name, done=False, reason=result.reason, **by), result
        member = self.state.members[result.name]
        member.kind, member.params = kind, params
        first = self.state.form.plain(member.state) if self._kept else None
        more = {"resolved_name": result.name, "kind": kind, "params": params, "initial_state": first}
        return _told(Operation.ADD, name, **more, **by), result

    def do(self, operation: Operation, name: Any, turns: int | None = None, **by: Any) -> Performed:
        """Remove, pause or resume."""
        manager, state = self.manager, self.state
        match operation:
            case Operation.REMOVE:
                reason = manager.validator.validate_remove(name, state).reason
                done = manager.remove_agent(name, state)
            case Operation.PAUSE:
                reason = manager.validator.validate_pause(name, turns, state).reason
                done = manager.pause_agent(name, turns, state)
            case _:
                reason = manager.validator.validate_resume(name, state).reason
                done = manager.resume_agent(name, state)
        if not done:
            return _told(operation, name, done=False, reason=reason, **by)
        return _told(operation, name, auto_resume_turns=turns, **by)

    def refused(self, operation: Operation, name: Any, reason: str, **by: Any) -> Performed:
        """What does not even reach the validator."""
        self.manager.refuse(operation.value, name, reason, self.state)
        return _told(operation, name, done=False, reason=reason, **by)

    def _keepable(self, kind: str | None, params: Any, initial_state: Any, agent: Any) -> Mapping[str, Any]:
        """The params as they read back. Raises `ValidationError` for what a resumed run could not make again."""
        faults = []
        if kind is None and agent is not None:
            bound = "cannot be made again after a crash, and this run is kept; name its class in the scenario's brains"
            faults.append(Fault(field="agent", bound=bound, value=shown(type(agent).__name__)))
        kept, wrong = _PLAIN.make(params, "params")
        faults += wrong
        made, wrong = self.state.form.make(initial_state)
        try:
            self.state.form.write([] if wrong else [made])
        except UnkeepableError as error:
            wrong = (Fault(field="initial_state", bound=f"cannot be kept: {error}"),)
        faults += wrong
        if faults:
            raise ValidationError(faults)
        found: Mapping[str, Any] = kept
        return found


def _told(operation: Operation, name: Any, **more: Any) -> Performed:
    return Performed(operation=operation, agent_name=name if isinstance(name, str) else shown(name), **more)


# --- failures and requests ---------------------------------------------------------------------------


def deal_with(
    failed: Sequence[tuple[Member, Failed]], settings: SimulationSettings, operations: Operations
) -> tuple[dict[str, Failure], list[Performed]]:
    """Pause, remove or keep the agents that gave no answer."""
    failures: dict[str, Failure] = {}
    performed: list[Performed] = []
    for member, why in failed:
        policy = settings.on_timeout if why.timed_out else settings.on_error
        if policy is OnFailure.REMOVE:
            performed.append(operations.do(Operation.REMOVE, member.name, cause="policy"))
        elif policy is OnFailure.PAUSE:
            turns = settings.failure_pause_turns
            performed.append(operations.do(Operation.PAUSE, member.name, turns, cause="policy"))
        said = {"error_type": why.error_type, "message": why.message, "became": _BECAME[policy]}
        tell(logging.WARNING, "agent_failed", agent_name=member.name, **said, turn=operations.state.turn)
        failures[member.name] = Failure(timed_out=why.timed_out, **said)
    return failures, performed


def carry_out(
    requests: list[tuple[AgentView, LifecycleRequest]], decisions: Decisions, operations: Operations
) -> Iterator[Performed]:
    """Only those are heard who decided in this turn: not one that failed, nor one with a view of an earlier turn."""
    if not requests:
        return  # as in most turns; the set of all agents is what a large population would notice
    heard = {member.number for member in decisions.members}
    requests.sort(key=lambda one: one[0].number)  # stable: the requests of one agent keep their order
    for view, request in requests:
        if view.number in heard and not view.closed:
            yield _carry_out_one(view, request, operations)


def _carry_out_one(view: AgentView, request: LifecycleRequest, operations: Operations) -> Performed:
    by: dict[str, Any] = {"cause": "agent", "by": view.name}
    name = request.agent_name
    if request.operation is Operation.ADD:
        return operations.add(request, **by)[0]
    now = operations.state.members.get(name) if isinstance(name, str) else None
    if now is not None and now.number != request.number:
        reason = f"the agent {shown(name)} that was meant has left, and another has its name now"
        if request.number is None:
            reason = f"there was no agent {shown(name)} when this was asked; ask in the next turn"
        return operations.refused(request.operation, name, reason, **by)
    return operations.do(request.operation, name, request.auto_resume_turns, **by)
