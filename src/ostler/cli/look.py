"""Commands that look at a home without changing it: `ps`, `stats`, `events`, `audit verify`, `version`."""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

import click

from ostler.cli.output import ExitCode, as_json, note, plain, rough_duration, table
from ostler.model.events import Event
from ostler.model.instance import AgentInstance
from ostler.model.people import HOME_WORKSPACE_ID
from ostler.model.query import GetInstancesFilter
from ostler.model.states import AgentState
from ostler.store import audit as chains
from ostler.store import events as log
from ostler.store import leases, queries
from ostler.store.store import default_home, view
from ostler.version import __version__

T = TypeVar("T", bound=Callable[..., Any])
_NOT_SHOWN = {"sequence", "occurred_at", "correlation_id", "workspace_id", "version", "instance_id"}


def _home_option(command: T) -> T:
    option = click.option("--home", metavar="DIR", help="The home, or a postgresql:// address.")
    return option(command)


def _place(home: str | None) -> str:
    return home or str(default_home())


_output = click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print it.")


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that failed or were terminated.")
@click.option("--state", type=click.Choice([state.value for state in AgentState]), help="Only in this state.")
@click.option("--tag", help="Only with this tag.")
@click.option("--name", "pattern", help="Only with such a name; * stands for any text.")
@click.option("-n", "count", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many.")
@click.option("-q", "--quiet", is_flag=True, help="Only the ids, one on each line.")
@_output
@_home_option
def ps(home: str | None, count: int, output: str, quiet: bool, **chosen: Any) -> None:
    """List agents, newest first; without -a only those that live."""
    wanted = GetInstancesFilter(
        state=AgentState(chosen["state"]) if chosen["state"] else None,
        tag=chosen["tag"],
        name_pattern=chosen["pattern"],
        include_terminated=chosen["everything"],
        limit=count,
    ).checked()
    with view(_place(home)) as reader:
        found = queries.list_instances(reader, wanted, HOME_WORKSPACE_ID)
        lease = leases.get_lease(reader)
    now = datetime.now(UTC)
    if quiet:
        for instance in found:
            click.echo(str(instance.instance_id))
    elif output == "json":
        as_json([instance.to_dict() for instance in found])
    else:
        table(("NAME", "STATE", "HEALTH", "UP", "RESTARTS", "ID"), (_row(instance, now) for instance in found))
    if any(instance.is_active for instance in found) and (lease is None or lease.expires_at <= now):
        note("no manager owns this home now, so this is how it was left; open it to find out what still lives")


def _row(instance: AgentInstance, now: datetime) -> tuple[str, ...]:
    return (
        instance.name or "-",
        instance.state.value,
        instance.health.state.value,
        rough_duration(instance.uptime(now)),
        str(instance.restart_count),
        str(instance.instance_id),
    )


@click.command()
@_output
@_home_option
def stats(home: str | None, output: str) -> None:
    """Totals of the workspace."""
    with view(_place(home)) as reader:
        found = queries.statistics(reader, HOME_WORKSPACE_ID, datetime.now(UTC))
    if output == "json":
        as_json(found.to_dict())
        return
    limit = "unlimited" if found.max_concurrent is None else str(found.max_concurrent)
    rows = [
        ("active", f"{found.active_instances} of {limit}"),
        *((state.value, str(found.by_state[state])) for state in AgentState),
        *((f"health {health.value}", str(number)) for health, number in found.by_health.items()),
        ("spawned", str(found.total_spawned)),
        ("terminated", str(found.total_terminated)),
        ("restarts", str(found.total_restarts)),
        ("average uptime", rough_duration(found.average_uptime)),
    ]
    table(("WHAT", "HOW MANY"), rows)


@click.command()
@click.argument("agent", required=False)
@click.option("-n", "count", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@click.option("--after", type=click.IntRange(0), help="From this number on, oldest first.")
@_output
@_home_option
def events(home: str | None, agent: str | None, count: int, after: int | None, output: str) -> None:
    """Show the numbered log, of one AGENT (name or id) or of all."""
    with view(_place(home)) as reader:
        instance_id = None if agent is None else _find(reader, agent)
        if after is None:
            found = log.last_events(reader, count, workspace_id=HOME_WORKSPACE_ID, instance_id=instance_id)
        else:
            page = log.read_events(reader, after, workspace_id=HOME_WORKSPACE_ID, instance_id=instance_id, limit=count)
            found = list(page.events)
    for event in found:
        if output == "json":
            as_json({"event_type": event.event_type, **event.to_dict()}, indent=None)
        else:
            click.echo(_event_line(event))


def _find(reader: Any, agent: str) -> UUID:
    found = queries.find_instances(reader, agent, HOME_WORKSPACE_ID)
    if not found:
        note(f'there is no agent "{agent}". `ostler ps -a` lists all.')
        raise click.exceptions.Exit(ExitCode.NOT_FOUND)
    return found[0].instance_id


def _event_line(event: Event) -> str:
    when = "" if event.occurred_at is None else f"{event.occurred_at:%Y-%m-%d %H:%M:%S}"
    who = str(getattr(event, "instance_id", ""))[-6:]
    said = {
        name: value for name, value in event.to_dict().items() if name not in _NOT_SHOWN and value not in (None, False)
    }
    details = "  ".join(f"{name}={plain(str(value))}" for name, value in said.items())
    return f"{event.sequence:>6}  {when}  {who}  {event.event_type.removeprefix('agent_'):<16}  {details}".rstrip()


@click.group()
def audit() -> None:
    """The chain of acts of a workspace."""


@audit.command()
@click.option("-n", "count", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@_output
@_home_option
def show(home: str | None, count: int, output: str) -> None:
    """Show the newest acts."""
    with view(_place(home)) as reader:
        found = chains.last_entries(reader, HOME_WORKSPACE_ID, count)
    if output == "json":
        as_json([entry.to_dict() for entry in found])
        return
    rows = (
        (str(one.number), f"{one.occurred_at:%Y-%m-%d %H:%M:%S}", one.actor, one.action, one.outcome, one.detail or "")
        for one in found
    )
    table(("NUMBER", "TIME", "ACTOR", "ACTION", "OUTCOME", "DETAIL"), rows)


@audit.command()
@_home_option
def verify(home: str | None) -> None:
    """Check every chain; exit code 1 with each break on a line of its own."""
    broken = 0
    with view(_place(home)) as reader:
        for workspace_id in chains.list_chains(reader):
            report = chains.verify(reader, workspace_id)
            broken += not report.is_sound
            for fault in report.faults:
                click.echo(f"{workspace_id}: {plain(fault)}")
            if report.is_sound:
                click.echo(
                    f"{workspace_id}: sound, {report.entries} entries, head {report.head.number} {report.head.hash}"
                )
    if broken:
        raise click.exceptions.Exit(ExitCode.FAILED)


@click.command()
def version() -> None:
    """Say which Ostler this is, and what it runs on."""
    click.echo(f"ostler {__version__}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}")
