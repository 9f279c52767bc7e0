"""A session on any SQL database: rows to records and back, and one commit's changes as few statements."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.errors import StoreError
from ostler.model import (
    AgentInstance,
    Attempt,
    AuditEntry,
    Event,
    GetInstancesFilter,
    Task,
    TaskFilter,
    Wait,
    event_from_json,
)
from ostler.model.codec import dump_compact
from ostler.store.filters import Found, instance_query, task_query
from ostler.store.kinds import Key, Kind, Ledger
from ostler.store.port import Change, Changes, EventWindow, Head, Session
from ostler.store.queries import queries
from ostler.store.shapes import SHAPES, Dialect, Mapper, Shape

Row = Mapping[str, Any]

_AUDIT_FORMS = {
    "workspace_id": "uuid",
    "number": "int",
    "occurred_at": "time",
    "actor": "text",
    "action": "text",
    "subject": "text",
    "outcome": "text",
    "detail": "text",
    "correlation_id": "text",
    "sequence": "int",
    "previous_hash": "text",
    "hash": "text",
}
#: Parents before children, so that foreign keys hold at every statement.
_ORDER = {kind: position for position, kind in enumerate((Kind.WORKSPACE, Kind.PRINCIPAL, Kind.INSTANCE, Kind.TASK))}


class OutOfStepError(StoreError):
    """A row was not as the cache had it; the batch is run again on what is really there."""


class SqlSession(Session):
    """What SQLite and PostgreSQL share. A subclass brings the connection and its dialect."""

    dialect: Dialect

    @abstractmethod
    def execute(self, sql: str, values: Row) -> Sequence[Row]: ...

    @abstractmethod
    def execute_many(self, sql: str, rows: Sequence[Row]) -> int:
        """Run for each row and return how many rows changed in all."""

    def unindexed(self, clause: str) -> str:
        """A clause that must not lead the choice of an index."""
        return clause

    # --- writing --------------------------------------------------------------------------------

    def save(self, changes: Changes) -> None:
        ordered = sorted(changes.rows, key=lambda change: _ORDER.get(change.kind, len(_ORDER)))
        for kind in dict.fromkeys(change.kind for change in ordered):
            self._save_kind(kind, [change for change in ordered if change.kind is kind], changes)
        if changes.events:
            self.execute_many(queries()["insert_event"], [self._event_row(event) for event in changes.events])
        if changes.audit:
            self.execute_many(queries()["insert_audit"], [self._audit_row(entry) for entry in changes.audit])
        for prune in changes.prune:
            form = "time" if isinstance(prune.until, datetime) else "int"
            values = {"until": self.dialect.encode(form, prune.until)}
            if prune.workspace_id is not None:
                values["workspace_id"] = self.dialect.encode("uuid", prune.workspace_id)
            self.execute_many(queries()[f"prune_{prune.table}"], [values])
        self._save_head(changes.head)

    def _save_head(self, head: Head) -> None:
        values = {
            "commit_number": head.commit_number,
            "sequence": head.sequence,
            "horizon": head.horizon,
            "epoch": head.epoch,
            "was": head.commit_number - 1,
        }
        self._exactly(1, self.execute_many(queries()["save_head"], [values]))

    def _save_kind(self, kind: Kind, rows: list[Change], changes: Changes) -> None:
        mapper = self._mapper(kind)
        gone = [change for change in rows if change.new is None and change.old is not None]
        fresh = [change for change in rows if change.old is None and change.new is not None]
        kept = [change for change in rows if change.old is not None and change.new is not None]
        self._delete(kind, mapper, gone)
        if fresh:
            new_rows = [mapper.row(change.new) for change in fresh]
            self.execute_many(_insert(mapper.shape, tuple(new_rows[0])), new_rows)
        if kind is Kind.LEDGER:
            self._take_room(kept, changes)
        self._update(mapper, kept)
        if kind is Kind.INSTANCE:
            self._save_instance_tags(fresh, kept)
        if kind is Kind.TASK:
            self.execute_many(queries()["insert_task_tag"], [row for change in fresh for row in self._tags(change)])

    def _delete(self, kind: Kind, mapper: Mapper, gone: list[Change]) -> None:
        if not gone:
            return
        keys = [mapper.key(change.key) for change in gone]
        if kind is Kind.INSTANCE:
            self.execute_many(queries()["delete_instance_tags"], [{"instance_id": row["key_id"]} for row in keys])
        if kind is Kind.TASK:
            self.execute_many(queries()["delete_task_tags"], [{"task_id": row["key_id"]} for row in keys])
        self._exactly(len(keys), self.execute_many(_delete(mapper.shape), keys))

    def _update(self, mapper: Mapper, kept: list[Change]) -> None:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for change in kept:
            row = mapper.changes(change.old, change.new)
            if row:
                names = tuple(row)
                groups.setdefault(names, []).append(row | mapper.key(change.key))
        for names, rows in groups.items():
            self._exactly(len(rows), self.execute_many(_update(mapper.shape, names), rows))

    def _take_room(self, kept: list[Change], changes: Changes) -> None:
        """Quota is a conditional write: were the plan full after all, no row would change and nothing commits."""
        for position, change in enumerate(kept):
            grow, room = change.new.active - change.old.active, changes.room[change.new.workspace_id]
            if grow > 0 and room is not None:
                values = {
                    "workspace_id": self.dialect.encode("uuid", change.new.workspace_id),
                    "grow": grow,
                    "was": change.old.active,
                    "room": room,
                }
                self._exactly(1, self.execute_many(queries()["quota"], [values]))
                seen = change.old.copy()
                seen.active = change.new.active
                kept[position] = Change(kind=change.kind, key=change.key, old=seen, new=change.new)

    def _save_instance_tags(self, fresh: list[Change], kept: list[Change]) -> None:
        rows = [row for change in fresh for row in self._tags(change)]
        if rows:
            self.execute_many(queries()["insert_instance_tag"], rows)
        flipped = [
            {
                "instance_id": self.dialect.encode("uuid", change.new.instance_id),
                "active": self.dialect.encode("flag", change.new.is_active),
            }
            for change in kept
            if change.new.tags and change.new.is_active != change.old.is_active
        ]
        if flipped:
            self.execute_many(queries()["activate_instance_tags"], flipped)

    def _tags(self, change: Change) -> Iterable[Row]:
        record = change.new
        encode = self.dialect.encode
        for tag in record.tags:
            row = {"tag": tag, "workspace_id": encode("uuid", record.workspace_id)}
            if isinstance(record, AgentInstance):
                yield row | {
                    "instance_id": encode("uuid", record.instance_id),
                    "active": encode("flag", record.is_active),
                }
            else:
                yield row | {"task_id": encode("uuid", record.task_id)}

    def _exactly(self, wanted: int, changed: int) -> None:
        if changed != wanted:
            raise OutOfStepError(f"{wanted} rows should have changed, {changed} did")

    def _event_row(self, event: Event) -> Row:
        encode = self.dialect.encode
        return {
            "sequence": event.sequence,
            "id": encode("uuid", event.event_id),
            "workspace_id": encode("uuid", event.workspace_id),
            "instance_id": encode("uuid", getattr(event, "instance_id", None)),
            "task_id": encode("uuid", getattr(event, "task_id", None)),
            "event_type": event.event_type,
            "event_data_json": dump_compact(event),
            "occurred_at": encode("time", event.occurred_at),
            "correlation_id": event.correlation_id,
        }

    def _audit_row(self, entry: AuditEntry) -> Row:
        return {name: self.dialect.encode(form, getattr(entry, name)) for name, form in _AUDIT_FORMS.items()}

    # --- reading --------------------------------------------------------------------------------

    def load(self, kind: Kind, key: Key) -> Any:
        mapper = self._mapper(kind)
        rows = self.execute(_select(mapper.shape), mapper.key(key))
        return mapper.record(rows[0]) if rows else None

    def _mapper(self, kind: Kind) -> Mapper:
        return _mapper(self.dialect, kind)

    def head(self) -> Head:
        return Head(**dict(self.execute(queries()["head"], {})[0]))

    def instances(self, workspace_id: UUID, wanted: GetInstancesFilter) -> list[AgentInstance]:
        found = instance_query(wanted, self.unindexed, self.dialect.true)
        return self._records(Kind.INSTANCE, self._found(workspace_id, found))

    def tasks(self, workspace_id: UUID, wanted: TaskFilter) -> list[Task]:
        return self._records(Kind.TASK, self._found(workspace_id, task_query(wanted, self.unindexed)))

    def _found(self, workspace_id: UUID, found: Found) -> Sequence[Row]:
        values = {name: self.dialect.encode(form, value) for name, (form, value) in found.values.items()}
        return self.execute(found.sql, values | {"workspace_id": self.dialect.encode("uuid", workspace_id)})

    def _records(self, kind: Kind, rows: Iterable[Row]) -> list[Any]:
        mapper = self._mapper(kind)
        return [mapper.record(row) for row in rows]

    def ledger(self, workspace_id: UUID) -> Ledger | None:
        found: Ledger | None = self.load(Kind.LEDGER, (workspace_id,))
        return found

    def events(self, window: EventWindow) -> list[Event]:
        values: dict[str, Any] = {"after": window.after, "limit": window.limit}
        name = "events_all"
        for field in ("instance_id", "workspace_id"):
            value = getattr(window, field)
            if value is not None:
                name = f"events_of_{field.removesuffix('_id')}"
                values[field] = self.dialect.encode("uuid", value)
                break
        rows = self.execute(queries()[name], values)
        return [event_from_json(row["event_type"], row["event_data_json"]) for row in rows]

    def audit(self, workspace_id: UUID, after: int, limit: int) -> list[AuditEntry]:
        values = {"workspace_id": self.dialect.encode("uuid", workspace_id), "after": after, "limit": limit}
        return [
            AuditEntry(**{name: self.dialect.decode(form, row[name]) for name, form in _AUDIT_FORMS.items()})
            for row in self.execute(queries()["audit_entries"], values)
        ]

    def attempts(self, instance_id: UUID | None, limit: int) -> list[Attempt]:
        if instance_id is None:
            return self._records(Kind.ATTEMPT, self.execute(queries()["attempts_open"], {"limit": limit}))
        values = {"instance_id": self.dialect.encode("uuid", instance_id), "limit": limit}
        return self._records(Kind.ATTEMPT, self.execute(queries()["attempts_of_instance"], values))

    def waits(self, due_until: datetime | None, limit: int) -> list[Wait]:
        if due_until is None:
            return self._records(Kind.WAIT, self.execute(queries()["waits_open"], {"limit": limit}))
        values = {"until": self.dialect.encode("time", due_until), "limit": limit}
        return self._records(Kind.WAIT, self.execute(queries()["waits_due"], values))

    def due(self, kind: Kind, until: datetime, limit: int) -> list[Key]:
        name = "due_instances" if kind is Kind.INSTANCE else "due_tasks"
        rows = self.execute(queries()[name], {"until": self.dialect.encode("time", until), "limit": limit})
        return [(self.dialect.decode("uuid", row["id"]),) for row in rows]

    def event_before(self, moment: datetime, limit: int) -> int:
        values = {"moment": self.dialect.encode("time", moment), "limit": limit}
        return int(self.execute(queries()["event_before"], values)[0]["last"])

    def audit_before(self, workspace_id: UUID, moment: datetime, limit: int) -> int:
        values = {
            "workspace_id": self.dialect.encode("uuid", workspace_id),
            "moment": self.dialect.encode("time", moment),
            "limit": limit,
        }
        return int(self.execute(queries()["audit_before"], values)[0]["last"])

    def listing(self, kind: Kind, after: Key | None, limit: int) -> Sequence[Any]:
        shape = SHAPES[kind]
        values: dict[str, Any] = {"limit": limit}
        if after is not None:
            values.update(self._mapper(kind).key(after))
        return self._records(kind, self.execute(_page(shape, after is not None), values))

    def token(self, token_hash: str) -> Any:
        rows = self._records(Kind.TOKEN, self.execute(queries()["token_by_hash"], {"token_hash": token_hash}))
        return rows[0] if rows else None


@functools.cache
def _mapper(dialect: Dialect, kind: Kind) -> Mapper:
    return Mapper(dialect, SHAPES[kind])


def _where_key(shape: Shape) -> str:
    return " AND ".join(f"{name} = :key_{name}" for name in shape.keys)


@functools.cache
def _select(shape: Shape) -> str:
    return f"SELECT * FROM {shape.table} WHERE {_where_key(shape)}"  # noqa: S608 - names are ours


@functools.cache
def _insert(shape: Shape, names: tuple[str, ...]) -> str:
    values = ", ".join(f":{name}" for name in names)
    return f"INSERT INTO {shape.table} ({', '.join(names)}) VALUES ({values})"  # noqa: S608 - names are ours


@functools.cache
def _update(shape: Shape, names: tuple[str, ...]) -> str:
    sets = ", ".join(f"{name} = :{name}" for name in names)
    return f"UPDATE {shape.table} SET {sets} WHERE {_where_key(shape)}"  # noqa: S608 - names are ours


@functools.cache
def _delete(shape: Shape) -> str:
    return f"DELETE FROM {shape.table} WHERE {_where_key(shape)}"  # noqa: S608 - names are ours


@functools.cache
def _page(shape: Shape, further: bool) -> str:
    where = f"WHERE {shape.keys[0]} > :key_{shape.keys[0]} " if further else ""
    return f"SELECT * FROM {shape.table} {where}ORDER BY {shape.keys[0]} LIMIT :limit"  # noqa: S608 - names are ours
