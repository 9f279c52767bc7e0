"""The end of a turn and its report: failures first, then the requests of agents.

The order is fixed: failures in the order of joining; then requests by their agents in the order of joining, and of each
agent in the order of asking. Each is checked against what the earlier ones left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ostler.errors import ValidationError
from ostler.model.simulation import OnFailure, SimulationSettings
from ostler.model.validation import Fault, fault, shown
from ostler.simulation.active_brains import ActiveSet
from ostler.simulation.ask import Failed
from ostler.simulation.brains import Brains
from ostler.simulation.membership import LifecycleManager, log_event
from ostler.simulation.schema import StateForm, UnkeepableError
from ostler.simulation.state import Member, SimulationState
from ostler.simulation.view import AgentView, Decisions, LifecycleRequest, Operation

_BECAME = {OnFailure.PAUSE: "paused", OnFailure.REMOVE: "removed", OnFailure.KEEP: "kept"}
#: Failures that a report describes; more are only counted.
_MAX_DESCRIBED = 5
_PLAIN = StateForm()


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
    #: Of an addition: the name that the agent got, how its brain is made again, and its first state as JSON.
    resolved_name: str | None = None
    kind: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    initial_state: Any = None
    #: Of a pause.
    auto_resume_turns: int | None = None
    #: Of a refused addition: everything that is wrong with the brain or the first state.
    faults: tuple[Fault, ...] = field(default=(), compare=False, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Without the fields that mean nothing for this operation."""
        entry: dict[str, Any] = {"operation": self.operation.value, "agent_name": self.agent_name, "cause": self.cause}
        if self.by is not None:
            entry["by"] = self.by
        if not self.done:
            return {**entry, "done": False, "reason": self.reason}
        if self.operation is Operation.ADD:
            entry |= {"resolved_name": self.resolved_name, "kind": self.kind, "params": dict(self.params)}
            entry["initial_state"] = self.initial_state
        if self.operation is Operation.PAUSE:
            entry["auto_resume_turns"] = self.auto_resume_turns
        return entry


@dataclass(slots=True)
class TurnReport:
    turn: int
    #: The agents that resumed by themselves at the start.
    resumed: Sequence[str]
    decisions: Decisions
    failures: Mapping[str, Failure]
    #: In the order in which they were done; those from outside before the turn come first.
    operations: Sequence[Performed]


@dataclass(kw_only=True, slots=True)
class RunReport:
    #: The last complete turn.
    turn: int = 0
    #: The turns that this call has played.
    played: int = 0
    #: Why the run is over; None when more turns can be played.
    ended: str | None = None
    #: How often an agent failed, and the first few in words.
    failed: int = 0
    first_failures: tuple[str, ...] = ()

    def count_failures(self, report: TurnReport) -> None:
        self.failed += len(report.failures)
        self.first_failures += tuple(
            f"{name} in turn {report.turn}, {failure.became}: {failure.message}"
            for name, failure in report.failures.items()
        )
        self.first_failures = self.first_failures[:_MAX_DESCRIBED]


class Turn:
    """A turn that is being played."""

    #: Agents that gave no answer, and what became of each.
    failed: Sequence[tuple[Member, Failed]] = ()
    failures: Mapping[str, Failure] = MappingProxyType({})
    decisions = Decisions()
    engine_answer: Any = None
    is_over = False

    def __init__(self, state: SimulationState, active: ActiveSet, resumed: list[str]) -> None:
        self.number = state.turn
        #: Before the engine, which must not change them.
        self.counters = state.auto_resume.copy()
        self.member_count = len(state.members)
        self.active = active
        self.resumed = resumed
        self.operations: list[Performed] = []

    def report(self) -> TurnReport:
        return TurnReport(self.number, self.resumed, self.decisions, self.failures, self.operations)

    def set_aside(self, failed: Mapping[int, Failed]) -> None:
        """Take the agents that failed, by place, out of the decisions."""
        members, values = self.decisions.members, self.decisions.values_in_order
        self.failed = [*self.failed, *((members[place], answer) for place, answer in failed.items())]
        self.failed.sort(key=lambda entry: entry[0].number)
        kept = [place for place in range(len(members)) if place not in failed]
        self.decisions = Decisions([members[place] for place in kept], [values[place] for place in kept])


# --- operations --------------------------------------------------------------------------------------


class Operations:
    """The four operations as a run does them: by the lifecycle manager, and reported."""

    def __init__(self, manager: LifecycleManager, state: SimulationState, brains: Brains) -> None:
        self.manager = manager
        self.state = state
        self.brains = brains
        #: Only brains that can be made again may join, and states that can be written.
        self.kept = False

    def perform(self, request: LifecycleRequest, **by: Any) -> Performed:
        """`by` says who asked: `cause`, and the agent."""
        manager, state, name, turns = self.manager, self.state, request.agent_name, request.auto_resume_turns
        match request.operation:
            case Operation.ADD:
                return self._add(request, **by)
            case Operation.REMOVE:
                reason = manager.validator.validate_remove(name, state).reason
                done = manager.remove_agent(name, state)
            case Operation.PAUSE:
                reason = manager.validator.validate_pause(name, turns, state).reason
                done = manager.pause_agent(name, turns, state)
            case Operation.RESUME:
                reason = manager.validator.validate_resume(name, state).reason
                done = manager.resume_agent(name, state)
        if not done:
            return _performed(request, done=False, reason=reason, **by)
        return _performed(request, auto_resume_turns=turns, **by)

    def refuse(self, request: LifecycleRequest, reason: str, **more: Any) -> Performed:
        """A refusal for which the validator is not needed."""
        self.manager.log_refusal(request.operation.value, request.agent_name, reason, self.state)
        return _performed(request, done=False, reason=reason, **more)

    def _add(self, request: LifecycleRequest, **by: Any) -> Performed:
        kind, params, agent = request.kind, request.params, request.agent
        try:
            if kind is None and agent is not None:
                kind, params = self.brains.kind_of(agent)
            if self.kept:
                params = self._keepable_params(kind, params, request.initial_state, agent)
            if kind is not None and (agent is None or self.kept):
                agent = self.brains.make(kind, params)  # as a resumed run makes it
            if agent is None:
                raise fault("agent", f"is missing; give a brain, or a kind of the run's brains ({self.brains.listed})")
        except ValidationError as error:
            faults = tuple(entry for entry in error.faults if isinstance(entry, Fault))
            return self.refuse(request, str(error), faults=faults, **by)
        result = self.manager.try_add_agent(request.agent_name, agent, request.initial_state, self.state)
        if not result:
            return _performed(request, done=False, reason=result.reason, faults=result.faults, **by)
        member = self.state.members[result.name]
        member.kind, member.params = kind, params
        first = self.state.form.plain(member.state) if self.kept else None
        more = {"resolved_name": result.name, "kind": kind, "params": params, "initial_state": first}
        return _performed(request, **more, **by)

    def _keepable_params(self, kind: str | None, params: Any, initial_state: Any, agent: Any) -> Mapping[str, Any]:
        """The params as they read back. Raises `ValidationError` for what a resumed run could not make again."""
        faults = []
        if kind is None and agent is not None:
            bound = "cannot be made again after a crash, and this run is kept; name its class in the scenario's brains"
            faults.append(Fault(field="agent", bound=bound, value=shown(type(agent).__name__)))
        read_back, wrong = _PLAIN.make(params, "params")
        faults += wrong
        state, wrong = self.state.form.make(initial_state)
        try:
            self.state.form.write([] if wrong else [state])
        except UnkeepableError as error:
            wrong = (Fault(field="initial_state", bound=f"cannot be kept: {error}"),)
        faults += wrong
        if faults:
            raise ValidationError(faults)
        kept: Mapping[str, Any] = read_back
        return kept


def _performed(request: LifecycleRequest, **more: Any) -> Performed:
    name = request.agent_name
    return Performed(operation=request.operation, agent_name=name if isinstance(name, str) else shown(name), **more)


# --- failures and requests ---------------------------------------------------------------------------


def apply_failures(
    failed: Sequence[tuple[Member, Failed]], settings: SimulationSettings, operations: Operations
) -> tuple[dict[str, Failure], list[Performed]]:
    """Pause, remove or keep the agents that gave no answer."""
    failures: dict[str, Failure] = {}
    performed: list[Performed] = []
    for member, answer in failed:
        policy = settings.on_timeout if answer.timed_out else settings.on_error
        if policy is not OnFailure.KEEP:
            operation = Operation.PAUSE if policy is OnFailure.PAUSE else Operation.REMOVE
            turns = settings.failure_pause_turns if policy is OnFailure.PAUSE else None
            request = LifecycleRequest(operation=operation, agent_name=member.name, auto_resume_turns=turns)
            performed.append(operations.perform(request, cause="policy"))
        fields = {"error_type": answer.error_type, "message": answer.message, "became": _BECAME[policy]}
        log_event(logging.WARNING, "agent_failed", agent_name=member.name, **fields, turn=operations.state.turn)
        failures[member.name] = Failure(timed_out=answer.timed_out, **fields)
    return failures, performed


def apply_requests(
    requests: list[tuple[AgentView, LifecycleRequest]], decisions: Decisions, operations: Operations
) -> Iterator[Performed]:
    """Only of agents that decided in this turn: not of those that failed, nor through a view of an earlier turn."""
    numbers = {member.number for member in decisions.members}
    requests.sort(key=lambda entry: entry[0].number)  # stable: the requests of each agent keep their order
    for view, request in requests:
        if view.number in numbers and not view.closed:
            yield _apply_request(view, request, operations)


def _apply_request(view: AgentView, request: LifecycleRequest, operations: Operations) -> Performed:
    by: dict[str, Any] = {"cause": "agent", "by": view.name}
    name = request.agent_name
    member = operations.state.members.get(name) if isinstance(name, str) else None
    if request.operation is not Operation.ADD and member is not None and member.number != request.number:
        reason = f"the agent {shown(name)} that was meant has left, and another has its name now"
        if request.number is None:
            reason = f"there was no agent {shown(name)} when this was asked; ask in the next turn"
        return operations.refuse(request, reason, **by)
    return operations.perform(request, **by)
