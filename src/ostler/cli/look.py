"""Commands that look: events, waits with their answers, totals, audit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

import click

from ostler.cli import completers
from ostler.cli.common import Daemon, Group, fail, on_agent, output_option
from ostler.cli.output import as_json, cost_text, local_time, plain, seconds_since, sentence
from ostler.cli.table import Column, Table, print_table, show, terminal_width
from ostler.durations import rough_duration
from ostler.errors import ExitCode

_TYPES = completers.event_types
_NOT_SHOWN = frozenset(
    {
        *("event_type", "sequence", "occurred_at", "correlation_id", "workspace_id", "version"),
        *("instance_id", "attempt", "task_id", "key", "crew"),
    }
)


@click.command()
@click.argument("agent", required=False, shell_complete=completers.agents())
@click.option("-f", "--follow", is_flag=True, help="Go on as they happen.")
@click.option("-n", "count", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@click.option("--after", type=click.IntRange(0), help="From this number on.")
@click.option("--type", "types", multiple=True, help="Only of this type, such as agent_error.", shell_complete=_TYPES)
@output_option(name=False)
def events(agent: str | None, follow: bool, count: int, after: int | None, types: tuple[str, ...], form: str) -> None:
    """Show the numbered log, of one AGENT or of all."""
    if follow and form == "json":
        raise click.UsageError("-f goes on without an end, so it has no array; use -o jsonl")
    daemon, type_names = Daemon(), ",".join(types) or None
    instance = None if agent is None else on_agent(daemon, "instance", agent)["instance_id"]
    newest = daemon.call("events", instance=instance, after=after, limit=count, types=type_names)
    if not follow:
        show(newest, form, EVENT_COLUMNS, empty="there is no such event; `ostler events` without words shows all")
        return
    last = newest[-1]["sequence"] if newest else after
    if last is None:
        last = newest_event(daemon)
    later = daemon.stream("events", instance=instance, types=type_names, after=str(last))
    _print_events(newest, (item.data for item in later if item.event != "missed"), form)


def newest_event(daemon: Daemon) -> int:
    """The number of the newest event; 0 before the first."""
    events = daemon.call("events", limit=1)
    return int(events[-1]["sequence"]) if events else 0


def _print_events(events: list[dict[str, Any]], later: Iterator[dict[str, Any]], form: str) -> None:
    """Those that are there, then each as it comes."""
    if form == "jsonl":
        for event in chain(events, later):
            as_json(event, indent=None)
        return
    table = Table(EVENT_COLUMNS, events, terminal_width(), wide=form == "wide")
    for line in chain(table.lines(), map(table.line, later)):
        click.echo(line)


def _event_kind(event: dict[str, Any]) -> str:
    return str(event["event_type"]).removeprefix("agent_")


def _event_subject(event: dict[str, Any]) -> str:
    """The key of a task, the name of a crew, the end of the id of an instance."""
    return str(event.get("key") or str(event.get("instance_id") or "")[-6:] or event.get("crew") or "")


def _event_text(event: dict[str, Any]) -> str:
    kind = _event_kind(event)
    if kind.endswith("state_changed"):
        reason = f"  ({sentence(str(event['reason']))})" if event.get("reason") else ""
        return f"{event['previous_state']} → {event['new_state']}{reason}"
    hidden = _NOT_SHOWN if kind != "spawned" else _NOT_SHOWN | {"options", "user_id", "definition_id"}
    shown = {name: value for name, value in event.items() if name not in hidden and value not in (None, False, "")}
    return "  ".join(f"{name}={sentence(str(value))}" for name, value in shown.items())


EVENT_COLUMNS = (
    Column("NUMBER", lambda event: str(event["sequence"]), is_number=True),
    Column("TIME", lambda event: local_time(event["occurred_at"]), usual=19),
    Column("WHO", _event_subject, least=8, usual=6),
    Column("EVENT", _event_kind, usual=14),
    Column("WHAT", _event_text, least=20),
)


@click.command()
@click.argument("agent", required=False, shell_complete=completers.agents(ended=False))
@click.option("--graph", is_flag=True, help="Which task waits for which, and where that leads back.")
@output_option(name=False)
def waits(agent: str | None, graph: bool, form: str) -> None:
    """List what agents and tasks wait for."""
    daemon = Daemon()
    if graph:
        _show_graph(daemon.call("wait_graph"), form)
        return
    instance = None if agent is None else on_agent(daemon, "instance", agent)["instance_id"]
    empty = "nothing waits for an answer; `ostler ps` and `ostler task list` show what goes on"
    show(_open_waits(daemon, instance), form, _WAIT_COLUMNS, empty=empty)


def _open_waits(daemon: Daemon, instance: str | None = None) -> list[dict[str, Any]]:
    """Without those that end by themselves: a restart to come, a pause."""
    waits = daemon.call("waits", instance=instance)
    return [wait for wait in waits if wait["kind"] not in {"backoff", "resume"}]


def _show_graph(graph: dict[str, Any], form: str) -> None:
    if form in {"json", "jsonl"}:
        as_json(graph)
        return
    for key, others in graph["waits"].items():
        click.echo(f"{plain(key)} waits for {plain(', '.join(others))}")
    for circle in graph["cycles"]:
        click.echo(f"cycle: {plain(' waits for '.join(circle))}")
    if not graph["waits"]:
        click.echo("no task waits for another")


def _waiter(wait: dict[str, Any]) -> str:
    return str(wait.get("task_key") or wait.get("instance_name") or "")


def _answer_command(wait: dict[str, Any]) -> str:
    """With the id of the wait where the name is long or no single word of a shell."""
    name = _waiter(wait)
    is_word = re.fullmatch(r"[\w.@:+-]{1,36}", name) is not None and not name.startswith("-")
    return f"ostler answer {name if is_word else wait['wait_id']} yes"


_WAIT_COLUMNS = (
    Column("WHO", _waiter, least=8),
    Column("FOR", lambda wait: "you" if wait["kind"] == "human" else str(wait["kind"])),
    Column("SINCE", lambda wait: rough_duration(seconds_since(wait["created_at"])), leaves=2),
    Column("UNTIL", lambda wait: local_time(wait["due_at"]), leaves=1),
    Column("REASON", lambda wait: sentence(str(wait["reason"] or "")), least=16),
    Column("ANSWER IT WITH", _answer_command),
)


@click.command()
@click.argument("target", shell_complete=completers.waiting)
@click.argument("outcome", default="done", shell_complete=completers.values("yes", "no", "done"))
@click.option("--data", help="JSON that the agent gets with the answer.")
def answer(target: str, outcome: str, data: str | None) -> None:
    """Answer a waiting agent or task: TARGET is its name, its key, or the id of a wait."""
    daemon = Daemon()
    names = ("wait_id", "instance_name", "instance_id", "task_key")
    waits = [wait for wait in _open_waits(daemon) if target in {wait.get(name) for name in names}]
    if not waits:
        raise fail(f"{target} waits for nothing; `ostler waits` lists what is open", ExitCode.NOT_FOUND)
    if len(waits) > 1:
        ids = ", ".join(wait["wait_id"] for wait in waits)
        raise fail(f"{target} waits for {len(waits)} answers; name one of them: {ids}", ExitCode.CONFLICT)
    try:
        parsed = None if data is None else json.loads(data)
    except ValueError as error:
        raise click.UsageError(f"--data must be JSON ({error})") from error
    daemon.call("answer", wait=waits[0]["wait_id"], outcome=outcome, answer=parsed)
    click.echo(f"{plain(_waiter(waits[0]) or target)} goes on with {plain(outcome)!r}.")


@click.command()
@click.option("-o", "--output", "form", type=click.Choice(["table", "json"]), default="table", help="How to print it.")
def stats(form: str) -> None:
    """Totals of the workspace."""
    totals = Daemon().call("statistics")
    if form == "json":
        as_json(totals)
        return
    tasks = totals["tasks"]
    limit = "unlimited" if totals["max_concurrent"] is None else str(totals["max_concurrent"])
    rows = [
        ("active", f"{totals['active_instances']} of {limit}"),
        *((state, str(number)) for state, number in totals["by_state"].items() if number),
        *((f"health {health}", str(number)) for health, number in totals["by_health"].items() if number),
        ("spawned in all", str(totals["total_spawned"])),
        ("terminated in all", str(totals["total_terminated"])),
        ("restarts in all", str(totals["total_restarts"])),
        ("average uptime", rough_duration(totals["average_uptime"])),
        *((f"tasks {state}", str(number)) for state, number in tasks["by_state"].items() if number),
    ]
    if tasks["parked"]:
        rows.append(("tasks that wait for you", str(tasks["parked"])))
    if tasks["success_rate"] is not None:
        rows.append(("tasks accepted of reviewed", f"{100 * tasks['success_rate']:.0f} %"))
    if tasks["average_duration"] is not None:
        rows.append(("average time of a task", rough_duration(tasks["average_duration"])))
    if tasks["cost_usd"]:
        rows.append(("cost of tasks", cost_text(tasks["cost_usd"])))
    print_table((Column("WHAT", itemgetter(0)), Column("NUMBER", itemgetter(1), is_number=True)), rows)


@click.group(cls=Group)
def audit() -> None:
    """The chain of acts."""


@audit.command()
@click.option("-n", "count", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@output_option(name=False)
def log(count: int, form: str) -> None:
    """Show the newest acts."""
    acts = Daemon().call("audit", limit=count)
    show(acts, form, _AUDIT_COLUMNS, empty="nothing has been done in this home yet")


_AUDIT_COLUMNS = (
    Column("NUMBER", lambda act: str(act["number"]), is_number=True),
    Column("TIME", lambda act: local_time(act["occurred_at"]), leaves=1),
    Column("ACTOR", itemgetter("actor"), least=12),
    Column("ACTION", itemgetter("action"), least=16),
    Column("OUTCOME", itemgetter("outcome")),
    Column("DETAIL", lambda act: sentence(act["detail"] or ""), least=16),
)


@audit.command()
@click.option("-o", "--output", "form", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
def verify(form: str) -> None:
    """Check the chain; exit code 1 with each break on a line of its own."""
    report = Daemon().call("verify_audit")
    if form == "json":
        as_json(report)
    elif report["is_sound"]:
        click.echo(f"sound: {report['entries']} acts, head {report['head']['number']} {report['head']['hash']}")
    else:
        for fault in report["faults"]:
            click.echo(plain(fault))
    if not report["is_sound"]:
        raise click.exceptions.Exit(ExitCode.FAILED)
