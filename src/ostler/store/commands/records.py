"""Commands about the quieter rows: workspaces, people, definitions, waits, and plain audit entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError, ValidationError
from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentInstance,
    Definition,
    Fault,
    Principal,
    Record,
    Task,
    Token,
    Wait,
    Workspace,
    shown,
)
from ostler.model.context import json_faults
from ostler.store.actor import Actor
from ostler.store.commands.base import Command
from ostler.store.commands.checking import (
    as_kept,
    kind_faults,
    mapping_faults,
    optional_faults,
    record_faults,
    word_faults,
)
from ostler.store.kinds import Kind, key_of
from ostler.store.unit import Unit

Puttable = Workspace | Principal | Token | Definition


@dataclass(kw_only=True, eq=False)
class PutRecord(Command[Record]):
    """Write a workspace, a principal, a token or a definition; the newest one stands."""

    action: ClassVar[str] = "put"

    record: Puttable

    def faults(self) -> Iterator[Fault]:
        if not isinstance(self.record, Puttable):
            # An instance or a task has a state machine, and no door beside it.
            bound = "must be a Workspace, Principal, Token or Definition"
            return iter([Fault(field="record", bound=bound, value=shown(type(self.record).__name__))])
        return iter(self.record.validate())

    @property
    def subject(self) -> str:
        kind = Kind(type(self.record))
        return f"{kind.name.lower()}:{key_of(kind, self.record)[0]}"

    def apply(self, unit: Unit) -> Record:
        kind = Kind(type(self.record))
        unit.workspace_id = self._home(unit)
        unit.put(kind, self.record)
        unit.audit(self.by, self.action, self.subject)
        return self.record

    def _home(self, unit: Unit) -> UUID:
        """The workspace whose audit tells of it."""
        match self.record:
            case Workspace(workspace_id=own):
                return own
            case Principal(workspace_id=own):
                return unit.workspace(own).workspace_id
            case Token(principal_id=owner):
                principal: Principal | None = unit.get(Kind.PRINCIPAL, (owner,))
                if principal is None:
                    raise InvalidOperationError(f"there is no principal {owner} for this token; create it first")
                return principal.workspace_id
            case _:
                return HOME_WORKSPACE_ID


@dataclass(kw_only=True, eq=False)
class RecordAudit(Command[None]):
    """An act that changed no record, such as a refusal."""

    workspace_id: UUID = HOME_WORKSPACE_ID
    what: str
    about: str
    outcome: str = "ok"
    detail: str | None = None

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("workspace_id", self.workspace_id, UUID)
        for name in ("what", "about", "outcome"):
            yield from word_faults(name, getattr(self, name))
        yield from optional_faults("detail", self.detail, str)

    def apply(self, unit: Unit) -> None:
        unit.workspace(self.workspace_id)
        unit.audit(self.by, self.what, self.about, self.outcome, self.detail)


@dataclass(kw_only=True, eq=False)
class OpenWait(Command[Wait]):
    """Write down why something does not run, and when to look again."""

    action: ClassVar[str] = "wait.open"

    wait: Wait

    def faults(self) -> Iterator[Fault]:
        return record_faults("wait", self.wait, Wait)

    @property
    def subject(self) -> str:
        return f"wait:{self.wait.wait_id}"

    def apply(self, unit: Unit) -> Wait:
        return put_wait(unit, self.by, self.wait)


def put_wait(unit: Unit, by: Actor, wait: Wait) -> Wait:
    """Write a wait that must not be there yet, in the workspace of what it is about."""
    unit.workspace(wait.workspace_id)
    about: list[AgentInstance | Task] = []
    if wait.instance_id is not None:
        about.append(unit.instance(wait.instance_id))
    if wait.task_id is not None:
        about.append(unit.task(wait.task_id))
    if any(one.workspace_id != wait.workspace_id for one in about):
        raise InvalidOperationError(f"the wait {wait.wait_id} is about something in another workspace")
    if unit.get(Kind.WAIT, (wait.wait_id,)) is not None:
        raise InvalidOperationError(f"the wait {wait.wait_id} exists already")
    unit.put(Kind.WAIT, wait)
    unit.audit(by, OpenWait.action, f"wait:{wait.wait_id}", detail=wait.kind)
    return wait


@dataclass(kw_only=True, eq=False)
class EndWait(Command[Wait]):
    """Exactly one caller ends a wait; the others are refused, so that one wake-up gives one start."""

    action: ClassVar[str] = "wait.end"

    wait_id: UUID
    outcome: str
    #: What came of it; kept as "answer" in the wait's detail.
    answer: Mapping[str, Any] | None = None

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("wait_id", self.wait_id, UUID)
        yield from word_faults("outcome", self.outcome)
        if self.answer is not None:
            yield from mapping_faults("answer", self.answer)

    @property
    def subject(self) -> str:
        return f"wait:{self.wait_id}"

    def apply(self, unit: Unit) -> Wait:
        return close_wait(unit, self.by, self.wait_id, self.outcome, answer=self.answer)


def close_wait(
    unit: Unit,
    by: Actor,
    wait_id: UUID,
    outcome: str,
    *,
    of: UUID | None = None,
    answer: Mapping[str, Any] | None = None,
) -> Wait:
    """End a wait that has not ended; with `of`, only one that holds this instance."""
    old: Wait | None = unit.get(Kind.WAIT, (wait_id,))
    if old is None:
        raise InvalidOperationError(f"there is no wait {wait_id}")
    if of is not None and old.instance_id != of:
        raise InvalidOperationError(f"the wait {wait_id} is not about instance {of}")
    unit.workspace_id = old.workspace_id
    if old.ended_at is not None:
        raise InvalidOperationError(f"the wait {wait_id} has ended already ({old.outcome})")
    detail = old.detail if answer is None else _answered(old, answer)
    new = old.evolve(ended_at=unit.now, outcome=outcome, detail=detail)
    unit.put(Kind.WAIT, new)
    unit.audit(by, EndWait.action, f"wait:{wait_id}", detail=outcome)
    return new


def _answered(wait: Wait, answer: Mapping[str, Any]) -> dict[str, Any]:
    detail = {**(wait.detail or {}), "answer": as_kept(answer)}
    faults = tuple(json_faults("detail", detail))  # each may fit, and both together not
    if faults:
        raise ValidationError(faults)
    return detail
