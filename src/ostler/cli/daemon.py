"""Commands on the daemon: up, down, status, restart-daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from ostler.cli.common import Daemon, fail, the_home
from ostler.cli.output import as_json, cost_text, counted, note, plain, seconds_since, sentence, short_path
from ostler.client.blocking import BlockingClient, UnreachableError
from ostler.client.homes import keeps_agents
from ostler.client.launch import DaemonStartError, start_daemon, wait_until_gone, wait_while_starting
from ostler.durations import rough_duration
from ostler.errors import ExitCode
from ostler.home import DAEMON_LOG, KEEPER

#: The daemon ends its agents first; then it only has to close its files.
_END_SECONDS = 60.0
_listen = click.option("--listen", metavar="HOST:PORT", help="Also on loopback TCP, with tokens.")


@click.command()
@click.option("-d", "--detach", is_flag=True, help="In the background; its log is in the home.")
@_listen
def up(detach: bool, listen: str | None) -> None:
    """Start the daemon: in the foreground with its log, or with -d in the background."""
    home = the_home()
    try:
        reply = BlockingClient(home).call("status")
    except UnreachableError:
        pass
    else:
        note(f"the daemon of {short_path(home)} runs already (pid {reply['pid']})")
        return
    if detach:
        _start(listen)
        return
    words = [sys.executable, "-P", "-m", "ostler.daemon", "--strict", "--home", str(home)]
    # In this process: Ctrl+C and the exit code are the daemon's own.
    os.execv(sys.executable, [*words, *(["--listen", listen] if listen else [])])  # noqa: S606 - our own program


def _start(listen: str | None) -> None:
    home = the_home()
    try:
        reply = start_daemon(home, listen=listen, strict=True)
    except DaemonStartError as error:
        raise fail(f"the daemon could not be started: {error}", ExitCode.UNREACHABLE) from error
    click.echo(f"The daemon runs (pid {reply['pid']}), home {short_path(home)}, log {short_path(home / DAEMON_LOG)}.")
    if reply.get("home_notice"):
        note(reply["home_notice"])
    for address in reply["listens"][1:]:
        click.echo(f"It listens on {address}; make a token with `ostler token create NAME`.")


@click.command()
@click.option("--keep", is_flag=True, help="Leave the agents running; the next daemon finds them.")
def down(keep: bool) -> None:
    """Stop the agents in order, then the daemon."""
    daemon = Daemon()
    wait_while_starting(daemon.home)
    try:
        reply = daemon.raw().call("stop_daemon", keep=keep)
    except UnreachableError:
        if keep or not keeps_agents(daemon.home):
            note(f"no daemon runs for {short_path(daemon.home)}")
            return
        reply = daemon.call("stop_daemon", keep=keep)  # its agents outlived it; the next one ends them in order
    for agent in reply["ended"]:
        click.echo(f"{plain(str(agent['name']))} {plain(agent['how'])}")
    pid = reply["pid"]
    if not wait_until_gone(pid, _END_SECONDS):
        raise fail(f"the daemon (pid {pid}) has not ended yet; see {daemon.home / DAEMON_LOG}", ExitCode.PENDING)
    click.echo("The daemon has ended; its agents go on." if keep else "The daemon has ended.")


@click.command("restart-daemon")
@_listen
@click.option("-y", "--yes", is_flag=True, help="Also where agents stay with a keeper of another version.")
@click.pass_context
def restart_daemon(ctx: click.Context, listen: str | None, yes: bool) -> None:
    """Restart the daemon, after an update or a change of its settings. The agents go on.

    The settings and the port are looked at first: where one of them is wrong, the daemon that runs goes on.
    """
    from ostler.daemon.run import check_start  # noqa: PLC0415 - loads the whole library

    home = the_home()
    if not home.is_dir():
        raise fail(f"there is no home at {short_path(home)}; `ostler up -d` makes one", ExitCode.NOT_FOUND)
    try:
        in_use = BlockingClient(home).call("status")["listens"]
    except UnreachableError:
        in_use = []
    check_start(home, listen, in_use)
    _warn_of_other_keeper(home, yes=yes)
    ctx.invoke(down, keep=True)
    _start(listen)


def _warn_of_other_keeper(home: Path, *, yes: bool) -> None:
    """After an update: what the new daemon cannot take over is said before the old one stops."""
    from ostler.isolation.process.launch import other_keeper  # noqa: PLC0415 - loads the whole library

    other = other_keeper(home / KEEPER)
    if other is None:
        return
    note(f"agents of this home are {other.sentence}")
    note("until then they run without a daemon that watches them, and no new agent or command can be started")
    if yes:
        return
    question = "Restart the daemon all the same?"
    if not sys.stdin.isatty() or not click.confirm(question, err=True):
        raise fail("nothing was stopped; wait for these agents, or use --yes", ExitCode.WRONG_STATE)


@click.command()
@click.option("-o", "--output", "form", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
def status(form: str) -> None:
    """Say how the daemon is; exit code 6 where none runs. Never starts one."""
    home = the_home()
    try:
        reply = Daemon().raw().call("status")
    except UnreachableError:
        if form == "json":
            as_json({"home": str(home), "pid": None})
        agents = ", but agents of it live" if keeps_agents(home) else ""
        message = f"no daemon runs for {short_path(home)}{agents}; start it with `ostler up -d`"
        raise fail(message, ExitCode.UNREACHABLE) from None
    if form == "json":
        as_json(reply)
        return
    up_for = rough_duration(seconds_since(reply["started_at"]))
    click.echo(f"ostler {reply['version']}, daemon pid {reply['pid']}, up {up_for}, home {short_path(reply['home'])}")
    for address in reply["listens"][1:]:
        click.echo(f"listens on {address}")
    if reply["settings_fault"]:
        click.echo(f"settings: {sentence(reply['settings_fault'])}")
    click.echo("    ".join(filter(None, (_agents_line(reply["statistics"]), _tasks_line(reply["tasks"])))))
    if reply["inbox"]:
        click.echo(f"{counted(reply['inbox'], 'thing')} {'needs' if reply['inbox'] == 1 else 'need'} you: ostler inbox")
    for name, failure in reply["background"].items():
        click.echo(f"{plain(name)} {sentence(failure)}")
    for instance, reason in reply["unrecovered"].items():
        click.echo(f"not recovered: {instance[:8]}: {sentence(reason)}")


def _tasks_line(tasks: dict[str, Any]) -> str:
    states = {name: number for name, number in tasks["by_state"].items() if number}
    if not states:
        return ""
    cost = f", {cost_text(tasks['cost_usd'])}" if tasks["cost_usd"] else ""
    return f"{counted(sum(states.values()), 'task')}: {_listed(states)}{cost}"


def _agents_line(statistics: dict[str, Any]) -> str:
    states = {name: number for name, number in statistics["by_state"].items() if number}
    live = {name: number for name, number in states.items() if name not in {"terminated", "failed"}}
    failed = f"; {states['failed']} failed" if "failed" in states else ""
    return f"{counted(statistics['active_instances'], 'agent')}{': ' if live else ''}{_listed(live)}{failed}"


def _listed(states: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in states.items())
