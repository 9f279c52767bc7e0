"""What needs you, and what happened while you were away: `ostler inbox` and `ostler report`."""

from __future__ import annotations

from typing import Any

import click

from ostler.cli.common import Daemon, output_option, since_moment
from ostler.cli.output import as_json, cost_text, local_time, note, seconds_since, sentence
from ostler.cli.table import Column, print_table, show
from ostler.durations import rough_duration

_INBOX_COLUMNS = (
    Column("KIND", lambda row: str(row["kind"])),
    Column("KEY", lambda row: str(row["key"]), least=14),
    Column("SINCE", lambda row: rough_duration(seconds_since(row["since"])), leaves=1, is_number=True),
    Column("WHAT", lambda row: sentence(row["sentence"]), least=16),
    Column("NEXT", lambda row: str(row["next"])),
)
_REPORT_COLUMNS = (
    Column("WHAT", lambda row: str(row[0])),
    Column("NUMBER", lambda row: str(row[1]), is_number=True),
    Column("WHICH", lambda row: str(row[2]), least=20),
)


@click.command()
@output_option()
def inbox(form: str) -> None:
    """List what needs you, the oldest first, each with its next command."""
    show_inbox(form)


def show_inbox(form: str) -> None:
    show(Daemon().call("inbox"), form, _INBOX_COLUMNS, name="key", empty="nothing needs you")


@click.command()
@click.option("--since", default="10h", show_default=True, help="So long ago, or a time such as 2026-11-17T22:00.")
@click.option("-o", "--output", "form", type=click.Choice(["table", "json"]), default="table", help="How to print it.")
def report(since: str, form: str) -> None:
    """Say what happened: tasks done, accepted, failed and parked; restarts, time, tokens and cost of agents."""
    reply = Daemon().call("report", since=since_moment(since))
    if form == "json":
        as_json(reply)
        return
    click.echo(f"Since {local_time(reply['since'])}, {rough_duration(seconds_since(reply['since']))} ago:")
    print_table(_REPORT_COLUMNS, _report_rows(reply))
    if not reply["is_whole"]:
        note("the log goes less far back: `[retention] events` of ostler.toml says how far")


def _report_rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    names = ("done", "accepted", "rejected", "failed", "parked")
    return [
        *((name, str(len(report[name])), ", ".join(report[name])) for name in names),
        ("restarts", str(report["restarts"]), ""),
        ("time", rough_duration(report["time"]), "of agents, in sum"),
        ("tokens", str(report["tokens"]), ""),
        ("cost", cost_text(report["cost_usd"]), ""),
    ]
