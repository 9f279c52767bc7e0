"""`ostler sim rm`: a run that nobody needs any more."""

from __future__ import annotations

import asyncio
import sys

import click

from ostler.cli.exits import Exit
from ostler.cli.homes import home_option
from ostler.cli.output import note
from ostler.cli.simruns import find_run, look_at_runs, run_argument
from ostler.model import RunState, SimulationRun
from ostler.simulation import remove_run
from ostler.store import open_store


@click.command(name="rm")
@run_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask first.")
@home_option
def remove(run: str, yes: bool, home: str) -> int:
    """Remove a run with all its turns. One from which others were forked stays until they are removed."""
    found = look_at_runs(home, lambda store: find_run(store, run))
    if not yes and not _is_agreed(found):
        note("nothing was removed")
        return Exit.FAILED
    asyncio.run(_remove(home, found))
    note(f"run {found.run_id} is removed")
    return Exit.OK


def _is_agreed(run: SimulationRun) -> bool:
    if not sys.stdin.isatty():
        raise click.UsageError(f"this removes run {run.run_id} for good, and nobody is here to be asked; say --yes")
    is_open = "; it is open, and somebody may be playing it" if run.state is RunState.OPEN else ""
    what = f"Remove run {run.run_id} ({run.name}, {run.turn} turns{is_open}) for good?"
    return click.confirm(what, err=True)


async def _remove(home: str, run: SimulationRun) -> None:
    async with open_store(home) as store:
        await remove_run(store, run.run_id)
