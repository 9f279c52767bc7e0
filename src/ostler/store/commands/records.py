"""Commands about the quieter rows: workspaces, people, definitions, waits, and plain audit entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model import (
    HOME_WORKSPACE_ID,
    Definition,
    Fault,
    Principal,
    Record,
    Token,
    Wait,
    Workspace,
    shown,
)
from ostler.store.commands.base import Command
from ostler.store.commands.checking import kind_faults, word_faults
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

    def apply(self, unit: Unit) -> None:
        unit.workspace(self.workspace_id)
        unit.audit(self.by, self.what, self.about, self.outcome, self.detail)


@dataclass(kw_only=True, eq=False)
class OpenWait(Command[Wait]):
    """Write down why something does not run, and when to look again."""

    action: ClassVar[str] = "wait.open"

    wait: Wait

    def faults(self) -> Iterator[Fault]:
        return iter(self.wait.validate())

    @property
    def subject(self) -> str:
        return f"wait:{self.wait.wait_id}"

    def apply(self, unit: Unit) -> Wait:
        unit.workspace(self.wait.workspace_id)
        if self.wait.instance_id is not None:
            unit.instance(self.wait.instance_id)
        if self.wait.task_id is not None:
            unit.task(self.wait.task_id)
        if unit.get(Kind.WAIT, (self.wait.wait_id,)) is not None:
            raise InvalidOperationError(f"the wait {self.wait.wait_id} exists already")
        unit.put(Kind.WAIT, self.wait)
        unit.audit(self.by, self.action, self.subject, detail=self.wait.kind)
        return self.wait


@dataclass(kw_only=True, eq=False)
class EndWait(Command[Wait]):
    """Exactly one caller ends a wait; the others are refused, so that one wake-up gives one start."""

    action: ClassVar[str] = "wait.end"

    wait_id: UUID
    outcome: str

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("wait_id", self.wait_id, UUID)
        yield from word_faults("outcome", self.outcome)

    @property
    def subject(self) -> str:
        return f"wait:{self.wait_id}"

    def apply(self, unit: Unit) -> Wait:
        old: Wait | None = unit.get(Kind.WAIT, (self.wait_id,))
        if old is None:
            raise InvalidOperationError(f"there is no wait {self.wait_id}")
        unit.workspace_id = old.workspace_id
        if old.ended_at is not None:
            raise InvalidOperationError(f"the wait {self.wait_id} has ended already ({old.outcome})")
        new = old.evolve(ended_at=unit.now, outcome=self.outcome)
        unit.put(Kind.WAIT, new)
        unit.audit(self.by, self.action, self.subject, detail=self.outcome)
        return new
