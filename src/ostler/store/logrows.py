"""Events and audit entries to rows and back, in the form that a database wants."""

from __future__ import annotations

from typing import Any

from ostler.model import AuditEntry, Event
from ostler.store.damage import blame, shown_key
from ostler.store.eventrows import EventRow, event_of
from ostler.store.mapper import Dialect
from ostler.store.port import AUDIT_FIELDS, AuditRow

Values = tuple[Any, ...]


def event_row(dialect: Dialect, row: EventRow) -> Values:
    encode = dialect.uuid_out
    sequence, event_id, space, instance_id, task_id, event_type, text, occurred_at, correlation_id = row
    return (
        sequence,
        dialect.id_out(event_id),
        space and encode(space),
        instance_id and encode(instance_id),
        task_id and encode(task_id),
        event_type,
        text,
        dialect.time_out(occurred_at),
        correlation_id,
    )


def event_from(dialect: Dialect, row: Values) -> Event:
    decode = dialect.uuid_in
    sequence, event_id, space, instance_id, task_id, event_type, text, occurred_at, correlation_id = row
    return event_of(
        EventRow(
            sequence,
            decode(event_id).int,
            space and decode(space),
            instance_id and decode(instance_id),
            task_id and decode(task_id),
            event_type,
            text,
            dialect.time_in(occurred_at),
            correlation_id,
        )
    )


def events_from(dialect: Dialect, rows: list[Values]) -> list[Event]:
    try:
        return [event_from(dialect, row) for row in rows]
    except MemoryError:  # the row may well be sound
        raise
    except Exception:  # noqa: BLE001 - whatever a damaged row makes of our decoders
        blame(rows, lambda row: event_from(dialect, row), "agent_instance_events", lambda row: f"sequence {row[0]}")


def audits_from(dialect: Dialect, rows: list[Values]) -> list[AuditEntry]:
    try:
        return [audit_from(dialect, row) for row in rows]
    except MemoryError:  # the row may well be sound
        raise
    except Exception:  # noqa: BLE001 - the same
        blame(rows, lambda row: audit_from(dialect, row), "audit", lambda row: f"{shown_key(row[0])} {row[1]}")


def audit_row(dialect: Dialect, row: AuditRow) -> Values:
    workspace_id, number, occurred_at, *words = row
    return (dialect.uuid_out(workspace_id), number, dialect.time_out(occurred_at), *words)


def audit_from(dialect: Dialect, row: Values) -> AuditEntry:
    space, number, occurred_at, *words = row
    values = (dialect.uuid_in(space), number, dialect.time_in(occurred_at), *words)
    return AuditEntry(**dict(zip(AUDIT_FIELDS, values, strict=True)))
