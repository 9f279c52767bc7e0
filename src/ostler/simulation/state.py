"""`SimulationState`: who takes part in a population, who is paused, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

from ostler.errors import AgentNotFoundError, InvalidOperationError, ValidationError
from ostler.model.text import name_faults
from ostler.model.types import MAX_COUNT
from ostler.model.validation import Fault, shown
from ostler.simulation.schema import StateForm


class Member:
    """One agent of a population. Its name may be given again after it has left, its number never."""

    __slots__ = ("_name", "_number", "agent", "kind", "params", "state", "view")

    def __init__(self, name: str, number: int, agent: Any, state: Any) -> None:
        self._name = name
        self._number = number
        #: The `AgentView` that shows its state to its brain.
        self.view: Any = None
        #: The brain.
        self.agent = agent
        #: A plain dict; a Pydantic model where the population has a schema.
        self.state = state
        #: The kind and the parameters by which its brain is made again; None where that is not known.
        self.kind: str | None = None
        self.params: Mapping[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Brains read their states far more often than these are exchanged, so exchanging a state may cost more."""
        object.__setattr__(self, name, value)
        if name == "state" and self.view is not None:
            self.view.show(value)

    @property
    def name(self) -> str:
        return self._name

    @property
    def number(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"<{self._name} #{self._number} {self.state!r}>"


class SimulationState:
    """`members` is the truth; `agents` and `states` are mappings over it, in the order of joining."""

    def __init__(
        self,
        *,
        agents: Mapping[str, Any] | None = None,
        paused_agents: Iterable[str] = (),
        auto_resume: Mapping[str, int] | None = None,
        turn: int = 0,
        global_state: Any = None,
        schema: Any = None,
    ) -> None:
        """Raises `ValidationError` with every fault."""
        self.form = StateForm(schema)
        self.members: dict[str, Member] = {}
        self.paused_agents: set[str] = set()
        #: The turns that are left to a paused agent; a paused agent that is not in it stays paused.
        self.auto_resume: dict[str, int] = {}
        #: The last complete turn; during a turn the one that is played.
        self.turn = turn
        #: Shared by all agents; the engine writes it.
        self.global_state: Any = {} if global_state is None else global_state
        #: The number of the newest agent.
        self.last_number = 0
        #: Rises when an agent joins, leaves or gets another brain.
        self.version = 0
        #: Held by every operation of `LifecycleManager`.
        self.lock = threading.RLock()
        #: By name: `name_1` to the one before this number are taken, so that many agents of one name join quickly.
        self._next_suffix: dict[str, int] = {}
        faults = [*_shape_faults(agents, paused_agents, auto_resume, turn)]
        if not faults:
            faults = [*self._fill(agents or {}, tuple(paused_agents), auto_resume or {})]
        if faults:
            raise ValidationError(faults)

    @property
    def agents(self) -> MutableMapping[str, Any]:
        """Names and brains. A new key is a new agent with an empty state; a deleted one takes its pause along."""
        return _Agents(self)

    @property
    def states(self) -> MutableMapping[str, Any]:
        return _States(self)

    def member(self, name: str) -> Member:
        member = self.members.get(name)
        if member is None:
            raise AgentNotFoundError(f"there is no agent {shown(name)} in this population; look at state.agents")
        return member

    def free_name(self, name: str) -> str:
        """The name itself, or the first of `name_1`, `name_2`, … that is free."""
        if name not in self.members:
            return name
        number = self._next_suffix.get(name, 1)
        while f"{name}_{number}" in self.members:
            number += 1
        self._next_suffix[name] = number
        return f"{name}_{number}"

    def admit(self, name: str, agent: Any, state: Any, number: int | None = None) -> Member:
        """Take in an agent under a free name, without asking the rules."""
        if name in self.members:
            raise InvalidOperationError(f"there is an agent {shown(name)} already; take `free_name`")
        self.last_number = self.last_number + 1 if number is None else max(number, self.last_number)
        member = self.members[name] = Member(name, self.last_number if number is None else number, agent, state)
        self.version += 1
        return member

    def dismiss(self, name: str) -> None:
        """Remove an agent with its pause and its counter."""
        del self.members[name]
        self.paused_agents.discard(name)
        self.auto_resume.pop(name, None)
        base, _, digits = name.rpartition("_")
        if base in self._next_suffix and digits.isdecimal():
            self._next_suffix[base] = min(self._next_suffix[base], max(int(digits), 1))
        self.version += 1

    def active_members(self) -> list[Member]:
        """In the order of joining."""
        paused = self.paused_agents
        if not paused:
            return list(self.members.values())
        return [member for name, member in self.members.items() if name not in paused]

    def _fill(self, agents: Mapping[str, Any], paused: tuple[str, ...], counters: Mapping[str, int]) -> Iterator[Fault]:
        for name, agent in agents.items():
            try:
                self.agents[name] = agent
            except ValidationError as error:
                yield from (fault for fault in error.faults if isinstance(fault, Fault))
        self.paused_agents.update(name for name in paused if name in agents)
        self.auto_resume.update(counters)
        yield from (
            Fault(field="paused_agents", bound=f"must name agents; {shown(name)} is none")
            for name in paused
            if name not in agents
        )
        for name, turns in counters.items():
            if name not in self.paused_agents:
                yield Fault(field="auto_resume", bound=f"must name paused agents; {shown(name)} is none")
            yield from term_faults(f"auto_resume.{name}", turns)


class _Agents(MutableMapping[str, Any]):
    def __init__(self, state: SimulationState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        return self._state.members[name].agent

    def __setitem__(self, name: str, agent: Any) -> None:
        state = self._state
        with state.lock:
            if name in state.members:
                state.members[name].agent = agent
                state.version += 1
                return
            made, faults = state.form.make({}, f"states.{name}")
            faults = (*label_faults("name", name), *faults)
            if faults:
                raise ValidationError(faults)
            state.admit(name, agent, made)

    def __delitem__(self, name: str) -> None:
        with self._state.lock:
            self._state.dismiss(name)

    def __contains__(self, name: object) -> bool:
        return name in self._state.members

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.members)

    def __len__(self) -> int:
        return len(self._state.members)

    def __repr__(self) -> str:
        return repr(dict(self))


class _States(_Agents):
    def __getitem__(self, name: str) -> Any:
        return self._state.members[name].state

    def __setitem__(self, name: str, value: Any) -> None:
        member = self._state.members[name]
        made, faults = self._state.form.make(value, f"states.{name}")
        if faults:
            raise ValidationError(faults)
        member.state = made

    def __delitem__(self, name: str) -> None:
        raise InvalidOperationError(f"an agent has a state as long as it takes part; remove the agent {shown(name)}")


# --- single values -----------------------------------------------------------------------------------


def read_only(state: Any) -> Any:
    """All agents decide on the same state, so a brain must not change it; a model looks after itself."""
    return MappingProxyType(state) if type(state) is dict else state


def label_faults(field: str, name: Any) -> Iterator[Fault]:
    if not isinstance(name, str):
        yield Fault(field=field, bound="must be text", value=shown(name))
    yield from name_faults(field, name)


def term_faults(field: str, turns: Any) -> Iterator[Fault]:
    """A term is an int from 1, and nothing that only compares like one."""
    if type(turns) is not int or not 1 <= turns <= MAX_COUNT:
        yield Fault(field=field, bound=f"must be a whole number from 1 to {MAX_COUNT}", value=shown(turns))


def _shape_faults(agents: Any, paused: Any, counters: Any, turn: Any) -> Iterator[Fault]:
    for field, value in (("agents", agents), ("auto_resume", counters)):
        if value is not None and not isinstance(value, Mapping):
            yield Fault(field=field, bound="must be a mapping with names as keys", value=shown(value))
    if isinstance(paused, str) or not isinstance(paused, Iterable):
        yield Fault(field="paused_agents", bound="must be a set or a list of names", value=shown(paused))
    if type(turn) is not int or not 0 <= turn <= MAX_COUNT:
        yield Fault(field="turn", bound=f"must be a whole number from 0 to {MAX_COUNT}", value=shown(turn))
