"""A task: a piece of work with a review outcome."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any
from uuid import UUID

from ostler.model.loop import TaskLoop
from ostler.model.record import Record, record
from ostler.model.states import AgentPriority
from ostler.model.text import name_faults, tag_faults, unkeepable_faults
from ostler.model.types import Duration, Interval, Moment
from ostler.model.validation import Fault, shown

MAX_TASK = 100_000
MAX_COMMENT = 20_000
MAX_DEPENDENCIES = 100
MAX_CHECKS = 20
_MAX_SLUG = 30
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


TaskBackoff = Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(minutes=10))]


class TaskState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"  #: submitted and proven; waits for its review
    ACCEPTED = "accepted"
    REJECTED = "rejected"


_T = TaskState
TASK_TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = MappingProxyType(
    {
        _T.QUEUED: frozenset({_T.RUNNING, _T.REJECTED}),
        _T.RUNNING: frozenset({_T.QUEUED, _T.COMPLETED, _T.REJECTED}),
        _T.COMPLETED: frozenset({_T.QUEUED, _T.ACCEPTED, _T.REJECTED}),
        _T.ACCEPTED: frozenset({_T.COMPLETED}),  # only by undo
        _T.REJECTED: frozenset(),
    }
)
FINISHED_STATES = frozenset({_T.ACCEPTED, _T.REJECTED})


@record
class Receipt(Record):
    """One check that Ostler ran itself: what it ran on, and how it ended."""

    command: str
    #: The tree that was checked out for it; None where the workdir is no git tree.
    tree: str | None = None
    #: None where it did not end in its time.
    exit_code: int | None = None
    seconds: float
    #: SHA-256 of the output; of a long one its first and its last part count, as they were kept.
    output_digest: str
    #: The end of the output.
    output: str

    @property
    def passed(self) -> bool:
        return self.exit_code == 0


@record
class Task(Record):
    task_id: UUID
    workspace_id: UUID
    #: Short and unique in its workspace: T001, or chosen by the caller.
    key: str
    state: TaskState = TaskState.QUEUED
    #: What is to be done.
    task: str
    #: The definition that works on it; without one it waits until a program claims it.
    agent: str | None = None
    model: str | None = None
    priority: AgentPriority = AgentPriority.NORMAL
    tags: tuple[str, ...] = ()
    #: The key of the task whose agent added it.
    parent: str | None = None
    #: Keys of tasks that must be accepted before.
    depends_on: tuple[str, ...] = ()
    #: Command lines that must pass on the submitted tree.
    checks: tuple[str, ...] = ()
    #: A command line that prepares its workdir before its agent begins; else that of its agent, else of the settings.
    setup: str | None = None
    #: Whether that was done in the present workdir.
    is_set_up: bool = False
    #: Leased to it until it is finished, for a server that its work needs.
    port: int | None = None
    #: Kept back until it is released.
    is_held: bool = False
    #: How often it was begun; the number of the present or the last attempt.
    attempt: int = 0
    #: Attempts that failed. Waits and sendings back spend nothing.
    failures: int = 0
    max_failures: Annotated[int, Interval(ge=1, le=1000)] = 3
    #: Before the attempt after the first failure; doubled with each that follows, up to ten minutes.
    backoff: TaskBackoff = timedelta(seconds=30)
    #: Attempts in a row that were lost with the machine. They spend no failure.
    lost: int = 0
    #: How long one attempt may work.
    timeout: Annotated[Duration, Interval(ge=timedelta(seconds=1), le=timedelta(days=7))] | None = None
    #: The directory that it was submitted from.
    near: str | None = None
    #: The directory of the project that it belongs to; None for the project of the home.
    project: str | None = None
    workdir: Mapping[str, Any] | None = None
    instance_id: UUID | None = None
    #: Where the program of its agent can go on.
    session: str | None = None
    session_usage: Mapping[str, Any] | None = None
    #: Driven through fresh instances until it is proven done.
    loop: TaskLoop | None = None
    #: The crew and the member that began the present or the last attempt.
    crew: str | None = None
    member: str | None = None
    #: What the next attempt is told beside the task.
    comments: tuple[str, ...] = ()
    summary: str | None = None
    #: What the agent says it changed, and what it did change.
    claimed_files: tuple[str, ...] | None = None
    changed_files: tuple[str, ...] | None = None
    #: For an agent that hands in text instead of files.
    generated_code: str | None = None
    error: str | None = None
    snapshot: Mapping[str, Any] | None = None
    receipts: tuple[Receipt, ...] = ()
    accepted: Mapping[str, Any] | None = None
    vault: Mapping[str, Any] | None = None
    tokens: int = 0
    cost_usd: float | None = None
    created_by: str
    created_at: Moment
    updated_at: Moment
    #: When it first ran, was last completed, and was accepted or rejected.
    started_at: Moment | None = None
    completed_at: Moment | None = None
    ended_at: Moment | None = None
    version: int = 1

    @property
    def title(self) -> str:
        return self.task.strip().splitlines()[0][:200] if self.task.strip() else ""

    @property
    def slug(self) -> str:
        """Of lower-case letters, digits and _, begun by a letter, no other task has it: for names of databases."""
        name = re.sub(r"[^a-z0-9]+", "_", self.key.lower())[:_MAX_SLUG].strip("_")
        return f"{name if name[:1].isalpha() else f't{name}'}_{self.task_id.hex[-8:]}"

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED_STATES

    def rules(self) -> Iterator[Fault]:
        yield from key_faults("key", self.key)
        if not self.task.strip():
            yield Fault(field="task", bound="must say what is to be done")
        yield from _long_text_faults("task", self.task, MAX_TASK)
        for name in ("agent", "model"):
            if (value := getattr(self, name)) is not None:
                yield from name_faults(name, value)
        yield from tag_faults("tags", self.tags)
        if len(self.depends_on) > MAX_DEPENDENCIES:
            yield Fault(field="depends_on", bound=f"must be at most {MAX_DEPENDENCIES} keys")
        if self.key in self.depends_on:
            yield Fault(field="depends_on", bound=f"must not hold the task itself ({self.key})")
        if len(self.checks) > MAX_CHECKS:
            yield Fault(field="checks", bound=f"must be at most {MAX_CHECKS} command lines")
        yield from setup_faults(self.setup)
        for check in self.checks:
            if not check.strip():
                yield Fault(field="checks", bound="must be command lines, not empty text")
            yield from _long_text_faults("checks", check, MAX_COMMENT)


def key_faults(field: str, key: str) -> Iterator[Fault]:
    if not _KEY.fullmatch(key):
        bound = "must be 1 to 64 letters, digits, - and _, beginning with a letter or a digit"
        yield Fault(field=field, bound=bound, value=shown(key))


def setup_faults(setup: str | None) -> Iterator[Fault]:
    if setup is not None and not setup.strip():
        yield Fault(field="setup", bound="must be a command line, not empty text")
    yield from _long_text_faults("setup", setup or "", MAX_COMMENT)


def _long_text_faults(field: str, text: str, most: int) -> Iterator[Fault]:
    if len(text) > most:
        yield Fault(
            field=field, bound=f"must be at most {most} characters; put the rest into a file", value=str(len(text))
        )
    yield from unkeepable_faults(field, text)


@record
class TaskWhy(Record):
    """Why a task is where it is; see `Why` for instances."""

    key: str
    state: TaskState
    verdict: str
    evidence: tuple[str, ...] = ()
    what_would_change_it: tuple[str, ...] = ()


@record
class TaskFilter(Record):
    state: TaskState | None = None
    agent: str | None = None
    tag: str | None = None
    #: Part of the text of the task, in any case.
    text: str | None = None
    created_from: Moment | None = None
    created_until: Moment | None = None
    #: Without it finished tasks are left out, unless their state is asked for.
    include_finished: bool = False
    limit: Annotated[int, Interval(ge=1, le=1000)] = 100
    offset: Annotated[int, Interval(ge=0, le=1_000_000)] = 0


@record
class TaskStatistics(Record):
    by_state: Mapping[TaskState, int]
    #: Queued ones that wait for a person.
    parked: int = 0
    #: Accepted among those that a person reviewed, by accepting or rejecting them; None before the first.
    success_rate: float | None = None
    #: From the first start to the completion.
    average_duration: Duration | None = None
    cost_usd: float = 0.0


_Long = Annotated[Duration, Interval(ge=timedelta(seconds=1), le=timedelta(days=7))]


@record
class TaskSettings(Record):
    """The table `[tasks]` of ostler.toml."""

    #: Tasks that are worked on at the same time. Without a number, as many as there are cores.
    at_once: Annotated[int, Interval(ge=0, le=1000)] | None = None
    #: How long one attempt may work, where neither the task nor its agent says.
    timeout: _Long = timedelta(hours=2)
    #: How long one check may run.
    check_timeout: _Long = timedelta(minutes=15)
    #: A command line that prepares each workdir before an agent begins, where neither the task nor its agent has one.
    setup: str | None = None
    setup_timeout: _Long = timedelta(minutes=15)
    #: Failed attempts before a task is parked for a person.
    max_failures: Annotated[int, Interval(ge=1, le=1000)] = 3
    #: Before the attempt after the first failure.
    backoff: TaskBackoff = timedelta(seconds=30)
    #: How long accepted and rejected tasks stay before they go to the vault.
    retention: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(days=3650))] = timedelta(hours=24)
    #: A command line for `sh`, run in the project on every change of state of a task.
    on_change: str | None = None

    def rules(self) -> Iterator[Fault]:
        yield from setup_faults(self.setup)
