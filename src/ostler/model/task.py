"""A piece of work with a review outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from ostler.model.bounds import Interval
from ostler.model.moments import Moment
from ostler.model.record import MAX_COUNT, Record, settle
from ostler.model.states import FINISHED_TASK_STATES, AgentPriority, TaskState, TaskStateTransitions
from ostler.model.text import plain_text_faults, tag_faults
from ostler.model.validation import Fault, all_are

MAX_TASK_TEXT = 100_000
MAX_DEPENDENCIES = 100
#: What Linux allows a path to have.
MAX_PATH = 4096


@dataclass(frozen=True, kw_only=True)
class Task(Record):
    task_id: UUID
    #: What is to be done, in words.
    task: str
    state: TaskState = TaskState.QUEUED
    created_at: Moment
    updated_at: Moment
    generated_code: str | None = None
    submission_summary: str | None = None
    changed_files: tuple[str, ...] = ()
    error: str | None = None

    definition_id: UUID | None = None
    attempt: Annotated[int, Interval(ge=0, le=MAX_COUNT)] = 0
    spawn_count: Annotated[int, Interval(ge=0, le=MAX_COUNT)] = 0
    retry_count: Annotated[int, Interval(ge=0, le=MAX_COUNT)] = 0
    priority: AgentPriority = AgentPriority.NORMAL
    dependencies: tuple[UUID, ...] = ()
    #: Where it is worked on: a directory, a worktree, an overlay.
    workspace: str | None = None
    branch: str | None = None
    tags: tuple[str, ...] = ()
    workspace_id: UUID | None = None
    owner_id: UUID | None = None
    version: int = 1

    def __post_init__(self) -> None:
        settle(self, "changed_files", "dependencies", "tags")

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED_TASK_STATES

    def can_transition_to(self, target: TaskState) -> bool:
        return TaskStateTransitions.is_valid(self.state, target)

    def rules(self) -> Iterator[Fault]:
        if all_are(str, self.task) and not self.task.strip():
            yield Fault(field="task", bound="must say what is to be done")
        for name in ("task", "generated_code", "submission_summary", "workspace", "branch", "error"):
            limit = 10 * MAX_TASK_TEXT if name == "generated_code" else MAX_TASK_TEXT
            yield from plain_text_faults(name, getattr(self, name), limit)
        if all_are(tuple, self.changed_files):
            for index, path in enumerate(self.changed_files):
                yield from plain_text_faults(f"changed_files.{index}", path, MAX_PATH)
        yield from tag_faults("tags", self.tags)
        if all_are(tuple, self.dependencies) and len(self.dependencies) > MAX_DEPENDENCIES:
            value = f"{len(self.dependencies)} entries"
            yield Fault(field="dependencies", bound=f"must have at most {MAX_DEPENDENCIES} entries", value=value)
