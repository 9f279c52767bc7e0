"""How each record lies in its table: which column holds which field, and in what form.

The plain statements (insert, update of what changed, select by key, delete) follow from this table and are
made here; every other query stands in queries.sql.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
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
    RunState,
    SimulationRun,
    SimulationTurn,
    Task,
    TaskState,
    Tier,
    Token,
    Wait,
    WaitKind,
    Workspace,
)
from ostler.store.kinds import IdempotencyRow, Kind, Ledger, key_fields

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
        Column("final_state_json", "final_state", "json"),
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


_SIMULATION_RUN = Shape(
    "simulation_runs",
    SimulationRun,
    (
        *_plain("id=run_id:uuid", "workspace_id:uuid", "name:text", "seed:int"),
        Column("state", "state", RunState),
        *_plain("turn:int", "parent_id:uuid", "forked_at:int", "outcome:text", "digest:text"),
        *_plain("created_at:time", "updated_at:time", "version:int"),
        *_plain("settings_json=settings:json", "scenario_json=scenario:json"),
    ),
)

_SIMULATION_TURN = Shape(
    "simulation_turns",
    SimulationTurn,
    _plain("run_id:uuid", "turn:int", "whole:flag", "digest:text", "occurred_at:time", "body:text"),
)


LEDGER_TOTALS = ("spawned", "terminated", "restarts", "running", "running_created_ms", "ended", "ended_uptime_ms")
LEDGER_CHAIN = ("audit_number", "audit_hash", "anchor_number", "anchor_hash")


def _ledger_columns() -> tuple[Column, ...]:
    counts = [Column(f"state_{state}", f"states.{state}", "int") for state in AgentState]
    counts += [Column(f"health_{state}", f"healths.{state}", "int") for state in HealthState]
    return (
        *_plain("workspace_id:uuid", "active:int"),
        *counts,
        *_plain(*(f"{name}:int" for name in LEDGER_TOTALS)),
        *_plain("audit_number:int", "audit_hash:text", "anchor_number:int", "anchor_hash:text"),
    )


SHAPES: Mapping[Kind, Shape] = {
    Kind.INSTANCE: _INSTANCE,
    Kind.TASK: _TASK,
    Kind.ATTEMPT: _ATTEMPT,
    Kind.WAIT: _WAIT,
    Kind.PRINCIPAL: _PRINCIPAL,
    Kind.WORKSPACE: _WORKSPACE,
    Kind.SIMULATION_RUN: _SIMULATION_RUN,
    Kind.SIMULATION_TURN: _SIMULATION_TURN,
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
