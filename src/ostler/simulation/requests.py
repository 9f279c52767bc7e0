"""What an agent may ask for at the end of a turn, about itself or about others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ostler.errors import ValidationError
from ostler.model import Fault, shown


class Operation(StrEnum):
    ADD = "add_agent"
    REMOVE = "remove_agent"
    PAUSE = "pause_agent"
    RESUME = "resume_agent"


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleRequest:
    """One wish. It is checked and carried out after every agent was asked, not before."""

    operation: Operation
    agent_name: str
    #: Of a pause; None: until somebody lets it go on.
    auto_resume_turns: int | None = None
    #: Of an addition: the brain itself, or the entry of the brains' table by which it is made.
    agent: Any = None
    kind: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    initial_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a brain may return instead of its plain decision, when it asks for something too."""

    decision: Any = None
    requests: tuple[LifecycleRequest, ...] = ()


_OWN = (Operation.REMOVE, Operation.PAUSE)
_ENVELOPE = frozenset({"decision", "requests"})
_FIELDS = frozenset({"operation", "agent_name", "auto_resume_turns", "kind", "params", "initial_state"})


def unwrap(answer: Any, by: str) -> tuple[Any, tuple[LifecycleRequest, ...]]:
    """An answer as decision and wishes. Brains elsewhere speak JSON: there a mapping with `requests` counts.

    `by` is the name of whoever answered; a wish that names nobody means it.
    """
    if isinstance(answer, Decision):
        return answer.decision, requests_from(answer.requests, by)
    if isinstance(answer, dict) and "requests" in answer and answer.keys() <= _ENVELOPE and _is_envelope(answer):
        return answer.get("decision"), requests_from(answer["requests"], by)
    return answer, ()


def _is_envelope(answer: dict[str, Any]) -> bool:
    """A lone field of that name which is no list is somebody's decision."""
    return "decision" in answer or isinstance(answer["requests"], list)


def requests_from(given: Any, by: str) -> tuple[LifecycleRequest, ...]:
    """Wishes out of JSON; raises one `ValidationError` with every fault."""
    if not isinstance(given, list | tuple):
        raise ValidationError([Fault(field="requests", bound="must be a list", value=shown(given))])
    given = [_about(one, by) for one in given]
    faults = tuple(fault for place, one in enumerate(given) for fault in _faults(f"requests.{place}", one))
    if faults:
        raise ValidationError(faults)
    return tuple(_made(one) for one in given)


def _about(one: Any, by: str) -> Any:
    """To pause or to remove without a name is to mean oneself, as it is by the view."""
    if isinstance(one, dict) and "agent_name" not in one and one.get("operation") in _OWN:
        return {**one, "agent_name": by}
    return one


def _made(one: LifecycleRequest | Mapping[str, Any]) -> LifecycleRequest:
    if isinstance(one, LifecycleRequest):
        return replace(one, operation=Operation(one.operation))
    return LifecycleRequest(**{**one, "operation": Operation(one["operation"])})


def _faults(place: str, one: Any) -> Iterator[Fault]:
    if isinstance(one, LifecycleRequest):
        # Objects are not checked when they are made; what is in the state is the manager's to check.
        one = {name: getattr(one, name) for name in ("operation", "agent_name", "kind", "params")}
    if not isinstance(one, Mapping):
        yield Fault(field=place, bound="must be a mapping", value=shown(one))
        return
    if one.get("operation") not in list(Operation):
        known = ", ".join(Operation)
        yield Fault(field=f"{place}.operation", bound=f"must be one of {known}", value=shown(one.get("operation")))
    if not isinstance(one.get("agent_name"), str):
        yield Fault(field=f"{place}.agent_name", bound="must be text", value=shown(one.get("agent_name")))
    for name in ("params", "initial_state"):
        if not isinstance(one.get(name, {}), Mapping):
            yield Fault(field=f"{place}.{name}", bound="must be a mapping", value=shown(one[name]))
    if not isinstance(one.get("kind"), str | None):
        yield Fault(field=f"{place}.kind", bound="must be text", value=shown(one["kind"]))
    for name in sorted(map(str, one.keys() - _FIELDS)):
        yield Fault(field=f"{place}.{name}", bound=f"is not known; there are {', '.join(sorted(_FIELDS))}")
