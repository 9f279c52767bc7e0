"""Lists of instances by filter, the search for one by name or short id, and the statistics of a workspace."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from ostler.errors import WorkspaceNotFoundError
from ostler.model.instance import AgentInstance
from ostler.model.query import MAX_PAGE, GetInstancesFilter, LifecycleStatistics
from ostler.model.states import ACTIVE_STATES, AgentState, HealthState, Tier
from ostler.model.types import from_micros
from ostler.policy.quota import plan
from ostler.store.moves import INSTANCES, get_instance
from ostler.store.totals import ENDED, ENDED_LIVED
from ostler.store.transaction import Reader

_STARS = re.compile(r"\*+")
_LAST_CHARACTER = "\U0010ffff"
_SELECT = "SELECT " + ", ".join(f"i.{column}" for column in INSTANCES.columns)
#: Digits that tell ids of one millisecond apart; the short form of an id is a prefix or a suffix of this length.
MIN_SHORT_ID = 4
_MOST_FOUND = 10
#: How the job of an instance ends whose caller watches it to its end, as `ostler run` in the foreground does.
_ATTENDED = '"attended":true}'
_RESTARTING = (
    "SELECT instance_id FROM waits WHERE workspace_id = :workspace_id AND ended_at IS NULL "
    "AND instance_id IS NOT NULL AND kind = 'backoff'"
)


def like_pattern(pattern: str) -> str:
    """`*` as the only wildcard; the wildcards of LIKE stand for themselves."""
    plain = pattern.casefold().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return _STARS.sub("%", plain)


def list_instances(reader: Reader, query: GetInstancesFilter, workspace_id: UUID) -> list[AgentInstance]:
    """Newest first, off an index: the clause that narrows most leads, the planner does not choose among the rest."""
    clauses, values = _clauses(query)
    active = query.state in ACTIVE_STATES if query.state is not None else not query.include_terminated
    source, order = "agent_instances AS i", "i.id"
    where = ["i.workspace_id = :workspace_id"]
    if query.tag is not None:
        source = "agent_instance_tags AS t JOIN agent_instances AS i ON i.id = t.instance_id"
        where = ["t.workspace_id = :workspace_id", "t.tag = :tag"]
        order, values["tag"] = "t.instance_id", query.tag.lower()
    if active:
        flag = "t.active = 1" if query.tag is not None else "i.active = 1"
        where.append(f"({flag} OR {order} IN ({_RESTARTING}))" if query.include_restarting else flag)
    for position, group in enumerate(clauses):
        leads = position == 0 and query.tag is None
        where += [reader.filter_clause(clause, first=leads) for clause in group]
    if query.before is not None:
        where.append(f"{order} < :before")
        values["before"] = query.before
    sql = f"{_SELECT} FROM {source} WHERE {' AND '.join(where)} ORDER BY {order} DESC LIMIT :limit OFFSET :offset"
    rows = reader.fetch(sql, workspace_id=workspace_id, limit=query.limit, offset=query.offset, **values)
    return INSTANCES.read(rows)


def _clauses(query: GetInstancesFilter) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
    """In the order of how much each is expected to narrow."""
    clauses: list[tuple[str, ...]] = []
    values: dict[str, Any] = {}
    for name in ("task_id", "crew", "owner_id", "definition_id"):
        if (value := getattr(query, name)) is not None:
            clauses.append((f"i.{name} = :{name}",))
            values[name] = value
    if query.name_pattern is not None:
        clauses.append(_name_clause(query.name_pattern, values))
    for name in ("health_state", "state"):
        if (value := getattr(query, name)) is not None:
            clauses.append((f"i.{name} = :{name}",))
            values[name] = value
    return clauses, values


def _name_clause(pattern: str, values: dict[str, Any]) -> tuple[str, ...]:
    values["name_pattern"] = like_pattern(pattern)
    like = "i.name_key LIKE :name_pattern ESCAPE '\\'"
    prefix = pattern.split("*", 1)[0].casefold()
    if not prefix:
        return (like,)
    values["name_from"], values["name_until"] = prefix, prefix + _LAST_CHARACTER
    return ("i.name_key >= :name_from", "i.name_key <= :name_until", like)


def find_instances(reader: Reader, text: str, workspace_id: UUID) -> list[AgentInstance]:
    """By a whole id, an exact name, or a part of an id at its beginning or end.

    An active instance with the name hides ended ones; so does the newest of several that have ended.
    """
    try:
        instance = get_instance(reader, UUID(text))
    except ValueError:
        pass
    else:
        return [instance] if instance is not None and instance.workspace_id == workspace_id else []
    named = INSTANCES.read(
        reader.fetch(
            f"{INSTANCES.select} WHERE workspace_id = :space AND name_key = :key AND name = :name "
            "ORDER BY active DESC, id DESC LIMIT :limit",
            space=workspace_id,
            key=text.casefold(),
            name=text,
            limit=_MOST_FOUND,
        )
    )
    if named:
        return [instance for instance in named if instance.is_active] or named[:1]
    digits = text.lower().replace("-", "")
    if len(digits) < MIN_SHORT_ID or not re.fullmatch(r"[0-9a-f]+", digits):
        return []
    rows = reader.fetch(
        "SELECT id FROM agent_instances WHERE workspace_id = :space ORDER BY id DESC", space=workspace_id
    )
    ids = [UUID(bytes=row[0]) if isinstance(row[0], bytes) else row[0] for row in rows]
    matching = [match for match in ids if match.hex.endswith(digits) or match.hex.startswith(digits)]
    return [instance for match in matching[:_MOST_FOUND] if (instance := get_instance(reader, match)) is not None]


def living_since(reader: Reader, workspace_id: UUID, moment: datetime) -> list[AgentInstance]:
    """Instances that live, or failed after this moment."""
    rows = reader.fetch(
        f"""{INSTANCES.select} WHERE workspace_id = :space AND (active = 1
            OR (state = 'failed' AND terminated_at >= :moment)) ORDER BY id""",
        space=workspace_id,
        moment=moment,
    )
    return INSTANCES.read(rows)


def lasting_failures(
    reader: Reader, workspace_id: UUID, owner_id: UUID | None = None
) -> list[tuple[str, str, datetime]]:
    """Name, error and end of each failed instance that nothing will restart, the newest first.

    Those of tasks and crews are left out, because these act on it; so are those that a terminal has shown.
    """
    owner = "" if owner_id is None else "AND owner_id = :owner"
    rows = reader.fetch(
        f"""SELECT id, name, error_message, coalesce(terminated_at, updated_at) FROM agent_instances
            WHERE workspace_id = :workspace_id AND state = 'failed' AND task_id IS NULL AND crew IS NULL {owner}
            AND (job_json IS NULL OR job_json NOT LIKE :attended) AND id NOT IN ({_RESTARTING})
            ORDER BY id DESC LIMIT :limit""",
        workspace_id=workspace_id,
        attended=f"%{_ATTENDED}",
        limit=MAX_PAGE,
        **({} if owner_id is None else {"owner": owner_id}),
    )
    return [
        (name or str(row_id if isinstance(row_id, UUID) else UUID(bytes=row_id)), error or "", from_micros(ended))
        for row_id, name, error, ended in rows
    ]


#: One statement, so that all of it is of one moment.
_STATISTICS = """
    SELECT 'instances', state, health_state, count(*), sum(CASE WHEN lived > 0 THEN lived ELSE 0 END)
    FROM (SELECT state, health_state, :now - created_at - downtime_us AS lived
          FROM agent_instances WHERE workspace_id = :id AND active = 1) AS i GROUP BY {groups}
    UNION ALL SELECT 'counter', name, '', value, 0 FROM counters WHERE workspace_id = :id
    UNION ALL SELECT 'tier', tier, '', 0, 0 FROM workspaces WHERE id = :id"""


def statistics(reader: Reader, workspace_id: UUID, now: datetime) -> LifecycleStatistics:
    by_state = dict.fromkeys(AgentState, 0)
    by_health = dict.fromkeys(HealthState, 0)
    counters: dict[str, int] = {}
    tier: Tier | None = None
    lived = 0
    # No index by state: it holds the ended ones too.
    groups = ", ".join(reader.filter_clause(column, first=False) for column in ("state", "health_state"))
    sql = _STATISTICS.format(groups=groups)
    for kind, name, health, value, microseconds in reader.fetch(sql, id=workspace_id, now=now):
        if kind == "instances":
            by_state[AgentState(name)] += value
            by_health[HealthState(health)] += value
            lived += int(microseconds)
        elif kind == "counter" and name.startswith(ENDED):
            _, state, health_state = name.split(".")
            by_state[AgentState(state)] += value
            by_health[HealthState(health_state)] += value
        elif kind == "counter":
            counters[name] = value
        else:
            tier = Tier(name)
    if tier is None:
        raise WorkspaceNotFoundError
    return LifecycleStatistics(
        active_instances=sum(by_state[state] for state in ACTIVE_STATES),
        by_state=by_state,
        by_health=by_health,
        max_concurrent=plan(tier).max_concurrent,
        total_spawned=counters.get("spawned", 0),
        total_terminated=counters.get("terminated", 0),
        average_uptime=timedelta(microseconds=(lived + counters.get(ENDED_LIVED, 0)) // max(sum(by_state.values()), 1)),
        total_restarts=counters.get("restarts", 0),
    )


def state_counts(reader: Reader) -> dict[AgentState, int]:
    """Of all workspaces, for the gauges."""
    counts = dict.fromkeys(AgentState, 0)
    active = reader.fetch("SELECT state, count(*) FROM agent_instances WHERE active = 1 GROUP BY state")
    ended = reader.fetch("SELECT name, value FROM counters WHERE name LIKE 'ended.%'")
    for state, count in (*active, *((name.split(".")[1], value) for name, value in ended)):
        if state in counts:  # else the row is damaged, which its readers are told
            counts[AgentState(state)] += count
    return counts


def tasks_of_instances(reader: Reader, workspace_id: UUID) -> dict[str, str]:
    """The id of the task of each instance that worked on one."""
    rows = reader.fetch(
        "SELECT id, task_id FROM agent_instances WHERE workspace_id = :space AND task_id IS NOT NULL",
        space=workspace_id,
    )
    return {str(_uuid(instance)): str(_uuid(task)) for instance, task in rows}


def _uuid(value: Any) -> UUID:
    """As the database gives it."""
    return value if isinstance(value, UUID) else UUID(bytes=value)


def list_terminating(reader: Reader) -> list[UUID]:
    """Of all workspaces: terminations that an earlier manager did not finish."""
    rows = reader.fetch("SELECT id FROM agent_instances WHERE state = 'terminating' ORDER BY id")
    return [_uuid(row[0]) for row in rows]
