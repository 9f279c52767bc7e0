"""Commands on agents: list, look, ask, pause, resume, stop, kill, restart, remove, wait."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click

from ostler.cli.common import Daemon, fail, on_agent, output_option
from ostler.cli.output import as_json, note, plain, seconds_since, show
from ostler.client.blocking import DaemonError, UnreachableError
from ostler.durations import parse_seconds, rough_duration, size_text
from ostler.errors import ExitCode

_HEAD = ("NAME", "AGENT", "STATE", "HEALTH", "UP", "RESTARTS", "CPU", "MEM", "DOING")
_LOOK_SECONDS = 0.1
_ENDED = frozenset({"terminated", "failed"})
_names = click.argument("names", nargs=-1, metavar="AGENT...")
_all = click.option("--all", "everything", is_flag=True, help="All that live.")


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that have ended.")
@click.option("-q", "--quiet", is_flag=True, help="Only the names.")
@click.option("--state", help="Only in this state.")
@click.option("--tag", help="Only with this tag.")
@click.option("--name", "pattern", help="Only with such a name; * stands for any text.")
@click.option("-n", "count", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many.")
@output_option()
def ps(everything: bool, quiet: bool, form: str, count: int, **chosen: Any) -> None:
    """List agents, newest first; without -a only those that live."""
    found = Daemon().call(
        "instances",
        include_terminated=everything,
        state=chosen["state"],
        tag=chosen["tag"],
        name_pattern=chosen["pattern"],
        limit=count,
    )
    # Some columns are there only when there is something in them.
    more = {"EXIT": _exit_code, "TOKENS": _tokens, "COST": _cost}
    chosen_more = [name for name in more if (everything if name == "EXIT" else any(more[name](one) for one in found))]
    head = (*_HEAD[:-1], *chosen_more, _HEAD[-1])
    show(found, "name" if quiet else form, head, lambda one: _row(one, *(more[name](one) for name in chosen_more)))


def _exit_code(agent: dict[str, Any]) -> str:
    code = agent.get("exit_code")
    return "" if code is None else str(code)


def _metrics(agent: dict[str, Any]) -> dict[str, Any]:
    return agent.get("metrics_now") or agent.get("metrics") or {}


def _tokens(agent: dict[str, Any]) -> str:
    count = int(_metrics(agent).get("tokens_used") or 0)
    return "" if not count else str(count) if count < 10_000 else f"{count / 1000:.0f} k"


def _cost(agent: dict[str, Any]) -> str:
    cost = (_metrics(agent).get("custom") or {}).get("cost_usd")
    return "" if cost is None else "<$0.01" if 0 < cost < 0.01 else f"${cost:.2f}"


def _row(agent: dict[str, Any], *more: str) -> tuple[str, ...]:
    metrics = _metrics(agent)
    ended = agent["state"] in _ENDED
    memory = metrics.get("memory_bytes") or 0
    definition = str(agent.get("definition") or "")
    row = (
        agent["name"] or "-",
        "command" if definition.startswith("command/") else definition,
        agent["state"],
        agent["health"]["state"],
        rough_duration(_uptime(agent)),
        str(agent["restart_count"]),
        "" if ended else f"{metrics.get('cpu_percent', 0.0):.0f} %",
        "" if ended or not memory else size_text(memory),
    )
    doing = agent.get("doing") or (_first_line(agent.get("error_message")) if ended else "")
    return (*row, *more, doing)


def _uptime(agent: dict[str, Any]) -> float:
    since = seconds_since(agent["created_at"])
    ended = seconds_since(agent["terminated_at"]) if agent["terminated_at"] else 0.0
    return max(since - ended - float(agent.get("downtime") or 0), 0.0)


def _first_line(text: str | None) -> str:
    return text.splitlines()[0].removesuffix("; its last lines:")[:80] if text else ""


@click.command()
@click.argument("agent")
def inspect(agent: str) -> None:
    """Show everything about an agent, as JSON."""
    as_json(on_agent(Daemon(), "instance", agent))


@click.command()
@click.argument("agent")
@click.argument("request")
@click.option("--id", "request_id", help="An id: asked again, the same answer is given.")
@click.option("--timeout", help="At most so long, such as 30s.")
@click.option("-d", "--detach", is_flag=True, help="Do not wait for the answer; print the id of the request.")
def ask(agent: str, request: str, request_id: str | None, timeout: str | None, detach: bool) -> None:
    """Ask an agent something: text, or JSON. The answer is printed as JSON, or as text where it is text."""
    daemon = Daemon()
    # With an id of our own a daemon that is killed meanwhile is asked again, and answers once.
    name = request_id or f"cli-{os.urandom(6).hex()}"
    parameters = {"request": _json_or_text(request), "request_id": name, "timeout": timeout, "detach": detach}
    while True:
        try:
            found = on_agent(daemon, "ask", agent, **parameters)
            break
        except UnreachableError:
            note("the daemon went away; asking again")
            time.sleep(_LOOK_SECONDS)
            daemon = Daemon()
    if detach:
        click.echo(found["request_id"])
    elif isinstance(found["answer"], str):
        click.echo(plain(found["answer"]) if "\n" not in found["answer"] else found["answer"])
    else:
        as_json(found["answer"])


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@click.command()
@click.argument("agent")
@click.option("-o", "--output", "form", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
def why(agent: str, form: str) -> None:
    """Say why an agent is as it is, and what would change it."""
    found = on_agent(Daemon(), "why", agent)
    if form == "json":
        as_json(found)
        return
    click.echo(f"{agent}: {plain(found['verdict'])}.")
    for line in found["evidence"]:
        click.echo(f"  {plain(line)}")
    for line in found["what_would_change_it"]:
        click.echo(f"  → {plain(line)}")


# --- verbs on many -----------------------------------------------------------------------------------


def _chosen(daemon: Daemon, names: tuple[str, ...], *, everything: bool) -> list[str]:
    if everything:
        return [str(one["instance_id"]) for one in daemon.call("instances", limit=1000)]
    if not names:
        raise click.UsageError("name at least one agent, or use --all")
    return list(names)


def _on_each(names: tuple[str, ...], everything: bool, verb: Any) -> None:
    """Each in its turn; what fails for one does not keep the others from it."""
    daemon = Daemon()
    failed: DaemonError | None = None
    for name in _chosen(daemon, names, everything=everything):
        try:
            verb(daemon, name)
        except UnreachableError:
            raise
        except DaemonError as error:
            note(str(error))
            failed = failed or error
    if failed is not None:
        from ostler.errors import exit_code_of  # noqa: PLC0415 - only a failure needs it

        raise click.exceptions.Exit(exit_code_of(failed.code))


@click.command()
@_names
@_all
@click.option("--depth", type=click.Choice(["freeze", "hold", "park"]), help="Else frozen where it can be, else held.")
@click.option("--resume-after", help="Go on by itself after so long, such as 8h.")
def pause(names: tuple[str, ...], everything: bool, depth: str | None, resume_after: str | None) -> None:
    """Pause agents. Frozen ones stop where they are, held ones finish their work, parked ones end their process."""

    def one(daemon: Daemon, name: str) -> None:
        chosen = depth
        if chosen is None:
            found = on_agent(daemon, "instance", name)
            chosen = "freeze" if found["spawn_options"]["isolation_level"] == "process" else "hold"
        found = on_agent(daemon, "suspend", name, depth=chosen, resume_after=resume_after)
        words = {"freeze": "frozen where it is", "hold": "held", "park": "parked"}[chosen]
        label = found["name"]
        click.echo(f"{plain(label)} is suspended ({words}). Go on with: ostler resume {plain(label)}")

    _on_each(names, everything, one)


@click.command()
@_names
@_all
def resume(names: tuple[str, ...], everything: bool) -> None:
    """Let paused agents go on."""

    def one(daemon: Daemon, name: str) -> None:
        found = on_agent(daemon, "resume", name)
        click.echo(f"{plain(found['name'])} is {found['state']}.")

    _on_each(names, everything, one)


@click.command()
@_names
@_all
@click.option("-t", "--time", "grace", default="10s", show_default=True, help="How long it may take to end by itself.")
@click.option("--reason", help="Kept in the log and in the audit.")
def stop(names: tuple[str, ...], everything: bool, grace: str, reason: str | None) -> None:
    """Stop agents in order; what does not end in time is ended by force."""
    _on_each(names, everything, lambda daemon, name: _end(daemon, name, grace, reason))


@click.command()
@_names
@_all
@click.option("--reason", help="Kept in the log and in the audit.")
def kill(names: tuple[str, ...], everything: bool, reason: str | None) -> None:
    """End agents at once, by force."""
    _on_each(names, everything, lambda daemon, name: _end(daemon, name, 0, reason or "killed"))


def _end(daemon: Daemon, name: str, grace: str | int, reason: str | None) -> None:
    result = on_agent(daemon, "terminate", name, options={"graceful_timeout": grace, "reason": reason})
    label = plain((result.get("final_instance") or {}).get("name") or name)
    if not result["success"]:
        raise DaemonError("wrong_state", f"{label}: {result['error_message']}")
    how = "gracefully" if result["was_graceful"] else "by force"
    click.echo(f"{label} terminated {how} in {result['duration']:.1f} s.")
    if result.get("error_message"):
        note(result["error_message"])


@click.command()
@_names
@_all
@click.option("--reason", help="Kept in the log and in the audit.")
def restart(names: tuple[str, ...], everything: bool, reason: str | None) -> None:
    """Start agents again, with fresh processes; spends none of their retries."""

    def one(daemon: Daemon, name: str) -> None:
        found = on_agent(daemon, "restart", name, reason=reason)
        click.echo(f"{plain(found['name'])} is {found['state']} (attempt {found['attempt']}).")

    _on_each(names, everything, one)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="AGENT...")
@click.option("-f", "--force", is_flag=True, help="Kill those that live first.")
def rm(names: tuple[str, ...], force: bool) -> None:
    """Remove the records and the output of ended agents. The log and the audit keep what happened."""

    def one(daemon: Daemon, name: str) -> None:
        if force and on_agent(daemon, "instance", name)["state"] not in _ENDED:
            daemon.call("terminate", instance=name, options={"graceful_timeout": 0, "reason": "removed"})
        found = on_agent(daemon, "remove", name)
        click.echo(plain(found["name"]))

    _on_each(names, False, one)


@click.command()
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def prune(yes: bool) -> None:
    """Remove all agents that have ended; says which first."""
    daemon = Daemon()
    ended = [one for one in daemon.call("instances", include_terminated=True, limit=1000) if one["state"] in _ENDED]
    if not ended:
        note("there is nothing to remove")
        return
    shown = ", ".join(plain(one["name"]) for one in ended[:10])
    more = f" and {len(ended) - 10} more" if len(ended) > 10 else ""
    note(f"{len(ended)} ended agents with their output: {shown}{more}")
    if not yes and not click.confirm("Remove them?", err=True):
        raise click.Abort
    freed = 0
    for one in ended:
        try:
            freed += daemon.call("remove", instance=one["instance_id"])["freed_bytes"]
        except DaemonError as error:
            note(str(error))
    click.echo(f"{size_text(freed)} freed")


@click.command()
@click.argument("agent")
@click.option("--for", "wanted", default="ended", show_default=True, help="A state, healthy, or ended.")
@click.option("--timeout", default=None, help="At most so long, such as 5min; then exit code 124.")
def wait(agent: str, wanted: str, timeout: str | None) -> None:
    """Wait until an agent is in a state. Exit code 1 where it can no longer get there."""
    limit = None if timeout is None else parse_seconds(timeout)
    if timeout is not None and limit is None:
        raise click.UsageError(f"--timeout must be a duration such as 30s, was {timeout}")
    daemon, until = Daemon(), None if limit is None else time.monotonic() + limit
    while True:
        found = on_agent(daemon, "instance", agent)
        state, ended = found["state"], found["state"] in _ENDED
        if wanted in {state, found["health"]["state"]} or (wanted == "ended" and ended):
            click.echo(state)
            return
        if ended and not found.get("doing"):
            raise fail(f"{agent} is {state} and will not be {wanted}")
        if until is not None and time.monotonic() >= until:
            raise fail(f"{agent} is still {state}", ExitCode.TIMED_OUT)
        time.sleep(_LOOK_SECONDS)
