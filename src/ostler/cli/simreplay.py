"""`ostler sim replay`: the turns of a run as they were played, and whether they would come out the same again."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

import click

from ostler.cli.exits import Exit
from ostler.cli.homes import home_option
from ostler.cli.output import as_json_line, note, plain
from ostler.cli.simruns import (
    find_run,
    ground_of,
    look_at_runs,
    require_home,
    run_argument,
    scenario_of,
    scenario_option,
)
from ostler.simulation import Comparison, Ground, Operation, PlayedTurn, compare_run, replay
from ostler.store import Store, view_store

_TURN = click.IntRange(min=0)
#: Reasons that are told of what was refused in one turn; more are only counted.
_REASONS = 2


@click.command(name="replay")
@run_argument
@click.option("--from", "first", type=_TURN, help="From this turn on; else from the beginning.")
@click.option("--to", "last", type=_TURN, help="Up to this turn; else to the last.")
@click.option("--turn", "only", type=_TURN, help="Only this turn.")
@click.option("--check", is_flag=True, help="Ask every brain again and tell whether the same comes of it.")
@scenario_option
@click.option("-v", "--verbose", is_flag=True, help="Every operation of each turn.")
@click.option("-o", "--output", type=click.Choice(["text", "jsonl"]), default="text", help="How to print the turns.")
@home_option
def replay_command(run: str, file: str | None, verbose: bool, output: str, home: str, **how: Any) -> int:
    """Show the turns of a run as they were played; with --check, play them again and compare."""
    check = how.pop("check")
    first, last = _span(**how)
    if file is not None and not check:
        raise click.UsageError("--scenario is for --check; without it, nothing but the record is read")
    if check:
        if first is not None:
            raise click.UsageError("--check plays from the beginning; say how far with --to alone")
        require_home(home)
        with redirect_stdout(sys.stderr):  # what brains print is no result
            found = asyncio.run(_compare(home, run, last, file))
        return _checked(found)

    async def within(store: Store) -> None:
        found = await find_run(store, run)
        async for played in replay(store, found.run_id, first=first or 0, last=last):
            if output == "jsonl":
                as_json_line(asdict(played))
            else:
                for line in _lines(played, verbose=verbose):
                    click.echo(plain(line))

    look_at_runs(home, within)
    return Exit.OK


def _span(*, first: int | None, last: int | None, only: int | None) -> tuple[int | None, int | None]:
    if only is not None:
        if first is not None or last is not None:
            raise click.UsageError("--turn means one turn, --from and --to mean several; use one or the other")
        return only, only
    if first is not None and last is not None and first > last:
        raise click.UsageError(f"--from {first} lies after --to {last}; turn them round")
    return first, last


async def _compare(home: str, text: str, last: int | None, file: str | None) -> Comparison:
    """Brains that live elsewhere are spawned for it, so then the home must be free; else it is only looked at."""
    async with view_store(home) as store:
        run = await find_run(store, text)
        scenario = scenario_of(run, file)
        if not scenario.brains.needs_manager:
            return await compare_run(Ground(store=store), run.run_id, scenario, last=last)
    async with ground_of(home, scenario) as ground:
        return await compare_run(ground, run.run_id, scenario, last=last)


def _checked(found: Comparison) -> int:
    if found.equal:
        click.echo(f"{found.turns} turns were played again, and every one was the same")
        return Exit.OK
    note(f"turn {found.differs_at} is not the same when it is played again; has the code or the machine changed?")
    return Exit.FAILED


# --- a turn in words ------------------------------------------------------------------------------


def _lines(played: PlayedTurn, *, verbose: bool) -> Iterator[str]:
    """Counts first, which line up from turn to turn; then what a person has to know."""
    yield f"turn {played.turn}: " + ", ".join(_counts(played))
    for name, one in played.failures.items():
        message = one.get("message") or one["error_type"]
        yield f"  {name} {'hung' if one['timed_out'] else 'failed'}, {one['became']}: {message}"
    if verbose:
        yield from (f"  {name} went on" for name in played.resumed)
        yield from (f"  {_operation(one)}" for one in played.operations)


def _counts(played: PlayedTurn) -> Iterator[str]:
    yield f"{len(played.states)} agents"
    yield f"{len(played.decisions)} decided"
    done = Counter(one["operation"] for one in played.operations if one.get("done", True))
    moved = [f"+{done[Operation.ADD]}" if done[Operation.ADD] else ""]
    moved.append(f"-{done[Operation.REMOVE]}" if done[Operation.REMOVE] else "")
    if any(moved):
        yield " ".join(filter(None, moved))
    if played.paused:
        yield f"{len(played.paused)} paused"
    if played.resumed:
        yield f"{len(played.resumed)} went on"
    if played.failures:
        yield f"{len(played.failures)} failed"
    refused = Counter(str(one.get("reason")) for one in played.operations if not one.get("done", True))
    if refused:
        reasons = [reason for reason, _ in refused.most_common(_REASONS)]
        more = ["…"] if len(refused) > _REASONS else []
        yield f"{refused.total()} refused ({'; '.join(reasons + more)})"


def _operation(one: Mapping[str, Any]) -> str:
    who = f"{one['by']}: " if one.get("by") else "" if one["cause"] == "agent" else f"{one['cause']}: "
    name = one.get("resolved_name") or one["agent_name"]
    turns = one.get("auto_resume_turns")
    term = f" for {turns} turns" if turns is not None else ""
    refused = "" if one.get("done", True) else f" refused ({one['reason']})"
    return f"{who}{one['operation']} {name}{term}{refused}"
