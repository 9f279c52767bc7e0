"""Commands about a piece of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError, TaskNotFoundError, ValidationError
from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentPriority,
    Fault,
    Record,
    Task,
    TaskCreatedEvent,
    TaskState,
    TaskStateChangedEvent,
    TaskUpdatedEvent,
    clean_text,
    fold_tags,
    from_micros,
    shown,
)
from ostler.model.validation import named
from ostler.store.commands.base import Command, check_attempt, check_version, remember, replayed
from ostler.store.commands.checking import kind_faults, optional_faults, said_faults
from ostler.store.kinds import Kind
from ostler.store.unit import Unit

#: What may be changed beside the state; everything else has its own rule.
MUTABLE = frozenset({
    "branch",
    "changed_files",
    "error",
    "generated_code",
    "priority",
    "retry_count",
    "spawn_count",
    "submission_summary",
    "workspace",
})  # fmt: skip


@dataclass(kw_only=True, eq=False)
class CreateTask(Command[Task]):
    action: ClassVar[str] = "task.create"
    answered_with: ClassVar[type[Record] | None] = Task

    task: str
    workspace_id: UUID = HOME_WORKSPACE_ID
    definition_id: UUID | None = None
    priority: AgentPriority = AgentPriority.NORMAL
    dependencies: tuple[UUID, ...] = ()
    workspace: str | None = None
    branch: str | None = None
    tags: tuple[str, ...] = ()

    def faults(self) -> Iterator[Fault]:
        if self.workspace_id is None:
            yield from kind_faults("workspace_id", self.workspace_id, UUID)
        # Its id, its times and its owner are given when it is written; the actor is looked at by itself.
        yield from self._record(HOME_WORKSPACE_ID, from_micros(0)).validate()

    def apply(self, unit: Unit) -> Task:
        unit.workspace(self.workspace_id)
        known = replayed(self, unit, self.workspace_id)
        if isinstance(known, Task):
            return known
        given = self._record(unit.ids.new(), unit.now)
        record = given.evolve(tags=fold_tags(self.tags), owner_id=self.by.principal_id)
        for dependency in self.dependencies:
            needed: Task | None = unit.get(Kind.TASK, (dependency,))
            if needed is None or needed.workspace_id != self.workspace_id:
                raise TaskNotFoundError(f"the dependency {dependency} is no task; create it first, or check the id")
        unit.put(Kind.TASK, record)
        unit.emit(TaskCreatedEvent, self.by, record, task=record.task)
        unit.audit(self.by, self.action, f"task:{record.task_id}")
        remember(self, unit, self.workspace_id, record)
        return record

    def _record(self, task_id: UUID, now: datetime) -> Task:
        return Task(
            task_id=task_id,
            task=self.task,
            created_at=now,
            updated_at=now,
            definition_id=self.definition_id,
            priority=self.priority,
            dependencies=self.dependencies,
            workspace=self.workspace,
            branch=self.branch,
            tags=self.tags,
            workspace_id=self.workspace_id,
        )


@dataclass(kw_only=True, eq=False)
class _OnTask(Command[Task]):
    task_id: UUID
    expected_version: int | None = None
    attempt: int | None = None

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("task_id", self.task_id, UUID)
        yield from optional_faults("expected_version", self.expected_version, int)
        yield from optional_faults("attempt", self.attempt, int)

    @property
    def subject(self) -> str:
        return f"task:{self.task_id}"

    def _current(self, unit: Unit) -> Task:
        record = unit.task(self.task_id)
        check_attempt(self, record.attempt, self.attempt)
        check_version(self, record.version, self.expected_version)
        return record


@dataclass(kw_only=True, eq=False)
class MoveTask(_OnTask):
    """The one way from state to state. Starting to run takes a new attempt; going back to the queue counts a retry."""

    action: ClassVar[str] = "task.move"

    to: TaskState
    reason: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from kind_faults("to", self.to, TaskState)
        yield from said_faults("reason", self.reason)
        yield from _unknown(self.changes)

    def apply(self, unit: Unit) -> Task:
        old = self._current(unit)
        if not old.can_transition_to(self.to):
            raise InvalidOperationError(
                f"task {old.task_id} is {old.state} and cannot become {self.to}",
                current=old.state,
                wanted=self.to,
            )
        starts, requeued = self.to is TaskState.RUNNING, self.to is TaskState.QUEUED
        new = old.evolve(
            state=self.to,
            attempt=old.attempt + starts,
            spawn_count=old.spawn_count + starts,
            retry_count=old.retry_count + requeued,
        )
        reason = clean_text(self.reason) if self.reason else None
        new = _changed(unit, new, self.changes)
        unit.put(Kind.TASK, new)
        unit.emit(TaskStateChangedEvent, self.by, new, previous_state=old.state, new_state=new.state, reason=reason)
        unit.audit(self.by, self.action, self.subject, detail=f"{old.state.value} to {new.state.value}")
        return new


@dataclass(kw_only=True, eq=False)
class UpdateTask(_OnTask):
    """Change what a task carries, without moving it."""

    action: ClassVar[str] = "task.update"

    changes: Mapping[str, Any]

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from _unknown(self.changes)

    def apply(self, unit: Unit) -> Task:
        new = _changed(unit, self._current(unit), self.changes)
        unit.put(Kind.TASK, new)
        unit.emit(TaskUpdatedEvent, self.by, new, changed=tuple(sorted(self.changes)))
        unit.audit(self.by, self.action, self.subject, detail=", ".join(sorted(self.changes)))
        return new


def _unknown(changes: Any) -> Iterator[Fault]:
    if not isinstance(changes, Mapping):
        yield Fault(field="changes", bound="must be a mapping", value=shown(changes))
        return
    for name in sorted(map(named, set(changes) - MUTABLE)):
        yield Fault(field=name, bound=f"cannot be changed; what can: {', '.join(sorted(MUTABLE))}")


def _changed(unit: Unit, task: Task, changes: Mapping[str, Any]) -> Task:
    new = task.evolve(**changes, version=task.version + 1, updated_at=unit.now)
    faults = new.validate().faults
    if faults:
        raise ValidationError(faults)
    return new
