"""Commands that remove what is due. Each bears a bounded batch, and each looks again before it removes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model import HOME_WORKSPACE_ID, AgentInstance, AuditEntry, Fault, Task, Wait, shown
from ostler.policy import RetentionPolicy, instance_due, task_due
from ostler.store.commands.base import Command
from ostler.store.commands.checking import count_faults, ids_faults, kind_faults, moment_faults, record_faults
from ostler.store.kinds import IdempotencyRow, Kind
from ostler.store.port import Prune
from ostler.store.unit import Unit


@dataclass(kw_only=True, eq=False)
class RemoveInstances(Command[int]):
    """Remove finished instances with their tags and attempts. Their events and audit entries stay."""

    action: ClassVar[str] = "retention.instances"

    ids: tuple[UUID, ...]
    policy: RetentionPolicy

    def faults(self) -> Iterator[Fault]:
        yield from ids_faults("ids", self.ids)
        yield from record_faults("policy", self.policy, RetentionPolicy)

    def apply(self, unit: Unit) -> int:
        removed: dict[UUID, int] = {}
        for instance_id in self.ids:
            record: AgentInstance | None = unit.get(Kind.INSTANCE, (instance_id,))
            if record is None or not instance_due(record, unit.now, self.policy):
                continue
            starts = [unit.get(Kind.ATTEMPT, (instance_id, number)) for number in range(1, record.attempt + 1)]
            if any(start is not None and start.is_open and start.identity is not None for start in starts):
                continue  # something of it may still live, and this row is all that knows it
            unit.remove(Kind.INSTANCE, (instance_id,))
            for start in starts:
                if start is not None:
                    unit.remove(Kind.ATTEMPT, (instance_id, start.number))
            if record.workspace_id is not None:
                removed[record.workspace_id] = removed.get(record.workspace_id, 0) + 1
        return _audited(self, unit, removed)


@dataclass(kw_only=True, eq=False)
class RemoveTasks(Command[int]):
    action: ClassVar[str] = "retention.tasks"

    ids: tuple[UUID, ...]
    policy: RetentionPolicy

    def faults(self) -> Iterator[Fault]:
        yield from ids_faults("ids", self.ids)
        yield from record_faults("policy", self.policy, RetentionPolicy)

    def apply(self, unit: Unit) -> int:
        removed: dict[UUID, int] = {}
        for task_id in self.ids:
            record: Task | None = unit.get(Kind.TASK, (task_id,))
            if record is None or not task_due(record, unit.now, self.policy):
                continue
            unit.remove(Kind.TASK, (task_id,))
            if record.workspace_id is not None:
                removed[record.workspace_id] = removed.get(record.workspace_id, 0) + 1
        return _audited(self, unit, removed)


def _audited(command: Command[Any], unit: Unit, removed: dict[UUID, int]) -> int:
    for workspace_id, count in removed.items():
        unit.workspace_id = workspace_id
        unit.audit(command.by, command.action, "records", detail=f"removed {count}")
    return sum(removed.values())


@dataclass(kw_only=True, eq=False)
class RemoveWaits(Command[int]):
    """Remove waits that ended long ago."""

    action: ClassVar[str] = "retention.waits"

    ids: tuple[UUID, ...]
    before: datetime

    def faults(self) -> Iterator[Fault]:
        yield from ids_faults("ids", self.ids)
        yield from moment_faults("before", self.before)

    def apply(self, unit: Unit) -> int:
        removed: dict[UUID, int] = {}
        for wait_id in self.ids:
            wait: Wait | None = unit.get(Kind.WAIT, (wait_id,))
            if wait is None or wait.ended_at is None or wait.ended_at > self.before:
                continue
            unit.remove(Kind.WAIT, (wait_id,))
            removed[wait.workspace_id] = removed.get(wait.workspace_id, 0) + 1
        return _audited(self, unit, removed)


@dataclass(kw_only=True, eq=False)
class RemoveAnswers(Command[int]):
    """Forget the answers that may no longer be repeated. Not audited: they are a help to callers, and no record."""

    action: ClassVar[str] = "retention.idempotency"

    #: Of each its workspace and the caller's own key.
    keys: tuple[tuple[UUID, str], ...]
    before: datetime

    def faults(self) -> Iterator[Fault]:
        yield from _answer_faults(self.keys)
        yield from moment_faults("before", self.before)

    def apply(self, unit: Unit) -> int:
        removed = 0
        for key in self.keys:
            row: IdempotencyRow | None = unit.get(Kind.IDEMPOTENCY, key)
            if row is not None and row.created_at <= self.before:  # else it was given anew meanwhile
                unit.remove(Kind.IDEMPOTENCY, key)
                removed += 1
        return removed


def _answer_faults(keys: Any) -> Iterator[Fault]:
    if not isinstance(keys, tuple):
        yield Fault(field="keys", bound="must be a tuple of keys", value=shown(keys))
        return
    for place, one in enumerate(keys):
        match one:
            case (UUID(), str()):
                pass
            case _:
                yield Fault(field=f"keys.{place}", bound="must be a workspace and a key", value=shown(one))


@dataclass(kw_only=True, eq=False)
class PruneEvents(Command[int]):
    """Drop the oldest events, always a prefix, so that one number tells every cursor what is gone."""

    action: ClassVar[str] = "retention.events"

    until: int

    def faults(self) -> Iterator[Fault]:
        return count_faults("until", self.until)

    def apply(self, unit: Unit) -> int:
        until = min(self.until, unit.sequence)
        if until <= unit.horizon:
            return 0
        removed = until - unit.horizon
        unit.raise_horizon(until)
        unit.prune(Prune(table="events", until=until))
        unit.workspace(HOME_WORKSPACE_ID)
        unit.audit(self.by, self.action, "events", detail=f"removed up to {until}")
        return removed


@dataclass(kw_only=True, eq=False)
class PruneAudit(Command[int]):
    """Drop the oldest entries of a chain and remember the last one's hash, from which the rest still verifies."""

    action: ClassVar[str] = "retention.audit"

    workspace_id: UUID
    #: The last entry to go.
    last: AuditEntry

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("workspace_id", self.workspace_id, UUID)
        yield from _last_faults(self.last)

    def apply(self, unit: Unit) -> int:
        unit.workspace(self.workspace_id)
        ledger = unit.ledger(self.workspace_id)
        if self.last.number > ledger.audit_number:
            raise InvalidOperationError(f"the chain of workspace {self.workspace_id} ends before {self.last.number}")
        if self.last.number <= ledger.anchor_number:
            return 0
        removed = self.last.number - ledger.anchor_number
        unit.anchor(self.workspace_id, self.last.number, self.last.hash)
        unit.prune(Prune(table="audit", until=self.last.number, owner_id=self.workspace_id))
        unit.audit(self.by, self.action, "audit", detail=f"removed up to {self.last.number}")
        return removed


def _last_faults(last: Any) -> Iterator[Fault]:
    """Only what is used of it: one that somebody has tampered with must not hold retention up."""
    if isinstance(last, AuditEntry):
        yield from count_faults("last.number", last.number)
        yield from kind_faults("last.hash", last.hash, str)
    else:
        yield from kind_faults("last", last, AuditEntry)
