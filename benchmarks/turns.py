"""Turns per second beside Mesa, which runs the same model in the same run.

Every agent has a counter. In each turn all decide on the state as it was, then all that was decided is applied: Mesa's
documented way is two phases, ours are brains and an engine. Ours and theirs take turns round by round, each in a new
process, for a shared machine is fast in one second and slow in the next. The floor is a bare loop that calls and a
bare loop that applies.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from measured import tell
from ostler.simulation.brains import Brains
from ostler.simulation.engine import Decisions
from ostler.simulation.orchestrator import SimulationOrchestrator
from ostler.simulation.runs import begin_run
from ostler.simulation.scenario import AgentGroup, Scenario
from ostler.simulation.settings import SimulationSettings
from ostler.simulation.state import SimulationState
from ostler.simulation.view import AgentView, World
from ostler.store import open_store
from processes import RIVALS, rivals_python
from table import Table

#: Agents, turns in a batch, and turns in a batch where every turn is a commit.
SIZES = ((25, 800, 50), (1_000, 40, 10), (10_000, 8, 3))
ROUNDS, QUICK_ROUNDS = 9, 3
BATCHES = 5
_SECONDS = 300
_ROUND = "--round"

#: By way and number of agents: turns per second, of each batch in a round, and then of the best batch of each round.
Rates = dict[str, list[float]]


class Holder:
    def decide(self, _view: AgentView) -> int:
        return 1


class Reader:
    """Looks at what it has before it decides."""

    def decide(self, view: AgentView) -> int:
        return 1 if view.state["wealth"] > 0 else 0


class Bank:
    def update(self, _state: SimulationState, decisions: Decisions, _world: World) -> None:
        for member, amount in decisions.pairs():
            member.state["wealth"] += amount


class Bare:
    """The same with nothing around it: no time-outs, no names, nobody comes or goes."""

    def __init__(self, count: int) -> None:
        self.calls = [Holder().decide for _ in range(count)]
        self.states = [{"wealth": 1} for _ in range(count)]
        self.view: Any = None

    async def run(self, turns: int) -> None:
        view = self.view
        for _ in range(turns):
            amounts = [decide(view) for decide in self.calls]
            for state, amount in zip(self.states, amounts, strict=True):
                state["wealth"] += amount


@asynccontextmanager
async def in_memory(count: int, brain: Callable[[], Any]) -> AsyncIterator[SimulationOrchestrator]:
    settings = SimulationSettings(max_agents=count)
    async with SimulationOrchestrator(engine=Bank(), settings=settings) as run:
        for number in range(count):
            run.add_agent(f"holder {number}", brain(), {"wealth": 1})
        yield run


@asynccontextmanager
async def kept(count: int) -> AsyncIterator[SimulationOrchestrator]:
    """Every turn is on the disk before the next begins."""
    scenario = Scenario(
        name="coins",
        brains=Brains({"holder": Holder}),
        agents=(AgentGroup(name="holder", kind="holder", count=count, initial_state={"wealth": 1}),),
        engine=Bank,
        settings=SimulationSettings(max_agents=count),
    )
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as home:
        async with open_store(home) as store, begin_run(store, scenario) as run:
            yield run


async def timed(found: list[float], one: Any, turns: int) -> None:
    await one.run(1)
    for _ in range(BATCHES):
        begin = time.perf_counter()
        await one.run(turns)
        found.append(turns / (time.perf_counter() - begin))


async def our_round() -> None:
    rates: Rates = defaultdict(list)
    for count, turns, commits in SIZES:
        async with in_memory(count, Holder) as run:
            await timed(rates[f"ours {count}"], run, turns)
            wealth = {one.state["wealth"] for one in run.state.members.values()}
            assert wealth == {2 + BATCHES * turns}
        async with in_memory(count, Reader) as run:
            await timed(rates[f"ours reading {count}"], run, turns)
        await timed(rates[f"floor {count}"], Bare(count), turns)
        async with kept(count) as run:
            await timed(rates[f"kept {count}"], run, commits)
    tell(**rates)


def add_round(program: list[str], rates: Rates) -> None:
    told = subprocess.run(program, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if told.returncode:
        print(f"{program[1]} is left out: {(told.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
        return
    for name, each in json.loads(told.stdout.splitlines()[-1]).items():
        rates[name].append(max(each))


def turns_tables(*, quick: bool = False) -> tuple[Table, Table]:
    rates: Rates = defaultdict(list)
    python = rivals_python()
    sizes = [f"{count}:{turns}" for count, turns, _ in SIZES]
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        add_round([sys.executable, __file__, _ROUND], rates)
        if python is not None:
            add_round([python, str(RIVALS / "rival_mesa.py"), str(BATCHES), *sizes], rates)
    return _in_memory(rates), _kept(rates)


def _in_memory(rates: Rates) -> Table:
    heads = ("agents", "Ostler", "Mesa, two phases", "x", "Mesa, one phase", "x", "shuffled", "x", "bare loops", "x")
    table = Table("Turns per second in memory, the same model (x: Ostler is so many times as fast)", heads)
    for ours, two, say in (("ours", "two", "{:,}"), ("ours reading", "reading", "{:,}, each reads its state")):
        for count, _, _ in SIZES:
            own = rates[f"{ours} {count}"]
            beside = [rates[f"{way} {count}"] for way in (two, "one", "shuffled", "floor")]
            cells = [cell for other in beside for cell in (_say(other), _ratio(own, other))]
            table.add(say.format(count), _say(own), *cells)
    return table


def _kept(rates: Rates) -> Table:
    heads = ("agents", "Ostler, each turn a commit", "Mesa, a DataCollector in memory", "x")
    table = Table(
        "Turns per second, kept (SQLite home; Mesa collects one figure per agent and keeps it in memory)", heads
    )
    for count, _, _ in SIZES:
        own, other = rates[f"kept {count}"], rates[f"collected {count}"]
        table.add(f"{count:,}", _say(own), _say(other), _ratio(own, other))
    return table


def _say(each: list[float]) -> str:
    return f"{statistics.median(each):,.0f}" if each else "-"


def _ratio(own: list[float], other: list[float]) -> str:
    return f"{statistics.median(own) / statistics.median(other):.2f}" if other else "-"


if __name__ == "__main__":
    if _ROUND in sys.argv:
        asyncio.run(our_round())
    else:
        print(*turns_tables(quick=True), sep="\n")
