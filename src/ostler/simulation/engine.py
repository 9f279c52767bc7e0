"""What the decisions of a turn do to the world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ostler.model import Fault, shown
from ostler.simulation.members import Member
from ostler.simulation.state import SimulationState
from ostler.simulation.view import World


class Decisions(Mapping[str, Any]):
    """Who decided what, in the order of coming. Agents that failed in this turn are not in it."""

    __slots__ = ("_members", "_table", "_values")

    def __init__(self, members: Sequence[Member], values: Sequence[Any]) -> None:
        self._members = members
        self._values = values
        self._table: dict[str, Any] | None = None

    def pairs(self) -> Iterator[tuple[Member, Any]]:
        """Members and decisions: `member.name`, `member.state`. The fastest way through many."""
        return zip(self._members, self._values, strict=True)

    def _by_name(self) -> dict[str, Any]:
        if self._table is None:
            self._table = {member.name: value for member, value in self.pairs()}
        return self._table

    def __getitem__(self, name: str) -> Any:
        return self._by_name()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return repr(self._by_name())


class Engine(Protocol):
    """Changes states in place, those of the members and the global one.

    A plain one works in a thread, as plain brains do; one that is bound to the event loop is `async def`.

    `world.chance("…")` gives random numbers that a replay draws again. Who joins or leaves is decided by requests.
    An engine that keeps anything itself has `save` and `restore`, as a brain. In a run that is kept, what it holds of
    a state is good for one turn: afterwards every state holds what would be read again.

    What it returns is None, or a mapping of names and reasons: whose decisions it could not use. These have failed.
    The state that it was given counts as None; anything else breaks the turn.
    """

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> Any: ...


def engine_faults(engine: Any) -> Iterator[Fault]:
    if isinstance(engine, type) or not callable(getattr(engine, "update", None)):
        yield Fault(field="engine", bound="must be an object with a method `update`", value=shown(engine))


class MergeEngine:
    """Where nothing else is said: a decision that is a mapping is merged into the agent's own state.

    One that does not fit, or makes the state too large, changes nothing and counts as a failure of its agent.
    """

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> Mapping[str, str]:
        del world
        unused: dict[str, str] = {}
        for member, decision in decisions.pairs():
            if isinstance(decision, Mapping):
                current = member.state if state.form.schema is None else dict(member.state)
                made, wrong = state.form.make({**current, **decision}, "state")
                if wrong:
                    unused[member.name] = "; ".join(fault.message for fault in wrong)
                else:
                    member.state = made
        return unused
