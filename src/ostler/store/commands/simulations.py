"""Commands about simulations. A run and its newest turn are one commit, so the two always agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from ostler.errors import InvalidOperationError, SimulationNotFoundError, VersionConflictError
from ostler.model import Fault, RunState, SimulationRun, SimulationTurn, clean_text
from ostler.store.commands.base import Command, check_version
from ostler.store.commands.checking import (
    as_kept,
    flag_faults,
    kind_faults,
    optional_faults,
    said_faults,
)
from ostler.store.kinds import Kind
from ostler.store.port import Prune
from ostler.store.unit import Unit

R_co = TypeVar("R_co", covariant=True)

_END, _REOPEN = "simulation.end", "simulation.reopen"
#: The outcome of a run that is about to go; what is forked must not lean on such a one.
REMOVING = "it is being removed"
_REMOVED = "its later turns were removed"
#: What a turn changes in its run; saying so keeps the large parts of the row from being compared and written.
_STEP = frozenset({"turn", "digest", "updated_at", "version"})
_MOVE = frozenset({"state", "outcome", "updated_at", "version"})


@dataclass(kw_only=True, eq=False)
class CreateRun(Command[SimulationRun]):
    """Begin a run with the turn that it starts from; with a parent, as a fork of that one."""

    action: ClassVar[str] = "simulation.create"
    #: It touches nothing that there was before.
    fenced: ClassVar[bool] = False

    run: SimulationRun
    first: SimulationTurn

    def faults(self) -> Iterator[Fault]:
        wrong = [
            *kind_faults("run", self.run, SimulationRun),
            *kind_faults("first", self.first, SimulationTurn),
        ]
        if wrong:
            yield from wrong
            return
        yield from (fault.under("run") for fault in self.run.validate())
        yield from (fault.under("first") for fault in self.first.validate())
        yield from self._mismatches(self.run, self.first)

    def _mismatches(self, run: SimulationRun, first: SimulationTurn) -> Iterator[Fault]:
        for name in ("run_id", "turn", "digest"):
            if getattr(first, name) != getattr(run, name):
                yield Fault(field=f"first.{name}", bound="must be that of the run")
        if first.whole is False:
            yield Fault(field="first.whole", bound="must be true; a run begins from a complete state")
        if run.state is RunState.ENDED or run.outcome is not None:
            yield Fault(field="run.state", bound="must be open and without an outcome; what begins has not ended")
        if run.forked_at is not None and run.forked_at != run.turn:
            yield Fault(field="run.forked_at", bound="must be the turn that the run begins with")

    @property
    def subject(self) -> str:
        return _subject(self.run.run_id)

    def apply(self, unit: Unit) -> SimulationRun:
        unit.workspace(self.run.workspace_id)
        if unit.get(Kind.SIMULATION_RUN, (self.run.run_id,)) is not None:
            raise InvalidOperationError(f"the simulation {self.run.run_id} exists already; give the new one its own id")
        unit.require_unpruned(self.run.run_id)
        if self.run.parent_id is not None:
            self._require_parent(unit, self.run.parent_id)
        scenario = self.run.scenario
        record = self.run.evolve(
            settings=as_kept(self.run.settings),
            scenario=None if scenario is None else as_kept(scenario),
            created_at=unit.now,
            updated_at=unit.now,
            version=1,
        )
        unit.put(Kind.SIMULATION_RUN, record)
        unit.put(Kind.SIMULATION_TURN, self.first)
        forked = f"from {record.parent_id} at turn {record.forked_at}" if record.parent_id else None
        unit.audit(self.by, self.action, self.subject, detail=forked)
        return record

    def _require_parent(self, unit: Unit, parent_id: UUID) -> None:
        parent: SimulationRun | None = unit.get(Kind.SIMULATION_RUN, (parent_id,))
        if parent is None or parent.workspace_id != self.run.workspace_id:
            raise SimulationNotFoundError(f"there is no simulation {parent_id} to fork; list what exists")
        if is_marked(parent):
            raise InvalidOperationError(
                f"the simulation {parent_id} is being removed and cannot be forked; where that was broken off, remove "
                "it again, or reopen it first"
            )
        if self.run.turn > parent.turn:
            raise InvalidOperationError(
                f"the simulation {parent_id} is at turn {parent.turn} and cannot be forked at turn {self.run.turn}; "
                "run it further first, or fork it earlier"
            )


@dataclass(kw_only=True, eq=False)
class _OnRun(Command[R_co]):
    #: A run belongs to whoever plays it, also while somebody manages agents in the same home. Of two who play it, the
    #: number of the turn lets one through, and the version does where it is moved.
    fenced: ClassVar[bool] = False

    run_id: UUID
    #: Whether it counts only while the store that it is given to is the owner's. Somebody whose agents think for a run
    #: says so: a manager that was replaced can ask none of them any more, and would play on without them.
    by_owner: bool = False

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("run_id", self.run_id, UUID)
        yield from flag_faults("by_owner", self.by_owner)

    @property
    def is_fenced(self) -> bool:
        return self.by_owner

    @property
    def subject(self) -> str:
        return _subject(self.run_id)

    def _current(self, unit: Unit) -> SimulationRun:
        found: SimulationRun | None = unit.get(Kind.SIMULATION_RUN, (self.run_id,))
        if found is None:
            raise SimulationNotFoundError(f"there is no simulation {self.run_id}; list what exists, or check the id")
        unit.workspace_id = found.workspace_id
        return found


@dataclass(kw_only=True, eq=False)
class RecordTurn(_OnRun[SimulationRun]):
    """Complete the next turn of a run. Of several who try, one does it; the others are refused."""

    action: ClassVar[str] = "simulation.turn"

    turn: SimulationTurn
    #: Why the run ends with this turn; None while it goes on.
    ended: str | None = None
    #: The digest of the turn that it was played after. None: whoever has the number is believed to follow.
    follows: str | None = None

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from said_faults("ended", self.ended)
        yield from optional_faults("follows", self.follows, str)
        if not isinstance(self.turn, SimulationTurn):
            yield from kind_faults("turn", self.turn, SimulationTurn)
            return
        yield from (fault.under("turn") for fault in self.turn.validate())
        if self.turn.run_id != self.run_id:
            yield Fault(field="turn.run_id", bound="must be that of the run")

    def apply(self, unit: Unit) -> SimulationRun:
        old = self._current(unit)
        if old.state is not RunState.OPEN:
            raise InvalidOperationError(
                f"{self.subject} is {old.state} and takes no more turns; reopen it first, or fork it",
                current=old.state,
            )
        if self.turn.turn != old.turn + 1:
            raise VersionConflictError(
                f"{self.subject} is at turn {old.turn}, so turn {self.turn.turn} cannot be next; somebody else may be "
                "running it: read it again and go on from there"
            )
        if self.follows is not None and self.follows != old.digest:
            raise VersionConflictError(
                f"{self.subject} is at turn {old.turn}, but not as it was when turn {self.turn.turn} was played; "
                "somebody else may be running it: read it again and go on from there"
            )
        unit.require_unpruned(self.run_id)
        step: dict[str, Any] = {"turn": self.turn.turn, "digest": self.turn.digest}
        new = old.evolve(**step, updated_at=unit.now, version=old.version + 1)
        if self.ended is not None:
            new = new.evolve(state=RunState.ENDED, outcome=clean_text(self.ended))
            unit.audit(self.by, _END, self.subject, detail=new.outcome)
        unit.put(Kind.SIMULATION_TURN, self.turn)
        unit.put(Kind.SIMULATION_RUN, new, _STEP if self.ended is None else _STEP | _MOVE)
        return new


@dataclass(kw_only=True, eq=False)
class MoveRun(_OnRun[SimulationRun]):
    """End a run where it stands, or let an ended one go on. One that has ended may be ended as `REMOVING`, and back."""

    action: ClassVar[str] = "simulation.move"

    to: RunState
    #: Why it ends.
    outcome: str | None = None
    expected_version: int | None = None

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from kind_faults("to", self.to, RunState)
        yield from said_faults("outcome", self.outcome)
        yield from optional_faults("expected_version", self.expected_version, int)
        if self.to is RunState.OPEN and self.outcome is not None:
            yield Fault(field="outcome", bound="is only for a run that ends")

    def apply(self, unit: Unit) -> SimulationRun:
        old = self._current(unit)
        check_version(self, old.version, self.expected_version)
        if old.state is self.to and not (is_marked(old) or self.outcome == REMOVING):
            raise InvalidOperationError(f"{self.subject} is {old.state} already", current=old.state, wanted=self.to)
        outcome = clean_text(self.outcome) if self.outcome is not None else None
        new = old.evolve(state=self.to, outcome=outcome, updated_at=unit.now, version=old.version + 1)
        unit.put(Kind.SIMULATION_RUN, new, _MOVE)
        unit.audit(self.by, _END if self.to is RunState.ENDED else _REOPEN, self.subject, detail=outcome)
        return new


@dataclass(kw_only=True, eq=False)
class RemoveRun(_OnRun[SimulationRun | None]):
    """Take back the newest turns of a run, so many at a time; with the last of them the run goes too.

    What is left stands at an earlier turn and is sound, so that a removal may be broken off, and whoever still plays
    the run finds that its next turn is not the next. Who asks sees to it that no fork leans on these turns: it ends the
    run as `REMOVING`, looks for forks, and says which version that was.
    """

    action: ClassVar[str] = "simulation.remove"

    most: int = 256
    expected_version: int | None = None

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from optional_faults("expected_version", self.expected_version, int)
        wrong = tuple(kind_faults("most", self.most, int))
        yield from wrong
        if not wrong and self.most < 1:
            yield Fault(field="most", bound="must be 1 or more")

    def apply(self, unit: Unit) -> SimulationRun | None:
        old = self._current(unit)
        check_version(self, old.version, self.expected_version)
        first, begun = old.turn - self.most + 1, old.forked_at or 0
        before: SimulationTurn | None = None
        if first > begun:
            before = unit.get(Kind.SIMULATION_TURN, (self.run_id, first - 1))
        if before is None:  # all of it; also where somebody else has made a gap, for then nothing sound is left
            unit.prune(Prune(table="turns", until=0, owner_id=self.run_id))
            unit.remove(Kind.SIMULATION_RUN, (self.run_id,))
            unit.audit(self.by, self.action, self.subject, detail=old.name)
            return None
        new = old.evolve(turn=before.turn, digest=before.digest, updated_at=unit.now, version=old.version + 1)
        new = new.evolve(state=RunState.ENDED, outcome=REMOVING if is_marked(old) else _REMOVED)
        unit.prune(Prune(table="turns", until=first, owner_id=self.run_id))
        unit.put(Kind.SIMULATION_RUN, new, _STEP | _MOVE)
        unit.audit(self.by, self.action, self.subject, detail=f"turns {first} to {old.turn}")
        return new


def is_marked(run: SimulationRun) -> bool:
    """Whether somebody is about to remove it, or has begun to."""
    return run.state is RunState.ENDED and run.outcome == REMOVING


def _subject(run_id: UUID) -> str:
    return f"simulation:{run_id}"
