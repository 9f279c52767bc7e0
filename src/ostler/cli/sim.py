"""`ostler sim`: runs of turn-based populations. They are played by this program itself, beside a daemon or without."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import click

from ostler.cli.common import the_home
from ostler.cli.output import as_json, note, plain, table
from ostler.errors import (
    DefinitionError,
    ExitCode,
    InvalidOperationError,
    LeaseHeldError,
    OstlerError,
    SimulationNotFoundError,
    ValidationError,
)
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.open import open_manager
from ostler.model.simulation import OnIdle, RunState, SimulationRun, SimulationSettings
from ostler.model.validation import shown
from ostler.simulation import (
    KeptRun,
    PlayedTurn,
    RunReport,
    Scenario,
    TurnReport,
    begin_run,
    compare_run,
    export_turns,
    fork_run,
    load_scenario,
    remove_run,
    replay,
    resume_run,
    scenario_of_run,
)
from ostler.simulation.export import FORMS
from ostler.simulation.orchestrator import NOBODY
from ostler.simulation.scenario_file import put_at
from ostler.store import simulations
from ostler.store.store import Store, view
from ostler.store.transaction import Reader

R = TypeVar("R")
_LAST = re.compile(r"last(?:~([0-9]{1,9}))?")
_TURN = click.IntRange(min=0)
#: What a fork may have otherwise, beside settings.* and parameters.*; everything else has happened already.
_FORKED = ("seed", "turns", "name")
_WIDE = 200


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def sim() -> None:
    """Turn-based populations. Every turn is kept, so that a run goes on after any crash.

    RUN is an id, the beginning of one, a name that only one run has, `last`, or `last~1` for the one before.
    """


_run_argument = click.argument("run", metavar="RUN")
_scenario_option = click.option(
    "--scenario", "file", metavar="FILE", help="Where the scenario stands now; else it is as it was kept."
)
_turns_option = click.option("--turns", type=click.IntRange(min=1), help="Up to this turn; else as the scenario says.")
_name_option = click.option("--name", help="Another name than the scenario's, to find the run by.")
_seed_option = click.option("--seed", type=_TURN, help="Another seed.")
_set_option = click.option(
    "--set", "changed", multiple=True, metavar="KEY=VALUE", help="Another value at a dotted key, as parameters.tax=0.2."
)
_output_option = click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to end.")
_quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress.")


# --- playing -----------------------------------------------------------------------------------------


@sim.command()
@click.argument("scenario", type=click.Path(dir_okay=False))
@_seed_option
@_turns_option
@_name_option
@_set_option
@_output_option
@_quiet_option
def run(scenario: str, changed: tuple[str, ...], output: str, quiet: bool, **more: Any) -> int:
    """Begin a run of a scenario file, TOML or YAML, and play it to its last turn."""
    _stand_beside(Path(scenario))
    with redirect_stdout(sys.stderr):  # what its code prints while it is loaded is no result
        loaded = load_scenario(scenario, overrides=_overrides(changed, more))
    _refuse_waiting(loaded.settings)
    return _play(_Plan(loaded, lambda store, manager: begin_run(store, loaded, manager=manager), output, quiet))


@sim.command()
@_run_argument
@_turns_option
@_scenario_option
@_output_option
@_quiet_option
def resume(run: str, turns: int | None, file: str | None, output: str, quiet: bool) -> int:
    """Go on after the last complete turn of a run, whatever has stopped it."""
    found = _look(lambda reader: _find(reader, run))
    scenario = _scenario_of(found, file)
    if (turns or scenario.turns) <= found.turn:
        raise click.UsageError(f"the run stands at turn {found.turn} already; say how far with --turns")
    _refuse_waiting(found.settings)

    def opening(store: Store, manager: AgentLifecycleManager | None) -> AbstractAsyncContextManager[KeptRun]:
        return resume_run(store, found.run_id, scenario, manager=manager)

    return _play(_Plan(scenario, opening, output, quiet, turns=turns, file=file))


@sim.command()
@_run_argument
@click.option("--at", type=_TURN, required=True, help="The turn after which it goes its own way.")
@_seed_option
@_turns_option
@_name_option
@_set_option
@_scenario_option
@_output_option
@_quiet_option
def fork(run: str, at: int, changed: tuple[str, ...], file: str | None, output: str, quiet: bool, **more: Any) -> int:
    """Begin a run that shares the turns of another up to one of them, with other settings from there on."""
    changes = _overrides(changed, more)
    for key in changes:
        if key not in _FORKED and not re.fullmatch(r"(settings|parameters)\..+", key):
            known = f"settings.*, parameters.*, {', '.join(_FORKED)}"
            raise click.BadParameter(f"{key} cannot be changed by a fork; it may set {known}", param_hint="--set")
    found = _look(lambda reader: _find(reader, run))
    if at > found.turn:
        raise InvalidOperationError(f"run {found.run_id} stands at turn {found.turn}; fork it there or before")
    scenario = _scenario_of(found, file, changes)
    settings = _forked_settings(found.settings, scenario.settings, changes)
    _refuse_waiting(settings)
    if scenario.turns <= at:
        raise click.UsageError(f"there is nothing to play after turn {at} up to turn {scenario.turns}; use --turns")

    def opening(store: Store, manager: AgentLifecycleManager | None) -> AbstractAsyncContextManager[KeptRun]:
        return fork_run(store, found.run_id, scenario, at=at, settings=settings, manager=manager)

    return _play(_Plan(scenario, opening, output, quiet))


@dataclass
class _Plan:
    scenario: Scenario
    opening: Callable[[Store, AgentLifecycleManager | None], AbstractAsyncContextManager[KeptRun]]
    output: str
    quiet: bool
    turns: int | None = None
    #: Where the scenario stands now, if the run does not know.
    file: str | None = None
    #: How far it came.
    run: KeptRun | None = None
    report: RunReport | None = None
    #: The exit code that a signal asks for.
    stopped: int | None = None

    def hint(self) -> str:
        """A whole command that goes on where this one stopped."""
        if self.run is None:
            return "stopped before the run was begun"
        words = ["ostler", "--home", str(the_home()), "sim", "resume", str(self.run.run_id)]
        words += ["--turns", str(self.turns)] if self.turns else []
        words += ["--scenario", self.file] if self.file else []
        return f"the run stands at turn {self.run.record.turn}; go on with: {shlex.join(words)}"


def _play(plan: _Plan) -> int:
    """Play it, say what came of it; the exit code."""
    try:
        with redirect_stdout(sys.stderr):  # what brains print is no result
            asyncio.run(_within(plan))
    except OstlerError as error:
        for sentence in [one.message for one in error.faults] if isinstance(error, ValidationError) else [str(error)]:
            note(sentence)
        if plan.run is not None:
            note(plan.hint())
        return plan.stopped or error.cli_exit
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        # Signals are heard by `_hear_signals`; code of a scenario that raises these must not look like a success.
        if plan.stopped is None:
            note(f"the code of the scenario has ended the run: {type(error).__name__}: {error}; {plan.hint()}")
        return plan.stopped or ExitCode.FAILED
    if plan.run is None or plan.report is None:
        return plan.stopped or ExitCode.INTERRUPTED
    return _say(plan.run, plan.report, plan.output)


async def _within(plan: _Plan) -> None:
    _hear_signals(plan)
    async with _opened(plan.scenario) as (store, manager), plan.opening(store, manager) as run:
        plan.run = run
        note(f"run {run.run_id}")
        last = plan.turns or plan.scenario.turns
        progress = None if plan.quiet or not _has_terminal() else _progress(last)
        plan.report = await run.finish(plan.turns, on_turn=progress)
        if progress is not None:
            click.echo("", err=True)


@asynccontextmanager
async def _opened(scenario: Scenario) -> AsyncIterator[tuple[Store, AgentLifecycleManager | None]]:
    """The store of the home; with a manager, which needs the home for itself, where brains are managed."""
    if not scenario.brains.needs_manager:
        async with Store(the_home()) as store:
            yield store, None
        return
    async with AsyncExitStack() as stack:
        try:
            manager = await stack.enter_async_context(open_manager(the_home()))
        except LeaseHeldError as error:
            raise LeaseHeldError(
                f"{error}. This scenario has managed brains, so its run needs a home without another manager: stop the "
                "daemon with `ostler down`, or name another home with --home"
            ) from None
        yield manager.store, manager


def _say(run: KeptRun, report: RunReport, output: str) -> int:
    record, state = run.record, run.state
    if output == "json":
        said = {"run_id": str(record.run_id), "name": record.name, "digest": record.digest, **asdict(report)}
        as_json({**said, "agents": len(state.members), "paused": len(state.paused_agents)})
    else:
        failed = f", {report.failed} failures" if report.failed else ""
        click.echo(
            plain(
                f"{record.name}: turn {report.turn}, {report.ended}; {len(state.members)} agents, "
                f"{len(state.paused_agents)} of them paused{failed}; digest {record.digest[:12]}"
            )
        )
    for sentence in report.first_failures:
        note(f"failed: {sentence}")
    # A population of which nothing is left because all failed must not look like a success.
    return ExitCode.FAILED if report.failed and report.ended == NOBODY else ExitCode.OK


def _hear_signals(plan: _Plan) -> None:
    """Ctrl-C and SIGTERM: the first cancels the turn and says how to go on, the second ends the program at once.

    Heard by Python and not by the event loop, which a brain may hold up.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop(number: int, _frame: object) -> None:
        if plan.stopped is not None or task is None or task.done():
            os._exit(128 + number)  # not by an exception: threads in which a brain hangs would be waited for
        plan.stopped = 128 + number
        os.write(sys.stderr.fileno(), f"\nostler: stopped; {plain(plan.hint())}\n".encode())
        loop.call_soon_threadsafe(task.cancel)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, stop)


def _has_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _progress(last: int) -> Callable[[TurnReport], None]:
    """One line that is written anew, ten times a second at most."""
    shown_at = 0.0

    def show(report: TurnReport) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= 0.1 or report.turn == last:
            shown_at = now
            click.echo(f"\rturn {report.turn} of {last}", nl=False, err=True)

    return show


def _refuse_waiting(settings: SimulationSettings) -> None:
    if settings.on_idle is OnIdle.WAIT:
        raise click.UsageError(
            "settings.on_idle is wait, but no operation from outside can reach a run that is played here; "
            "use pass or end"
        )


# --- looking -----------------------------------------------------------------------------------------


@sim.command("list")
@click.option("-n", "count", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many runs.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print it.")
def list_runs(count: int, output: str) -> None:
    """List the runs, newest first."""
    runs = _look(lambda reader: simulations.list_runs(reader, limit=count + 1))
    if output == "json":
        as_json([_brief(one) for one in runs[:count]])
    else:
        table(("ID", "NAME", "TURN", "STATE", "SEED", "FROM", "BEGAN"), [_row(one) for one in runs[:count]])
    if len(runs) > count:
        note(f"only the newest {count} are shown; ask for more with -n")


@sim.command()
@_run_argument
@click.option("--turn", type=_TURN, help="As it was after this turn; else after the last.")
@click.option("-n", "count", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many agents.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print it.")
def show(run: str, turn: int | None, count: int, output: str) -> None:
    """Show a run: its settings, and its agents after a turn."""

    async def read(store: _View) -> tuple[SimulationRun, PlayedTurn]:
        found = _find(store.reader, run)
        at = found.turn if turn is None else turn
        return found, await anext(replay(store, found.run_id, first=at, last=at))

    found, played = _look_async(read)
    if output == "json":
        as_json({"run": _brief(found), "turn": asdict(played)})
        return
    table(("WHAT", "IS"), _facts(found, played))
    click.echo()
    rows = [
        (name, str(played.numbers[name]), _activity(played, name), _short(state))
        for name, state in islice(played.states.items(), count)
    ]
    table(("AGENT", "NUMBER", "IS", "STATE"), rows)
    if len(played.states) > count:
        note(f"only the first {count} of {len(played.states)} agents are shown; ask for more with -n")


@sim.command("replay")
@_run_argument
@click.option("--from", "first", type=_TURN, default=0, help="From this turn on; else from the beginning.")
@click.option("--to", "last", type=_TURN, help="Up to this turn; else to the last.")
@click.option("-v", "--verbose", is_flag=True, help="Every operation of each turn.")
@click.option("-o", "--output", type=click.Choice(["text", "jsonl"]), default="text", help="How to print the turns.")
def replay_command(run: str, first: int, last: int | None, verbose: bool, output: str) -> None:
    """Show the turns of a run as they were played, from the record alone."""

    async def read(store: _View) -> None:
        found = _find(store.reader, run)
        async for played in replay(store, found.run_id, first=first, last=last):
            if output == "jsonl":
                as_json(asdict(played), indent=None)
            else:
                for line in _lines(played, verbose=verbose):
                    click.echo(plain(line))

    _look_async(read)


@sim.command()
@_run_argument
@click.option("--to", "last", type=_TURN, help="Up to this turn; else to the last.")
@_scenario_option
def check(run: str, last: int | None, file: str | None) -> int:
    """Play a run once more, and say whether the same comes of it."""
    found = _look(lambda reader: _find(reader, run))
    scenario = _scenario_of(found, file)

    async def compare() -> Any:
        if not scenario.brains.needs_manager:
            with view(the_home()) as reader:
                return await compare_run(_View(reader), found.run_id, scenario, last=last)
        async with _opened(scenario) as (store, manager):
            return await compare_run(store, found.run_id, scenario, last=last, manager=manager)

    with redirect_stdout(sys.stderr):  # what brains print is no result
        result = asyncio.run(compare())
    if result:
        click.echo(f"{result.turns} turns were played again, and every one was the same")
        return ExitCode.OK
    click.echo(f"turn {result.differs_at} is not the same when it is played again; the {result.turns} before it are")
    return ExitCode.FAILED


@sim.command()
@_run_argument
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMS), help="Else by the ending of the file's name.")
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
def export(run: str, file: Path, form: str | None, force: bool) -> None:
    """Write the turns into a file: JSON lines with a turn on each, or CSV with a row for each agent."""
    chosen = form or file.suffix.removeprefix(".").lower()
    if chosen not in FORMS:
        raise click.UsageError(f"{file.name} does not say what to write; end its name in {', '.join(FORMS)}")
    if not force and file.exists():
        raise click.UsageError(f"{file} exists already; choose another name, or use --force")

    async def read(store: _View) -> UUID:
        found = _find(store.reader, run)
        await export_turns(lambda: replay(store, found.run_id, last=found.turn), file, chosen)
        return found.run_id

    note(f"run {_look_async(read)} is written to {file}")


@sim.command()
@_run_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask first.")
def rm(run: str, yes: bool) -> int:
    """Remove a run with all its turns. A run that others were forked from stays until they are removed."""
    found = _look(lambda reader: _find(reader, run))
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"this removes run {found.run_id} for good; say --yes")
        is_open = "; it is open, and another program may be playing it" if found.state is RunState.OPEN else ""
        what = f"Remove run {found.run_id} ({found.name}, {found.turn} turns{is_open}) for good?"
        if not click.confirm(what, err=True):
            return ExitCode.FAILED

    async def remove() -> None:
        async with Store(the_home()) as store:
            await remove_run(store, found.run_id)

    asyncio.run(remove())
    note(f"run {found.run_id} is removed")
    return ExitCode.OK


# --- finding runs and scenarios ----------------------------------------------------------------------


class _View:
    """Queries on one connection that cannot write, as a store answers them."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    async def read(self, query: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        return query(self.reader, *args, **kwargs)


def _look(query: Callable[[Reader], R]) -> R:
    with view(the_home()) as reader:
        return query(reader)


def _look_async(query: Callable[[_View], Awaitable[R]]) -> R:
    async def within() -> R:
        with view(the_home()) as reader:
            return await query(_View(reader))

    return asyncio.run(within())


def _find(reader: Reader, text: str) -> SimulationRun:
    """By id, the beginning of an id, a name that only one run has, `last`, `last~1` and so on."""
    counted = _LAST.fullmatch(text)
    skipped = -1 if counted is None else int(counted[1] or 0)
    matches: list[SimulationRun] = []
    for place, one in enumerate(_all_runs(reader)):
        if place == skipped:
            return one
        if counted is None and text and (text == one.name or str(one.run_id).startswith(text.lower())):
            matches.append(one)
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise SimulationNotFoundError(f"there is no run {shown(text)} here; `ostler sim list` lists those there are")
    ids = ", ".join(str(one.run_id) for one in matches[:5])
    raise SimulationNotFoundError(f"{len(matches)} runs match {shown(text)} ({ids}); give the id of one")


def _all_runs(reader: Reader) -> Iterator[SimulationRun]:
    before: UUID | None = None
    while page := simulations.list_runs(reader, before=before):
        yield from page
        before = page[-1].run_id


def _scenario_of(run: SimulationRun, file: str | None, changes: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario as it was when the run began, or as it is in this file; its code is read from where it stands."""
    kept = (run.scenario or {}).get("path")
    if place := file or kept:
        _stand_beside(Path(place))
    try:
        with redirect_stdout(sys.stderr):  # what its code prints while it is loaded is no result
            return scenario_of_run(run, file=file, overrides=changes)
    except DefinitionError:
        if file is None and kept is not None and not Path(kept).exists():
            note(f"{kept} is not there any more; say where it is now with --scenario FILE")
        raise


def _stand_beside(scenario: Path) -> None:
    """Modules beside a scenario are found by their plain names, also by agents in processes of their own."""
    sys.path.insert(0, str(scenario.absolute().parent))


def _overrides(changed: tuple[str, ...], more: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in changed:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{text!r} is not KEY=VALUE, such as parameters.tax=0.2", param_hint="--set")
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            found[key.strip()] = value  # `pause` needs no quotes
    return {**found, **{name: value for name, value in more.items() if value is not None}}


def _forked_settings(
    settings: SimulationSettings, wanted: SimulationSettings, changes: Mapping[str, Any]
) -> SimulationSettings:
    """Those of the run itself, whatever its file says, with the changes of the fork."""
    parameters = json.loads(json.dumps(dict(settings.parameters)))
    for key, value in changes.items():
        room, _, name = key.partition(".")
        if room == "parameters":
            put_at(parameters, name, value)
        elif key == "seed" or room == "settings":
            settings = settings.evolve(**{name or key: getattr(wanted, name or key)})
    return settings.evolve(parameters=parameters)


# --- in words ----------------------------------------------------------------------------------------


def _brief(run: SimulationRun) -> dict[str, Any]:
    """Without the text of the scenario, which may be long."""
    return {**run.evolve(scenario=None).to_dict(), "scenario": (run.scenario or {}).get("path")}


def _row(run: SimulationRun) -> tuple[str, ...]:
    parent = f"{str(run.parent_id)[:13]}@{run.forked_at}" if run.parent_id is not None else "-"
    began = f"{run.created_at.astimezone():%Y-%m-%d %H:%M:%S}"
    return str(run.run_id), run.name, str(run.turn), run.state.value, str(run.seed), parent, began


def _facts(run: SimulationRun, played: PlayedTurn) -> list[tuple[str, str]]:
    defaults = SimulationSettings().to_dict()
    own = {"seed", "parameters"}
    changed = [f"{k}={v}" for k, v in run.settings.to_dict().items() if k not in own and v != defaults[k]]
    forked = [("forked from", f"{run.parent_id} after turn {run.forked_at}")] if run.parent_id else []
    return [
        ("run", str(run.run_id)),
        ("name", run.name),
        *forked,
        ("state", run.state.value if run.outcome is None else f"{run.state.value}: {run.outcome}"),
        ("turn", f"{played.turn} of {run.turn}"),
        ("agents", f"{len(played.states)}, {len(played.paused)} of them paused"),
        ("seed", str(run.seed)),
        ("parameters", _short(run.settings.parameters)),
        ("settings", ", ".join(changed) or "the defaults"),
        ("scenario", (run.scenario or {}).get("path") or "begun by a program"),
        ("digest", played.digest),
        ("global state", _short(played.global_state)),
    ]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}… (whole with -o json)"


def _activity(played: PlayedTurn, name: str) -> str:
    if name not in played.paused:
        return "active"
    left = played.paused[name]
    return "paused" if left is None else f"paused, {left} more"


def _lines(played: PlayedTurn, *, verbose: bool) -> Iterator[str]:
    """Counts first, which line up from turn to turn; then the failures."""
    done = Counter(one["operation"] for one in played.operations if one.get("done", True))
    refused = sum(not one.get("done", True) for one in played.operations)
    counts = [f"{len(played.states)} agents", f"{len(played.decisions)} decided"]
    for count, what in (
        (done["add_agent"], "joined"),
        (done["remove_agent"], "left"),
        (len(played.paused), "paused"),
        (len(played.resumed), "resumed by themselves"),
        (len(played.failures), "failed"),
        (refused, "requests refused"),
    ):
        counts += [f"{count} {what}"] if count else []
    yield f"turn {played.turn}: {', '.join(counts)}"
    for name, one in played.failures.items():
        yield f"  {name} {'timed out' if one['timed_out'] else 'failed'}, {one['became']}: {one['message']}"
    for one in played.operations if verbose else ():
        who = one.get("by") or one["cause"]
        turns = one.get("auto_resume_turns")
        term = f" for {turns} turns" if turns is not None else ""
        no = "" if one.get("done", True) else f": refused, {one['reason']}"
        yield f"  {who}: {one['operation']} {one.get('resolved_name') or one['agent_name']}{term}{no}"
