"""What a brain sees of the world when it is asked, and its way to ask for something."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from ostler.errors import InvalidOperationError
from ostler.simulation.members import Member
from ostler.simulation.requests import LifecycleRequest, Operation
from ostler.simulation.schema import json_values
from ostler.simulation.state import SimulationState

#: In a greater population, a brain that lives elsewhere is not told everybody's name each time.
MOST_NAMES = 1000


class World:
    """What all agents of one run share."""

    __slots__ = ("_drawn", "_names", "_names_at", "asked", "listening", "parameters", "seed", "state")

    def __init__(self, state: SimulationState, seed: int, parameters: Mapping[str, Any]) -> None:
        self.state = state
        self.seed = seed
        #: The free settings of the run, to look at; a fork may have others.
        self.parameters: Mapping[str, Any] = MappingProxyType(dict(parameters))
        #: What was asked for in this turn, by whom, and about whom: the number that had the name then.
        self.asked: list[tuple[AgentView, LifecycleRequest, int | None]] = []
        #: Whether agents are being asked; at other times nobody hears what is asked for.
        self.listening = True
        #: The chance of each agent that has drawn in this turn.
        self._drawn: dict[int, Random] = {}
        self._names: tuple[str, ...] = ()
        self._names_at = -1

    @property
    def turn(self) -> int:
        return self.state.turn

    @property
    def names(self) -> tuple[str, ...]:
        if self._names_at != self.state.changes:
            self._names, self._names_at = tuple(self.state.members), self.state.changes
        return self._names

    def ask(self, view: AgentView, request: LifecycleRequest) -> None:
        """From any thread. Names are labels: who is meant is whoever has the name now."""
        meant = self.state.members.get(request.agent_name)
        self.asked.append((view, request, None if meant is None else meant.number))

    def chance(self, *who: object) -> Random:
        """Numbers that depend on the seed, the turn and who draws, and on nothing that happened before or beside."""
        return Random(f"world {'/'.join(map(repr, (self.seed, self.state.turn, *who)))}")  # noqa: S311 - repeatable

    def own_chance(self, number: int) -> Random:
        """That of one agent in this turn; nobody else draws from it."""
        found = self._drawn.get(number)
        if found is None:
            found = self._drawn[number] = Random(self.own_seed(number))  # noqa: S311 - repeatable on purpose
        return found

    def own_seed(self, number: int) -> str:
        return f"agent {self.seed}/{self.state.turn}/{number}"

    def begin_turn(self, turn: int) -> None:
        """From here on agents are asked, and heard."""
        self.state.turn = turn
        self.listening = True
        self._drawn.clear()


class AgentView:
    """Handed to `decide`. Read it; what is changed is changed by the engine and by the requests made here."""

    __slots__ = ("_member", "_world", "closed", "state")

    #: The agent's own, to look at: a plain one cannot be written here. `dict(view.state)` is a copy.
    state: Any

    def __init__(self, member: Member, world: World) -> None:
        self._member = member
        self.show(member.state)
        self._world = world
        #: Set when it was given up on: what it says from then on counts no more.
        self.closed = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state":
            raise AttributeError("a brain decides, and the engine changes states; return what is to change")
        object.__setattr__(self, name, value)

    def show(self, state: Any) -> None:
        """Called when the state is exchanged, not by brains."""
        object.__setattr__(self, "state", _to_look_at(state))

    @property
    def name(self) -> str:
        return self._member.name

    @property
    def number(self) -> int:
        """Unlike the name, never given to another."""
        return self._member.number

    @property
    def turn(self) -> int:
        return self._world.state.turn

    @property
    def global_state(self) -> Any:
        return _to_look_at(self._world.state.global_state)

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self._world.parameters

    @property
    def names(self) -> tuple[str, ...]:
        """Everybody, in the order of coming, the paused included."""
        return self._world.names

    def state_of(self, name: str) -> Any:
        return _to_look_at(self._world.state.member(name).state)

    @property
    def random(self) -> Random:
        """Chance of this agent in this turn: the same in every run of one seed, whoever is asked first."""
        return self._world.own_chance(self.number)

    def as_request(self) -> dict[str, Any]:
        """The same as JSON, for a brain that lives elsewhere."""
        state = self._world.state
        own, shared = self._member.state, state.global_state
        return {
            "name": self.name,
            "number": self.number,
            "turn": self.turn,
            "seed": self._world.own_seed(self.number),
            "state": json_values(own) if isinstance(own, BaseModel) else own,
            "global_state": json_values(shared) if isinstance(shared, BaseModel) else shared,
            "parameters": dict(self.parameters),
            "names": list(self.names) if len(self.names) <= MOST_NAMES else None,
        }

    # --- asking, for the end of the turn ----------------------------------------------------------

    def add_agent(
        self,
        name: str,
        agent: Any = None,
        initial_state: Mapping[str, Any] | None = None,
        *,
        kind: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask for another agent: its brain, or the kind by which the run makes one."""
        self._ask(
            LifecycleRequest(
                operation=Operation.ADD,
                agent_name=name,
                agent=agent,
                kind=kind,
                params=params or {},
                initial_state=initial_state or {},
            )
        )

    def remove_agent(self, name: str | None = None) -> None:
        """Without a name: itself."""
        self._ask(LifecycleRequest(operation=Operation.REMOVE, agent_name=self.name if name is None else name))

    def pause_agent(self, name: str | None = None, auto_resume_turns: int | None = None) -> None:
        """Without a name: itself."""
        self._ask(
            LifecycleRequest(
                operation=Operation.PAUSE,
                agent_name=self.name if name is None else name,
                auto_resume_turns=auto_resume_turns,
            )
        )

    def resume_agent(self, name: str) -> None:
        self._ask(LifecycleRequest(operation=Operation.RESUME, agent_name=name))

    def _ask(self, request: LifecycleRequest) -> None:
        if self.closed or not self._world.listening:
            raise InvalidOperationError(f"the turn of {self.name} is over; what it asks for now is not heard")
        self._world.ask(self, request)


def _to_look_at(state: Any) -> Any:
    """All decide on the same state, so nobody may change it meanwhile. What a model allows is its own affair."""
    return MappingProxyType(state) if type(state) is dict else state
