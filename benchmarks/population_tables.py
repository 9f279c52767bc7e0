"""Populations: what each operation costs, and turns per second beside Mesa in the same run.

Every agent has a counter. In each turn all decide on the state as it was, then all decisions are applied: Mesa's
documented way is two phases, ours are brains and an engine. Ours and theirs take turns round by round, each in a new
process, and seconds are those of the processor, all threads together, so that other work on the machine does not count;
on a quiet machine they are the seconds of a clock. Turns that are committed are measured by the clock.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostler.simulation import (
    AgentGroup,
    AgentView,
    Decisions,
    LifecycleManager,
    LifecycleValidator,
    Scenario,
    SimulationOrchestrator,
    SimulationSettings,
    SimulationState,
    World,
    begin_run,
)
from ostler.store.store import Store
from rivals import rival_python
from table import Table, middle, percentile

#: Agents, turns in a batch, turns in a batch where every turn is a commit, and the goal as a multiple of Mesa.
_SIZES = ((25, 1_000, 50, 1.0), (1_000, 40, 10, 1.2), (10_000, 4, 3, 1.2))
#: Short batches, and the best of all rounds: on a shared machine most of them are disturbed.
_BATCHES = 60
_KEPT_BATCHES = 5
_MESA = "mesa==3.3.1"
_ROUND = "--round"


def populations(*, quick: bool) -> str:
    return "\n".join(map(str, (_operations(quick=quick), *_turns(3 if quick else 9), _waiting())))


# --- operations --------------------------------------------------------------------------------------


class Brain:
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


class _Population:
    """Agents of one name, half of them paused with a counter."""

    def __init__(self, size: int) -> None:
        self.manager = LifecycleManager(LifecycleValidator(max_agents=2 * size))
        self.state = SimulationState()
        for _ in range(size):
            self.manager.add_agent("agent", Brain(), {"coins": 1}, self.state)
        self.names = list(self.state.members)
        for name in self.names[::2]:
            self.manager.pause_agent(name, 2**30, self.state)


def _operations(*, quick: bool) -> Table:
    """The log is as in production: no handler listens."""
    logging.getLogger("ostler.simulation").setLevel(logging.ERROR)
    table = Table(
        "Operations of a population, all agents of one name (microseconds, p50 / p95)",
        *("operation", "25 agents", "10,000 agents", "goal"),
    )
    few, many = _Population(25), _Population(10_000)
    for title, goal, act, undo in (
        ("add_agent", "50", _add, lambda town, name: town.manager.remove_agent(name, town.state)),
        ("remove_agent", "50", _remove, lambda town, _: _add(town)),
        ("pause_agent", "50", _pause, lambda town, name: town.manager.resume_agent(name, town.state)),
        ("resume_agent", "50", _resume, lambda town, name: town.manager.pause_agent(name, 2**30, town.state)),
        ("get_active_agents", "1,000 at 25", lambda town: town.manager.get_active_agents(town.state), lambda *_: None),
        (
            "process_auto_resume",
            "1,000 at 25",
            lambda town: town.manager.process_auto_resume(town.state),
            lambda *_: None,
        ),
    ):
        cells = [_timed(town, act, undo, 300 if quick else 2000) for town in (few, many)]
        table.add(title, *(f"{middle(cell):,.1f} / {percentile(cell, 0.95):,.1f}" for cell in cells), goal)
    for town in (few, many):
        assert town.manager.check_invariants(town.state)
    return table


def _add(town: _Population) -> str:
    return town.manager.add_agent("agent", town.state.agents["agent"], {"coins": 1}, town.state)


def _remove(town: _Population) -> str:
    name = f"agent_{len(town.names) - 1}"
    assert town.manager.remove_agent(name, town.state)
    return name


def _pause(town: _Population) -> str:
    name = town.names[1]
    assert town.manager.pause_agent(name, 5, town.state)
    return name


def _resume(town: _Population) -> str:
    name = town.names[2]
    assert town.manager.resume_agent(name, town.state)
    return name


def _timed(town: _Population, act: Callable[..., Any], undo: Callable[..., Any], count: int) -> list[float]:
    count = count if act in {_add, _remove, _pause, _resume} else count // 10
    gc.collect()
    gc.disable()
    try:
        times = []
        for _ in range(count):
            began = time.perf_counter_ns()
            answer = act(town)
            times.append((time.perf_counter_ns() - began) / 1000)
            undo(town, answer)
        return times
    finally:
        gc.enable()


# --- turns -------------------------------------------------------------------------------------------


async def _measure(rates: dict[str, list[float]]) -> None:
    for count, turns, commits, _ in _SIZES:
        for way, brain in (("plain", Brain), ("reading", Reader)):
            settings = SimulationSettings(max_agents=count)
            async with SimulationOrchestrator(engine=Bank(), settings=settings) as run:
                for number in range(count):
                    run.add_agent(f"holder {number}", brain(), {"wealth": 1})
                rates[f"{way} {count}"] = await _batches(run, turns, _BATCHES, time.process_time)
                assert {state["wealth"] for state in run.state.states.values()} == {2 + _BATCHES * turns}
        scenario = Scenario(
            name="coins",
            brains={"holder": Brain},
            agents=(AgentGroup(name="holder", kind="holder", count=count, initial_state={"wealth": 1}),),
            engine=Bank,
            settings=SimulationSettings(max_agents=count),
        )
        with tempfile.TemporaryDirectory() as home:
            async with Store(home) as store, begin_run(store, scenario) as kept:
                rates[f"kept {count}"] = await _batches(kept, commits, _KEPT_BATCHES, time.perf_counter)


async def _batches(run: SimulationOrchestrator, turns: int, batches: int, clock: Callable[[], float]) -> list[float]:
    """Turns per second of each batch."""
    await run.run(1)
    rates = []
    for _ in range(batches):
        began = clock()
        await run.run(turns)
        rates.append(turns / (clock() - began))
    return rates


def _turns(rounds: int) -> tuple[Table, Table]:
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: dict[str, list[float]] = defaultdict(list)
    python = rival_python("mesa", _MESA, "networkx")  # which Mesa imports and does not name
    sizes = [f"{count}:{turns}" for count, turns, _, _ in _SIZES]
    for _ in range(rounds):
        _add_round([sys.executable, __file__, _ROUND], ours)
        if python is not None:
            _add_round([python, str(Path(__file__).with_name("rival_mesa.py")), str(_BATCHES), *sizes], theirs)
    title = "Turns per processor second in memory, the same model (the best batch of all rounds)"
    memory = Table(title, "agents", "Ostler", "Mesa, two phases", "x Mesa", "goal", "")
    for way, description in (("plain", ""), ("reading", ", each reads its state")):
        for count, _, _, goal in _SIZES:
            own, other = max(ours[f"{way} {count}"]), max(theirs[f"{way} {count}"], default=None)
            ratio = None if other is None else own / other
            memory.add(
                f"{count:,}{description}",
                f"{own:,.0f}",
                "-" if other is None else f"{other:,.0f}",
                "-" if ratio is None else f"{ratio:.2f}",
                f"{goal:.1f}",
                "" if ratio is None else "reached" if ratio >= goal else "missed",
            )
    kept = Table("Turns per second, each turn a commit (SQLite home)", "agents", "Ostler", "goal")
    for count, least in ((25, "500"), (1_000, ""), (10_000, "20")):
        kept.add(f"{count:,}", f"{max(ours[f'kept {count}']):,.0f}", least)
    return memory, kept


def _add_round(words: list[str], rates: dict[str, list[float]]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        print(f"{words[1]} is left out: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
        return
    for name, each in json.loads(done.stdout.splitlines()[-1]).items():
        rates[name].append(max(each))


# --- brains that wait --------------------------------------------------------------------------------


def _waiting() -> Table:
    table = Table("A turn of 100 plain brains that each wait 0.2 s", "what", "seconds", "goal")

    def wait(_view: AgentView) -> None:
        time.sleep(0.2)

    async def turn() -> float:
        async with SimulationOrchestrator(settings=SimulationSettings(max_agents=100)) as run:
            for _ in range(100):
                run.add_agent("waiter", wait, {})
            began = time.perf_counter()
            await run.play_turn()
            return time.perf_counter() - began

    table.add("64 at a time", f"{middle([asyncio.run(turn()) for _ in range(3)]):.2f}", "0.6")
    return table


if __name__ == "__main__":
    if _ROUND in sys.argv:
        measured: dict[str, list[float]] = {}
        asyncio.run(_measure(measured))
        print(json.dumps(measured))
    else:
        print(populations(quick=True))
