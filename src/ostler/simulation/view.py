"""The arguments of brains and engines: views, the world, decisions; and the requests that agents make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from functools import cached_property
from random import Random
from types import MappingProxyType
from typing import Any, Protocol

from pydantic import BaseModel

from ostler.errors import InvalidOperationError
from ostler.model.record import Record, record
from ostler.simulation.brains import Call
from ostler.simulation.schema import ordered_json
from ostler.simulation.state import Member, SimulationState, read_only

#: In a larger population a managed brain does not get all names each time.
MAX_NAMES = 1000


# --- requests ----------------------------------------------------------------------------------------


class Operation(StrEnum):
    ADD = "add_agent"
    REMOVE = "remove_agent"
    PAUSE = "pause_agent"
    RESUME = "resume_agent"


@record
class LifecycleRequest(Record):
    """What an agent asks for; checked and carried out at the end of the turn."""

    operation: Operation
    #: None: the agent that asks.
    agent_name: Any = None
    #: The number that had the name when the request was made; None: no agent had it.
    number: int | None = None
    auto_resume_turns: Any = None
    #: Of an addition: the brain, or the kind by which it is made.
    agent: Any = None
    kind: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    initial_state: Any = field(default_factory=dict)


@record
class _Answer(Record):
    """The answer of an `ostler.Agent` that asks for something."""

    decision: Any = None
    requests: tuple[LifecycleRequest, ...]


# --- the world and its views -------------------------------------------------------------------------


class World:
    """What all agents of a run share; the engine is given it too."""

    def __init__(self, state: SimulationState, seed: int = 0, parameters: Mapping[str, Any] | None = None) -> None:
        self.state = state
        self.seed = seed
        self.parameters: Mapping[str, Any] = MappingProxyType(dict(parameters or {}))
        #: Requests of this turn, each with the view that made it.
        self.requests: list[tuple[AgentView, LifecycleRequest]] = []
        #: False: no agent is being asked, so requests are refused.
        self.listening = False
        self._random: dict[int, Random] = {}
        self._names: tuple[int, tuple[str, ...]] = (-1, ())

    @property
    def turn(self) -> int:
        return self.state.turn

    @property
    def names(self) -> tuple[str, ...]:
        """All agents in the order of joining, the paused included."""
        version, names = self._names
        if version != self.state.version:
            version, names = self._names = (self.state.version, tuple(self.state.members))
        return names

    def chance(self, *who: object) -> Random:
        """Random numbers by seed, turn and `who` alone, so that a resumed run draws the same."""
        return Random(f"world/{self.seed}/{self.state.turn}/{who!r}")  # noqa: S311 - repeatable on purpose

    def begin_turn(self) -> None:
        self.requests = []
        self._random = {}
        self.listening = True

    def agent_seed(self, number: int) -> str:
        return f"agent/{self.seed}/{self.state.turn}/{number}"

    def agent_random(self, number: int) -> Random:
        random = self._random.get(number)
        if random is None:
            random = self._random[number] = Random(self.agent_seed(number))  # noqa: S311 - repeatable on purpose
        return random


class AgentView:
    """What a brain is asked with. States are read here, and changed by the engine alone."""

    __slots__ = ("_member", "agent", "call", "closed", "is_async", "state", "world")
    #: Its own state: a read-only mapping (`dict(view.state)` is a copy), or the model.
    state: Any

    def __init__(self, member: Member, world: World, call: Call, *, is_async: bool) -> None:
        self._member = member
        self.world = world
        #: The brain, and how it is called with this view.
        self.agent = member.agent
        self.call = call
        self.is_async = is_async
        self.show(member.state)
        member.view = self
        #: True: the call was abandoned, and its requests are refused.
        self.closed = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state":
            raise AttributeError("a brain decides, and the engine changes states; return what is to change")
        object.__setattr__(self, name, value)

    def show(self, state: Any) -> None:
        """Called by the member when its state is exchanged."""
        object.__setattr__(self, "state", read_only(state))

    @property
    def name(self) -> str:
        return self._member.name

    @property
    def number(self) -> int:
        return self._member.number

    @property
    def turn(self) -> int:
        return self.world.state.turn

    @property
    def global_state(self) -> Any:
        return read_only(self.world.state.global_state)

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.world.parameters

    @property
    def names(self) -> tuple[str, ...]:
        """All agents in the order of joining, the paused included."""
        return self.world.names

    @property
    def random(self) -> Random:
        """Random numbers of this agent in this turn: the same in every run with the seed."""
        return self.world.agent_random(self.number)

    def state_of(self, name: str) -> Any:
        return read_only(self.world.state.member(name).state)

    def as_request(self) -> dict[str, Any]:
        """The same as JSON values, for an `ostler.Agent`."""
        return {
            "name": self.name,
            "number": self.number,
            "turn": self.turn,
            "seed": self.world.agent_seed(self.number),
            "state": _as_json(self._member.state),
            "global_state": _as_json(self.world.state.global_state),
            "parameters": dict(self.parameters),
            "names": list(self.names) if len(self.names) <= MAX_NAMES else None,
        }

    def take_answer(self, answer: Any) -> Any:
        """The decision in the answer of an `ostler.Agent`, which may be `{"decision": …, "requests": […]}`."""
        if not (isinstance(answer, dict) and "requests" in answer and answer.keys() <= {"decision", "requests"}):
            return answer
        reply = _Answer.from_dict(answer)
        for request in reply.requests:
            self._ask(request)
        return reply.decision

    # --- requests, carried out at the end of the turn ---------------------------------------------

    def add_agent(
        self,
        name: str,
        agent: Any = None,
        initial_state: Mapping[str, Any] | None = None,
        *,
        kind: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask for another agent, by its brain or by the kind that makes it."""
        more = {"agent": agent, "kind": kind, "params": params or {}, "initial_state": initial_state or {}}
        self._ask(LifecycleRequest(operation=Operation.ADD, agent_name=name, **more))

    def remove_agent(self, name: str | None = None) -> None:
        """Without a name: itself."""
        self._ask(LifecycleRequest(operation=Operation.REMOVE, agent_name=name))

    def pause_agent(self, name: str | None = None, auto_resume_turns: int | None = None) -> None:
        """Without a name: itself. It is asked again in the turn that comes `auto_resume_turns` after this one."""
        self._ask(LifecycleRequest(operation=Operation.PAUSE, agent_name=name, auto_resume_turns=auto_resume_turns))

    def resume_agent(self, name: str) -> None:
        self._ask(LifecycleRequest(operation=Operation.RESUME, agent_name=name))

    def _ask(self, request: LifecycleRequest) -> None:
        world = self.world
        if self.closed or not world.listening:
            raise InvalidOperationError(f"the turn of {self.name} is over; a request is not heard now")
        name = self.name if request.agent_name is None else request.agent_name
        member = world.state.members.get(name) if isinstance(name, str) else None
        number = None if member is None else member.number
        world.requests.append((self, request.evolve(agent_name=name, number=number)))


def _as_json(state: Any) -> Any:
    return ordered_json(state) if isinstance(state, BaseModel) else state


# --- decisions and engines ---------------------------------------------------------------------------


class Decisions(Mapping[str, Any]):
    """Who decided what, in the order of joining. Agents that failed in this turn are not in it."""

    def __init__(self, members: Sequence[Member] = (), values: Sequence[Any] = ()) -> None:
        self.members = members
        self.values_in_order = values

    def pairs(self) -> Iterator[tuple[Member, Any]]:
        """Members and decisions; the fastest way through many."""
        return zip(self.members, self.values_in_order, strict=True)

    @cached_property
    def _by_name(self) -> dict[str, Any]:
        return {member.name: value for member, value in self.pairs()}

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return repr(self._by_name)


class Engine(Protocol):
    """Works the decisions of a turn into the states and the global state. `update` may be `async def`.

    It returns None, or names with the reason why the decision could not be used; these agents have failed. Who takes
    part is changed by requests, not by the engine. An engine that keeps something has `save` and `restore`, as a brain.
    """

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> Mapping[str, str] | None: ...


class MergeEngine:
    """The default: a decision that is a mapping is merged into the state of its agent."""

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> Mapping[str, str]:
        del world
        refused: dict[str, str] = {}
        for member, decision in decisions.pairs():
            if isinstance(decision, Mapping):
                made, faults = state.form.make({**dict(member.state), **decision}, "state")
                if faults:
                    refused[member.name] = "; ".join(fault.message for fault in faults)
                else:
                    member.state = made
        return refused
