"""Brains that do as they are told, and scenarios made of them, for the tests of turns and of kept runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from simulation_agents import Steady

from ostler.simulation import (
    AgentGroup,
    AgentView,
    Brains,
    Decisions,
    OnFailure,
    RunReport,
    Scenario,
    SimulationOrchestrator,
    SimulationSettings,
    SimulationState,
    World,
    begin_run,
    resume_run,
)
from ostler.simulation.brains import ManagedKind
from ostler.store.store import Store

Script = Callable[[AgentView], Any]
SETTINGS = SimulationSettings(max_agents=100)


class Diary:
    """Who was asked in which turn, in the order of asking."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []

    def brain(self, script: Script = lambda _: None) -> Script:
        def decide(view: AgentView) -> Any:
            self.asked.append((view.turn, view.name))
            return script(view)

        return decide

    def names(self, turn: int) -> set[str]:
        return {name for number, name in self.asked if number == turn}


@asynccontextmanager
async def playing(brains: Mapping[str, Any], **settings: Any) -> AsyncIterator[SimulationOrchestrator]:
    """A population in memory, with these brains."""
    engine = settings.pop("engine", None)
    state = SimulationState(schema=settings.pop("schema", None))
    chosen = SETTINGS.evolve(**settings)
    async with SimulationOrchestrator(state, engine=engine, settings=chosen) as orchestrator:
        for name, brain in brains.items():
            orchestrator.add_agent(name, brain, {})
        yield orchestrator


def in_turn(scripts: Mapping[int, Script]) -> Script:
    """Does something in some turns, and nothing in the others."""

    def decide(view: AgentView) -> Any:
        script = scripts.get(view.turn)
        return None if script is None else script(view)

    return decide


def fails(_: AgentView) -> Any:
    raise ValueError("not my day")


class Hang:
    """Thinks until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def decide(self, _: AgentView) -> None:
        self.let_go.wait(60)


async def hangs(_: AgentView) -> None:
    await asyncio.Event().wait()


# --- brains of kept runs: made by their kind and params alone ---------------------------------------------------


@dataclass
class Trader:
    """Gives away by chance; sometimes it rests, leaves, fails or brings somebody along."""

    step: int = 1
    goods: list[str] = field(default_factory=list)

    def decide(self, view: AgentView) -> Any:
        what = view.random.random()
        if what < 0.05:
            raise RuntimeError("no luck")
        if what < 0.2:
            view.pause_agent(auto_resume_turns=view.random.randint(1, 4))
        elif what < 0.3:
            view.add_agent("child", kind="trader", params={"step": self.step + 1}, initial_state={"wealth": 3})
        elif what < 0.35 and len(view.names) > 3:
            view.remove_agent(view.random.choice(view.names))
        elif what < 0.4:
            view.resume_agent(view.random.choice(view.names))
        return {"give": view.random.randint(0, self.step), "to": view.random.choice(view.names)}


class Learner:
    """Keeps something itself."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def save(self) -> Any:
        return {"seen": self.seen}

    def restore(self, saved: Any) -> None:
        self.seen = list(saved["seen"])

    async def decide(self, view: AgentView) -> Any:
        await asyncio.sleep(0)
        self.seen = [*self.seen[-4:], view.random.randint(0, 9)]
        return {"give": sum(self.seen) % 3, "to": view.names[0]}


class Market:
    """Moves wealth about, and keeps a count of its own."""

    def __init__(self) -> None:
        self.moved = 0

    def save(self) -> Any:
        return self.moved

    def restore(self, saved: Any) -> None:
        self.moved = saved

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> None:
        for member, decision in decisions.pairs():
            give = min(decision["give"], get(member.state, "wealth"))
            put(member.state, "wealth", get(member.state, "wealth") - give)
            other = state.members[decision["to"]]
            put(other.state, "wealth", get(other.state, "wealth") + give)
            self.moved += give
        shock = world.chance("shock").randint(0, 3) * world.parameters.get("shock", 1)
        state.global_state["shocks"] = [*state.global_state.get("shocks", [])[-3:], shock + self.moved % 7]


class Doing:
    """An engine that does one thing to the state."""

    def __init__(self, act: Callable[[SimulationState], Any]) -> None:
        self._act = act

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> Any:
        del decisions, world
        return self._act(state)


def get(state: Any, name: str) -> Any:
    return state[name] if isinstance(state, dict) else getattr(state, name)


def put(state: Any, name: str, value: Any) -> None:
    if isinstance(state, dict):
        state[name] = value
    else:
        setattr(state, name, value)


def economy(**more: Any) -> Scenario:
    """Everything in it: chance, failures, pauses with a term, comings and goings, memories."""
    given: dict[str, Any] = {
        "name": "economy",
        "brains": Brains({"trader": Trader, "learner": Learner}),
        "agents": (
            AgentGroup(name="trader", kind="trader", count=5, params={"step": 2}, initial_state={"wealth": 10}),
            AgentGroup(name="learner", kind="learner", count=2, initial_state={"wealth": 5}),
        ),
        "turns": 20,
        "engine": Market,
        "settings": SETTINGS.evolve(failure_pause_turns=3, snapshot_every=6, seed=7),
    }
    return Scenario(**{**given, **more})


def scripted(scripts: Mapping[str, Script], **more: Any) -> Scenario:
    """One agent for each script, which gives its kind and its name."""
    kinds = {name: lambda script=script: script for name, script in scripts.items()}
    groups = tuple(AgentGroup(name=name, kind=name) for name in scripts)
    given: dict[str, Any] = {"name": "scripted", "settings": SETTINGS, "agents": groups}
    return Scenario(brains=Brains(kinds), **{**given, **more})


async def played(store: Store, scenario: Scenario, turns: int | None = None) -> tuple[UUID, str]:
    """A run from its beginning: its id and the digest of its history."""
    async with begin_run(store, scenario) as run:
        await run.run(scenario.turns if turns is None else turns)
        return run.run_id, run.record.digest


async def gone_on(store: Store, run_id: UUID, scenario: Scenario, turns: int) -> tuple[RunReport, str]:
    async with resume_run(store, run_id, scenario) as run:
        report = await run.run(turns)
        return report, run.record.digest


def silent(_: AgentView) -> None:
    """It decides nothing, so that only the engine does something."""


def doing(act: Callable[[SimulationState], Any], **more: Any) -> Scenario:
    """Two who are silent, and an engine that does this to the state in each turn."""
    return scripted({"ada": silent, "bo": silent}, engine=lambda: Doing(act), **more)


def steady(**more: Any) -> Scenario:
    """Two agents in processes of their own; one of them blocks in turn 3 and does not heed TERM."""
    blocks = AgentGroup(name="ada", kind="steady", initial_state={"do": {"3": "block"}})
    return Scenario(
        name="steady",
        brains={"steady": ManagedKind(Steady, "process")},
        agents=(blocks, AgentGroup(name="bo", kind="steady")),
        turns=8,
        settings=SETTINGS.evolve(
            decision_timeout=timedelta(milliseconds=1200), on_timeout=OnFailure.KEEP, on_error=OnFailure.KEEP
        ),
        **more,
    )
