"""Commands on agents: list, look, ask, pause, resume, stop, kill, restart, remove, wait."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ostler.cli import completers
from ostler.cli.common import (
    ENDED,
    HEALTH,
    STATES,
    Daemon,
    count_option,
    fail,
    for_each,
    list_instances,
    name_projects,
    on_agent,
    output_option,
    seconds_of,
)
from ostler.cli.output import (
    as_json,
    cost_text,
    first_line,
    note,
    plain,
    seconds_since,
    sentence,
    tokens_text,
    written_by_agent,
)
from ostler.cli.table import Column, show
from ostler.cli.watch import watch, watch_option
from ostler.client.blocking import DaemonError, UnreachableError
from ostler.durations import rough_duration, size_text
from ostler.errors import ExitCode

_LOOK_SECONDS = 0.1
_live = completers.agents(ended=False)
_names = click.argument("names", nargs=-1, metavar="AGENT...", shell_complete=_live)
_all = click.option("--all", "everything", is_flag=True, help="All that live.")
_reason = click.option("--reason", help="Kept in the log and in the audit.")


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that have ended.")
@click.option("-q", "--quiet", is_flag=True, help="Only the names.")
@click.option("--state", type=click.Choice(STATES), help="Only in this state.")
@click.option("--tag", help="Only with this tag.", shell_complete=completers.tags)
@click.option(
    "--name", "name_pattern", help="Only with such a name; * stands for any text.", shell_complete=completers.agents()
)
@watch_option
@count_option
@output_option()
def ps(everything: bool, quiet: bool, is_live: bool, form: str, count: int | None, **filters: Any) -> None:
    """List agents, newest first; without -a only those that live or wait for their restart."""
    daemon = Daemon()

    def fetch(count: int | None = None) -> list[dict[str, Any]]:
        agents = list_instances(
            daemon, count, include_terminated=everything, include_restarting=not everything, **filters
        )
        return name_projects(agents, form)

    columns = [column for column in COLUMNS if everything or column.head != "EXIT"]
    if is_live:
        watch(daemon, lambda: fetch()[:count], "name" if quiet else form, columns)
    agents = fetch(count)
    if quiet:
        click.echo("".join(f"{name}\n" for name in _labels(agents)), nl=False)
        return
    narrowed = any(value is not None for value in filters.values())
    show(agents, form, columns, empty=_no_agents(everything=everything, narrowed=narrowed))


def _no_agents(*, everything: bool, narrowed: bool) -> str:
    if narrowed:
        return f"no such agent{'' if everything else ' lives; -a lists also those that have ended'}"
    return (
        "nothing has run yet; start something: ostler run -- CMD"
        if everything
        else ("no agent lives; start one with `ostler run -- CMD`, or see those that have ended: ostler ps -a")
    )


def _labels(agents: list[dict[str, Any]]) -> list[str]:
    """What each can be named by as one word of a command line: its name, else its id."""
    names = Counter(agent["name"] for agent in agents)
    return [
        agent["name"]
        if names[agent["name"]] == 1 and agent["name"] and not set(" *?[\\'\"$") & set(agent["name"])
        else agent["instance_id"]
        for agent in agents
    ]


def _exit_code(agent: dict[str, Any]) -> str:
    code = agent.get("exit_code")
    return "" if code is None else str(code)


def _metrics(agent: dict[str, Any]) -> dict[str, Any]:
    return agent.get("metrics_now") or agent.get("metrics") or {}


def tokens_of(agent: dict[str, Any]) -> str:
    return tokens_text(int(_metrics(agent).get("tokens_used") or 0))


def cost_of(agent: dict[str, Any]) -> str:
    cost = (_metrics(agent).get("custom") or {}).get("cost_usd")
    return "" if cost is None else cost_text(cost)


def _definition(agent: dict[str, Any]) -> str:
    name = str(agent.get("definition") or "")
    return "command" if name.startswith("command/") else name


def _cpu(agent: dict[str, Any]) -> str:
    return "" if agent["state"] in ENDED else f"{_metrics(agent).get('cpu_percent', 0.0):.0f} %"


def _memory(agent: dict[str, Any]) -> str:
    count = 0 if agent["state"] in ENDED else _metrics(agent).get("memory_bytes") or 0
    return size_text(count) if count else ""


def doing_of(agent: dict[str, Any]) -> str:
    error = agent["error_message"] if agent.get("state") in ENDED else None
    return sentence(agent.get("doing") or first_line(error))


def _uptime(agent: dict[str, Any]) -> float:
    since = seconds_since(agent["created_at"])
    ended = seconds_since(agent["terminated_at"]) if agent["terminated_at"] else 0.0
    return max(since - ended - float(agent.get("downtime") or 0), 0.0)


#: Of a list of agents.
COLUMNS = (
    Column("NAME", lambda agent: agent["name"] or "-", least=14),
    Column("AGENT", _definition, least=8, leaves=8),
    Column("STATE", lambda agent: str(agent["state"])),
    Column("PROJECT", lambda agent: str(agent.get("project_name") or ""), least=8, leaves=10, if_any=True),
    Column("HEALTH", lambda agent: str(agent["health"]["state"]), leaves=5),
    Column("UP", lambda agent: rough_duration(_uptime(agent)), leaves=7, is_number=True),
    Column("RESTARTS", lambda agent: str(agent["attempt"] - 1), leaves=1, is_number=True),
    Column("CPU", _cpu, leaves=4, is_number=True),
    Column("MEM", _memory, leaves=3, is_number=True),
    Column("EXIT", _exit_code, leaves=9, is_number=True),
    Column("TOKENS", tokens_of, leaves=2, is_number=True, if_any=True),
    Column("COST", cost_of, leaves=6, is_number=True, if_any=True),
    Column("LEVEL", lambda agent: str(agent["spawn_options"]["isolation_level"]), only_wide=True),
    Column("TAGS", lambda agent: ",".join(agent["spawn_options"].get("tags") or ()), only_wide=True, if_any=True),
    Column("ID", lambda agent: str(agent["instance_id"]), only_wide=True),
    Column("DOING", doing_of, least=20),
)


@click.command()
@click.argument("agent", shell_complete=completers.agents())
def inspect(agent: str) -> None:
    """Show everything about an agent, as JSON."""
    as_json(on_agent(Daemon(), "instance", agent))


@click.command()
@click.argument("agent", shell_complete=_live)
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
    _tell_queue(on_agent(daemon, "instance", agent))
    while True:
        try:
            reply = on_agent(daemon, "ask", agent, **parameters)
            break
        except UnreachableError:
            note("the daemon went away; asking again")
            time.sleep(_LOOK_SECONDS)
            daemon = Daemon()
    if detach:
        click.echo(reply["request_id"])
    else:
        print_answer(reply["answer"])


def _tell_queue(instance: dict[str, Any]) -> None:
    """Where the request has to wait for others: that it does, and for what."""
    most = instance["spawn_options"]["resource_limits"]["max_concurrent_tasks"]
    open_requests = int(_metrics(instance).get("open_tasks") or 0)
    if instance["state"] != "processing" or open_requests < most:
        return
    name = instance["name"] or instance["instance_id"]
    if instance["job"] is None:
        work = "a request" if open_requests == 1 else f"{open_requests} requests"
        note(f"{name} is busy with {work}; your request is queued behind that")
    else:
        rest = "an agent that was run for a job ends with it, and then refuses what is queued"
        note(f"{name} is busy with its job: your request is queued behind it; {rest}")


def print_answer(answer: Any) -> None:
    """Text as text, anything else as JSON."""
    if isinstance(answer, str):
        click.echo("\n".join(map(written_by_agent, answer.split("\n"))), color=True)
    else:
        as_json(answer)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@click.command()
@click.argument("name", metavar="AGENT|TASK", shell_complete=completers.agents_and_tasks)
@click.option("-o", "--output", "form", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
def why(name: str, form: str) -> None:
    """Say why an agent or a task is as it is, and what would change it."""
    daemon = Daemon()
    try:
        reply = daemon.call("why_task", task=name)
    except DaemonError as error:
        if error.code != "not_found":
            raise
        reply = on_agent(daemon, "why", name)
    if form == "json":
        as_json(reply)
        return
    click.echo(f"{plain(reply.get('key') or name)}: {sentence(reply['verdict'])}.")
    for line in reply["evidence"]:
        click.echo(f"  {sentence(line)}")
    for line in reply["what_would_change_it"]:
        click.echo(f"  → {sentence(line)}")


# --- verbs on many -----------------------------------------------------------------------------------


def _for_each(names: tuple[str, ...], everything: bool, act: Callable[[Daemon, str], None]) -> None:
    daemon = Daemon()
    if everything:
        names = tuple(agent["instance_id"] for agent in list_instances(daemon, include_restarting=True))
    elif not names:
        raise click.UsageError("name at least one agent, or use --all")
    for_each(names, partial(act, daemon))


@click.command()
@_names
@_all
@click.option("--depth", type=click.Choice(["freeze", "hold", "park"]), help="Else frozen where it can be, else held.")
@click.option("--resume-after", help="Go on by itself after so long, such as 8h.")
def pause(names: tuple[str, ...], everything: bool, depth: str | None, resume_after: str | None) -> None:
    """Pause agents. Frozen ones stop where they are, held ones finish their work, parked ones end their process."""

    def pause_agent(daemon: Daemon, name: str) -> None:
        chosen = depth
        if chosen is None:
            level = on_agent(daemon, "instance", name)["spawn_options"]["isolation_level"]
            chosen = "freeze" if level == "process" else "hold"
        label = plain(on_agent(daemon, "suspend", name, depth=chosen, resume_after=resume_after)["name"])
        words = {"freeze": "frozen where it is", "hold": "held", "park": "parked"}[chosen]
        click.echo(f"{label} is suspended ({words}). Go on with: ostler resume {label}")

    _for_each(names, everything, pause_agent)


@click.command()
@click.argument("names", nargs=-1, metavar="AGENT...", shell_complete=completers.agents("suspended"))
@_all
def resume(names: tuple[str, ...], everything: bool) -> None:
    """Let paused agents go on."""

    def resume_agent(daemon: Daemon, name: str) -> None:
        instance = on_agent(daemon, "resume", name)
        click.echo(f"{plain(instance['name'])} is {instance['state']}.")

    _for_each(names, everything, resume_agent)


@click.command()
@_names
@_all
@click.option("-t", "--time", "grace", default="10s", show_default=True, help="How long it may take to end by itself.")
@_reason
def stop(names: tuple[str, ...], everything: bool, grace: str, reason: str | None) -> None:
    """Stop agents in order; what does not end in time is ended by force."""
    _for_each(names, everything, lambda daemon, name: _terminate(daemon, name, grace, reason))


@click.command()
@_names
@_all
@_reason
def kill(names: tuple[str, ...], everything: bool, reason: str | None) -> None:
    """End agents at once, by force."""
    _for_each(names, everything, lambda daemon, name: _terminate(daemon, name, 0, reason or "killed"))


def _terminate(daemon: Daemon, name: str, grace: str | int, reason: str | None) -> None:
    try:
        result = on_agent(daemon, "terminate", name, options={"graceful_timeout": grace, "reason": reason})
    except DaemonError as error:
        if error.code != "wrong_state" or on_agent(daemon, "instance", name)["state"] != "terminated":
            raise
        click.echo(f"{plain(name)} had ended already.")
        return
    label = plain((result.get("final_instance") or {}).get("name") or name)
    if not result["success"]:
        raise DaemonError("wrong_state", f"{label}: {result['error_message']}")
    how = "gracefully" if result["was_graceful"] else "by force"
    click.echo(f"{label} terminated {how} in {result['duration']:.1f} s.")
    if result.get("error_message"):
        note(result["error_message"])


@click.command()
@click.argument("names", nargs=-1, metavar="AGENT...", shell_complete=completers.agents())
@_all
@_reason
def restart(names: tuple[str, ...], everything: bool, reason: str | None) -> None:
    """Start agents again, with fresh processes; spends none of their retries."""

    def restart_agent(daemon: Daemon, name: str) -> None:
        instance = on_agent(daemon, "restart", name, reason=reason)
        click.echo(f"{plain(instance['name'])} is {instance['state']} (attempt {instance['attempt']}).")

    _for_each(names, everything, restart_agent)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="AGENT...", shell_complete=completers.agents(ended=True))
@click.option("-f", "--force", is_flag=True, help="Kill those that live first.")
def rm(names: tuple[str, ...], force: bool) -> None:
    """Remove the records and the output of ended agents. The log and the audit keep what happened."""

    def remove_agent(daemon: Daemon, name: str) -> None:
        if force and on_agent(daemon, "instance", name)["state"] not in ENDED:
            daemon.call("terminate", instance=name, options={"graceful_timeout": 0, "reason": "removed"})
        click.echo(plain(on_agent(daemon, "remove", name)["name"]))

    _for_each(names, False, remove_agent)


@click.command()
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--older-than", help="Only those that ended longer ago, such as 7d.")
def prune(yes: bool, older_than: str | None) -> None:
    """Remove all agents that have ended; says which first."""
    daemon = Daemon()
    ended = daemon.call("prune", older_than=seconds_of("--older-than", older_than), dry_run=True)
    if not ended:
        note("there is nothing to remove")
        return
    names = ", ".join(plain(agent["name"]) for agent in ended[:10])
    more = f" and {len(ended) - 10} more" if len(ended) > 10 else ""
    note(f"{len(ended)} ended agents with their output: {names}{more}")
    if not yes and not click.confirm("Remove them?", err=True):
        raise click.Abort
    freed = 0
    for agent in ended:
        try:
            freed += daemon.call("remove", instance=agent["instance_id"])["freed_bytes"]
        except DaemonError as error:
            note(str(error))
    click.echo(f"{size_text(freed)} freed")


@click.command()
@click.argument("agent", shell_complete=completers.agents())
@click.option(
    "--for",
    "goal",
    type=click.Choice(["ended", *STATES, *HEALTH]),
    default="ended",
    show_default=True,
    help="A state, a state of its health, or ended.",
)
@click.option("--timeout", default=None, help="At most so long, such as 5min; then exit code 124.")
def wait(agent: str, goal: str, timeout: str | None) -> None:
    """Wait until an agent is in a state. Exit code 1 where it can no longer get there."""
    limit = seconds_of("--timeout", timeout)
    daemon, until = Daemon(), None if limit is None else time.monotonic() + limit
    while True:
        instance = on_agent(daemon, "instance", agent)
        state, ended = instance["state"], instance["state"] in ENDED
        if goal in {state, instance["health"]["state"]} or (goal == "ended" and ended):
            click.echo(state)
            return
        if ended and not instance.get("doing"):
            raise fail(f"{agent} is {state} and will not be {goal}")
        if until is not None and time.monotonic() >= until:
            raise fail(f"{agent} is still {state}", ExitCode.TIMED_OUT)
        time.sleep(_LOOK_SECONDS)
