"""Loops: iterations, pull requests that Ostler keeps itself, and what CI said of a commit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.errors import InvalidOperationError, NotFoundError
from ostler.model.access import SYSTEM, Actor
from ostler.model.events import AgentSignalEvent, TaskIterationEvent
from ostler.model.loop import CiResult, Iteration, PullRequest, PullRequestState
from ostler.model.task import Task
from ostler.model.text import clipped
from ostler.model.wait import Wait
from ostler.store.events import read_event
from ostler.store.record_table import RecordTable
from ostler.store.transaction import Reader, Transaction
from ostler.store.waits import WAITS

ITERATIONS = RecordTable(Iteration, "iterations", key_columns=2)
PULL_REQUESTS = RecordTable(PullRequest, "pull_requests", renamed={"commit": "commit_id"}, key_columns=2)
CI_RESULTS = RecordTable(CiResult, "ci_results", renamed={"commit": "commit_id"}, key_columns=2)
_MAX_COMMENTS = 50


# --- iterations --------------------------------------------------------------------------------------


def get_iteration(reader: Reader, task_id: UUID, number: int) -> Iteration | None:
    row = reader.fetch_one(f"{ITERATIONS.select} WHERE task_id = :id AND number = :number", id=task_id, number=number)
    return ITERATIONS.read_one(row)


def list_iterations(reader: Reader, task_id: UUID, limit: int = 1000) -> list[Iteration]:
    """The newest, oldest first."""
    rows = reader.fetch(
        f"{ITERATIONS.select} WHERE task_id = :id ORDER BY number DESC LIMIT :limit", id=task_id, limit=limit
    )
    return ITERATIONS.read(rows)[::-1]


def begin_iteration(tx: Transaction, task: Task, iteration: Iteration) -> Iteration:
    """Begun again under the same number, it is as it was: a fresh program goes on with it."""
    begun = get_iteration(tx, task.task_id, iteration.number)
    if begun is not None:
        return begun
    ITERATIONS.insert(tx, iteration)
    tx.emit(_event(task, iteration), SYSTEM)
    return iteration


def end_iteration(tx: Transaction, task: Task, ended_by: str, **changes: Any) -> Iteration | None:
    """Of the present attempt. Ended twice, the first end stays."""
    iteration = get_iteration(tx, task.task_id, task.attempt)
    if iteration is None or iteration.ended_at is not None:
        return iteration
    ended = iteration.evolve(ended_by=ended_by, ended_at=tx.now, instance_id=task.instance_id, **changes)
    values = ITERATIONS.encode(ended)
    sets = ", ".join(f"{name} = :{name}" for name in values if name not in {"task_id", "number"})
    tx.execute(f"UPDATE iterations SET {sets} WHERE task_id = :task_id AND number = :number", **values)
    tx.emit(_event(task, ended), SYSTEM)
    return ended


def _event(task: Task, iteration: Iteration) -> TaskIterationEvent:
    return TaskIterationEvent(
        workspace_id=task.workspace_id,
        task_id=task.task_id,
        key=task.key,
        number=iteration.number,
        ended_by=iteration.ended_by,
        summary=None if iteration.summary is None else clipped(iteration.summary, 500),
        changed_files=iteration.changed_files,
        seconds=None if iteration.ended_at is None else (iteration.ended_at - iteration.started_at).total_seconds(),
        tokens=iteration.tokens,
        cost_usd=iteration.cost_usd,
        retries=0 if task.loop is None else task.loop.retries,
    )


def signals_of(reader: Reader, instance_id: UUID) -> list[AgentSignalEvent]:
    """All that it sent, in order."""
    rows = reader.fetch(
        """SELECT sequence, workspace_id, event_type, event_data_json, occurred_at, correlation_id
           FROM agent_instance_events WHERE instance_id = :id AND event_type = :kind ORDER BY sequence""",
        id=instance_id,
        kind=AgentSignalEvent.event_type,
    )
    return [event for row in rows if isinstance(event := read_event(row), AgentSignalEvent)]


def waits_ended_since(reader: Reader, task_id: UUID, since: datetime) -> list[Wait]:
    rows = reader.fetch(
        f"{WAITS.select} WHERE task_id = :id AND ended_at >= :since ORDER BY id", id=task_id, since=since
    )
    return WAITS.read(rows)


# --- pull requests -----------------------------------------------------------------------------------


def get_pull_request(reader: Reader, workspace_id: UUID, number: int) -> PullRequest:
    row = reader.fetch_one(
        f"{PULL_REQUESTS.select} WHERE workspace_id = :space AND number = :number", space=workspace_id, number=number
    )
    pull = PULL_REQUESTS.read_one(row)
    if pull is None:
        raise NotFoundError(f"there is no pull request #{number}; `ostler pr list -a` lists all")
    return pull


def list_pull_requests(reader: Reader, workspace_id: UUID, *, include_ended: bool = False) -> list[PullRequest]:
    """Newest first."""
    which = "" if include_ended else "AND state = 'open'"
    return PULL_REQUESTS.read(
        reader.fetch(
            f"{PULL_REQUESTS.select} WHERE workspace_id = :space {which} ORDER BY number DESC LIMIT 1000",
            space=workspace_id,
        )
    )


def pull_request_of(reader: Reader, task: Task) -> PullRequest | None:
    """The newest of a task."""
    row = reader.fetch_one(f"{PULL_REQUESTS.select} WHERE task_id = :id ORDER BY number DESC LIMIT 1", id=task.task_id)
    return PULL_REQUESTS.read_one(row)


def open_pull_request(tx: Transaction, task: Task, new: PullRequest) -> PullRequest:
    """The open one of the task is brought up to date; else a new one gets the next number."""
    newest = pull_request_of(tx, task)
    if newest is not None and newest.state is PullRequestState.OPEN:
        changes = {"commit": new.commit, "branch": new.branch, "ci": new.ci, "title": new.title}
        return change_pull_request(tx, newest, changes)
    row = tx.fetch_one("SELECT max(number) FROM pull_requests WHERE workspace_id = :space", space=task.workspace_id)
    number = 1 + int((row and row[0]) or 0)
    made = new.evolve(number=number, url=new.url or f"ostler:pr/{number}", created_at=tx.now, updated_at=tx.now)
    PULL_REQUESTS.insert(tx, made)
    tx.audit(task.workspace_id, SYSTEM, "pr.open", f"task:{task.key}", detail=f"#{number} {made.url}")
    return made


def change_pull_request(tx: Transaction, old: PullRequest, changes: Mapping[str, Any]) -> PullRequest:
    """One that is merged or closed stays as it is."""
    if old.state is not PullRequestState.OPEN:
        raise InvalidOperationError(f"pull request #{old.number} is {old.state}")
    new = old.evolve(**changes, updated_at=tx.now).checked()
    values = PULL_REQUESTS.encode(new)
    sets = ", ".join(f"{name} = :{name}" for name in values if name not in {"workspace_id", "number"})
    changed = tx.execute(
        f"""UPDATE pull_requests SET {sets}
            WHERE workspace_id = :workspace_id AND number = :number AND state = 'open'""",
        **values,
    )
    if not changed:
        raise InvalidOperationError(f"pull request #{old.number} was merged or closed meanwhile")
    return new


def comment_on(tx: Transaction, old: PullRequest, text: str, by: Actor) -> PullRequest:
    comments: tuple[Mapping[str, str], ...] = (*old.comments, {"by": by.name, "text": text})
    return change_pull_request(tx, old, {"comments": comments[-_MAX_COMMENTS:]})


# --- CI ----------------------------------------------------------------------------------------------


def get_ci_result(reader: Reader, workspace_id: UUID, commit: str) -> CiResult | None:
    row = reader.fetch_one(
        f"{CI_RESULTS.select} WHERE workspace_id = :space AND commit_id = :commit", space=workspace_id, commit=commit
    )
    return CI_RESULTS.read_one(row)


def report_ci(tx: Transaction, result: CiResult, by: Actor = SYSTEM) -> CiResult:
    """Kept by its commit, also when nothing waits for it yet. The newest counts."""
    kept = result.evolve(reported_at=tx.now)
    tx.execute(
        "DELETE FROM ci_results WHERE workspace_id = :space AND commit_id = :commit",
        space=kept.workspace_id,
        commit=kept.commit,
    )
    CI_RESULTS.insert(tx, kept)
    tx.audit(kept.workspace_id, by, "ci.report", f"commit:{kept.commit}", outcome="ok" if kept.passed else "failed")
    return kept
