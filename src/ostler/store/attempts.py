"""Attempts: one row per start. A row without a handle is an open intent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.model.attempt import Attempt, AttemptOutcome
from ostler.model.instance import AgentInstance
from ostler.model.text import clipped
from ostler.store.record_table import RecordTable
from ostler.store.transaction import PAGE, Reader, Transaction, page

ATTEMPTS = RecordTable(Attempt, "attempts", key_columns=2)
_MAX_DETAIL = 8000


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """How a start ended."""

    outcome: AttemptOutcome
    detail: str | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    #: When it ended, where that is known better than by the time of the commit.
    ended_at: datetime | None = None


def add_attempt(tx: Transaction, instance: AgentInstance) -> None:
    """The intent of the record's present attempt."""
    ATTEMPTS.insert(
        tx,
        Attempt(
            instance_id=instance.instance_id,
            number=instance.attempt,
            task_id=instance.task_id,
            intended_at=tx.now,
        ),
    )


def start_attempt(tx: Transaction, instance_id: UUID, number: int, handle: Mapping[str, Any]) -> None:
    tx.execute(
        "UPDATE attempts SET handle_json = :handle, started_at = :now WHERE instance_id = :id AND number = :number",
        id=instance_id,
        number=number,
        handle=ATTEMPTS.dump("handle", handle),
        now=tx.now,
    )


def end_attempt(tx: Transaction, instance_id: UUID, number: int, end: AttemptEnd) -> None:
    """Does nothing where it has ended already."""
    tx.execute(
        """UPDATE attempts SET ended_at = :ended, outcome = :outcome, exit_code = :code, exit_signal = :signal,
           detail = :detail WHERE instance_id = :id AND number = :number AND ended_at IS NULL""",
        id=instance_id,
        number=number,
        ended=end.ended_at or tx.now,
        outcome=end.outcome,
        code=end.exit_code,
        signal=end.exit_signal,
        detail=None if end.detail is None else clipped(end.detail, _MAX_DETAIL),
    )


def get_attempt(reader: Reader, instance_id: UUID, number: int) -> Attempt | None:
    row = reader.fetch_one(
        f"{ATTEMPTS.select} WHERE instance_id = :id AND number = :number", id=instance_id, number=number
    )
    return ATTEMPTS.read_one(row)


def exit_codes(reader: Reader, ended: Sequence[tuple[UUID, int]]) -> dict[UUID, int | None]:
    """By instance, how that attempt ended: the code, or 128 and the number of the signal."""
    codes: dict[UUID, int | None] = {}
    for instance_id, number in ended:
        attempt = get_attempt(reader, instance_id, number)
        if attempt is not None:
            codes[instance_id] = attempt.exit_code if attempt.exit_signal is None else 128 + attempt.exit_signal
    return codes


def list_attempts(reader: Reader, instance_id: UUID, *, after: int = 0, limit: int = PAGE) -> list[Attempt]:
    rows = reader.fetch(
        f"{ATTEMPTS.select} WHERE instance_id = :id AND number > :after ORDER BY number LIMIT :limit",
        id=instance_id,
        after=after,
        limit=page(limit),
    )
    return ATTEMPTS.read(rows)


def open_attempts(reader: Reader) -> list[Attempt]:
    """Of all workspaces, for recovery."""
    return ATTEMPTS.read(reader.fetch(f"{ATTEMPTS.select} WHERE ended_at IS NULL ORDER BY instance_id, number"))
