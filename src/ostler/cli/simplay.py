"""Playing the turns of a run: the progress bar, what is said at the end, and how to go on after a stop."""

from __future__ import annotations

import asyncio
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, field

import click

from ostler.agents.failures import error_place, error_text
from ostler.cli.complaints import complain, wants_traceback
from ostler.cli.exits import Exit, exit_for
from ostler.cli.homes import home_words
from ostler.cli.output import as_json, note, plain
from ostler.cli.progress import has_terminal, progress
from ostler.cli.simruns import ground_of
from ostler.cli.stopping import Stopping
from ostler.errors import OstlerError
from ostler.simulation import Ground, KeptRun, OnIdle, RunReport, Scenario, SimulationSettings, TurnReport
from ostler.simulation.orchestrator import NOBODY

Opening = Callable[[Ground], AbstractAsyncContextManager[KeptRun]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    scenario: Scenario
    opening: Opening
    home: str
    #: Up to this turn.
    turns: int
    #: The turn after which it begins.
    begun: int = 0
    quiet: bool = False
    output: str = "text"
    #: Where the scenario stands now, if the run does not know.
    file: str | None = None


@dataclass
class _Played:
    """What is known of it, however far it came."""

    stopping: Stopping = field(default_factory=Stopping)
    run: KeptRun | None = None
    report: RunReport | None = None


def play(plan: Plan) -> int:
    """Play it, say what came of it, and answer with the exit code."""
    played = _Played()
    try:
        # What brains print is no result.
        with played.stopping.heard(), redirect_stdout(sys.stderr):
            asyncio.run(_within(plan, played))
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # A signal is heard by `Stopping` and raises none of these; nor may code that raises one look like a success.
        if played.stopping.code is None:
            return _unheard(plan, played, error)
    except OstlerError as error:
        complain(error)
        if played.run is not None and played.report is None and played.stopping.code is None:
            note(_hint(plan, played.run))
        return played.stopping.code or exit_for(error)
    if played.run is None or played.report is None:
        return played.stopping.code or Exit.INTERRUPTED
    _tell(played.run, played.report, plan.output)
    return _judge(plan, played.run, played.report)


def _unheard(plan: Plan, played: _Played, error: BaseException) -> int:
    """Nobody has asked for an end, so it came from the code of the scenario."""
    if wants_traceback():
        traceback.print_exception(error, file=sys.stderr)
    where = error_place(error)
    note(f"the code of the scenario has ended the run: {error_text(error)}{f' ({where})' if where else ''}")
    if played.run is not None and played.report is None:
        note(_hint(plan, played.run))
    return Exit.FAILED


async def _within(plan: Plan, played: _Played) -> None:
    stopping = played.stopping
    stopping.watch()
    async with ground_of(plan.home, plan.scenario) as ground, plan.opening(ground) as run:
        note(f"run {run.run_id}")
        played.run = run
        stopping.hint = lambda: f"stopped; {_hint(plan, run)}"
        with _bar(plan, stopping) as step:
            played.report = await run.finish(plan.turns, on_turn=step)
        stopping.hint = None


def refuse_waiting(settings: SimulationSettings, cure: str) -> None:
    """A run that waits for somebody from outside would wait for ever, because nobody can come in by this program."""
    if settings.on_idle is OnIdle.WAIT:
        raise click.UsageError(
            f"settings.on_idle is wait, but nobody can join a run from outside that is played here; {cure}"
        )


def _hint(plan: Plan, run: KeptRun) -> str:
    """A whole command that goes on where this one stopped."""
    turns = f" --turns {plan.turns}" if plan.turns != plan.scenario.turns else ""
    moved = f" --scenario {shlex.quote(plan.file)}" if plan.file is not None else ""
    command = f"ostler sim resume {run.run_id}{turns}{moved}{home_words(plan.home)}"
    return f"it stands at turn {run.record.turn}; go on with: {command}"


@contextmanager
def _bar(plan: Plan, stopping: Stopping) -> Iterator[Callable[[TurnReport], None] | None]:
    """A progress bar, where somebody sits at a terminal; talk goes to standard error."""
    if plan.quiet or not has_terminal():
        yield None
        return
    stopping.has_bar = True
    with progress(plan.turns, plan.begun) as step:
        yield lambda _: step()
    stopping.has_bar = False


def _tell(run: KeptRun, report: RunReport, output: str) -> None:
    record, state = run.record, run.state
    if output == "json":
        as_json(
            {
                "run_id": str(record.run_id),
                "name": record.name,
                "turn": report.turn,
                "played": report.played,
                "ended": report.ended,
                "failed": report.failed,
                "agents": len(state.members),
                "paused": len(state.paused),
                "digest": record.digest,
            }
        )
        return
    failed = f", {_failures(report.failed)}" if report.failed else ""
    click.echo(
        plain(
            f"{record.name}: turn {report.turn}, {report.ended}; {len(state.members)} agents, {len(state.paused)} of "
            f"them paused{failed}; digest {record.digest[:12]}"
        )
    )


def _judge(plan: Plan, run: KeptRun, report: RunReport) -> int:
    """Failures are told; where nobody is left to play because of them, the run has failed."""
    if not report.failed:
        return Exit.OK
    for place, sentence in enumerate(report.first_failures):
        note(f"then: {sentence}" if place else f"{_failures(report.failed)}; first: {sentence}")
    note(f"see them all with: ostler sim replay {run.run_id}{home_words(plan.home)}")
    return Exit.FAILED if report.ended == NOBODY else Exit.OK


def _failures(count: int) -> str:
    return "1 failure" if count == 1 else f"{count} failures"
