"""Commands on the daemon: up, down, status, restart-daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from ostler.cli.common import Daemon, fail, the_home
from ostler.cli.output import as_json, note, plain, seconds_since, short_path
from ostler.client.blocking import BlockingClient, UnreachableError
from ostler.client.launch import DaemonStartError, start_daemon, wait_until_gone
from ostler.durations import rough_duration
from ostler.errors import ExitCode
from ostler.home import DAEMON_LOG

#: The daemon ends its agents first; then it only has to close its files.
_END_SECONDS = 60.0


@click.command()
@click.option("-d", "--detach", is_flag=True, help="In the background; its log is in the home.")
@click.option("--listen", metavar="HOST:PORT", help="Also on loopback TCP, with tokens.")
def up(detach: bool, listen: str | None) -> None:
    """Start the daemon: in the foreground with its log, or with -d in the background."""
    home = the_home()
    try:
        status = BlockingClient(home).call("status")
    except UnreachableError:
        pass
    else:
        note(f"the daemon of {short_path(home)} runs already (pid {status['pid']})")
        return
    if detach:
        _start(listen)
        return
    words = [sys.executable, "-P", "-m", "ostler.daemon", "--home", str(home)]
    # In this process: Ctrl+C and the exit code are the daemon's own.
    os.execv(sys.executable, [*words, *(["--listen", listen] if listen else [])])  # noqa: S606 - our own program


def _start(listen: str | None) -> None:
    home = the_home()
    try:
        status = start_daemon(home, listen=listen)
    except DaemonStartError as error:
        raise fail(f"the daemon could not be started: {error}", ExitCode.UNREACHABLE) from error
    click.echo(f"The daemon runs (pid {status['pid']}), home {short_path(home)}, log {short_path(home / DAEMON_LOG)}.")
    if status.get("home_notice"):
        note(status["home_notice"])
    for address in status["listens"][1:]:
        click.echo(f"It listens on {address}; make a token with `ostler token create NAME`.")


@click.command()
@click.option("--keep", is_flag=True, help="Leave the agents running; the next daemon finds them.")
def down(keep: bool) -> None:
    """Stop the agents in order, then the daemon."""
    _end(keep=keep)


def _end(*, keep: bool) -> bool:
    """Whether there was a daemon."""
    daemon = Daemon()
    try:
        told = daemon.raw().call("stop_daemon", keep=keep)
    except UnreachableError:
        if keep or not _keeps_agents(the_home()):
            note(f"no daemon runs for {short_path(the_home())}")
            return False
        told = daemon.call("stop_daemon", keep=keep)  # its agents outlived it; the next one ends them in order
    for one in told["ended"]:
        click.echo(f"{plain(str(one['name']))} {plain(one['how'])}")
    if not wait_until_gone(told["pid"], _END_SECONDS):
        raise fail(f"the daemon (pid {told['pid']}) has not ended yet; see {the_home() / DAEMON_LOG}", ExitCode.PENDING)
    click.echo("The daemon has ended; its agents go on." if keep else "The daemon has ended.")
    return True


def _keeps_agents(home: Path) -> bool:
    """Whether agents may live without a daemon: then their keeper holds its lock."""
    import fcntl  # noqa: PLC0415 - only where no daemon answers

    try:
        with (home / "keeper" / "keeper.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@click.command("restart-daemon")
@click.option("--listen", metavar="HOST:PORT", help="Also on loopback TCP, with tokens.")
def restart_daemon(listen: str | None) -> None:
    """Restart the daemon, after an update or a change of its settings. The agents go on."""
    _end(keep=True)
    _start(listen)


@click.command()
@click.option("-o", "--output", "form", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
def status(form: str) -> None:
    """Say how the daemon is; exit code 6 where none runs. Never starts one."""
    home = the_home()
    try:
        found = Daemon().raw().call("status")
    except UnreachableError:
        if form == "json":
            as_json({"home": str(home), "pid": None})
        raise fail(
            f"no daemon runs for {short_path(home)}{', but agents of it live' if _keeps_agents(home) else ''}; "
            "start it with `ostler up -d`",
            ExitCode.UNREACHABLE,
        ) from None
    if form == "json":
        as_json(found)
        return
    up_for = rough_duration(seconds_since(found["started_at"]))
    click.echo(f"ostler {found['version']}, daemon pid {found['pid']}, up {up_for}, home {short_path(found['home'])}")
    for address in found["listens"][1:]:
        click.echo(f"listens on {address}")
    click.echo("    ".join(filter(None, (_agents_line(found["statistics"]), _tasks_line(found["tasks"])))))
    if found["waits"]:
        click.echo(f"{found['waits']} wait for you: ostler waits")
    for name, failure in found["background"].items():
        click.echo(f"{plain(name)} {plain(failure)}")
    for instance, why in found["unrecovered"].items():
        click.echo(f"not recovered: {instance[:8]}: {plain(why)}")


def _tasks_line(tasks: dict[str, Any]) -> str:
    states = {name: number for name, number in tasks["by_state"].items() if number}
    many = sum(states.values())
    if not many:
        return ""
    told = ", ".join(f"{number} {name}" for name, number in states.items())
    cost = f", ${tasks['cost_usd']:.2f}" if tasks["cost_usd"] else ""
    return f"{many} task{'' if many == 1 else 's'}: {told}{cost}"


def _agents_line(statistics: dict[str, Any]) -> str:
    states = {name: number for name, number in statistics["by_state"].items() if number}
    live = {name: number for name, number in states.items() if name not in {"terminated", "failed"}}
    many = statistics["active_instances"]
    told = ", ".join(f"{number} {name}" for name, number in live.items())
    failed = f"; {states['failed']} failed" if "failed" in states else ""
    return f"{many} agent{'' if many == 1 else 's'}{': ' + told if told else ''}{failed}"
