"""A loop: one task, driven through fresh instances from breakpoint to breakpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from ostler.model.record import Record, record
from ostler.model.text import clipped, plain_text_faults, unkeepable_faults
from ostler.model.types import Duration, Interval, Moment
from ostler.model.validation import Fault

MAX_SUMMARY = 4000
MAX_BLOCKERS = 20
_SECOND = timedelta(seconds=1)


class BreakpointType(StrEnum):
    TASK_COMPLETE = "task_complete"
    BLOCKED = "blocked"
    PR_CREATED = "pr_created"


class LoopResultType(StrEnum):
    TASK_COMPLETE = "task_complete"
    BLOCKED = "blocked"
    PR_CREATED = "pr_created"
    MAX_RETRIES = "max_retries"
    ERROR = "error"
    SHUTDOWN = "shutdown"


class OnClose(StrEnum):
    """What becomes of a task whose pull request is closed without a merge."""

    REJECT = "reject"
    SEND_BACK = "send-back"


class OnMerge(StrEnum):
    """What becomes of a task whose pull request is merged."""

    ACCEPT = "accept"
    CONTINUE = "continue"  #: a fresh start goes on with the rest


@record
class Breakpoint(Record):
    """What an agent says where it stops: its claim, which the checks and the waits judge."""

    type: BreakpointType
    task_id: str | None = None
    summary: str | None = None
    #: Keys of tasks, `ci`, or `human` with a question behind a colon.
    blocked_on: tuple[str, ...] = ()
    pr_url: str | None = None

    @classmethod
    def read(cls, kind: str, values: Mapping[str, Any]) -> Breakpoint:
        """From what an agent wrote: unknown keys are ignored, one blocker may be plain text."""
        on = values.get("blocked_on") or ()
        blockers = (on,) if isinstance(on, str) else tuple(str(blocker) for blocker in on)
        texts = {name: values.get(name) for name in ("task_id", "summary", "pr_url")}
        text = {name: None if value is None else clipped(str(value), MAX_SUMMARY) for name, value in texts.items()}
        return cls(type=BreakpointType(kind), blocked_on=blockers[:MAX_BLOCKERS], **text).checked()

    def rules(self) -> Iterator[Fault]:
        for name in ("task_id", "summary", "pr_url"):
            if (value := getattr(self, name)) is not None:
                yield from unkeepable_faults(name, value)
        for blocker in self.blocked_on:
            yield from plain_text_faults("blocked_on", blocker, 1000)


@record
class LoopSettings(Record):
    """The table `[loop]` of ostler.toml; a task may have its own."""

    #: Iterations that ended without a breakpoint, in an error, or with a failed check.
    max_retries: Annotated[int, Interval(ge=0, le=100_000)] = 100
    #: Between such an iteration and the next.
    retry_interval: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(days=1))] = timedelta(seconds=30)
    #: How often communications.json is read where it cannot be watched.
    breakpoint_check_interval: Annotated[Duration, Interval(ge=timedelta(milliseconds=10), le=timedelta(hours=1))] = (
        _SECOND
    )
    #: How long a pull request may wait for its merge.
    pr_merge_timeout: Annotated[Duration, Interval(ge=_SECOND, le=timedelta(days=365))] = timedelta(hours=1)
    #: After so long a call returns that the task is blocked; the wait stays open. Without a time it goes on.
    blocked_timeout: Annotated[Duration, Interval(ge=_SECOND, le=timedelta(days=365))] | None = None
    #: How long an agent may go on after its breakpoint before it is ended.
    grace: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(hours=1))] = timedelta(seconds=10)
    #: Fresh starts in all; without a number, as many as the retries allow.
    max_iterations: Annotated[int, Interval(ge=1, le=1_000_000)] | None = None
    #: What the agent prints when it is done, for one that signals nothing.
    until: str | None = None
    #: What all iterations together may use.
    max_tokens: Annotated[int, Interval(ge=1, le=10**12)] | None = None
    #: What all iterations together may cost, in dollars.
    max_cost_usd: Annotated[float, Interval(ge=0, le=1_000_000)] | None = None
    #: Characters of the summary that a fresh agent gets.
    summary_limit: Annotated[int, Interval(ge=500, le=100_000)] = 8000
    #: Command lines that are the CI of a pull request; without any, the checks of the task.
    ci: tuple[str, ...] = ()
    #: What becomes of a task whose pull request is closed without a merge.
    on_close: OnClose = OnClose.REJECT
    #: What becomes of one whose pull request is merged.
    on_merge: OnMerge = OnMerge.ACCEPT


@record
class TaskLoop(LoopSettings):
    """The loop of one task: its settings, and what it has spent."""

    retries: int = 0
    #: Where its own communications.json is; None: in its workdir.
    comm_file: str | None = None


@record
class ContextSnapshot(Record):
    """What is known of a task where one agent stopped and before the next begins."""

    task_id: str
    title: str
    #: Fresh starts so far, with the one that begins now; and retries spent.
    spawn_count: int
    retry_count: int
    max_retries: int
    branch: str | None = None
    commit: str | None = None
    base: str | None = None
    changed_files: tuple[str, ...] = ()
    #: Key to state.
    dependencies: Mapping[str, str] = field(default_factory=dict)
    #: Waits that ended since the last start: what for, how they ended, what was answered.
    blockers: tuple[Mapping[str, Any], ...] = ()
    #: The last breakpoint, comments of reviews, results of checks and CI; each with its origin.
    last_signal: Mapping[str, Any] | None = None
    comments: tuple[Mapping[str, str], ...] = ()
    #: How the last iterations ended, one line each.
    history: tuple[str, ...] = ()
    taken_at: Moment


@record
class Iteration(Record):
    """One fresh start of a loop. Its number is that of the task's attempt."""

    task_id: UUID
    number: int
    instance_id: UUID | None = None
    snapshot: ContextSnapshot
    prompt: str
    #: breakpoint, until, exit, error, check, limit, lost, stopped.
    ended_by: str | None = None
    breakpoint: Breakpoint | None = None
    summary: str | None = None
    changed_files: int | None = None
    tokens: int = 0
    cost_usd: float | None = None
    started_at: Moment
    ended_at: Moment | None = None


class PullRequestState(StrEnum):
    OPEN = "open"
    MERGED = "merged"
    CLOSED = "closed"


@record
class PullRequest(Record):
    """A review of a task's branch, kept by Ostler itself."""

    workspace_id: UUID
    number: int
    task_id: UUID
    task_key: str
    #: As the agent named it, else `ostler:pr/NUMBER`.
    url: str
    title: str
    branch: str | None = None
    commit: str | None = None
    state: PullRequestState = PullRequestState.OPEN
    #: pending, passed, failed; None where nothing is declared.
    ci: str | None = None
    comments: tuple[Mapping[str, str], ...] = ()
    approved_by: tuple[str, ...] = ()
    created_at: Moment
    updated_at: Moment


@record
class CiResult(Record):
    """How CI judged a commit."""

    workspace_id: UUID
    commit: str
    passed: bool
    output: str = ""
    reported_at: Moment


@record
class LoopResult(Record):
    """Of a whole call of `run_agent_loop`."""

    result_type: LoopResultType
    task_id: str
    blocked_on: tuple[str, ...] = ()
    pr_url: str | None = None
    summary: str | None = None
    iterations: int = 0
