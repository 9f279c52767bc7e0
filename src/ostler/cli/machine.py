"""Commands on this machine: what a home takes on the disk, its start at boot, all homes."""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import Any

import click

from ostler.cli.common import Daemon, fail, output_option, the_home
from ostler.cli.output import as_json, note, seconds_since, short_path
from ostler.cli.table import Column, print_table, show
from ostler.durations import rough_duration, size_text
from ostler.errors import ExitCode

#: As the daemon names them, in the order in which they are shown.
_KINDS = ("workdirs", "vault", "logs", "repositories", "homes", "store", "other")
#: As in `model.disk`, which is slow to import.
_WARN_SHARE = 0.8


@click.command()
@click.option(
    "-n", "count", type=click.IntRange(0), default=10, show_default=True, help="So many tasks, largest first."
)
@click.option("-o", "--output", "form", type=click.Choice(["table", "json"]), default="table", help="How to print it.")
def df(count: int, form: str) -> None:
    """Say what the home takes on the disk, by kind and by task, and how much of its limit that is."""
    usage = Daemon().call("disk")
    if form == "json":
        as_json(usage)
        return
    limit = usage["limit"]
    rows = [(kind, size_text(usage[kind])) for kind in _KINDS if usage[kind]]
    print_table(_KIND_COLUMNS, [*rows, ("total", size_text(usage["total"]))])
    if usage["tasks"] and count:
        click.echo()
        print_table(_TASK_COLUMNS, usage["tasks"][:count])
        if len(usage["tasks"]) > count:
            note(f"these are the largest {count} of {len(usage['tasks'])}; -n shows more")
    click.echo()
    if limit is None:
        click.echo(f"No limit; {size_text(usage['free'])} are free on the disk. Set one: `disk` below [retention].")
        return
    click.echo(f"{100 * usage['share']:.0f} % of {size_text(limit)}; {size_text(usage['free'])} are free on the disk.")
    if usage["share"] >= 1:
        note(
            "no new task begins: review what `ostler task list` shows, or raise `disk` below [retention]; what "
            "`repositories` takes is not freed"
        )
    elif usage["share"] >= _WARN_SHARE:
        note("at 100 % no new task begins; accepted and rejected work then makes room, the oldest first")


def _size_column(name: str) -> Column:
    return Column(name.upper(), lambda task: size_text(task[name]) if task[name] else "", is_number=True)


_KIND_COLUMNS = (Column("WHAT", itemgetter(0)), Column("SIZE", itemgetter(1), is_number=True))
_TASK_COLUMNS = (
    Column("TASK", itemgetter("key"), least=8),
    Column("STATE", itemgetter("state")),
    *map(_size_column, ("workdir", "vault", "logs", "total")),
)


# --- at boot -----------------------------------------------------------------------------------------


@click.command()
@click.option("--linger/--no-linger", default=None, help="Start it at boot, not only at your login; else it asks.")
def enable(linger: bool | None) -> None:
    """Start the daemon of this home at boot, by systemd; its tasks and crews go on."""
    from ostler.client import boot  # noqa: PLC0415 - only here

    home = the_home()
    if not home.is_dir():
        raise fail(f"there is no home at {short_path(home)}; `ostler init` makes one", ExitCode.NOT_FOUND)
    try:
        enabled = boot.enable(home)
        lingers = enabled.lingers or _linger(linger)
    except boot.BootError as error:
        refusal = fail(str(error))
        if error.cron is not None:
            click.echo(error.cron)
        raise refusal from None
    click.echo(f"{short_path(home)} is enabled: {short_path(enabled.unit.path)}")
    if not enabled.started:
        note("a daemon runs already; systemd takes over at the next boot")
    if enabled.unverified:
        note(f"the unit was not verified: {enabled.unverified}")
    if not lingers:
        note("it starts when you log in; to start it at boot: ostler enable --linger")


def _linger(chosen: bool | None) -> bool:
    """Whether the user's units start at boot from now on."""
    from ostler.client import boot  # noqa: PLC0415 - only here

    if chosen is None and sys.stdin.isatty() and sys.stdout.isatty():
        chosen = click.confirm("Start it at boot, before you log in (loginctl enable-linger)?", default=True)
    if chosen:
        boot.enable_linger()
    return bool(chosen)


@click.command()
def disable() -> None:
    """Start the daemon of this home no longer at boot. One that runs goes on."""
    from ostler.client import boot  # noqa: PLC0415 - only here

    home = the_home()
    try:
        was_enabled = boot.disable(home)
    except boot.BootError as error:
        raise fail(str(error)) from None
    if was_enabled:
        click.echo(f"{short_path(home)} is not started at boot any more. Stop its daemon now: ostler down")
    else:
        note(f"{short_path(home)} is not enabled; nothing was changed")


# --- homes -------------------------------------------------------------------------------------------


@click.command()
@output_option()
def homes(form: str) -> None:
    """List every home of yours on this machine that was started, with its daemon. Starts none."""
    from ostler.client.homes import list_homes  # noqa: PLC0415 - only here

    views = [home._asdict() for home in list_homes([the_home()])]
    empty = "there is no home yet; `ostler init` prepares a project, `ostler run -- CMD` runs something"
    show(views, form, _HOME_COLUMNS, name="path", empty=empty)


def _up(home: dict[str, Any]) -> str:
    return "" if home["started_at"] is None else rough_duration(seconds_since(home["started_at"]))


def _count_column(name: str, leaves: int) -> Column:
    def cell(home: dict[str, Any]) -> str:
        return "" if home[name] is None else str(home[name])

    return Column(name.upper(), cell, is_number=True, leaves=leaves)


_HOME_COLUMNS = (
    Column("HOME", lambda home: short_path(home["path"]), least=20),
    Column("STATE", itemgetter("state")),
    Column("UP", _up, is_number=True, leaves=2),
    _count_column("agents", 3),
    _count_column("tasks", 4),
    Column("VERSION", lambda home: home["version"] or "", leaves=1),
    Column("BOOT", lambda home: "enabled" if home["enabled"] else "", leaves=5),
)
