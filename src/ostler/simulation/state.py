"""The state of a simulation: the one truth about who there is, who is paused, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pydantic

from ostler.errors import OstlerError, ValidationError
from ostler.model import Fault, shown
from ostler.model.record import MAX_COUNT
from ostler.model.validation import faults_of
from ostler.simulation.book import Book
from ostler.simulation.schema import StateForm
from ostler.simulation.sights import Agents, AutoResume, PausedAgents, States, paused_fault


class SimulationState(Book):
    """`agents`, `paused_agents` and `auto_resume` are three sights of one book: writing through one of them keeps the
    others right.
    """

    def __init__(
        self,
        *,
        agents: Mapping[str, Any] | None = None,
        paused_agents: Iterable[str] = (),
        auto_resume: Mapping[str, int] | None = None,
        turn: int = 0,
        global_state: Any = None,
        schema: type[pydantic.BaseModel] | None = None,
    ) -> None:
        super().__init__(StateForm(schema))
        #: The last complete turn, or the one that is being played.
        self.turn = turn
        #: What all agents share; the engine keeps it.
        self.global_state: Any = {} if global_state is None else global_state
        given = {"agents": agents or {}, "paused_agents": paused_agents, "auto_resume": auto_resume or {}}
        faults = (*_turn_faults(turn), *_shape_faults(given))
        faults = faults or tuple(self._take_over(agents or {}, tuple(paused_agents), auto_resume or {}))
        if faults:
            raise ValidationError(faults)

    def _take_over(
        self, agents: Mapping[str, Any], paused: tuple[str, ...], counters: Mapping[str, int]
    ) -> Iterator[Fault]:
        """Put in what was given, and tell all that does not go together."""
        for name, agent in agents.items():
            try:
                self.agents[name] = agent
            except ValidationError as error:
                yield from faults_of(error)
        for name in paused:
            if name in self.members:
                self.pause(name, None)
            elif name not in agents:
                yield paused_fault(name)
        for name, turns in counters.items():
            if name in agents and name not in self.members:
                continue
            try:
                self.auto_resume[name] = turns
            except OstlerError as error:
                yield Fault(field="auto_resume", bound=f"does not fit: {error}")

    @property
    def agents(self) -> Agents:
        """Names and brains, in the order of coming."""
        return Agents(self)

    @property
    def states(self) -> States:
        """Names and states, in the same order."""
        return States(self)

    @property
    def paused_agents(self) -> PausedAgents:
        return PausedAgents(self)

    @paused_agents.setter
    def paused_agents(self, names: Iterable[str]) -> None:
        PausedAgents(self).replace(names)

    @property
    def auto_resume(self) -> AutoResume:
        """For those that will go on by themselves, the turns that are left."""
        return AutoResume(self)

    @auto_resume.setter
    def auto_resume(self, counters: Mapping[str, int]) -> None:
        AutoResume(self).replace(counters)


def _turn_faults(turn: Any) -> Iterator[Fault]:
    if isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn <= MAX_COUNT:
        yield Fault(field="turn", bound=f"must be a whole number from 0 to {MAX_COUNT}", value=shown(turn))


def _shape_faults(given: Mapping[str, Any]) -> Iterator[Fault]:
    for field in ("agents", "auto_resume"):
        if not isinstance(given[field], Mapping):
            yield Fault(field=field, bound="must be a mapping with names as keys", value=shown(given[field]))
    names = given["paused_agents"]
    if isinstance(names, str) or not isinstance(names, Iterable):
        yield Fault(field="paused_agents", bound="must be a set or a list of names", value=shown(names))
