"""Commands that look: events, waits with their answers, totals, audit."""

from __future__ import annotations

import json
from typing import Any

import click

from ostler.cli.common import Daemon, fail, on_agent, output_option, since_moment
from ostler.cli.output import as_json, cost_text, local_time, note, plain, seconds_since, sentence, show, table
from ostler.durations import rough_duration
from ostler.errors import ExitCode

_NOT_SHOWN = frozenset(
    {"event_type", "sequence", "occurred_at", "correlation_id", "workspace_id", "version", "instance_id", "attempt"}
)


@click.command()
@click.argument("agent", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on as they happen.")
@click.option("-n", "count", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@click.option("--after", type=click.IntRange(0), help="From this number on.")
@click.option("--type", "types", multiple=True, help="Only of this type, such as agent_error.")
@output_option(name=False)
def events(agent: str | None, follow: bool, count: int, after: int | None, types: tuple[str, ...], form: str) -> None:
    """Show the numbered log, of one AGENT or of all."""
    if follow and form == "json":
        raise click.UsageError("-f goes on without an end, so it has no array; use -o jsonl")
    daemon, type_names = Daemon(), ",".join(types) or None
    instance = None if agent is None else on_agent(daemon, "instance", agent)["instance_id"]
    newest = daemon.call("events", instance=instance, after=after, limit=count, types=type_names)
    if form == "json":
        as_json(newest)
        return
    for event in newest:
        _print_event(event, form)
    if follow:
        last = newest[-1]["sequence"] if newest else after
        if last is None:
            last = newest_event(daemon)
        for item in daemon.stream("events", instance=instance, types=type_names, after=str(last)):
            if item.event != "missed":
                _print_event(item.data, form)


def newest_event(daemon: Daemon) -> int:
    """The number of the newest event; 0 before the first."""
    events = daemon.call("events", limit=1)
    return int(events[-1]["sequence"]) if events else 0


def _print_event(event: dict[str, Any], form: str) -> None:
    if form == "jsonl":
        as_json(event, indent=None)
        return
    who = str(event.get("instance_id") or "")[-6:]
    kind = str(event["event_type"]).removeprefix("agent_")
    if kind == "state_changed":
        text = f"{event['previous_state']} → {event['new_state']}"
        text += f"  ({sentence(str(event['reason']))})" if event.get("reason") else ""
    else:
        hidden = _NOT_SHOWN if kind != "spawned" else _NOT_SHOWN | {"options", "user_id", "definition_id"}
        shown = {name: value for name, value in event.items() if name not in hidden and value not in (None, False)}
        text = "  ".join(f"{name}={sentence(str(value))}" for name, value in shown.items())
    click.echo(f"{event['sequence']:>6}  {local_time(event['occurred_at'])}  {who:<6}  {kind:<14}  {text}".rstrip())


@click.command()
@output_option()
def inbox(form: str) -> None:
    """List what needs you, the oldest first, each with its next command."""
    show_inbox(form)


def show_inbox(form: str) -> None:
    rows = Daemon().call("inbox")
    if not rows and form == "table":
        click.echo("Nothing needs you.")
        return
    show(rows, form, ("KIND", "KEY", "SINCE", "WHAT", "NEXT"), _inbox_row, name="key")


def _inbox_row(row: dict[str, Any]) -> tuple[str, ...]:
    since = rough_duration(seconds_since(row["since"]))
    return row["kind"], row["key"], since, sentence(row["sentence"]), row["next"]


@click.command()
@click.option("--since", default="10h", show_default=True, help="So long ago, or a time such as 2026-11-17T22:00.")
@click.option("-o", "--output", "form", type=click.Choice(["table", "json"]), default="table", help="How to print it.")
def report(since: str, form: str) -> None:
    """Say what happened: tasks done, accepted, failed and parked; restarts, time, tokens and cost of agents."""
    reply = Daemon().call("report", since=since_moment(since))
    if form == "json":
        as_json(reply)
        return
    lists = [(name, reply[name]) for name in ("done", "accepted", "rejected", "failed", "parked")]
    rows = [(name, str(len(keys)), ", ".join(keys)) for name, keys in lists]
    rows += [
        ("restarts", str(reply["restarts"]), ""),
        ("time", rough_duration(reply["time"]), "of agents, in sum"),
        ("tokens", str(reply["tokens"]), ""),
        ("cost", cost_text(reply["cost_usd"]), ""),
    ]
    click.echo(f"Since {local_time(reply['since'])}, {rough_duration(seconds_since(reply['since']))} ago:")
    table(("WHAT", "NUMBER", "WHICH"), rows)
    if not reply["is_whole"]:
        note("the log goes less far back: `[retention] events` of ostler.toml says how far")


@click.command()
@click.argument("agent", required=False)
@click.option("--graph", is_flag=True, help="Which task waits for which, and where that leads back.")
@output_option(name=False)
def waits(agent: str | None, graph: bool, form: str) -> None:
    """List what agents and tasks wait for."""
    daemon = Daemon()
    if graph:
        _show_graph(daemon.call("wait_graph"), form)
        return
    instance = None if agent is None else on_agent(daemon, "instance", agent)["instance_id"]
    show(_open_waits(daemon, instance), form, ("WHO", "FOR", "SINCE", "UNTIL", "REASON", "ANSWER IT WITH"), _wait_row)


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


def _wait_row(wait: dict[str, Any]) -> tuple[str, ...]:
    cause = "you" if wait["kind"] == "human" else str(wait["kind"])
    name, since = _waiter(wait), rough_duration(seconds_since(wait["created_at"]))
    reason = sentence(str(wait["reason"] or ""))
    return name, cause, since, local_time(wait["due_at"]), reason, f"ostler answer {name} yes"


def _waiter(wait: dict[str, Any]) -> str:
    return str(wait.get("task_key") or wait.get("instance_name") or "")


@click.command()
@click.argument("target")
@click.argument("outcome", default="done")
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
    table(("WHAT", "NUMBER"), rows)


@click.group()
def audit() -> None:
    """The chain of acts."""


@audit.command()
@click.option("-n", "count", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@output_option(name=False)
def log(count: int, form: str) -> None:
    """Show the newest acts."""
    acts = Daemon().call("audit", limit=count)
    show(acts, form, ("NUMBER", "TIME", "ACTOR", "ACTION", "OUTCOME", "DETAIL"), _audit_row)


def _audit_row(act: dict[str, Any]) -> tuple[str, ...]:
    when = local_time(act["occurred_at"])
    return str(act["number"]), when, act["actor"], act["action"], act["outcome"], sentence(act["detail"] or "")


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
