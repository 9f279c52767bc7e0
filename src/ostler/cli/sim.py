"""`ostler sim`: populations that live in turns. What to play is said here; `simplay.py` plays it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from ostler.cli.homes import home_option
from ostler.cli.lazy import Entry, LazyGroup
from ostler.cli.simplay import Plan, play, refuse_waiting
from ostler.cli.simruns import (
    find_run,
    forked_settings,
    look_at_runs,
    overrides,
    require_forkable,
    run_argument,
    scenario_of,
    scenario_option,
    stand_beside,
)
from ostler.errors import InvalidOperationError
from ostler.simulation import Ground, KeptRun, begin_run, fork_run, load_scenario, resume_run, run_settings

_COMMANDS = MappingProxyType(
    {
        "run": Entry(module="ostler.cli.sim", attribute="run", summary="Begin a run of a scenario file."),
        "resume": Entry(module="ostler.cli.sim", attribute="resume", summary="Go on after the last complete turn."),
        "fork": Entry(module="ostler.cli.sim", attribute="fork", summary="Go on from a turn of a run, as another run."),
        "replay": Entry(module="ostler.cli.simreplay", attribute="replay_command", summary="Show the turns of a run."),
        "show": Entry(module="ostler.cli.simlook", attribute="show", summary="List the runs, or show one."),
        "export": Entry(module="ostler.cli.simlook", attribute="export", summary="Write the turns into a file."),
        "rm": Entry(module="ostler.cli.simremove", attribute="remove", summary="Remove a run with all its turns."),
    }
)

sim = LazyGroup(
    _COMMANDS,
    name="sim",
    help=(
        "Populations that live in turns. Every turn is kept in the home, so that a run goes on after any crash. "
        "RUN is an id, the beginning of one, a name that only one run has, `last`, or "
        "`last~1` for the one before."
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Decorated = Callable[..., Any]


def _playing(command: Decorated) -> Decorated:
    """The options of every command that plays turns."""
    for option in (
        home_option,
        click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to end."),
        click.option("-q", "--quiet", is_flag=True, help="No progress bar."),
    ):
        command = option(command)
    return command


_turns = click.option("--turns", type=click.IntRange(min=1), help="Up to this turn; else as the scenario says.")
_name = click.option("--name", help="Another name than the scenario's, to find the run by.")
_set = click.option(
    "--set", "changed", multiple=True, metavar="KEY=VALUE", help="Another value at a dotted key, as parameters.tax=0.2."
)


@click.command()
@click.argument("scenario", type=click.Path(dir_okay=False))
@click.option("--seed", type=click.IntRange(min=0), help="Another seed than the scenario's.")
@_turns
@_name
@_set
@_playing
def run(scenario: str, changed: tuple[str, ...], home: str, quiet: bool, output: str, **more: Any) -> int:
    """Begin a run of a scenario file, TOML or YAML, and play it to its last turn."""
    if not scenario.strip():
        raise click.UsageError("SCENARIO is empty; name a TOML or a YAML file")
    stand_beside(Path(scenario))
    with redirect_stdout(sys.stderr):  # what its code prints while it is loaded is no result
        loaded = load_scenario(scenario, overrides=overrides(changed, **more))
    refuse_waiting(loaded.settings, "use pass or end")

    def opening(ground: Ground) -> AbstractAsyncContextManager[KeptRun]:
        return begin_run(ground, loaded)

    return play(Plan(scenario=loaded, opening=opening, turns=loaded.turns, home=home, quiet=quiet, output=output))


@click.command()
@run_argument
@_turns
@scenario_option
@_playing
def resume(run: str, turns: int | None, file: str | None, home: str, **how: Any) -> int:
    """Go on after the last complete turn of a run, whatever has stopped it."""
    found = look_at_runs(home, lambda store: find_run(store, run))
    scenario = scenario_of(found, file)
    last = turns or scenario.turns
    if last <= found.turn:
        said = f", and --turns {turns} is no later one" if turns else ""
        raise click.UsageError(
            f"the run stands at turn {found.turn} already{said}; say how far with --turns, as --turns {found.turn + 1}"
        )
    refuse_waiting(run_settings(found), "go on by a program, or by a fork with --set settings.on_idle=pass")

    def opening(ground: Ground) -> AbstractAsyncContextManager[KeptRun]:
        return resume_run(ground, found.run_id, scenario)

    return play(Plan(scenario=scenario, opening=opening, turns=last, home=home, begun=found.turn, file=file, **how))


@click.command()
@run_argument
@click.option("--at", type=click.IntRange(min=0), required=True, help="The turn after which it goes its own way.")
@click.option("--seed", type=click.IntRange(min=0), help="Another seed from there on.")
@_turns
@_name
@_set
@scenario_option
@_playing
def fork(run: str, at: int, changed: tuple[str, ...], file: str | None, home: str, **more: Any) -> int:
    """Begin a run that shares the turns of another up to one of them, with other settings from there on."""
    how = {name: more.pop(name) for name in ("quiet", "output")}
    changes = overrides(changed, **more)
    require_forkable(changes)
    found = look_at_runs(home, lambda store: find_run(store, run))
    if at > found.turn:
        raise InvalidOperationError(
            f"run {found.run_id} stands at turn {found.turn}; fork it at a turn from 0 to {found.turn}"
        )
    scenario = scenario_of(found, file, changes)
    settings = forked_settings(found, scenario, changes)
    refuse_waiting(settings, "use --set settings.on_idle=pass, or end")
    if scenario.turns <= at:
        raise click.UsageError(
            f"there is nothing to play after turn {at} up to turn {scenario.turns}; say how far with --turns"
        )

    def opening(ground: Ground) -> AbstractAsyncContextManager[KeptRun]:
        return fork_run(ground, found.run_id, scenario, at=at, settings=settings)

    return play(Plan(scenario=scenario, opening=opening, turns=scenario.turns, home=home, begun=at, **how))
