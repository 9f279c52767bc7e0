"""Waits: durable reasons why something does not run. Each ends exactly once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.errors import InvalidOperationError, NotFoundError
from ostler.model.access import SYSTEM, Actor
from ostler.model.events import AgentWaitEndedEvent, AgentWaitOpenedEvent
from ostler.model.wait import Wait, WaitKind
from ostler.store.record_table import RecordTable
from ostler.store.transaction import PAGE, Reader, Transaction, page

WAITS = RecordTable(Wait, "waits", renamed={"wait_id": "id"})
#: Suspensions and backoffs are told by the moves that they belong to.
_SILENT = frozenset({WaitKind.RESUME, WaitKind.BACKOFF})


def get_wait(reader: Reader, wait_id: UUID) -> Wait | None:
    return WAITS.read_one(reader.fetch_one(f"{WAITS.select} WHERE id = :id", id=wait_id))


def open_waits(
    reader: Reader,
    workspace_id: UUID | None = None,
    *,
    instance_id: UUID | None = None,
    after: UUID | None = None,
    limit: int = PAGE,
) -> list[Wait]:
    """By their ids. Without a workspace: of all of them, for recovery."""
    where = ["ended_at IS NULL"]
    if instance_id is not None:
        where.append("instance_id = :instance_id")
    elif workspace_id is not None:
        where.append("workspace_id = :workspace_id")
    if after is not None:
        where.append("id > :after")
    parameters = {"instance_id": instance_id, "workspace_id": workspace_id, "after": after}
    clauses = " AND ".join(where)
    values = {name: value for name, value in parameters.items() if f":{name}" in clauses}
    return WAITS.read(
        reader.fetch(f"{WAITS.select} WHERE {clauses} ORDER BY id LIMIT :limit", limit=page(limit), **values)
    )


def all_open_waits(reader: Reader) -> list[Wait]:
    waits: list[Wait] = []
    while more := open_waits(reader, after=waits[-1].wait_id if waits else None):
        waits += more
    return waits


def waits_since(reader: Reader, instance_id: UUID, moment: datetime) -> list[Wait]:
    """Of an instance: those that are open, and those that ended after this moment."""
    rows = reader.fetch(
        f"{WAITS.select} WHERE instance_id = :id AND ended_at > :moment ORDER BY id", id=instance_id, moment=moment
    )
    return [*WAITS.read(rows), *open_waits(reader, instance_id=instance_id)]


def open_wait(tx: Transaction, wait: Wait, *, attempt: int = 0, by: Actor = SYSTEM) -> Wait:
    """Opened again under the same id, it is joined: an agent that was adopted asks again."""
    stored = get_wait(tx, wait.wait_id)
    if stored is not None:
        if stored.instance_id != wait.instance_id:
            raise InvalidOperationError(f"the wait {wait.wait_id} is of another instance; use a new id")
        return stored
    wait = wait.checked()
    WAITS.insert(tx, wait)
    if wait.instance_id is not None and wait.kind not in _SILENT:
        tx.emit(
            AgentWaitOpenedEvent(
                workspace_id=wait.workspace_id,
                instance_id=wait.instance_id,
                attempt=attempt,
                wait_id=wait.wait_id,
                kind=wait.kind,
                reason=wait.reason,
                due_at=wait.due_at,
                detail=wait.detail,
            ),
            by,
        )
    return wait


def end_wait(
    tx: Transaction,
    wait_id: UUID,
    outcome: str,
    answer: Mapping[str, Any] | None = None,
    *,
    by: Actor = SYSTEM,
    act: str | None = None,
) -> Wait:
    """Of two that end it one counts; the other gets `InvalidOperationError`."""
    wait = get_wait(tx, wait_id)
    if wait is None:
        raise NotFoundError(f"there is no wait {wait_id}; list the open ones")
    if act is not None:
        tx.audit_refusal(wait.workspace_id, by, act, f"wait:{wait_id}")
    ended = wait.evolve(ended_at=tx.now, outcome=outcome, answer=answer).checked()
    changed = tx.execute(
        """UPDATE waits SET ended_at = :now, outcome = :outcome, answer_json = :answer
           WHERE id = :id AND ended_at IS NULL""",
        id=wait_id,
        now=tx.now,
        outcome=outcome,
        answer=WAITS.dump("answer", answer),
    )
    if not changed:
        raise InvalidOperationError(f"the wait {wait_id} has ended already ({wait.outcome}); list the open ones")
    _tell_end(tx, ended, by)
    if act is not None:
        tx.audit(wait.workspace_id, by, act, f"wait:{wait_id}", detail=outcome)
    return ended


def end_waits_of(
    tx: Transaction, instance_id: UUID, outcome: str, *, kinds: Collection[WaitKind] | None = None
) -> list[Wait]:
    """End what is still open of an instance, together with the move that causes it."""
    chosen = ", ".join(f"'{kind.value}'" for kind in sorted(kinds or WaitKind))
    rows = tx.fetch(
        f"""UPDATE waits SET ended_at = :now, outcome = :outcome
            WHERE instance_id = :id AND ended_at IS NULL AND kind IN ({chosen}) RETURNING {", ".join(WAITS.columns)}""",
        id=instance_id,
        now=tx.now,
        outcome=outcome,
    )
    ended = sorted(WAITS.read(rows), key=lambda wait: wait.wait_id)
    for wait in ended:
        _tell_end(tx, wait, SYSTEM)
    return ended


def _tell_end(tx: Transaction, wait: Wait, by: Actor) -> None:
    if wait.instance_id is not None and wait.kind not in _SILENT:
        tx.emit(
            AgentWaitEndedEvent(
                workspace_id=wait.workspace_id,
                instance_id=wait.instance_id,
                wait_id=wait.wait_id,
                kind=wait.kind,
                outcome=wait.outcome or "",
            ),
            by,
        )
