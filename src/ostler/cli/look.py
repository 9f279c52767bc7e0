"""Commands that look: events, waits with their answers, totals, audit."""

from __future__ import annotations

import json
from typing import Any

import click

from ostler.cli.common import Daemon, fail, on_agent, output_option
from ostler.cli.output import as_json, local_time, plain, seconds_since, show, table
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
    daemon = Daemon()
    kinds = ",".join(types) or None
    instance = None if agent is None else on_agent(daemon, "instance", agent)["instance_id"]
    found = daemon.call("events", instance=instance, after=after, limit=count, types=kinds)
    for event in found:
        _print_event(event, form)
    if follow:
        last = found[-1]["sequence"] if found else after
        if last is None:
            newest = daemon.call("events", limit=1)
            last = newest[-1]["sequence"] if newest else 0
        for item in daemon.stream("events", instance=instance, types=kinds, after=str(last)):
            if item.event != "missed":
                _print_event(item.data, form)


def _print_event(event: dict[str, Any], form: str) -> None:
    if form in {"json", "jsonl"}:
        as_json(event, indent=None)
        return
    who = str(event.get("instance_id") or "")[-6:]
    kind = str(event["event_type"]).removeprefix("agent_")
    if kind == "state_changed":
        said = f"{event['previous_state']} → {event['new_state']}"
        said += f"  ({plain(str(event['reason']))})" if event.get("reason") else ""
    else:
        hidden = _NOT_SHOWN if kind != "spawned" else _NOT_SHOWN | {"options", "user_id", "definition_id"}
        shown = {name: value for name, value in event.items() if name not in hidden and value not in (None, False)}
        said = "  ".join(f"{name}={plain(str(value))}" for name, value in shown.items())
    click.echo(f"{event['sequence']:>6}  {local_time(event['occurred_at'])}  {who:<6}  {kind:<14}  {said}".rstrip())


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
    found = [one for one in daemon.call("waits", instance=instance) if one["kind"] not in {"backoff", "resume"}]
    show(found, form, ("WHO", "FOR", "SINCE", "UNTIL", "REASON", "ANSWER IT WITH"), _wait_row)


def _show_graph(found: dict[str, Any], form: str) -> None:
    if form in {"json", "jsonl"}:
        as_json(found)
        return
    for key, others in found["waits"].items():
        click.echo(f"{plain(key)} waits for {plain(', '.join(others))}")
    for circle in found["cycles"]:
        click.echo(f"cycle: {plain(' waits for '.join(circle))}")
    if not found["waits"]:
        click.echo("no task waits for another")


def _wait_row(wait: dict[str, Any]) -> tuple[str, ...]:
    who = "you" if wait["kind"] == "human" else str(wait["kind"])
    name = _who_waits(wait)
    since = rough_duration(seconds_since(wait["created_at"]))
    until = local_time(wait["due_at"])
    return name, who, since, until, str(wait["reason"] or ""), f"ostler answer {name} yes"


def _who_waits(wait: dict[str, Any]) -> str:
    return str(wait.get("task_key") or wait.get("instance_name") or "")


@click.command()
@click.argument("target")
@click.argument("outcome", default="done")
@click.option("--data", help="JSON that the agent gets with the answer.")
def answer(target: str, outcome: str, data: str | None) -> None:
    """Answer a waiting agent or task: TARGET is its name, its key, or the id of a wait."""
    daemon = Daemon()
    found = [one for one in daemon.call("waits") if one["kind"] not in {"backoff", "resume"}]
    names = ("wait_id", "instance_name", "instance_id", "task_key")
    mine = [one for one in found if target in {one.get(name) for name in names}]
    if not mine:
        raise fail(f"{target} waits for nothing; `ostler waits` lists what is open", ExitCode.NOT_FOUND)
    if len(mine) > 1:
        ids = ", ".join(one["wait_id"] for one in mine)
        raise fail(f"{target} waits for {len(mine)} answers; name one of them: {ids}", ExitCode.CONFLICT)
    try:
        parsed = None if data is None else json.loads(data)
    except ValueError as error:
        raise click.UsageError(f"--data must be JSON ({error})") from error
    daemon.call("answer", wait=mine[0]["wait_id"], outcome=outcome, answer=parsed)
    click.echo(f"{plain(_who_waits(mine[0]) or target)} goes on with {plain(outcome)!r}.")


@click.command()
@click.option("-o", "--output", "form", type=click.Choice(["table", "json"]), default="table", help="How to print it.")
def stats(form: str) -> None:
    """Totals of the workspace."""
    found = Daemon().call("statistics")
    if form == "json":
        as_json(found)
        return
    limit = "unlimited" if found["max_concurrent"] is None else str(found["max_concurrent"])
    rows = [
        ("active", f"{found['active_instances']} of {limit}"),
        *((state, str(number)) for state, number in found["by_state"].items() if number),
        *((f"health {health}", str(number)) for health, number in found["by_health"].items() if number),
        ("spawned in all", str(found["total_spawned"])),
        ("terminated in all", str(found["total_terminated"])),
        ("restarts in all", str(found["total_restarts"])),
        ("average uptime", rough_duration(found["average_uptime"])),
        *((f"tasks {state}", str(number)) for state, number in found["tasks"]["by_state"].items() if number),
    ]
    tasks = found["tasks"]
    if tasks["success_rate"] is not None:
        rows.append(("tasks accepted of reviewed", f"{100 * tasks['success_rate']:.0f} %"))
    if tasks["average_duration"] is not None:
        rows.append(("average time of a task", rough_duration(tasks["average_duration"])))
    if tasks["cost_usd"]:
        rows.append(("cost of tasks", f"${tasks['cost_usd']:.2f}"))
    table(("WHAT", "NUMBER"), rows)


@click.group()
def audit() -> None:
    """The chain of acts."""


@audit.command()
@click.option("-n", "count", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@output_option(name=False)
def log(count: int, form: str) -> None:
    """Show the newest acts."""
    found = Daemon().call("audit", limit=count)
    show(found, form, ("NUMBER", "TIME", "ACTOR", "ACTION", "OUTCOME", "DETAIL"), _audit_row)


def _audit_row(one: dict[str, Any]) -> tuple[str, ...]:
    when = local_time(one["occurred_at"])
    return str(one["number"]), when, one["actor"], one["action"], one["outcome"], one["detail"] or ""


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
