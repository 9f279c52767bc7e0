"""Finding a run by what a person types, and its scenario by what the run has kept."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import click

from ostler.cli.homes import is_address, look
from ostler.cli.output import note
from ostler.cli.values import parse_value
from ostler.errors import DefinitionError, SimulationNotFoundError, StoreError
from ostler.lifecycle import open_manager
from ostler.model import SimulationRun, shown
from ostler.simulation import Ground, Scenario, SimulationSettings, run_settings, scenario_of_run
from ostler.simulation.scenariofile import put_at
from ostler.store import Store, open_store
from ostler.store.opening import DATABASE_FILE

_PAGE = 100
_SHOWN = 5
_LAST = re.compile(r"last(?:~([0-9]{1,9}))?")
#: What a fork may have otherwise; everything else has happened already.
_FORKED = ("seed", "turns", "name")
_FORKED_IN = ("settings", "parameters")

R = TypeVar("R")

run_argument = click.argument("run", metavar="RUN")
scenario_option = click.option(
    "--scenario",
    "file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Where the scenario stands now; else it is as it was kept, with the code where that stood.",
)


def look_at_runs(home: str, read: Callable[[Store], Awaitable[R]]) -> R:
    """Look at a home; where there is none, say how a home with runs in it comes to be."""
    require_home(home)
    return look(home, read)


def require_home(home: str) -> None:
    if is_address(home):
        return
    try:
        missing = not (Path(home).expanduser() / DATABASE_FILE).exists()
    except OSError:
        return  # who opens it says what is wrong
    if missing:
        raise StoreError(
            f"there is no Ostler home at {Path(home).expanduser()}; check the path, or begin a run: "
            "`ostler sim run FILE` makes one"
        )


async def find_run(store: Store, text: str) -> SimulationRun:
    """By id, the beginning of an id, a name that only one run has, or `last`, `last~1` and so on."""
    if not text.strip():
        raise SimulationNotFoundError("RUN is empty; `ostler sim show` lists those there are")
    known = await store.get_run(UUID(text)) if _is_id(text) else None
    if known is not None:
        return known
    counted = _LAST.fullmatch(text)
    if counted is not None:
        return await _newest_but(store, int(counted[1] or 0))
    named, begun = [], []
    async for run in all_runs(store):
        if run.name == text:
            named.append(run)
        elif str(run.run_id).startswith(text.lower()):
            begun.append(run)
    matches = named + begun
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise SimulationNotFoundError(f"there is no run {shown(text)} here; `ostler sim show` lists those there are")
    ids = ", ".join(str(run.run_id) for run in matches[:_SHOWN])
    more = f" and {len(matches) - _SHOWN} more" if len(matches) > _SHOWN else ""
    what = " or ".join(word for word, some in (("are called", named), ("begin with", begun)) if some)
    raise SimulationNotFoundError(f"{len(matches)} runs {what} {shown(text)}: {ids}{more}; give the id of one")


async def _newest_but(store: Store, skipped: int) -> SimulationRun:
    count = 0
    async for run in all_runs(store):
        if count == skipped:
            return run
        count += 1
    if not count:
        raise SimulationNotFoundError("there is no run here yet; `ostler sim run FILE` begins one")
    runs = "is only one run" if count == 1 else f"are only {count} runs"
    raise SimulationNotFoundError(f"there {runs} here; `ostler sim show` lists them")


async def all_runs(store: Store) -> AsyncIterator[SimulationRun]:
    """Newest first, a page at a time."""
    before: UUID | None = None
    while page := await store.list_runs(before=before, limit=_PAGE):
        for run in page:
            yield run
        before = page[-1].run_id


def scenario_of(run: SimulationRun, file: str | None, changes: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario as it was when the run began, or as it is in this file; its code is read from where it stands."""
    kept = (run.scenario or {}).get("path")
    place = file or kept
    if place is not None:
        stand_beside(Path(place))
    try:
        with redirect_stdout(sys.stderr):  # what its code prints while it is loaded is no result
            return scenario_of_run(run, file=file, overrides=changes)
    except DefinitionError:
        if file is None and kept is not None and not Path(kept).exists():
            note(f"{kept} is not there any more; say where it is now with --scenario FILE")
        raise


def stand_beside(scenario: Path) -> None:
    """Modules beside a scenario are found by their plain names, also by agents in processes of their own."""
    sys.path.insert(0, str(scenario.absolute().parent))


@asynccontextmanager
async def ground_of(home: str, scenario: Scenario) -> AsyncIterator[Ground]:
    """The home; with a manager over it where brains live elsewhere."""
    if scenario.brains.needs_manager:
        async with open_manager(home) as manager:
            yield Ground(store=manager.store, manager=manager)
    else:
        async with open_store(home) as store:
            yield Ground(store=store)


def overrides(settings: tuple[str, ...], **more: int | str | None) -> Mapping[str, Any]:
    """`--set settings.max_agents=50` and the options that have a name of their own."""
    found = dict(_pairs(settings))
    found.update({name: value for name, value in more.items() if value is not None})
    return found


def require_forkable(changes: Mapping[str, Any]) -> None:
    """Who there was and what they had is history by then."""
    for key in changes:
        room, dot, name = key.partition(".")
        if not (key in _FORKED or (room in _FORKED_IN and dot and name)):
            raise click.BadParameter(
                f"{key} cannot be changed by a fork; it may set settings.*, parameters.*, {', '.join(_FORKED)}",
                param_hint="--set",
            )


def forked_settings(run: SimulationRun, scenario: Scenario, changes: Mapping[str, Any]) -> SimulationSettings:
    """Those of the run itself, whatever its file says, with the changes of the fork."""
    wanted, settings = scenario.settled(), run_settings(run)
    parameters = json.loads(json.dumps(dict(settings.parameters)))
    for key, value in changes.items():
        room, _, name = key.partition(".")
        if room == "settings":
            settings = settings.evolve(**{name: getattr(wanted, name)})
        elif room == "parameters":
            put_at(parameters, name, value)
        elif room == "seed":
            settings = settings.evolve(seed=wanted.seed)
    return settings.evolve(parameters=parameters)


def _pairs(settings: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{text!r} is not KEY=VALUE, such as parameters.tax=0.2", param_hint="--set")
        yield key.strip(), parse_value(value)


def _is_id(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True
