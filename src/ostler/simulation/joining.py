"""The four operations as a run does them: by the lifecycle manager, and told as what was performed."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ostler.errors import OstlerError, ValidationError
from ostler.model import Fault, shown
from ostler.model.context import json_faults
from ostler.simulation.brains import Brains, Managed, brain_faults
from ostler.simulation.manager import AddOutcome, LifecycleManager
from ostler.simulation.reports import Performed
from ostler.simulation.requests import Operation
from ostler.simulation.state import SimulationState

MadeBy = tuple[str | None, Mapping[str, Any]]


class Joining:
    """With `kept`, only brains that can be made again may join."""

    def __init__(self, manager: LifecycleManager, state: SimulationState, brains: Brains, *, kept: bool) -> None:
        self._manager = manager
        self._state = state
        self.brains = brains
        self._kept = kept

    def add(
        self, name: str, agent: Any, initial_state: Any, *, made_by: MadeBy = (None, {}), **by: Any
    ) -> tuple[Performed, AddOutcome]:
        made = made_by[0] is not None
        kind, params = made_by if made else self._made_by(agent)
        faults: tuple[Fault, ...] = ()
        if self._kept:
            faults = (*self._unkept(agent, kind, params, made=made), *self._lost(initial_state))
        if faults:
            reason = "; ".join(fault.message for fault in faults)
            refused = AddOutcome(added=False, name=name, reason=reason, faults=faults)
            return self.refused(Operation.ADD, name, reason, **by), refused
        outcome = self._manager.try_add_agent(name, agent, initial_state, self._state)
        if not outcome:
            return self._told(Operation.ADD, name, done=False, reason=outcome.reason, **by), outcome
        member = self._state.member(outcome.name)
        member.kind, member.params = (kind, _copied(params)) if made or self._kept else _remembered(kind, params)
        first = None if not self._kept else self._state.form.plain(member.state)
        performed = self._told(
            Operation.ADD,
            name,
            **by,
            resolved_name=outcome.name,
            kind=member.kind,
            params=member.params,
            initial_state=first,
        )
        return performed, outcome

    def remove(self, name: str, **by: Any) -> Performed:
        done = self._manager.remove_agent(name, self._state)
        return self._told(Operation.REMOVE, name, done=done, reason=self._why(done, Operation.REMOVE, name), **by)

    def pause(self, name: str, turns: int | None, **by: Any) -> Performed:
        reason = self._manager.validator.validate_pause(name, turns, self._state).reason
        done = self._manager.pause_agent(name, turns, self._state)
        if not done:
            return self._told(Operation.PAUSE, name, done=False, reason=reason, **by)
        return self._told(Operation.PAUSE, name, auto_resume_turns=turns, **by)

    def resume(self, name: str, **by: Any) -> Performed:
        done = self._manager.resume_agent(name, self._state)
        return self._told(Operation.RESUME, name, done=done, reason=self._why(done, Operation.RESUME, name), **by)

    def refused(self, operation: Operation, name: str, reason: str, **by: Any) -> Performed:
        """What does not even come to the validator."""
        self._manager.tell_refused(operation, name, reason, self._state)
        return self._told(operation, name, done=False, reason=reason, **by)

    def tell_failed(self, name: str, error_type: str, message: str, became: str) -> None:
        """Into the log."""
        self._manager.log.warning(
            "agent_failed",
            agent_name=name,
            error_type=error_type,
            message=message,
            became=became,
            turn=self._state.turn,
        )

    def _why(self, done: bool, operation: Operation, name: str) -> str | None:
        """A refused operation has changed nothing, so the validator says the same again."""
        if done:
            return None
        validator = self._manager.validator
        look = validator.validate_remove if operation is Operation.REMOVE else validator.validate_resume
        return look(name, self._state).reason

    @staticmethod
    def _told(operation: Operation, name: Any, **more: Any) -> Performed:
        return Performed(operation=operation, agent_name=name if isinstance(name, str) else shown(name), **more)

    def _made_by(self, agent: Any) -> MadeBy:
        """How a brain that came as an object can be made again: by its class, and the fields of a dataclass."""
        kind = self.brains.kind_of(agent)
        if kind is None:
            return None, {}
        if dataclasses.is_dataclass(agent) and not isinstance(agent, type):
            named = (one.name for one in dataclasses.fields(agent) if one.init)
            return kind, {name: getattr(agent, name) for name in named if hasattr(agent, name)}
        return kind, getattr(agent, "params", {})

    def _lost(self, initial_state: Any) -> Iterator[Fault]:
        """Why a typed state would not be read again as it is; of plain ones the manager tells."""
        form = self._state.form
        if form.schema is None:
            return
        made, wrong = form.make(initial_state)
        try:
            if not wrong:
                form.dump(made)
        except ValidationError as error:
            yield from (Fault(field="initial_state", bound=one.message.removeprefix("state ")) for one in error.faults)

    def _unkept(self, agent: Any, kind: str | None, params: Mapping[str, Any], *, made: bool) -> Iterator[Fault]:
        """Why it could not be made again after a crash; one that was just `made` by its kind can."""
        if isinstance(agent, Managed) and kind is None:
            yield Fault(field="agent", bound="must come by a kind of the scenario's brains, for this run is kept")
            return
        wrong = tuple(brain_faults(agent))
        yield from wrong
        if wrong:
            return
        if kind is None:
            bound = "cannot be made again after a crash, and this run is kept; name its class in the scenario's brains"
            yield Fault(field="agent", bound=bound, value=shown(type(agent).__name__))
            return
        faults = tuple(_params_faults(params))
        yield from faults
        if not faults and not made:
            try:
                self.brains.make(kind, params)
            except OstlerError as error:
                bound = f"cannot be made again: {error}; give it `params`, or make it a dataclass"
                yield Fault(field="agent", bound=bound)


def _params_faults(params: Any) -> Iterator[Fault]:
    """Why a brain would be made again with other params than it was made with now."""
    if not isinstance(params, Mapping):
        yield Fault(field="params", bound="must be a mapping", value=shown(params))
        return
    faults = tuple(json_faults("params", params))
    yield from faults
    if not faults and json.loads(json.dumps(dict(params))) != dict(params):
        yield Fault(field="params", bound="would come back as something else: use lists for tuples")


def _copied(params: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(params))


def _remembered(kind: str | None, params: Any) -> tuple[str | None, dict[str, Any]]:
    """In memory nobody makes a brain again, so one that cannot say how it is made may join too."""
    try:
        return kind, _copied(params)
    except Exception:  # noqa: BLE001 - locks, sockets and the like: a foreign object may do anything when it is copied
        return None, {}
