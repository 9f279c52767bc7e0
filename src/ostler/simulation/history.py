"""What was written down, read again: the state at any turn, and every turn on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pydantic

from ostler.errors import (
    HistoryBrokenError,
    InvalidOperationError,
    SimulationError,
    SimulationNotFoundError,
    ValidationError,
)
from ostler.model import Fault, SimulationRun, SimulationTurn, shown
from ostler.simulation.answers import placed_text
from ostler.simulation.bodies import broken, missing, opened
from ostler.simulation.brains import Brains
from ostler.simulation.checking import require_store, require_turn
from ostler.simulation.foreign import is_call_off
from ostler.simulation.played import PlayedTurn
from ostler.simulation.schema import StateForm
from ostler.simulation.state import SimulationState
from ostler.store import Store

#: Bodies may be large; so few are held at a time.
_PAGE = 16


@dataclass(kw_only=True)
class Kept:
    """The state as it was written, one turn after the other."""

    turn: int = 0
    digest: str = ""
    tick: int = 0
    last_number: int = 0
    #: By number, as the scribe writes them.
    agents: dict[int, dict[str, Any]] = field(default_factory=dict)
    global_state: Any = None
    #: What the engine has saved, under "engine"; empty when it saves nothing at all.
    memory: dict[str, Any] = field(default_factory=dict)

    def take(self, row: SimulationTurn) -> dict[str, Any]:
        """Go on to this turn; what its body says."""
        body = opened(row, self.digest)
        try:
            self._go_on(body)
        except (LookupError, TypeError, AttributeError):
            raise broken(row) from None
        self.turn, self.digest = row.turn, row.digest
        return body

    def _go_on(self, body: dict[str, Any]) -> None:
        changes = body.get("whole") or body["changes"]
        if "whole" in body:
            self.agents, self.memory = {}, {}
        for number in changes.get("gone", ()):
            del self.agents[number]
        for agent in changes["agents"]:
            self.agents[agent["number"]] = agent
        self.tick, self.last_number = changes["tick"], changes["last_number"]
        self.global_state = changes.get("global_state", self.global_state)
        self.memory = {"engine": changes["engine"]} if "engine" in changes else self.memory

    def in_order(self) -> list[dict[str, Any]]:
        return [self.agents[number] for number in sorted(self.agents)]

    def state(self, brains: Brains | None, schema: type[pydantic.BaseModel] | None = None) -> SimulationState:
        """The state again, with every brain made anew; without brains, a state to look at."""
        state = SimulationState(turn=self.turn, schema=schema)
        state.global_state = self.global_state
        for kept in self.in_order():
            brain = None
            if brains is not None:
                brain = brains.make(kept["kind"], kept["params"])
                remind(brain, kept, f"the brain of {kept['name']}")
            own = loaded(state.form, kept["name"], kept["state"])
            member = state.admit(kept["name"], brain, own, kept["number"])
            member.kind, member.params = kept["kind"], kept["params"]
        state.last_number = self.last_number
        state.countdown.tick = self.tick
        for kept in self.in_order():
            if kept["paused"]:
                state.pause(kept["name"], None)
                if kept["due"] is not None:
                    state.countdown.set_due(kept["name"], kept["due"])
        return state

    def played(self, body: dict[str, Any]) -> PlayedTurn:
        notes = body.get("notes", {})
        agents = self.in_order()
        return PlayedTurn(
            turn=self.turn,
            resumed=tuple(body.get("resumed", ())),
            decisions=body.get("decisions", {}),
            failures={name: {**one, "message": notes.get(name, "")} for name, one in body.get("failures", {}).items()},
            operations=tuple(body.get("operations", ())),
            states={one["name"]: one["state"] for one in agents},
            paused={
                one["name"]: None if one["due"] is None else one["due"] - self.tick for one in agents if one["paused"]
            },
            numbers={one["name"]: one["number"] for one in agents},
            global_state=self.global_state,
            digest=self.digest,
        )


def remind(keeper: Any, kept: Mapping[str, Any], who: str, field: str = "memory") -> None:
    """Give back what `save` had returned, also when it was None; not to one that had no `save`."""
    if field not in kept:
        return
    restore, saved = getattr(keeper, "restore", None), kept[field]
    if callable(restore):
        try:
            restore(saved)
        except BaseException as error:
            if is_call_off(error):
                raise
            raise SimulationError(f"restore() of {who} failed: {placed_text(error)}") from error
    elif saved is not None:
        raise InvalidOperationError(f"{who} has saved something, but has no `restore` to take it back; give it one")


def loaded(form: StateForm, name: str, value: Any) -> Any:
    """A state as it was kept."""
    try:
        return form.load(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(("state", *map(str, first["loc"])))
        raise InvalidOperationError(
            f"what is kept of {name} does not fit the schema: {place}: {first['msg']}; use that of the run"
        ) from error


async def require_run(store: Store, run_id: UUID | str) -> SimulationRun:
    """By its id, or the text of it."""
    require_store(store)
    wanted = _as_uuid(run_id)
    run = await store.get_run(wanted)
    if run is None:
        raise SimulationNotFoundError(f"there is no run {wanted}; `ostler sim show` lists those there are")
    return run


def _as_uuid(run_id: Any) -> UUID:
    try:
        return run_id if isinstance(run_id, UUID) else UUID(run_id)
    except (AttributeError, TypeError, ValueError):
        bound = "must be the id of a run, a UUID; `ostler sim show` lists those there are"
        raise ValidationError([Fault(field="run_id", bound=bound, value=shown(run_id))]) from None


async def kept_at(store: Store, run_id: UUID | str, turn: int) -> Kept:
    """The state after a turn; of a fork, turns before it are those of the run it came from."""
    run = await _home_of(store, await require_run(store, run_id), require_turn("turn", turn))
    kept = Kept()
    async for row in _rows_from(store, run.run_id, turn, turn):
        kept.take(row)
    require_end(run, kept.turn, kept.digest)
    return kept


async def state_at(
    store: Store, run_id: UUID | str, turn: int, *, schema: type[pydantic.BaseModel] | None = None
) -> SimulationState:
    """A state to look at: everybody is there, without a brain."""
    return (await kept_at(store, run_id, turn)).state(None, schema)


async def replay(
    store: Store, run_id: UUID | str, *, first: int = 0, last: int | None = None
) -> AsyncIterator[PlayedTurn]:
    """Every turn as it was played, by its record: no brain is asked. A fork begins with the turns of its parent."""
    run = await require_run(store, run_id)
    end = run.turn if last is None else require_turn("last", last)
    _require_turn(run, end)
    _require_turn(run, require_turn("first", first))
    kept: Kept | None = None
    for one, until in await _lineage(store, run, end):
        if until < first:
            continue
        begun = kept is not None
        kept = kept or Kept()
        later = turn_rows(store, one.run_id, kept.turn, until)
        rows = later if begun else _rows_from(store, one.run_id, first, until)
        async for row in rows:
            body = kept.take(row)
            if row.turn >= first:
                yield kept.played(body)
        require_end(one, kept.turn, kept.digest)


async def _lineage(store: Store, run: SimulationRun, end: int) -> list[tuple[SimulationRun, int]]:
    """The run and those it came from, the oldest first, and the last turn that counts of each."""
    chain = [(run, end)]
    while run.parent_id is not None and run.forked_at is not None:
        end = min(run.forked_at, end)
        run = await require_run(store, run.parent_id)
        chain.insert(0, (run, end))
    return chain


async def _home_of(store: Store, run: SimulationRun, turn: int) -> SimulationRun:
    """The run in whose records a turn stands."""
    _require_turn(run, turn)
    while run.parent_id is not None and run.forked_at is not None and turn < run.forked_at:
        run = await require_run(store, run.parent_id)
    return run


def _require_turn(run: SimulationRun, turn: int) -> None:
    if not 0 <= turn <= run.turn:
        raise InvalidOperationError(f"run {run.run_id} stands at turn {run.turn}; ask for a turn from 0 to {run.turn}")


async def _rows_from(store: Store, run_id: UUID, turn: int, until: int) -> AsyncIterator[SimulationTurn]:
    """The rows up to `until`, from the last whole one that helps to know `turn`."""
    whole = await store.whole_turn(run_id, turn)
    if whole is None:
        raise HistoryBrokenError(
            f"the store has no whole state of run {run_id} at turn {turn} or before; restore the home from a backup"
        )
    yield whole
    async for row in turn_rows(store, run_id, whole.turn, until):
        yield row


async def turn_rows(store: Store, run_id: UUID, after: int, until: int) -> AsyncIterator[SimulationTurn]:
    """The rows after a turn, each of them, up to another."""
    while after < until:
        page = await store.read_turns(run_id, after=after, limit=min(_PAGE, until - after))
        for row in page:
            after += 1
            if row.turn != after:
                raise missing(run_id, after)
            yield row
        if not page:
            raise missing(run_id, after + 1)


def require_end(run: SimulationRun, turn: int, digest: str) -> None:
    """The run knows the digest of its last turn; a history that ends otherwise belongs to another."""
    if turn == run.turn and digest != run.digest:
        raise HistoryBrokenError(
            f"turn {turn} of run {run.run_id} is not the one that the run came to; restore the home from a backup"
        )
