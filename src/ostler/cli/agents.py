"""`ostler ps` and `ostler stats`: who there is, and how many."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import click

from ostler.cli.homes import home_option, look, require_workspace, workspace_option
from ostler.cli.output import as_json, note, table
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter, LifecycleStatistics
from ostler.model.states import AgentState
from ostler.store import Store

_PAGE = 1000
_HEAD = ("ID", "NAME", "STATE", "HEALTH", "RESTARTS", "UPTIME", "TAGS")


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that failed or were terminated.")
@click.option("--state", type=click.Choice([state.value for state in AgentState]), help="Only in this state.")
@click.option("--tag", help="Only with this tag.")
@click.option("--name", "pattern", help="Only with such a name; * stands for any text.")
@click.option("-n", "count", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print them.")
@click.option("-q", "--quiet", is_flag=True, help="Only the ids, one on each line.")
@workspace_option()
@home_option
def ps(count: int, output: str, quiet: bool, workspace: UUID, home: str, **filters: Any) -> None:
    """List agents, newest first; without -a only those that live."""
    if quiet and output == "json":
        raise click.UsageError("-q means ids alone, -o json means everything; use one or the other")
    wanted = GetInstancesFilter(
        state=AgentState(filters["state"]) if filters["state"] else None,
        tag=filters["tag"],
        name_pattern=filters["pattern"],
        include_terminated=filters["everything"],
    )
    found, left = look(home, lambda store: _list(store, wanted, workspace, count + 1))
    shown = found[:count]
    if quiet:
        for instance in shown:
            click.echo(str(instance.instance_id))
    elif output == "json":
        as_json([json.loads(instance.to_json()) for instance in shown])
    else:
        now = left or datetime.now(UTC)
        table(_HEAD, (_row(instance, now) for instance in shown))
    if left is not None and any(instance.is_active for instance in shown):
        note(
            f"nobody manages this home since {left:%Y-%m-%d %H:%M:%S} UTC, so this is how it was left; "
            "opening it with ostler.open finds out what still lives"
        )
    if len(found) > count:
        note(f"only the newest {count} are shown; ask for more with -n")


async def _list(
    store: Store, wanted: GetInstancesFilter, workspace: UUID, count: int
) -> tuple[list[AgentInstance], datetime | None]:
    """Those that were asked for; and since when nobody looks after them, where an owner has ended without a word."""
    await require_workspace(store, workspace)
    lease = await store.get_lease()
    left = lease.expires_at if lease is not None and lease.expires_at <= datetime.now(UTC) else None
    found: list[AgentInstance] = []
    while len(found) < count:
        asked = min(_PAGE, count - len(found))
        page = await store.list_instances(
            wanted.evolve(limit=asked, before=found[-1].instance_id if found else None), workspace
        )
        found += page
        if len(page) < asked:
            break
    return found, left


def _row(instance: AgentInstance, now: datetime) -> tuple[str, ...]:
    return (
        str(instance.instance_id),
        instance.name or "-",
        instance.state.value,
        instance.health.state.value,
        str(instance.restart_count),
        rough_duration(instance.uptime(now)),
        ",".join(instance.tags) or "-",
    )


@click.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print them.")
@workspace_option()
@home_option
def stats(output: str, workspace: UUID, home: str) -> None:
    """Totals of a workspace, in the same time for a thousand agents or a million."""

    async def read(store: Store) -> LifecycleStatistics:
        await require_workspace(store, workspace)
        return await store.statistics(workspace)

    found = look(home, read)
    if output == "json":
        as_json(json.loads(found.to_json()))
        return
    limit = "unlimited" if found.max_concurrent is None else str(found.max_concurrent)
    rows = [
        ("active", f"{found.active_instances} of {limit}"),
        *((f"  {state.value}", str(found.by_state[state])) for state in AgentState),
        *((f"health {health.value}", str(number)) for health, number in found.by_health.items()),
        ("spawned", str(found.total_spawned)),
        ("terminated", str(found.total_terminated)),
        ("restarts", str(found.total_restarts)),
        ("average uptime", rough_duration(found.average_uptime)),
    ]
    table(("WHAT", "HOW MANY"), rows)


def rough_duration(value: timedelta) -> str:
    """Two units are enough to know how long: 3d 4h, 5m 12s, 7s."""
    seconds = int(value.total_seconds())
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")):
        amount, seconds = divmod(seconds, size)
        if amount or parts:
            parts.append(f"{amount}{unit}")
    return " ".join(parts[:2]) or "0s"
