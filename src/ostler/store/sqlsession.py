"""A session on any SQL database: rows to records and back, and one commit's changes as few statements."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.errors import StoreFailedError
from ostler.model import (
    AgentInstance,
    Attempt,
    AuditEntry,
    Event,
    GetInstancesFilter,
    SimulationRun,
    SimulationTurn,
    Task,
    TaskFilter,
    Wait,
    Workspace,
)
from ostler.store import plainsql
from ostler.store.damage import damaged_row, shown_key
from ostler.store.filters import (
    Found,
    attempt_query,
    instance_query,
    run_query,
    task_query,
    turn_query,
    wait_query,
    whole_turn_query,
)
from ostler.store.kinds import Key, Kind, Ledger
from ostler.store.logrows import audit_row, audits_from, event_row, events_from
from ostler.store.mapper import Dialect, Mapper
from ostler.store.port import Change, Changes, EventWindow, Head, OutOfStepError, Session, WaitWindow
from ostler.store.queries import queries
from ostler.store.shapes import SHAPES

Row = Mapping[str, Any]
Values = tuple[Any, ...]

_PARENTS = (Kind.WORKSPACE, Kind.PRINCIPAL, Kind.INSTANCE, Kind.TASK, Kind.SIMULATION_RUN)
#: Parents before children, so that foreign keys hold at every statement.
_ORDER = {kind: position for position, kind in enumerate((*_PARENTS, *(kind for kind in Kind if kind not in _PARENTS)))}
_TAGGED = frozenset({Kind.INSTANCE, Kind.TASK})
_DUE = {
    Kind.INSTANCE: "due_instances",
    Kind.TASK: "due_tasks",
    Kind.WAIT: "due_waits",
    Kind.IDEMPOTENCY: "due_answers",
}
_SQL = queries()
HEADLESS = "the store is damaged (the one row of store_head is gone); restore it from a backup"


class SqlSession(Session):
    """What SQLite and PostgreSQL share. A subclass brings the connection and its dialect."""

    dialect: Dialect

    @abstractmethod
    def execute(self, sql: str, values: Row | Values) -> Sequence[Row]: ...

    @abstractmethod
    def select(self, sql: str, values: Row | Values) -> tuple[list[str], list[Values]]:
        """Column names and plain rows: for reading by the hundred, where looking names up per row is dear."""

    @abstractmethod
    def execute_many(self, sql: str, rows: Sequence[Values]) -> int:
        """Run for each row and return how many rows changed in all."""

    def unindexed(self, clause: str) -> str:
        """A clause that must not lead the choice of an index."""
        return clause

    # --- writing --------------------------------------------------------------------------------

    def save(self, changes: Changes) -> None:
        groups: dict[Kind, list[Change]] = {}
        for change in changes.rows:
            groups.setdefault(change.kind, []).append(change)
        for kind in sorted(groups, key=_ORDER.__getitem__):
            self._save_kind(kind, groups[kind], changes)
        if changes.events:
            self.execute_many(_SQL["insert_event"], [event_row(self.dialect, row) for row in changes.events])
        if changes.audit:
            self.execute_many(_SQL["insert_audit"], [audit_row(self.dialect, entry) for entry in changes.audit])
        for prune in changes.prune:  # last: what came in the same commit goes too
            where = () if prune.owner_id is None else (self.dialect.uuid_out(prune.owner_id),)
            self.execute_many(_SQL[f"prune_{prune.table}"], [(prune.until, *where)])
        head = changes.head
        values = (head.commit_number, head.sequence, head.horizon, head.epoch, head.commit_number - 1)
        self._exactly(1, self.execute_many(_SQL["save_head"], [values]))

    def _save_kind(self, kind: Kind, rows: list[Change], changes: Changes) -> None:
        mapper = _mapper(self.dialect, kind)
        fresh: list[Change] = []
        kept: list[Change] = []
        gone: list[Change] = []
        for change in rows:
            if change.new is not None:
                (fresh if change.old is None else kept).append(change)
            elif change.old is not None:
                gone.append(change)
        if gone:
            self._delete(kind, mapper, gone)
        if fresh:
            self._insert(kind, mapper, fresh)
        if kept:
            if kind is Kind.LEDGER:
                self._take_room(kept, changes)
            self._update(mapper, kept)
            if kind is Kind.INSTANCE:
                self._flip_tags(kept)

    def _insert(self, kind: Kind, mapper: Mapper, fresh: list[Change]) -> None:
        self.execute_many(plainsql.insert(mapper.shape, mapper.columns), [mapper.row(change.new) for change in fresh])
        if kind in _TAGGED:
            tags = [row for change in fresh for row in self._tag_rows(change.new)]
            self.execute_many(_SQL[f"insert_{kind.name.lower()}_tag"], tags)
        if kind is Kind.TASK:
            self._save_dependencies(fresh)

    def _delete(self, kind: Kind, mapper: Mapper, gone: list[Change]) -> None:
        keys = [mapper.key(change.key) for change in gone]
        if kind in _TAGGED:
            self.execute_many(_SQL[f"delete_{kind.name.lower()}_tags"], keys)
        if kind is Kind.TASK:
            self.execute_many(_SQL["delete_task_dependencies"], keys)
        if kind is Kind.SIMULATION_RUN:
            self.execute_many(_SQL["delete_turns"], keys)
        self._exactly(len(keys), self.execute_many(plainsql.delete(mapper.shape), keys))

    def _update(self, mapper: Mapper, kept: list[Change]) -> None:
        groups: dict[tuple[str, ...], list[Values]] = {}
        for change in kept:
            names, values = (
                mapper.changes(change.old, change.new)
                if change.fields is None
                else mapper.picked(change.new, change.fields)
            )
            if names:
                groups.setdefault(names, []).append(values + mapper.key(change.key))
        for names, rows in groups.items():
            self._exactly(len(rows), self.execute_many(plainsql.update(mapper.shape, names), rows))

    def _take_room(self, kept: list[Change], changes: Changes) -> None:
        """Quota is a conditional write: were the plan full after all, no row would change and nothing commits."""
        for position, change in enumerate(kept):
            space = change.new.workspace_id
            grow, room = change.new.active - change.old.active, changes.room.get(space)
            if grow > 0 and room is not None:
                values = (grow, self.dialect.uuid_out(space), change.old.active, grow, room)
                self._exactly(1, self.execute_many(_SQL["quota"], [values]))
                seen = change.old.copy()
                seen.active = change.new.active
                kept[position] = Change(change.kind, change.key, seen, change.new)

    def _flip_tags(self, kept: list[Change]) -> None:
        """Tags are looked for among those that live now, so they know whether theirs does."""
        flipped = [
            (self.dialect.flag_out(change.new.is_active), self.dialect.uuid_out(change.new.instance_id))
            for change in kept
            if change.new.tags and change.new.is_active != change.old.is_active
        ]
        self.execute_many(_SQL["activate_instance_tags"], flipped)

    def _tag_rows(self, record: AgentInstance | Task) -> Iterable[Values]:
        uuid_out = self.dialect.uuid_out
        space = record.workspace_id and uuid_out(record.workspace_id)
        for tag in record.tags:
            if isinstance(record, AgentInstance):
                yield uuid_out(record.instance_id), tag, space, self.dialect.flag_out(record.is_active)
            else:
                yield uuid_out(record.task_id), tag, space

    def _save_dependencies(self, fresh: list[Change]) -> None:
        """They are given when a task is made and stay; here they can be asked for from the other end."""
        uuid_out = self.dialect.uuid_out
        rows = [
            (uuid_out(change.new.task_id), uuid_out(needed))
            for change in fresh
            for needed in dict.fromkeys(change.new.dependencies)
        ]
        self.execute_many(_SQL["insert_task_dependency"], rows)

    def _exactly(self, wanted: int, changed: int) -> None:
        if changed != wanted:
            raise OutOfStepError(f"{wanted} rows should have changed, {changed} did")

    # --- reading --------------------------------------------------------------------------------

    def load(self, kind: Kind, key: Key) -> Any:
        mapper = _mapper(self.dialect, kind)
        found = self._records(kind, plainsql.select(mapper.shape), mapper.key(key))
        return found[0] if found else None

    def head(self) -> Head:
        rows = self.execute(_SQL["head"], {})
        if not rows:
            raise StoreFailedError(HEADLESS)
        return Head(**dict(rows[0]))

    def instances(self, workspace_id: UUID, wanted: GetInstancesFilter) -> list[AgentInstance]:
        found = instance_query(wanted, self.unindexed, self.dialect.true)
        return self._records(Kind.INSTANCE, *self._found(found, workspace_id))

    def tasks(self, workspace_id: UUID, wanted: TaskFilter) -> list[Task]:
        return self._records(Kind.TASK, *self._found(task_query(wanted, self.unindexed), workspace_id))

    def _found(self, found: Found, workspace_id: UUID | None = None) -> tuple[str, Row]:
        values = {name: self.dialect.encode(form, value) for name, (form, value) in found.values.items()}
        if workspace_id is not None:
            values["workspace_id"] = self.dialect.uuid_out(workspace_id)
        return found.sql, values

    def _records(self, kind: Kind, sql: str, values: Row | Values) -> list[Any]:
        return _mapper(self.dialect, kind).records(*self.select(sql, values))

    def ledger(self, workspace_id: UUID) -> Ledger | None:
        found: Ledger | None = self.load(Kind.LEDGER, (workspace_id,))
        return found

    def totals(self, workspace_id: UUID) -> tuple[Workspace, Ledger] | None:
        names, rows = self.select(_SQL["totals"], {"workspace_id": self.dialect.uuid_out(workspace_id)})
        if not rows:
            return None
        workspace: Workspace = _mapper(self.dialect, Kind.WORKSPACE).records(names, rows)[0]
        if rows[0][names.index("workspace_id")] is None:
            return workspace, Ledger(workspace_id=workspace_id)
        return workspace, _mapper(self.dialect, Kind.LEDGER).records(names, rows)[0]

    def events(self, window: EventWindow) -> list[Event]:
        values: dict[str, Any] = {"after": window.after, "limit": window.limit}
        name = "events_all"
        for field in ("instance_id", "workspace_id"):
            value = getattr(window, field)
            if value is not None:
                name = f"events_of_{field.removesuffix('_id')}"
                values[field] = self.dialect.encode("uuid", value)
                break
        _, rows = self.select(_SQL[name], values)
        return events_from(self.dialect, rows)

    def audit(self, workspace_id: UUID, after: int, limit: int) -> list[AuditEntry]:
        values = {"workspace_id": self.dialect.encode("uuid", workspace_id), "after": after, "limit": limit}
        _, rows = self.select(_SQL["audit_entries"], values)
        return audits_from(self.dialect, rows)

    def chain_from(self, first: UUID) -> UUID | None:
        rows = self.execute(_SQL["next_chain"], {"first": self.dialect.encode("uuid", first)})
        if not rows:
            return None
        value = rows[0]["workspace_id"]
        try:
            return self.dialect.uuid_in(value)
        except (TypeError, ValueError) as error:
            tables = "workspaces, workspace_ledgers or audit"
            raise damaged_row(tables, shown_key(value), error, "workspace_id") from error

    def attempts(self, instance_id: UUID | None, limit: int, after: tuple[UUID, int] | None = None) -> list[Attempt]:
        return self._records(Kind.ATTEMPT, *self._found(attempt_query(instance_id, limit, after)))

    def waits(self, window: WaitWindow) -> list[Wait]:
        return self._records(Kind.WAIT, *self._found(wait_query(window)))

    def due(self, kind: Kind, until: datetime, limit: int) -> list[Key]:
        _, rows = self.select(_SQL[_DUE[kind]], {"until": self.dialect.encode("time", until), "limit": limit})
        return [_mapper(self.dialect, kind).key_from(row) for row in rows]

    def event_before(self, moment: datetime, limit: int) -> int:
        values = {"moment": self.dialect.encode("time", moment), "limit": limit}
        return int(self.execute(_SQL["event_before"], values)[0]["last"])

    def audit_before(self, workspace_id: UUID, moment: datetime, limit: int) -> int:
        values = {
            "workspace_id": self.dialect.encode("uuid", workspace_id),
            "moment": self.dialect.encode("time", moment),
            "limit": limit,
        }
        return int(self.execute(_SQL["audit_before"], values)[0]["last"])

    def listing(self, kind: Kind, after: Key | None, limit: int) -> Sequence[Any]:
        shape = SHAPES[kind]
        values: dict[str, Any] = {"limit": limit}
        if after is not None:
            values["after"] = _mapper(self.dialect, kind).key(after)[0]
        return self._records(kind, plainsql.page(shape, after is not None), values)

    def token(self, token_hash: str) -> Any:
        rows = self._records(Kind.TOKEN, _SQL["token_by_hash"], {"token_hash": token_hash})
        return rows[0] if rows else None

    def runs(self, workspace_id: UUID, before: UUID | None, limit: int) -> list[SimulationRun]:
        return self._records(Kind.SIMULATION_RUN, *self._found(run_query(before, limit), workspace_id))

    def turns(self, run_id: UUID, after: int, limit: int) -> list[SimulationTurn]:
        return self._records(Kind.SIMULATION_TURN, *self._found(turn_query(run_id, after, limit)))

    def whole_turn(self, run_id: UUID, until: int) -> SimulationTurn | None:
        found = whole_turn_query(run_id, until, self.dialect.true)
        rows = self._records(Kind.SIMULATION_TURN, *self._found(found))
        return rows[0] if rows else None


@functools.cache
def _mapper(dialect: Dialect, kind: Kind) -> Mapper:
    return Mapper(dialect, SHAPES[kind])
