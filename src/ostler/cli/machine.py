"""Commands on this machine: what a home takes on the disk."""

from __future__ import annotations

from typing import Any

import click

from ostler.cli.common import Daemon
from ostler.cli.output import as_json, note, table
from ostler.durations import size_text

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
    table(("WHAT", "SIZE"), [*rows, ("total", size_text(usage["total"]))])
    if usage["tasks"] and count:
        click.echo()
        table(("TASK", "STATE", "WORKDIR", "VAULT", "LOGS", "TOTAL"), map(_task_row, usage["tasks"][:count]))
        if len(usage["tasks"]) > count:
            note(f"these are the largest {count} of {len(usage['tasks'])}; -n shows more")
    click.echo()
    if limit is None:
        click.echo(f"No limit; {size_text(usage['free'])} are free on the disk. Set one: `disk` below [retention].")
        return
    click.echo(f"{100 * usage['share']:.0f} % of {size_text(limit)}; {size_text(usage['free'])} are free on the disk.")
    if usage["share"] >= 1:
        note("no new task begins: review what `ostler task list` shows, or raise `disk` below [retention]")
    elif usage["share"] >= _WARN_SHARE:
        note("at 100 % no new task begins; accepted and rejected work then makes room, the oldest first")


def _task_row(task: dict[str, Any]) -> tuple[str, ...]:
    sizes = (size_text(task[name]) if task[name] else "" for name in ("workdir", "vault", "logs", "total"))
    return task["key"], task["state"], *sizes
