"""The numbered log: pages from a cursor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.errors import CursorGoneError, DamagedRowError
from ostler.model.events import EVENT_CLASSES, AgentStateChangedEvent, Event
from ostler.model.record import adapter
from ostler.model.states import AgentState
from ostler.model.types import from_micros
from ostler.model.validation import fault
from ostler.store.transaction import PAGE, Reader, page


@dataclass(frozen=True, slots=True)
class EventPage:
    events: tuple[Event, ...]
    #: Read on from here. It covers everything that was looked at, also where nothing matched.
    cursor: int


def read_events(
    reader: Reader,
    after: int,
    *,
    workspace_id: UUID | None = None,
    instance_id: UUID | None = None,
    limit: int = PAGE,
    types: Collection[str] = (),
) -> EventPage:
    """The events after `after`, or those of these types, in their order.

    Raises `CursorGoneError` where retention has removed some of them.

    The newest number is read before the page and the last removed one after it: so the cursor of a quiet workspace
    moves on, and a removal in between is noticed.
    """
    head, limit = _head(reader, "sequence"), page(limit)
    if not 0 <= after <= head:
        raise fault("after", f"must be 0 to {head}, the newest event; a larger number is of another store", after)
    where = ["sequence > :after", "sequence <= :head"]
    values: dict[str, Any] = {"after": after, "head": head, "limit": limit}
    if instance_id is not None:
        where.append("instance_id = :instance_id")
        values["instance_id"] = instance_id
    elif workspace_id is not None:
        where.append("workspace_id = :workspace_id")
        values["workspace_id"] = workspace_id
    if types:
        where.append(_of_types(types, values))
    rows = reader.fetch(
        f"""SELECT sequence, workspace_id, event_type, event_data_json, occurred_at, correlation_id
            FROM agent_instance_events WHERE {" AND ".join(where)} ORDER BY sequence LIMIT :limit""",
        **values,
    )
    pruned_until = _head(reader, "horizon")
    events = tuple(read_event(row) for row in rows)
    if after < pruned_until:
        is_whole = instance_id and (_is_first(events) or _is_younger(reader, instance_id, pruned_until))
        if not is_whole:
            raise CursorGoneError(cursor=after, horizon=pruned_until)
    return EventPage(events, events[-1].sequence if len(events) == limit else head)


def newest_sequence(reader: Reader) -> int:
    return _head(reader, "sequence")


def pruned_until(reader: Reader) -> int:
    """Events up to this number are no longer kept."""
    return _head(reader, "horizon")


def last_events(
    reader: Reader,
    count: int,
    *,
    workspace_id: UUID,
    instance_id: UUID | None = None,
    types: Collection[str] = (),
) -> list[Event]:
    """The newest `count` events, or those of these types, oldest first."""
    clause = "workspace_id = :space" if instance_id is None else "instance_id = :instance"
    values: dict[str, Any] = {"space": workspace_id} if instance_id is None else {"instance": instance_id}
    if types:
        clause += f" AND {_of_types(types, values)}"
    rows = reader.fetch(
        f"""SELECT sequence, workspace_id, event_type, event_data_json, occurred_at, correlation_id
            FROM agent_instance_events WHERE {clause} ORDER BY sequence DESC LIMIT :limit""",
        limit=page(count),
        **values,
    )
    return [read_event(row) for row in reversed(rows)]


def _of_types(types: Collection[str], values: dict[str, Any]) -> str:
    names = {f"type{number}": name for number, name in enumerate(sorted(types))}
    values |= names
    return f"event_type IN ({', '.join(f':{name}' for name in names)})"


def first_event_at(reader: Reader, moment: datetime) -> int:
    """The number of the first event that is kept and not older than this moment; one above the newest where none is.

    Numbers rise with the time, so a few rows are looked at, not all of them.
    """
    low, high = _head(reader, "horizon") + 1, _head(reader, "sequence") + 1
    while low < high:
        middle = (low + high) // 2
        row = reader.fetch_one(
            "SELECT occurred_at FROM agent_instance_events WHERE sequence >= :middle ORDER BY sequence LIMIT 1",
            middle=middle,
        )
        if row is not None and from_micros(row[0]) < moment:
            low = middle + 1
        else:
            high = middle
    return low


def read_outcomes(reader: Reader, after: int, workspace_id: UUID) -> list[Event]:
    """A page of what a report is made of: what became of tasks; failures, restarts and ends of agents."""
    rows = reader.fetch(
        """SELECT sequence, workspace_id, event_type, event_data_json, occurred_at, correlation_id
           FROM agent_instance_events WHERE workspace_id = :space AND sequence > :after AND (event_type IN
           ('task_state_changed', 'task_wait_opened', 'agent_restarting', 'agent_terminated')
           OR (event_type = 'agent_state_changed' AND event_data_json LIKE '%"new_state":"failed"%'))
           ORDER BY sequence LIMIT :limit""",
        space=workspace_id,
        after=after,
        limit=PAGE,
    )
    return [read_event(row) for row in rows]


def _is_first(events: Sequence[Event]) -> bool:
    """Whether the oldest event that is kept of an instance is its first move, before which there are none."""
    match events:
        case [AgentStateChangedEvent(attempt=1, previous_state=AgentState.INITIALIZING), *_]:
            return True
    return False


def _is_younger(reader: Reader, instance_id: UUID, pruned_until: int) -> bool:
    """Whether the instance was made after the oldest event that is kept, so that all of its events are."""
    row = reader.fetch_one(
        """SELECT 1 FROM agent_instances WHERE id = :id AND created_at > (
             SELECT occurred_at FROM agent_instance_events WHERE sequence > :pruned_until ORDER BY sequence LIMIT 1)""",
        id=instance_id,
        pruned_until=pruned_until,
    )
    return row is not None


def _head(reader: Reader, column: str) -> int:
    row = reader.fetch_one(f"SELECT {column} FROM head")
    return 0 if row is None else int(row[0])


def read_event(row: tuple[Any, ...]) -> Event:
    sequence, workspace_id, event_type, body, occurred_at, correlation_id = row
    try:
        event: Event = adapter(EVENT_CLASSES[event_type]).validate_json(body)
        space = workspace_id if workspace_id is None or isinstance(workspace_id, UUID) else UUID(bytes=workspace_id)
        object.__setattr__(event, "workspace_id", space)
        return event.stamp(sequence, from_micros(occurred_at), correlation_id)
    except (KeyError, ValueError, TypeError) as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else event_type}"
        raise DamagedRowError(
            f"the row {sequence} of the table agent_instance_events is damaged ({what}); "
            "restore the store from a backup"
        ) from error
