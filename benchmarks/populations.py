"""What the operations of a population cost, from 25 agents to a hundred thousand.

Sizes take turns within each round, for a shared machine is fast in one second and slow in the next. Whom an operation
is about is drawn by chance among all, so that a large population pays for the memory it is scattered over. The log is
as in production: nobody listens.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from ostler.simulation.manager import LifecycleManager
from ostler.simulation.state import SimulationState
from ostler.simulation.validator import LifecycleValidator
from table import Table

SIZES = (25, 1_000, 10_000, 100_000)
ROUNDS = 16
QUICK_ROUNDS = 4
#: Samples that one size gives before the next has its turn; many, for the first of them finds nothing warm.
IN_TURN = 200
#: Operations that are timed one by one before the population is put back as it was.
BATCH = 10
#: How many fall due in one turn, where some do.
DUE = 10
_FAR = 2**30
_READ = "get_active_agents, and read it all"

#: By operation and size: one sample per call, in microseconds.
Samples = dict[tuple[str, int], list[float]]


class Brain:
    def decide(self, _view: Any) -> None:
        """Nobody is asked here."""


_BRAIN = Brain()


class Ground:
    """Populations of one size: all awake, all of one name, all asleep, and all asleep with some due at every turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.chance = Random(size)  # noqa: S311 - repeatable on purpose
        self.manager = LifecycleManager(LifecycleValidator(max_agents=2 * size + BATCH))
        self.names = [f"agent {number}" for number in range(size)]
        self.awake = self._crowd(self.names)
        self.alike = self._crowd(["agent"] * size)
        self.asleep = self._crowd(self.names)
        self.rota = self._crowd(self.names)
        self.waiting = size // DUE
        self._fresh = 0
        for state in (self.asleep, self.rota):
            for name in self.names:
                state.pause(name, _FAR)
        for place, name in enumerate(self.some(self.waiting * DUE)):
            self.rota.pause(name, 1 + place // DUE)

    def _crowd(self, names: list[str]) -> SimulationState:
        state = SimulationState()
        for name in names:
            self.manager.add_agent(name, _BRAIN, {"coins": 1}, state)
        return state

    def some(self, count: int = BATCH) -> list[str]:
        return self.chance.sample(self.names, count)

    def new(self) -> list[str]:
        self._fresh += BATCH
        return [f"new {number}" for number in range(self._fresh, self._fresh + BATCH)]


@dataclass(kw_only=True, frozen=True)
class Operation:
    """What is timed, whom it is about, and how it is undone; all but `act` is outside the clock."""

    title: str
    whom: Callable[[Ground], list[str]]
    act: Callable[[Ground, str], Any]
    #: Gets the names and what `act` answered for each.
    undo: Callable[[Ground, list[str], list[Any]], None]


def _readmit(state: SimulationState, names: list[str]) -> None:
    for name in names:
        state.admit(name, _BRAIN, {"coins": 1})


def _dismiss(state: SimulationState, names: list[str]) -> None:
    for name in reversed(names):
        state.dismiss(name)


def _wake(state: SimulationState, names: list[str]) -> None:
    for name in names:
        state.resume(name)


def _put_to_sleep(state: SimulationState, names: list[str], turns: int) -> None:
    for name in names:
        state.pause(name, turns)


def _leave(ground: Ground) -> list[str]:
    """Some of one name go, so that their numbers are free."""
    names = [f"agent_{number}" for number in ground.chance.sample(range(1, ground.size), BATCH)]
    _dismiss(ground.alike, names)
    return names


def _nothing(_ground: Ground, _names: list[str], _answers: list[Any]) -> None:
    """Changed nothing, or put it back itself."""


def _turn(ground: Ground, _name: str) -> list[str]:
    resumed = ground.manager.process_auto_resume(ground.rota)
    assert len(resumed) == DUE
    return resumed


OPERATIONS = (
    Operation(
        title="add_agent",
        whom=Ground.new,
        act=lambda ground, name: ground.manager.add_agent(name, _BRAIN, {"coins": 1}, ground.awake),
        undo=lambda ground, names, _: _dismiss(ground.awake, names),
    ),
    Operation(
        title="add_agent, all others have its name",
        whom=lambda _: ["agent"] * BATCH,
        act=lambda ground, name: ground.manager.add_agent(name, _BRAIN, {"coins": 1}, ground.alike),
        undo=lambda ground, _, given: _dismiss(ground.alike, given),
    ),
    Operation(
        title="add_agent, the same where numbers were freed",
        whom=_leave,
        act=lambda ground, _: ground.manager.add_agent("agent", _BRAIN, {"coins": 1}, ground.alike),
        undo=_nothing,
    ),
    Operation(
        title="remove_agent",
        whom=Ground.some,
        act=lambda ground, name: ground.manager.remove_agent(name, ground.awake),
        undo=lambda ground, names, _: _readmit(ground.awake, names),
    ),
    Operation(
        title="pause_agent",
        whom=Ground.some,
        act=lambda ground, name: ground.manager.pause_agent(name, None, ground.awake),
        undo=lambda ground, names, _: _wake(ground.awake, names),
    ),
    Operation(
        title="pause_agent for 5 turns",
        whom=Ground.some,
        act=lambda ground, name: ground.manager.pause_agent(name, 5, ground.awake),
        undo=lambda ground, names, _: _wake(ground.awake, names),
    ),
    Operation(
        title="resume_agent",
        whom=Ground.some,
        act=lambda ground, name: ground.manager.resume_agent(name, ground.asleep),
        undo=lambda ground, names, _: _put_to_sleep(ground.asleep, names, _FAR),
    ),
    Operation(
        title="get_active_agents",
        whom=Ground.some,
        act=lambda ground, _: ground.manager.get_active_agents(ground.awake),
        undo=_nothing,
    ),
    Operation(
        title="process_auto_resume, all paused, none due",
        whom=Ground.some,
        act=lambda ground, _: ground.manager.process_auto_resume(ground.asleep),
        undo=_nothing,
    ),
    Operation(
        title=f"process_auto_resume, all paused, {DUE} due",
        whom=lambda _: [""],
        act=_turn,
        undo=lambda ground, _, resumed: _put_to_sleep(ground.rota, resumed[0], ground.waiting),
    ),
)
#: For comparison: whoever reads every agent pays for every agent.
READING = Operation(
    title=_READ,
    whom=lambda _: [""],
    act=lambda ground, _: len(ground.manager.get_active_agents(ground.awake)),
    undo=_nothing,
)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without the garbage collector, which comes when it likes."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def timed(ground: Ground, operation: Operation, count: int) -> list[float]:
    clock, act, times = time.perf_counter_ns, operation.act, list[float]()
    while len(times) < count:
        names, answers = operation.whom(ground), []
        for name in names:
            begin = clock()
            answer = act(ground, name)
            times.append((clock() - begin) / 1_000)
            answers.append(answer)
        operation.undo(ground, names, answers)
    return times


def measure(rounds: int) -> Samples:
    samples: Samples = defaultdict(list)
    grounds = [Ground(size) for size in SIZES]
    with undisturbed():
        for _ in range(rounds):
            for operation in OPERATIONS:
                for ground in grounds:
                    samples[operation.title, ground.size] += timed(ground, operation, IN_TURN)
            for ground in grounds:
                samples[_READ, ground.size] += timed(ground, READING, 2)
    for ground in grounds:
        for state in (ground.awake, ground.alike, ground.asleep, ground.rota):
            assert len(state.agents) == ground.size
            assert ground.manager.check_invariants(state)
    return samples


def operations_table(*, quick: bool = False) -> str:
    samples = measure(QUICK_ROUNDS if quick else ROUNDS)
    heads = ("p50 / p95", *(f"{size:,} agents" for size in SIZES), f"p95 at {SIZES[-1]:,} : at {SIZES[0]}")
    table = Table("Operations of a population, one at a time (microseconds)", heads)
    for operation in (*OPERATIONS, READING):
        each = [samples[operation.title, size] for size in SIZES]
        cells = (f"{statistics.median(one):,.1f} / {p95(one):,.1f}" for one in each)
        table.add(operation.title, *cells, f"{p95(each[-1]) / p95(each[0]):,.2f}")
    return str(table)


def p95(each: list[float]) -> float:
    return statistics.quantiles(each, n=20)[-1]


if __name__ == "__main__":
    print(operations_table(quick=True))
