"""A filter as SQL: which clauses, led by which index, and the pattern of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from ostler.model import ACTIVE_STATES, GetInstancesFilter, TaskFilter
from ostler.store.port import WaitWindow
from ostler.store.queries import queries

_STARS = re.compile(r"\*+")
_LAST = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Found:
    """A query and the values that go with it, not yet in the form of a dialect."""

    sql: str
    values: Mapping[str, tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class _Clause:
    #: Fragments of queries.sql.
    names: tuple[str, ...]
    #: Parameter to its form and value.
    values: Mapping[str, tuple[str, Any]]


def like_pattern(pattern: str) -> str:
    """`*` as the only wildcard; what LIKE would take as one stands for itself."""
    plain = pattern.casefold().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return _STARS.sub("%", plain)


def matches(pattern: str, name: str | None) -> bool:
    """The same rule in Python, for stores without SQL: each part in turn, so that no pattern takes long."""
    if name is None:
        return False
    text = name.casefold()
    first, *others = _STARS.split(pattern.casefold())
    if not others:
        return text == first
    *middle, last = others
    place, end = len(first), len(text) - len(last)
    if place > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in middle:
        found = text.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


def instance_query(wanted: GetInstancesFilter, unindexed: Callable[[str], str], true: str) -> Found:
    """The clause that narrows most leads; the others are kept away from the planner's choice of index."""
    clauses = list(_instance_clauses(wanted))
    tagged = wanted.tag is not None
    source = "agent_instances AS i"
    where = ["i.workspace_id = :workspace_id"]
    values: dict[str, tuple[str, Any]] = {"limit": ("int", wanted.limit), "offset": ("int", wanted.offset)}
    active = _only_active(wanted)
    if tagged:
        source = "agent_instance_tags AS t JOIN agent_instances AS i ON i.id = t.instance_id"
        where = ["t.workspace_id = :workspace_id", "t.tag = :tag"]
        values["tag"] = ("text", str(wanted.tag).lower())
        if active:
            where.append(f"t.active = {true}")
    elif active:
        where.append(queries()["filter_active"].format(true=true))
    for position, clause in enumerate(clauses):
        leads = position == 0 and not tagged
        for name in clause.names:
            where.append(queries()[name] if leads else unindexed(queries()[name]))
        values.update(clause.values)
    order = "t.instance_id" if tagged else "i.id"
    if wanted.before is not None:
        where.append(f"{order} < :before")
        values["before"] = ("uuid", wanted.before)
    sql = f"SELECT i.* FROM {source} WHERE {' AND '.join(where)} ORDER BY {order} DESC LIMIT :limit OFFSET :offset"  # noqa: S608 - fragments are ours, values are bound
    return Found(sql, values)


def _only_active(wanted: GetInstancesFilter) -> bool:
    if wanted.state is not None:
        return wanted.state in ACTIVE_STATES
    return not wanted.include_terminated


def _instance_clauses(wanted: GetInstancesFilter) -> list[_Clause]:
    """In the order of how much each is expected to narrow."""
    clauses = []
    if wanted.owner_id is not None:
        clauses.append(_Clause(("filter_owner",), {"owner_id": ("uuid", wanted.owner_id)}))
    if wanted.definition_id is not None:
        clauses.append(_Clause(("filter_definition",), {"definition_id": ("uuid", wanted.definition_id)}))
    if wanted.name_pattern is not None:
        clauses.append(_name_clause(wanted.name_pattern))
    if wanted.health_state is not None:
        clauses.append(_Clause(("filter_health",), {"health_state": ("text", wanted.health_state.value)}))
    if wanted.state is not None:
        clauses.append(_Clause(("filter_state",), {"state": ("text", wanted.state.value)}))
    return clauses


def _name_clause(pattern: str) -> _Clause:
    values: dict[str, tuple[str, Any]] = {"name_pattern": ("text", like_pattern(pattern))}
    prefix = pattern.split("*", 1)[0].casefold()
    if not prefix:
        return _Clause(("filter_name",), values)
    values["name_from"] = ("text", prefix)
    values["name_until"] = ("text", prefix + _LAST)
    return _Clause(("filter_name_from", "filter_name_until", "filter_name"), values)


def task_query(wanted: TaskFilter, unindexed: Callable[[str], str]) -> Found:
    source = "tasks AS i"
    where = ["i.workspace_id = :workspace_id"]
    values: dict[str, tuple[str, Any]] = {"limit": ("int", wanted.limit), "offset": ("int", wanted.offset)}
    order = "i.id"
    if wanted.tag is not None:
        source = "task_tags AS t JOIN tasks AS i ON i.id = t.task_id"
        where = ["t.workspace_id = :workspace_id", "t.tag = :tag"]
        values["tag"] = ("text", wanted.tag.lower())
        order = "t.task_id"
    led = wanted.tag is not None
    for name, value in (("definition_id", wanted.definition_id), ("state", wanted.state)):
        if value is not None:
            fragment = queries()[f"filter_{name.removesuffix('_id')}"]
            where.append(unindexed(fragment) if led else fragment)
            values[name] = ("uuid", value) if name == "definition_id" else ("text", str(value))
            led = True
    for name in ("created_from", "created_until"):
        moment = getattr(wanted, name)
        if moment is not None:
            where.append(queries()[f"filter_{name}"])
            values[name] = ("time", moment)
    if wanted.before is not None:
        where.append(f"{order} < :before")
        values["before"] = ("uuid", wanted.before)
    sql = f"SELECT i.* FROM {source} WHERE {' AND '.join(where)} ORDER BY {order} DESC LIMIT :limit OFFSET :offset"  # noqa: S608 - fragments are ours, values are bound
    return Found(sql, values)


def attempt_query(instance_id: UUID | None, limit: int, after: tuple[UUID, int] | None) -> Found:
    values: dict[str, tuple[str, Any]] = {"limit": ("int", limit)}
    if instance_id is not None:
        values |= {"instance_id": ("uuid", instance_id), "number": ("int", after[1] if after else 0)}
        return Found(queries()["attempts_of_instance"], values)
    if after is None:
        return Found(queries()["attempts_open"], values)
    values |= {"instance_id": ("uuid", after[0]), "number": ("int", after[1])}
    return Found(queries()["attempts_open_after"], values)


def wait_query(wanted: WaitWindow) -> Found:
    values: dict[str, tuple[str, Any]] = {"limit": ("int", wanted.limit)}
    where = ["ended_at IS NULL"]
    if wanted.instance_id is not None:
        where.append(queries()["filter_wait_instance"])
        values["instance_id"] = ("uuid", wanted.instance_id)
    if wanted.due_until is not None:
        where.append(queries()["filter_due_until"])
        values["until"] = ("time", wanted.due_until)
    if (after := wanted.after) is not None:
        undated = after.due_at is None
        where.append(queries()["filter_undated_after" if undated else "filter_dated_after"])
        values["id"] = ("uuid", after.wait_id)
        if not undated:
            values["due_at"] = ("time", after.due_at)
    sql = f"SELECT * FROM waits WHERE {' AND '.join(where)} ORDER BY due_at NULLS LAST, id LIMIT :limit"  # noqa: S608 - fragments are ours, values are bound
    return Found(sql, values)


def run_query(before: UUID | None, limit: int) -> Found:
    values: dict[str, tuple[str, Any]] = {"limit": ("int", limit)}
    if before is None:
        return Found(queries()["runs_of_workspace"], values)
    return Found(queries()["runs_of_workspace_before"], values | {"before": ("uuid", before)})


def turn_query(run_id: UUID, after: int, limit: int) -> Found:
    values = {"run_id": ("uuid", run_id), "after": ("int", after), "limit": ("int", limit)}
    return Found(queries()["turns_of_run"], values)


def whole_turn_query(run_id: UUID, until: int, true: str) -> Found:
    values = {"run_id": ("uuid", run_id), "until": ("int", until)}
    return Found(queries()["whole_turn"].format(true=true), values)
