"""`ostler sim show` and `export`: what was played, from its record."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

import click

from ostler.cli.homes import home_option
from ostler.cli.output import as_json, note, table
from ostler.cli.simruns import all_runs, find_run, look_at_runs, run_argument
from ostler.model import SimulationRun
from ostler.simulation import PlayedTurn, SimulationSettings, export_turns, replay
from ostler.store import Store

_HEAD = ("ID", "NAME", "TURN", "STATE", "SEED", "FROM", "BEGAN")
_WIDE = 200
_OUTCOMES = ("table", "json")
_FORMS = ("jsonl", "csv", "parquet")


@click.command()
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--turn", type=click.IntRange(min=0), help="As it was after this turn; else after the last.")
@click.option(
    "-n", "count", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many runs, or agents."
)
@click.option("-o", "--output", type=click.Choice(_OUTCOMES), default="table", help="How to print it.")
@home_option
def show(run: str | None, turn: int | None, count: int, output: str, home: str) -> None:
    """List the runs, newest first; or show one: its settings, and everybody in it."""
    if run is None:
        _list(look_at_runs(home, lambda store: _newest(store, count + 1)), count, output)
        return
    found, played = look_at_runs(home, lambda store: _one(store, run, turn))
    if output == "json":
        as_json({"run": _brief(found), "turn": asdict(played)})
        return
    table(("WHAT", "IS"), _facts(found, played, asked=turn is not None))
    click.echo()
    rows = [
        (name, str(played.numbers[name]), _activity(played, name), _short(state))
        for name, state in islice(played.states.items(), count)
    ]
    table(("AGENT", "NUMBER", "IS", "STATE"), rows)
    if len(played.states) > count:
        note(f"only the first {count} of {len(played.states)} agents are shown; ask for more with -n")


async def _newest(store: Store, count: int) -> list[SimulationRun]:
    found: list[SimulationRun] = []
    async for run in all_runs(store):
        found.append(run)
        if len(found) == count:
            break
    return found


def _list(runs: list[SimulationRun], count: int, output: str) -> None:
    if output == "json":
        as_json([_brief(run) for run in runs[:count]])
    else:
        table(_HEAD, (_row(run) for run in runs[:count]))
    if len(runs) > count:
        note(f"only the newest {count} are shown; ask for more with -n")


def _row(run: SimulationRun) -> tuple[str, ...]:
    parent = f"{str(run.parent_id)[:13]}@{run.forked_at}" if run.parent_id is not None else "-"
    began = run.created_at.isoformat(sep=" ", timespec="seconds")
    return str(run.run_id), run.name, str(run.turn), run.state.value, str(run.seed), parent, began


async def _one(store: Store, text: str, turn: int | None) -> tuple[SimulationRun, PlayedTurn]:
    run = await find_run(store, text)
    at = run.turn if turn is None else turn
    played = [one async for one in replay(store, run.run_id, first=at, last=at)]
    return run, played[0]


def _brief(run: SimulationRun) -> dict[str, Any]:
    """Without the text of the scenario, which may be long."""
    whole: dict[str, Any] = json.loads(run.evolve(scenario=None).to_json())
    whole["scenario"] = (run.scenario or {}).get("path")
    return whole


def _facts(run: SimulationRun, played: PlayedTurn, *, asked: bool) -> list[tuple[str, str]]:
    paused = len(played.paused)
    facts = [
        ("run", str(run.run_id)),
        ("name", run.name),
        ("state", run.state.value if run.outcome is None else f"{run.state.value}: {run.outcome}"),
        ("turn", f"{played.turn} of {run.turn}" if asked else str(played.turn)),
        ("agents", f"{len(played.states)}, {paused} of them paused"),
        ("seed", str(run.seed)),
        ("parameters", _short(run.settings.get("parameters", {}))),
        ("settings", _changed(run)),
        ("scenario", (run.scenario or {}).get("path") or "begun by a program"),
        ("digest", played.digest or "-"),
        ("global state", _short(played.global_state)),
    ]
    if run.parent_id is not None:
        facts.insert(2, ("forked from", f"{run.parent_id} after turn {run.forked_at}"))
    return facts


def _changed(run: SimulationRun) -> str:
    """The settings that are not the defaults; seed and parameters have lines of their own."""
    defaults = json.loads(SimulationSettings().to_json())
    own = {"seed", "parameters"}
    changed = [f"{name}={value}" for name, value in run.settings.items() if name not in own and value != defaults[name]]
    return ", ".join(changed) or "the defaults"


def _short(value: Any) -> str:
    """As much as a line bears; the whole is in the JSON."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}… (whole with -o json)"


def _activity(played: PlayedTurn, name: str) -> str:
    if name not in played.paused:
        return "active"
    left = played.paused[name]
    return "paused" if left is None else f"paused, {left} more"


@click.command()
@run_argument
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--format", "form", type=click.Choice(_FORMS), help="Else by the ending of the file's name.")
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
@home_option
def export(run: str, file: Path, form: str | None, force: bool, home: str) -> None:
    """Write the turns into a file: JSON Lines with a turn on each line; CSV or Parquet with a row for each agent."""
    if str(file) == "-":
        raise click.UsageError("FILE must be a file; for standard output use: ostler sim replay RUN -o jsonl")
    chosen = form or file.suffix.removeprefix(".").lower()
    if chosen not in _FORMS:
        known = ", ".join(_FORMS)
        raise click.UsageError(f"{file.name} does not say what to write; end its name in {known}, or use --format")
    if not os.path.isdir(file.parent):  # noqa: PTH112 - the same
        raise click.UsageError(f"FILE would stand in {file.parent}, which is no directory; make it, or choose another")
    if not force and os.path.isfile(file):  # noqa: PTH113 - unlike a Path, it bears names that are too long
        raise click.UsageError(f"{file} is there already; choose another name, or use --force")

    async def within(store: Store) -> UUID:
        found = await find_run(store, run)

        def turns() -> AsyncIterator[PlayedTurn]:
            return replay(store, found.run_id, last=found.turn)  # the same for every pass, also while it is played

        await export_turns(turns, file, chosen)
        return found.run_id

    run_id = look_at_runs(home, within)
    note(f"run {run_id} is written to {file}")
