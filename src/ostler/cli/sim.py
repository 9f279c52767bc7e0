"""`ostler sim`: runs of turn-based populations. They are played by this program itself, beside a daemon or without."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import click

from ostler.cli import completers
from ostler.cli.common import Group, the_home
from ostler.cli.output import as_json, local_time, note, plain
from ostler.cli.table import Column, print_facts, print_table, show
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
    Comparison,
    KeptRun,
    PlayedTurn,
    RunReport,
    Scenario,
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
from ostler.simulation.orchestrator import NONE_ACTIVE
from ostler.simulation.scenario_file import put_at
from ostler.store import simulations
from ostler.store.store import Store, view
from ostler.store.transaction import Reader

R = TypeVar("R")
_LAST = re.compile(r"last(?:~([0-9]{1,9}))?")
_TURN = click.IntRange(min=0)
#: What a fork may change, beside settings.* and parameters.*; everything else has happened already.
_FORKED = ("seed", "turns", "name")
_WIDE = 200


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def sim() -> None:
    """Turn-based populations. Every turn is kept, so that a run goes on after any crash.

    RUN is an id, the beginning of one, a name that only one run has, `last`, or `last~1` for the one before.
    """


_run_argument = click.argument("run", metavar="RUN", shell_complete=completers.values("last"))
_to_option = click.option("--to", "last", type=_TURN, help="Up to this turn; else to the last.")
_scenario_option = click.option(
    "--scenario",
    "file",
    metavar="FILE",
    help="Where the scenario stands now; else it is as it was kept.",
    shell_complete=completers.files,
)
_turns_option = click.option("--turns", type=click.IntRange(min=1), help="Up to this turn; else as the scenario says.")
_name_option = click.option("--name", help="Another name than the scenario's, to find the run by.")
_seed_option = click.option("--seed", type=_TURN, help="Another seed.")
_set_option = click.option(
    "--set", "changed", multiple=True, metavar="KEY=VALUE", help="Another value at a dotted key, as parameters.tax=0.2."
)
_quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress.")
_count_option = click.option(
    "-n", "count", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many."
)


def _output_option(*forms: str) -> Callable[[Any], Any]:
    return click.option("-o", "--output", type=click.Choice(forms), default=forms[0], help="How to print it.")


# --- playing -----------------------------------------------------------------------------------------


@sim.command()
@click.argument("scenario", type=click.Path(dir_okay=False))
@_seed_option
@_turns_option
@_name_option
@_set_option
@_output_option("text", "json")
@_quiet_option
def run(scenario: str, changed: tuple[str, ...], output: str, quiet: bool, **more: Any) -> int:
    """Begin a run of a scenario file, TOML or YAML, and play it to its last turn."""
    with redirect_stdout(sys.stderr):  # what its code prints while it is loaded is no result
        loaded = load_scenario(scenario, overrides=_overrides(changed, more))
    return _play(_Plan(loaded, loaded.settings, partial(begin_run, scenario=loaded)), output, quiet)


@sim.command()
@_run_argument
@_turns_option
@_scenario_option
@_output_option("text", "json")
@_quiet_option
def resume(run: str, turns: int | None, file: str | None, output: str, quiet: bool) -> int:
    """Go on after the last complete turn of a run, whatever has stopped it."""
    record = _find(run)
    scenario = _scenario_of(record, file)
    if (turns or scenario.turns) <= record.turn:
        raise click.UsageError(f"the run stands at turn {record.turn} already; say how far with --turns")
    opening = partial(resume_run, run_id=record.run_id, scenario=scenario)
    return _play(_Plan(scenario, record.settings, opening, turns=turns, file=file), output, quiet)


@sim.command()
@_run_argument
@click.option("--at", type=_TURN, required=True, help="The turn after which it goes its own way.")
@_seed_option
@_turns_option
@_name_option
@_set_option
@_scenario_option
@_output_option("text", "json")
@_quiet_option
def fork(run: str, at: int, changed: tuple[str, ...], file: str | None, output: str, quiet: bool, **more: Any) -> int:
    """Begin a run that shares the turns of another up to one of them, with other settings from there on."""
    changes = _overrides(changed, more)
    for key in changes:
        if key not in _FORKED and not re.fullmatch(r"(settings|parameters)\..+", key):
            allowed = f"settings.*, parameters.*, {', '.join(_FORKED)}"
            raise click.BadParameter(f"{key} cannot be changed by a fork; it may set {allowed}", param_hint="--set")
    record = _find(run)
    if at > record.turn:
        raise InvalidOperationError(f"run {record.run_id} stands at turn {record.turn}; fork it there or before")
    scenario = _scenario_of(record, file, changes)
    settings = _forked_settings(record.settings, scenario.settings, changes)
    if scenario.turns <= at:
        raise click.UsageError(f"there is nothing to play after turn {at} up to turn {scenario.turns}; use --turns")
    opening = partial(fork_run, run_id=record.run_id, scenario=scenario, at=at, settings=settings)
    return _play(_Plan(scenario, settings, opening), output, quiet)


@dataclass
class _Plan:
    scenario: Scenario
    settings: SimulationSettings
    #: Takes the store and the manager.
    opening: Callable[..., AbstractAsyncContextManager[KeptRun]]
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


def _play(plan: _Plan, output: str, quiet: bool) -> int:
    """Play it and print how it ended; the exit code."""
    if plan.settings.on_idle is OnIdle.WAIT:
        raise click.UsageError(
            "settings.on_idle is wait, but no operation from outside can reach a run that is played here; "
            "use pass or end"
        )
    try:
        with redirect_stdout(sys.stderr):  # what brains print is no result
            asyncio.run(_play_plan(plan, quiet))
    except OstlerError as error:
        faults = error.faults if isinstance(error, ValidationError) else ()
        for sentence in [fault.message for fault in faults] or [str(error)]:
            note(sentence)
        if plan.run is not None:
            note(plan.hint())
        return plan.stopped or error.cli_exit
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        # Signals are handled by `_handle_signals`; code of a scenario that raises these must not look like a success.
        if plan.stopped is None:
            note(f"the code of the scenario has ended the run: {type(error).__name__}: {error}; {plan.hint()}")
        return plan.stopped or ExitCode.FAILED
    if plan.run is None or plan.report is None:
        return plan.stopped or ExitCode.INTERRUPTED
    return _print_end(plan.run, plan.report, output)


async def _play_plan(plan: _Plan, quiet: bool) -> None:
    _handle_signals(plan)
    async with _open_store(plan.scenario) as (store, manager), plan.opening(store, manager=manager) as run:
        plan.run = run
        note(f"run {run.run_id}")
        has_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        last = plan.turns or plan.scenario.turns
        if has_terminal and not quiet:
            plan.report = await run.finish(last, on_turn=lambda report: _show_progress(report.turn, last))
            click.echo("", err=True)
        else:
            plan.report = await run.finish(last)


def _show_progress(turn: int, last: int) -> None:
    """One line that is written anew."""
    click.echo(f"\rturn {turn} of {last}", nl=False, err=True)


@asynccontextmanager
async def _open_store(scenario: Scenario) -> AsyncIterator[tuple[Store, AgentLifecycleManager | None]]:
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


def _print_end(run: KeptRun, report: RunReport, output: str) -> int:
    record, agents, paused = run.record, len(run.state.members), len(run.state.paused_agents)
    if output == "json":
        head = {"run_id": str(record.run_id), "name": record.name, "digest": record.digest}
        as_json({**head, **asdict(report), "agents": agents, "paused": paused})
    else:
        failed = f", {report.failed} failures" if report.failed else ""
        end = f"turn {report.turn}, {report.ended}; {agents} agents, {paused} of them paused{failed}"
        click.echo(plain(f"{record.name}: {end}; digest {record.digest[:12]}"))
    for sentence in report.first_failures:
        note(f"failed: {sentence}")
    # A population of which nothing is left because all failed must not look like a success.
    return ExitCode.FAILED if report.failed and report.ended == NONE_ACTIVE else ExitCode.OK


def _handle_signals(plan: _Plan) -> None:
    """Ctrl-C and SIGTERM: the first cancels the turn and says how to go on, the second ends the program at once.

    Handled by Python and not by the event loop, which a brain may block.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop(number: int, _frame: object) -> None:
        if plan.stopped is not None or task is None or task.done():
            os._exit(128 + number)  # not by an exception: threads in which a brain hangs would be waited for
        plan.stopped = 128 + number
        os.write(sys.stderr.fileno(), f"\nostler: stopped; {plain(plan.hint())}\n".encode())
        loop.call_soon_threadsafe(task.cancel)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


# --- looking -----------------------------------------------------------------------------------------


@sim.command("list")
@_count_option
@_output_option("table", "wide", "json")
def list_runs(count: int, output: str) -> None:
    """List the runs, newest first."""
    with view(the_home()) as reader:
        runs = simulations.list_runs(reader, limit=count + 1)
    empty = "there is no run yet; begin one: ostler sim run SCENARIO.toml"
    show([_summary(run) for run in runs[:count]], output, _RUN_COLUMNS, empty=empty)
    if len(runs) > count:
        note(f"only the newest {count} are shown; ask for more with -n")


@sim.command("show")
@_run_argument
@click.option("--turn", type=_TURN, help="As it was after this turn; else after the last.")
@_count_option
@_output_option("table", "wide", "json")
def show_run(run: str, turn: int | None, count: int, output: str) -> None:
    """Show a run: its settings, and its agents after a turn."""
    record = _find(run)
    at = record.turn if turn is None else turn
    played = next(_replayed(record, at, at))
    if output == "json":
        as_json({"run": _summary(record), "turn": asdict(played)})
        return
    print_facts(("WHAT", "IS"), _facts(record, played))
    click.echo()
    rows = [
        (name, str(played.numbers[name]), _activity(played, name), json.dumps(state, ensure_ascii=False))
        for name, state in islice(played.states.items(), count)
    ]
    print_table(_AGENT_COLUMNS, rows, wide=output == "wide")
    if len(played.states) > count:
        note(f"only the first {count} of {len(played.states)} agents are shown; ask for more with -n")


@sim.command("replay")
@_run_argument
@click.option("--from", "first", type=_TURN, default=0, help="From this turn on; else from the beginning.")
@_to_option
@click.option("-v", "--verbose", is_flag=True, help="Every operation of each turn.")
@_output_option("text", "jsonl")
def replay_command(run: str, first: int, last: int | None, verbose: bool, output: str) -> None:
    """Show the turns of a run as they were played, from the record alone."""
    for played in _replayed(_find(run), first, last):
        if output == "jsonl":
            as_json(asdict(played), indent=None)
        else:
            for line in _lines(played, verbose=verbose):
                click.echo(plain(line))


@sim.command()
@_run_argument
@_to_option
@_scenario_option
def check(run: str, last: int | None, file: str | None) -> int:
    """Play a run once more, and say whether the same comes of it."""
    record = _find(run)
    scenario = _scenario_of(record, file)

    async def compare() -> Comparison:
        async with _open_store(scenario) as (store, manager):
            return await compare_run(store, record.run_id, scenario, last=last, manager=manager)

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
    record = _find(run)
    with _reading() as store:
        asyncio.run(export_turns(lambda: replay(store, record.run_id, last=record.turn), file, chosen))
    note(f"run {record.run_id} is written to {file}")


@sim.command()
@_run_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask first.")
def rm(run: str, yes: bool) -> int:
    """Remove a run with all its turns. A run that others were forked from stays until they are removed."""
    record = _find(run)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"this removes run {record.run_id} for good; say --yes")
        is_open = "; it is open, and another program may be playing it" if record.state is RunState.OPEN else ""
        question = f"Remove run {record.run_id} ({record.name}, {record.turn} turns{is_open}) for good?"
        if not click.confirm(question, err=True):
            return ExitCode.FAILED

    async def remove() -> None:
        async with Store(the_home()) as store:
            await remove_run(store, record.run_id)

    asyncio.run(remove())
    note(f"run {record.run_id} is removed")
    return ExitCode.OK


# --- runs and scenarios ------------------------------------------------------------------------------


@dataclass
class _View:
    """Queries on one connection that cannot write, as a store answers them."""

    reader: Reader

    async def read(self, query: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        return query(self.reader, *args, **kwargs)


@contextmanager
def _reading() -> Iterator[_View]:
    with view(the_home()) as reader:
        yield _View(reader)


def _replayed(record: SimulationRun, first: int, last: int | None) -> Iterator[PlayedTurn]:
    async def following() -> PlayedTurn | None:
        return await anext(turns, None)

    with _reading() as store, asyncio.Runner() as runner:
        turns = replay(store, record.run_id, first=first, last=last)
        while (played := runner.run(following())) is not None:
            yield played


def _find(text: str) -> SimulationRun:
    """By id, the beginning of an id, a name that only one run has, `last`, `last~1` and so on."""
    with view(the_home()) as reader:
        runs = _all_runs(reader)
        if counted := _LAST.fullmatch(text):
            place = int(counted[1] or 0)
            matches = list(islice(runs, place, place + 1))
        else:
            matches = [run for run in runs if text and (text == run.name or str(run.run_id).startswith(text.lower()))]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise SimulationNotFoundError(f"there is no run {shown(text)} here; `ostler sim list` lists those there are")
    ids = ", ".join(str(run.run_id) for run in matches[:5])
    raise SimulationNotFoundError(f"{len(matches)} runs match {shown(text)} ({ids}); give the id of one")


def _all_runs(reader: Reader) -> Iterator[SimulationRun]:
    before: UUID | None = None
    while page := simulations.list_runs(reader, before=before):
        yield from page
        before = page[-1].run_id


def _scenario_of(run: SimulationRun, file: str | None, changes: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario as it was when the run began, or as it is in this file; its code is read from where it stands."""
    kept = (run.scenario or {}).get("path")
    try:
        with redirect_stdout(sys.stderr):  # what its code prints while it is loaded is no result
            return scenario_of_run(run, file=file, overrides=changes)
    except DefinitionError:
        if file is None and kept is not None and not Path(kept).exists():
            note(f"{kept} is not there any more; say where it is now with --scenario FILE")
        raise


def _overrides(changed: tuple[str, ...], more: Mapping[str, Any]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for text in changed:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{text!r} is not KEY=VALUE, such as parameters.tax=0.2", param_hint="--set")
        try:
            overrides[key.strip()] = json.loads(value)
        except ValueError:
            overrides[key.strip()] = value  # `pause` needs no quotes
    return {**overrides, **{name: value for name, value in more.items() if value is not None}}


def _forked_settings(
    settings: SimulationSettings, changed: SimulationSettings, changes: Mapping[str, Any]
) -> SimulationSettings:
    """Those of the run itself, whatever its file says, with the changes of the fork."""
    parameters = json.loads(json.dumps(dict(settings.parameters)))
    for key, value in changes.items():
        table_name, _, name = key.partition(".")
        if table_name == "parameters":
            put_at(parameters, name, value)
        elif key == "seed" or table_name == "settings":
            settings = settings.evolve(**{name or key: getattr(changed, name or key)})
    return settings.evolve(parameters=parameters)


# --- in words ----------------------------------------------------------------------------------------


def _summary(run: SimulationRun) -> dict[str, Any]:
    """Without the text of the scenario, which may be long."""
    return {**run.evolve(scenario=None).to_dict(), "scenario": (run.scenario or {}).get("path")}


def _parent(run: Mapping[str, Any]) -> str:
    return f"{run['parent_id'][:13]}@{run['forked_at']}" if run["parent_id"] else "-"


_RUN_COLUMNS = (
    Column("ID", lambda run: str(run["run_id"])),
    Column("NAME", lambda run: str(run["name"]), least=12),
    Column("TURN", lambda run: str(run["turn"])),
    Column("STATE", lambda run: str(run["state"])),
    Column("SEED", lambda run: str(run["settings"]["seed"]), leaves=1),
    Column("FROM", _parent, leaves=2),
    Column("BEGAN", lambda run: local_time(run["created_at"]), leaves=3),
)
_AGENT_COLUMNS = (
    Column("AGENT", itemgetter(0), least=16),
    Column("NUMBER", itemgetter(1), is_number=True),
    Column("IS", itemgetter(2)),
    Column("STATE", itemgetter(3), least=20),
)


def _facts(run: SimulationRun, played: PlayedTurn) -> list[tuple[str, str]]:
    defaults = SimulationSettings().to_dict()
    changed = [
        f"{key}={value}"
        for key, value in run.settings.to_dict().items()
        if key not in ("seed", "parameters") and value != defaults[key]
    ]
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
    done = Counter(operation["operation"] for operation in played.operations if operation.get("done", True))
    counts = {
        "joined": done["add_agent"],
        "left": done["remove_agent"],
        "paused": len(played.paused),
        "resumed by themselves": len(played.resumed),
        "failed": len(played.failures),
        "requests refused": len(played.operations) - done.total(),
    }
    others = [f"{count} {what}" for what, count in counts.items() if count]
    agents = [f"{len(played.states)} agents", f"{len(played.decisions)} decided"]
    yield f"turn {played.turn}: {', '.join([*agents, *others])}"
    for name, failure in played.failures.items():
        verb = "timed out" if failure["timed_out"] else "failed"
        yield f"  {name} {verb}, {failure['became']}: {failure['message']}"
    for operation in played.operations if verbose else ():
        agent = operation.get("resolved_name") or operation["agent_name"]
        turns = operation.get("auto_resume_turns")
        term = f" for {turns} turns" if turns is not None else ""
        refused = "" if operation.get("done", True) else f": refused, {operation['reason']}"
        yield f"  {operation.get('by') or operation['cause']}: {operation['operation']} {agent}{term}{refused}"
