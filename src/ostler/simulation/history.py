"""Recorded runs, read again: the state at any turn, and every turn on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from uuid import UUID

import pydantic
from pydantic_core import from_json

from ostler.errors import HistoryBrokenError, InvalidOperationError
from ostler.model.simulation import SimulationRun, SimulationTurn, SimulationWhole
from ostler.model.validation import fault
from ostler.simulation.brains import Brains
from ostler.simulation.state import SimulationState
from ostler.simulation.turn_record import core_digest, restore, whole_seal
from ostler.store import simulations
from ostler.store.transaction import Reader

P = ParamSpec("P")
R = TypeVar("R")
#: Rows may be large; so few are held at a time.
_PAGE = 16


class Readable(Protocol):
    """A `Store`, or another object that answers queries."""

    async def read(self, query: Callable[Concatenate[Reader, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedTurn:
    """One turn and the state after it, as JSON values."""

    turn: int
    #: The agents that resumed by themselves at the start.
    resumed: tuple[str, ...] = ()
    #: In the order of joining; agents that failed are not in it.
    decisions: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: What was done or refused, in its order.
    operations: tuple[Mapping[str, Any], ...] = ()
    states: Mapping[str, Any] = field(default_factory=dict)
    #: The turns that are left to each paused agent; None: it stays paused.
    paused: Mapping[str, int | None] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    global_state: Any = None
    #: Of the history up to here: two runs with the same digest had the same history.
    digest: str = ""


@dataclass(kw_only=True, slots=True)
class Kept:
    """The state of a run, built from its rows turn by turn."""

    run_id: UUID
    turn: int = 0
    digest: str = ""
    last_number: int = 0
    #: By number.
    agents: dict[int, dict[str, Any]] = field(default_factory=dict)
    global_state: Any = None
    #: What the engine saved, under "engine"; empty where it saves nothing at all.
    memory: dict[str, Any] = field(default_factory=dict)

    def begin(self, whole: SimulationWhole) -> None:
        if whole_seal(whole.turn, whole.digest, whole.body) != whole.seal:
            raise broken(self.run_id, whole.turn)
        try:
            self._apply(from_json(whole.body))
        except (LookupError, TypeError, ValueError, AttributeError):
            raise broken(self.run_id, whole.turn) from None
        self.turn, self.digest = whole.turn, whole.digest

    def advance(self, row: SimulationTurn) -> dict[str, Any]:
        """Apply the next turn; its core."""
        if row.turn != self.turn + 1 or core_digest(self.digest, row.core) != row.digest:
            raise broken(self.run_id, self.turn + 1)
        try:
            core: dict[str, Any] = from_json(row.core)
            self._apply(core["changes"])
            core["notes"] = from_json(row.notes) if row.notes else {}
        except (LookupError, TypeError, ValueError, AttributeError):
            raise broken(self.run_id, row.turn) from None
        self.turn, self.digest = row.turn, row.digest
        return core

    def _apply(self, changes: Mapping[str, Any]) -> None:
        for number in changes.get("gone", ()):
            del self.agents[number]
        for agent in changes["agents"]:
            self.agents[agent["number"]] = agent
        self.last_number = changes["last_number"]
        self.global_state = changes.get("global_state", self.global_state)
        self.memory = {"engine": changes["engine"]} if "engine" in changes else self.memory

    def in_order(self) -> list[dict[str, Any]]:
        return [self.agents[number] for number in sorted(self.agents)]

    def played(self, core: Mapping[str, Any]) -> PlayedTurn:
        agents = self.in_order()
        names, values = core.get("decided", ((), ()))
        failures, notes = core.get("failures", {}), core.get("notes", {})
        return PlayedTurn(
            turn=self.turn,
            resumed=tuple(core.get("resumed", ())),
            decisions={name: value for name, value in zip(names, values, strict=True) if name not in failures},
            failures={name: {**failure, "message": notes.get(name, "")} for name, failure in failures.items()},
            operations=tuple(core.get("operations", ())),
            states={agent["name"]: agent["state"] for agent in agents},
            paused={agent["name"]: agent["until"] - self.turn if agent["until"] else None for agent in _paused(agents)},
            numbers={agent["name"]: agent["number"] for agent in agents},
            global_state=self.global_state,
            digest=self.digest,
        )

    def state(self, brains: Brains | None, schema: type[pydantic.BaseModel] | None = None) -> SimulationState:
        """The state again, with every brain made anew; without brains, a state to look at."""
        state = SimulationState(turn=self.turn, schema=schema)
        state.global_state = self.global_state
        for kept in self.in_order():
            brain, name = None, kept["name"]
            if brains is not None:
                brain = brains.make(kept["kind"], kept["params"])
                restore(brain, kept, "memory", f"the brain of {name}")
            try:
                own = state.form.read(kept["state"])
            except pydantic.ValidationError as error:
                detail = error.errors(include_url=False)[0]
                place = ".".join(map(str, ("state", *detail["loc"])))
                raise InvalidOperationError(
                    f"what is kept of {name} does not fit the schema ({place}: {detail['msg']}); use that of the run"
                ) from None
            member = state.admit(name, brain, own, kept["number"])
            member.kind, member.params = kept["kind"], kept["params"]
        state.last_number = self.last_number
        for kept in _paused(self.in_order()):
            state.paused_agents.add(kept["name"])
            if kept["until"]:
                state.auto_resume[kept["name"]] = kept["until"] - self.turn
        return state


def _paused(agents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [agent for agent in agents if agent["until"] is not None]


def broken(run_id: UUID, turn: int) -> HistoryBrokenError:
    return HistoryBrokenError(
        f"turn {turn} of run {run_id} is missing or not as it was written; restore the home from a backup, or fork the "
        "run at an earlier turn"
    )


# --- reading runs ------------------------------------------------------------------------------------


async def find_run(store: Readable, run_id: UUID | str) -> SimulationRun:
    """By its id, or the text of it; raises `SimulationNotFoundError`."""
    try:
        valid_id = run_id if isinstance(run_id, UUID) else UUID(run_id)
    except (AttributeError, TypeError, ValueError):
        raise fault("run_id", "must be the id of a run, a UUID", run_id) from None
    return await store.read(simulations.require_run, valid_id)


async def turns_after(store: Readable, run_id: UUID, after: int, until: int) -> AsyncIterator[SimulationTurn]:
    """Every row after a turn, up to another."""
    while after < until:
        page = await store.read(simulations.list_turns, run_id, after=after, until=until, limit=_PAGE)
        for row in page:
            yield row
        if not page:
            raise broken(run_id, after + 1)
        after = page[-1].turn


async def kept_at(store: Readable, run: SimulationRun, turn: int) -> Kept:
    """The state after a turn. The turns of a fork before its own are those of its parent."""
    require_turn(run, "turn", turn)
    while run.parent_id is not None and turn < (run.forked_at or 0):
        run = await find_run(store, run.parent_id)
    kept = await _first_state(store, run.run_id, turn)
    async for row in turns_after(store, run.run_id, kept.turn, turn):
        kept.advance(row)
    _require_end(run, kept)
    return kept


async def state_at(
    store: Readable, run_id: UUID | str, turn: int, *, schema: type[pydantic.BaseModel] | None = None
) -> SimulationState:
    """A state to look at: all agents are there, without their brains."""
    return (await kept_at(store, await find_run(store, run_id), turn)).state(None, schema)


async def replay(
    store: Readable, run_id: UUID | str, *, first: int = 0, last: int | None = None
) -> AsyncIterator[PlayedTurn]:
    """Every turn as it was played, from the record alone: no brain is asked. A fork begins with its parent's turns."""
    run = await find_run(store, run_id)
    end = run.turn if last is None else last
    require_turn(run, "last", end)
    require_turn(run, "first", first)
    kept: Kept | None = None
    for ancestor, until in await _lineage(store, run, end):
        if until < first:
            continue
        if kept is None:
            # From before the first turn, so that its row is checked too.
            kept = await _first_state(store, ancestor.run_id, max(first - 1, 0))
            if first == 0:
                yield kept.played({})
        kept.run_id = ancestor.run_id
        async for row in turns_after(store, ancestor.run_id, kept.turn, until):
            core = kept.advance(row)
            if row.turn >= first:
                yield kept.played(core)
        _require_end(ancestor, kept)


async def _first_state(store: Readable, run_id: UUID, turn: int) -> Kept:
    whole = await store.read(simulations.last_whole, run_id, turn)
    if whole is None:
        raise HistoryBrokenError(
            f"run {run_id} has no whole state at turn {turn} or before it; restore the home from a backup"
        )
    kept = Kept(run_id=run_id)
    kept.begin(whole)
    return kept


async def _lineage(store: Readable, run: SimulationRun, end: int) -> list[tuple[SimulationRun, int]]:
    """The run and those that it came from, the oldest first, and the last turn that counts of each."""
    chain = [(run, end)]
    while run.parent_id is not None and run.forked_at is not None:
        end = min(run.forked_at, end)
        run = await find_run(store, run.parent_id)
        chain.insert(0, (run, end))
    return chain


def require_turn(run: SimulationRun, name: str, turn: Any) -> None:
    if type(turn) is not int:
        raise fault(name, "must be a whole number", turn)
    if not 0 <= turn <= run.turn:
        raise InvalidOperationError(f"run {run.run_id} stands at turn {run.turn}; ask for a turn from 0 to {run.turn}")


def _require_end(run: SimulationRun, kept: Kept) -> None:
    """The run knows the digest of its last turn; rows that end otherwise belong to another history."""
    if kept.turn == run.turn and kept.digest != run.digest:
        raise broken(run.run_id, kept.turn)
