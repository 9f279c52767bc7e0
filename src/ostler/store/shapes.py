"""How each record lies in its table: which column holds which field, and in what form.

The plain statements (insert, update of what changed, select by key, delete) follow from this table and are
made here; every other query stands in queries.sql.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import compress
from typing import Any, cast
from uuid import UUID

from ostler.model import (
    AgentHealthStatus,
    AgentInstance,
    AgentMetrics,
    AgentPriority,
    AgentSpawnOptions,
    AgentState,
    Attempt,
    AttemptOutcome,
    Definition,
    Enforcement,
    HealthState,
    Lease,
    Permission,
    Principal,
    Record,
    Role,
    Task,
    TaskState,
    Tier,
    Token,
    Wait,
    WaitKind,
    Workspace,
)
from ostler.model.codec import dump_compact
from ostler.store.kinds import IdempotencyRow, Key, Kind, Ledger, key_fields

Form = str | type[Record] | type[StrEnum] | tuple[str, type[Any]]


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    field: str
    #: "uuid", "time", "text", "int", "flag", "json"; a record or an enum class; ("list", element class).
    form: Form


@dataclass(frozen=True, eq=False)  # by identity: statements are cached per shape
class Shape:
    table: str
    record: type[Any]
    columns: tuple[Column, ...]
    #: Columns that only searching needs, worked out from the record; by field they depend on.
    derived: tuple[tuple[Column, Callable[[Any], Any]], ...] = ()

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        fields = key_fields(Kind(self.record))
        return tuple(column.name for column in self.columns if column.field in fields)


def _plain(*pairs: str) -> tuple[Column, ...]:
    """`"id=instance_id:uuid"` is column, field and form; without `=` the two have one name."""
    columns = []
    for pair in pairs:
        names, form = pair.split(":")
        name, _, field = names.partition("=")
        columns.append(Column(name, field or name, form))
    return tuple(columns)


def _folded(instance: AgentInstance) -> str | None:
    return instance.name.casefold() if instance.name else None


_INSTANCE = Shape(
    "agent_instances",
    AgentInstance,
    (
        *_plain("id=instance_id:uuid", "definition_id:uuid"),
        Column("state", "state", AgentState),
        *_plain("name:text", "owner_id:uuid", "workspace_id:uuid"),
        Column("spawn_options_json", "spawn_options", AgentSpawnOptions),
        Column("health_json", "health", AgentHealthStatus),
        Column("metrics_json", "metrics", AgentMetrics),
        Column("tags_json", "tags", ("list", str)),
        Column("context_json", "context", "json"),
        Column("enforcement_json", "enforcement", ("map", Enforcement)),
        *_plain("error_message:text", "restart_count:int", "lifetime_restarts:int", "attempt:int", "version:int"),
        *_plain("created_at:time", "updated_at:time", "terminated_at:time", "failing_since:time"),
    ),
    (
        (Column("health_state", "health", "text"), lambda instance: instance.health.state.value),
        (Column("name_key", "name", "text"), _folded),
        (Column("active", "state", "flag"), lambda instance: instance.is_active),
    ),
)

_TASK = Shape(
    "tasks",
    Task,
    (
        *_plain("id=task_id:uuid", "task:text"),
        Column("state", "state", TaskState),
        *_plain("created_at:time", "updated_at:time", "generated_code:text", "submission_summary:text"),
        Column("changed_files_json", "changed_files", ("list", str)),
        *_plain("error:text", "definition_id:uuid", "attempt:int", "spawn_count:int", "retry_count:int"),
        Column("priority", "priority", AgentPriority),
        Column("dependencies_json", "dependencies", ("list", UUID)),
        *_plain("workspace:text", "branch:text"),
        Column("tags_json", "tags", ("list", str)),
        *_plain("workspace_id:uuid", "owner_id:uuid", "version:int"),
    ),
)

_ATTEMPT = Shape(
    "attempts",
    Attempt,
    (
        *_plain(
            "instance_id:uuid",
            "number:int",
            "task_id:uuid",
            "intended_at:time",
            "identity_json=identity:json",
        ),
        *_plain("started_at:time", "ended_at:time"),
        Column("outcome", "outcome", AttemptOutcome),
        *_plain("detail:text"),
    ),
)

_WAIT = Shape(
    "waits",
    Wait,
    (
        *_plain("id=wait_id:uuid", "workspace_id:uuid"),
        Column("kind", "kind", WaitKind),
        *_plain("instance_id:uuid", "task_id:uuid", "reason:text", "created_at:time", "due_at:time"),
        *_plain("detail_json=detail:json", "ended_at:time", "outcome:text"),
    ),
)

_PRINCIPAL = Shape(
    "principals",
    Principal,
    (
        *_plain("id=principal_id:uuid", "name:text", "workspace_id:uuid"),
        Column("roles_json", "roles", ("list", Role)),
        Column("permissions_json", "permissions", ("list", Permission)),
        *_plain("created_at:time", "disabled_at:time"),
    ),
)

_WORKSPACE = Shape(
    "workspaces",
    Workspace,
    (*_plain("id=workspace_id:uuid", "name:text"), Column("tier", "tier", Tier), *_plain("created_at:time")),
)


_LEDGER_TOTALS = ("spawned", "terminated", "restarts", "running", "running_created_ms", "ended", "ended_uptime_ms")
_LEDGER_CHAIN = ("audit_number", "audit_hash", "anchor_number", "anchor_hash")


def _ledger_columns() -> tuple[Column, ...]:
    counts = [Column(f"state_{state}", f"states.{state}", "int") for state in AgentState]
    counts += [Column(f"health_{state}", f"healths.{state}", "int") for state in HealthState]
    return (
        *_plain("workspace_id:uuid", "active:int"),
        *counts,
        *_plain(*(f"{name}:int" for name in _LEDGER_TOTALS)),
        *_plain("audit_number:int", "audit_hash:text", "anchor_number:int", "anchor_hash:text"),
    )


SHAPES: Mapping[Kind, Shape] = {
    Kind.INSTANCE: _INSTANCE,
    Kind.TASK: _TASK,
    Kind.ATTEMPT: _ATTEMPT,
    Kind.WAIT: _WAIT,
    Kind.PRINCIPAL: _PRINCIPAL,
    Kind.WORKSPACE: _WORKSPACE,
    Kind.LEDGER: Shape("workspace_ledgers", Ledger, _ledger_columns()),
    Kind.LEASE: Shape(
        "leases", Lease, _plain("name:text", "owner:text", "epoch:int", "acquired_at:time", "expires_at:time")
    ),
    Kind.TOKEN: Shape(
        "tokens",
        Token,
        (
            *_plain("id=token_id:uuid", "principal_id:uuid", "token_hash:text", "name:text"),
            *_plain("created_at:time", "expires_at:time", "revoked_at:time"),
        ),
    ),
    Kind.DEFINITION: Shape(
        "definitions",
        Definition,
        (
            *_plain(
                "id=definition_id:uuid",
                "name:text",
                "kind:text",
                "manifest_json=manifest:json",
                "source:text",
            ),
            *_plain("created_at:time", "updated_at:time", "version:int"),
        ),
    ),
    Kind.IDEMPOTENCY: Shape(
        "idempotency_keys",
        IdempotencyRow,
        _plain("workspace_id:uuid", "key:text", "fingerprint:text", "result_json:text", "created_at:time"),
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Dialect:
    """How a database spells the few things that differ."""

    name: str
    true: str
    uuid_out: Callable[[UUID], Any]
    uuid_in: Callable[[Any], UUID]
    time_out: Callable[[datetime], Any]
    time_in: Callable[[Any], datetime]
    flag_out: Callable[[bool], Any]

    def encoder(self, form: Form) -> Callable[[Any], Any]:
        """How a field of this form goes into its column; None stays None and is not asked."""
        match form:
            case "text" | "int":
                return _same
            case "uuid":
                return self.uuid_out
            case "time":
                return self.time_out
            case "flag":
                return self.flag_out
            case "json" | ("map", _):
                return lambda value: json.dumps(dict(value), separators=(",", ":"))
            case ("list", _):
                return lambda value: json.dumps([str(item) for item in value], separators=(",", ":"))
            case _ if isinstance(form, type) and issubclass(form, StrEnum):
                return str.__str__
            case _:
                return dump_compact

    def decoder(self, form: Form) -> Callable[[Any], Any]:
        match form:
            case "text" | "int":
                return _same
            case "uuid":
                return self.uuid_in
            case "time":
                return self.time_in
            case "json":
                return json.loads
            case ("map", element):
                return lambda value: {key: element(item) for key, item in json.loads(value).items()}
            case ("list", element):
                return lambda value: tuple(element(item) for item in json.loads(value))
            case type() if issubclass(form, Record):
                return form.from_json
            case _:
                return cast("Callable[[Any], Any]", form)

    def encode(self, form: Form, value: Any) -> Any:
        return None if value is None else self.encoder(form)(value)

    def decode(self, form: Form, value: Any) -> Any:
        return None if value is None else self.decoder(form)(value)


def _same(value: Any) -> Any:
    return value


class Mapper:
    """The rows of one shape in one dialect; everything that can be looked up is looked up once."""

    def __init__(self, dialect: Dialect, shape: Shape) -> None:
        self.shape = shape
        self._names = tuple(column.name for column in shape.columns)
        self._fields = tuple(column.field for column in shape.columns)
        self._encoders = tuple(dialect.encoder(column.form) for column in shape.columns)
        self._decoders = tuple(dialect.decoder(column.form) for column in shape.columns)
        self._derived = tuple(
            (column.name, column.field, dialect.encoder(column.form), work_out) for column, work_out in shape.derived
        )
        self._values: Callable[[Any], tuple[Any, ...]] = (
            _ledger_values if shape.record is Ledger else operator.attrgetter(*self._fields)
        )
        self._keys = tuple(self._encoders[self._names.index(name)] for name in shape.keys)
        self._plans: dict[frozenset[str], tuple[tuple[str, ...], tuple[Callable[[Any], Any], ...]]] = {}
        #: The columns of `row`, in its order.
        self.columns = self._names + tuple(name for name, _, _, _ in self._derived)

    def row(self, record: Any) -> tuple[Any, ...]:
        """Every column."""
        plain = [
            None if value is None else encode(value)
            for encode, value in zip(self._encoders, self._values(record), strict=True)
        ]
        for _, _, encode, work_out in self._derived:
            value = work_out(record)
            plain.append(None if value is None else encode(value))
        return tuple(plain)

    def changes(self, old: Any, new: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Only the columns whose fields are not what they were, and what they are now."""
        names, values, fields = [], [], set()
        before, after = self._values(old), self._values(new)
        for place in compress(range(len(after)), map(operator.is_not, before, after)):
            value = after[place]
            if value != before[place]:
                names.append(self._names[place])
                values.append(None if value is None else self._encoders[place](value))
                fields.add(self._fields[place])
        for name, field, encode, work_out in self._derived:
            if field in fields and (value := work_out(new)) != work_out(old):
                names.append(name)
                values.append(None if value is None else encode(value))
        return tuple(names), tuple(values)

    def picked(self, record: Any, fields: frozenset[str]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The columns of some fields, without looking whether they differ. Derived columns are left alone."""
        plan = self._plans.get(fields)
        if plan is None:
            plan = self._plans[fields] = self._plan(fields)
        names, readers = plan
        return names, tuple([read(record) for read in readers])

    def _plan(self, fields: frozenset[str]) -> tuple[tuple[str, ...], tuple[Callable[[Any], Any], ...]]:
        chosen = [place for place, field in enumerate(self._fields) if field in fields]
        names = tuple(self._names[place] for place in chosen)
        return names, tuple(
            _reading(operator.attrgetter(self._fields[place]), self._encoders[place]) for place in chosen
        )

    def key(self, key: Key) -> tuple[Any, ...]:
        """The values that name one row."""
        return tuple([encode(value) for encode, value in zip(self._keys, key, strict=True)])

    def record(self, row: Mapping[str, Any]) -> Any:
        values = [
            None if row[name] is None else decode(row[name])
            for name, decode in zip(self._names, self._decoders, strict=True)
        ]
        if self.shape.record is Ledger:
            return _ledger_from(values)
        return self.shape.record(**dict(zip(self._fields, values, strict=True)))


def _reading(read: Callable[[Any], Any], encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if encode is _same:
        return read

    def column(record: Any) -> Any:
        value = read(record)
        return None if value is None else encode(value)

    return column


def _ledger_values(ledger: Ledger) -> tuple[Any, ...]:
    """In the order of the columns."""
    plain = _ledger_plain(ledger)
    return (*plain[:2], *ledger.states.values(), *ledger.healths.values(), *plain[2:])


_ledger_plain = operator.attrgetter("workspace_id", "active", *_LEDGER_TOTALS, *_LEDGER_CHAIN)


def _ledger_from(values: list[Any]) -> Ledger:
    after_states = 2 + len(AgentState)
    after_healths = after_states + len(HealthState)
    rest = zip((*_LEDGER_TOTALS, *_LEDGER_CHAIN), values[after_healths:], strict=True)
    return Ledger(
        workspace_id=values[0],
        active=values[1],
        states=dict(zip(AgentState, values[2:after_states], strict=True)),
        healths=dict(zip(HealthState, values[after_states:after_healths], strict=True)),
        **dict(rest),
    )
