"""A run before it begins: who takes part, by which rules, for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pydantic
from pydantic_core import from_json

from ostler.errors import ValidationError
from ostler.model.context import MAX_BYTES, json_faults
from ostler.model.simulation import MAX_SCENARIO_BYTES, SimulationSettings
from ostler.model.types import MAX_COUNT
from ostler.model.validation import Fault, shown
from ostler.simulation.brains import Brains
from ostler.simulation.schema import StateForm, write_json
from ostler.simulation.state import label_faults
from ostler.simulation.view import MergeEngine


@dataclass(frozen=True, kw_only=True)
class AgentGroup:
    """Some agents of one kind; the second gets the name with `_1` behind it."""

    name: str
    #: One of the scenario's brains.
    kind: str
    count: int = 1
    #: What their brains are made with.
    params: Mapping[str, Any] = field(default_factory=dict)
    initial_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Constructing one never raises; `checked()` raises with every fault."""

    name: str
    #: `Brains`, or a mapping from kinds to classes or functions that make a brain.
    brains: Any = field(default_factory=Brains)
    agents: tuple[AgentGroup, ...] = ()
    #: How many turns a run has.
    turns: int = 10
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    #: Makes the engine, once for each run.
    engine: Callable[[], Any] = MergeEngine
    #: The Pydantic model of every state; None: plain dicts.
    schema: type[pydantic.BaseModel] | None = None
    global_state: Mapping[str, Any] = field(default_factory=dict)
    #: Where it came from, to resume a run from; JSON values.
    source: Mapping[str, Any] | None = None

    def checked(self) -> Scenario:
        """A copy whose values are what a resumed run reads; raises `ValidationError` with every fault."""
        faults = tuple(self.faults())
        if faults:
            raise ValidationError(faults)
        return replace(
            self,
            brains=self.brains if isinstance(self.brains, Brains) else Brains(self.brains),
            agents=tuple(self.agents),
            settings=self.settings.checked(),
            global_state=from_json(write_json(dict(self.global_state))),
        )

    def faults(self) -> Iterator[Fault]:
        yield from label_faults("name", self.name)
        yield from _number_faults("turns", self.turns)
        yield from _mapping_faults("global_state", self.global_state, MAX_SCENARIO_BYTES)
        if self.source is not None:
            yield from _mapping_faults("source", self.source, MAX_SCENARIO_BYTES)
        if isinstance(self.settings, SimulationSettings):
            yield from (fault.under("settings") for fault in self.settings.validate())
        else:
            yield Fault(field="settings", bound="must be SimulationSettings(...)", value=shown(self.settings))
        made = isinstance(self.engine, type) and not callable(getattr(self.engine, "update", None))
        if made or not callable(self.engine):
            bound = "must be a class with a method `update`, or a function that makes the engine"
            yield Fault(field="engine", bound=bound, value=shown(self.engine))
        yield from _faults_of(lambda: StateForm(self.schema))
        if not isinstance(self.brains, Brains | Mapping):
            yield Fault(field="brains", bound="must be Brains({...}), or a mapping", value=shown(self.brains))
        elif isinstance(self.brains, Mapping):
            yield from _faults_of(lambda: Brains(self.brains))
        if not isinstance(self.agents, tuple | list):
            yield Fault(field="agents", bound="must be a list of AgentGroup(...)", value=shown(self.agents))
            return
        for place, group in enumerate(self.agents):
            if isinstance(group, AgentGroup):
                yield from (fault.under(f"agents.{place}") for fault in self._group_faults(group))
            else:
                yield Fault(field=f"agents.{place}", bound="must be an AgentGroup(...)", value=shown(group))

    def _group_faults(self, group: AgentGroup) -> Iterator[Fault]:
        yield from label_faults("name", group.name)
        yield from _number_faults("count", group.count)
        yield from _mapping_faults("params", group.params)
        if not isinstance(group.initial_state, Mapping | pydantic.BaseModel):
            yield Fault(field="initial_state", bound="must be a mapping", value=shown(group.initial_state))
        if isinstance(self.brains, Brains | Mapping) and group.kind not in list(self.brains):
            kinds = ", ".join(sorted(map(str, self.brains))) or "none"
            yield Fault(field="kind", bound=f"must be one of the brains ({kinds})", value=shown(group.kind))


def _number_faults(name: str, value: Any) -> Iterator[Fault]:
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        yield Fault(field=name, bound=f"must be a whole number from 1 to {MAX_COUNT}", value=shown(value))


def _mapping_faults(name: str, value: Any, limit: int = MAX_BYTES) -> Iterator[Fault]:
    if not isinstance(value, Mapping):
        yield Fault(field=name, bound="must be a mapping", value=shown(value))
    yield from json_faults(name, value, limit)


def _faults_of(make: Callable[[], object]) -> Iterator[Fault]:
    try:
        make()
    except ValidationError as error:
        yield from (fault for fault in error.faults if isinstance(fault, Fault))
