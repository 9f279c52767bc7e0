"""A run before it begins: who takes part, by which rules, for how long."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic

from ostler.errors import ValidationError
from ostler.model import Fault, ValidationResult, shown
from ostler.model.context import MAX_BYTES, json_faults
from ostler.model.record import MAX_COUNT
from ostler.model.simulation import MAX_SCENARIO_BYTES, MAX_SEED
from ostler.model.text import name_faults
from ostler.model.validation import faults_of
from ostler.simulation.brains import Brains
from ostler.simulation.engine import Engine, MergeEngine
from ostler.simulation.schema import StateForm
from ostler.simulation.settings import SimulationSettings


@dataclass(frozen=True, kw_only=True)
class AgentGroup:
    """Some agents of one kind; the second gets the name with `_1`, as every collision does."""

    name: str
    #: An entry of the scenario's brains.
    kind: str
    count: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    initial_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    brains: Brains
    agents: tuple[AgentGroup, ...] = ()
    #: How many turns a run of it has, where nobody says otherwise.
    turns: int = 10
    #: None: that of the settings.
    seed: int | None = None
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    #: Makes the engine; called once for each run.
    engine: Callable[[], Engine] = MergeEngine
    #: The Pydantic model of every agent's state; None: plain dicts.
    schema: type[pydantic.BaseModel] | None = None
    global_state: Mapping[str, Any] = field(default_factory=dict)
    #: Whatever engine and brains want to be told; a fork may have others. None: those of the settings.
    parameters: Mapping[str, Any] | None = None
    #: Where it came from, for whoever resumes it; JSON values.
    source: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Any mapping of brains will do, and any list of groups."""
        if isinstance(self.brains, Mapping):
            object.__setattr__(self, "brains", Brains(self.brains))
        if isinstance(self.agents, list):
            object.__setattr__(self, "agents", tuple(self.agents))

    def settled(self) -> SimulationSettings:
        """The settings of a run, with seed and parameters in them, as JSON gives them back."""
        seed = self.settings.seed if self.seed is None else self.seed
        parameters = self.settings.parameters if self.parameters is None else self.parameters
        return self.settings.evolve(seed=seed, parameters=json.loads(json.dumps(dict(parameters))))

    def validate(self) -> ValidationResult:
        return ValidationResult.failure(self._faults())

    def _faults(self) -> Iterator[Fault]:
        yield from _name_faults("name", self.name)
        yield from _number_faults("turns", self.turns, 1, MAX_COUNT)
        if self.seed is not None:
            yield from _number_faults("seed", self.seed, 0, MAX_SEED)
        yield from _mapping_faults("global_state", self.global_state, MAX_SCENARIO_BYTES)
        if self.parameters is not None:
            yield from _mapping_faults("parameters", self.parameters)
        if self.source is not None:
            yield from _mapping_faults("source", self.source, MAX_SCENARIO_BYTES)
        yield from self._settings_faults()
        yield from _engine_faults(self.engine)
        yield from _schema_faults(self.schema)
        if not isinstance(self.brains, Brains):
            yield Fault(field="brains", bound="must be Brains({...}), or a mapping", value=shown(self.brains))
        if not isinstance(self.agents, tuple):
            yield Fault(field="agents", bound="must be a tuple of AgentGroup(...)", value=shown(self.agents))
            return
        for place, group in enumerate(self.agents):
            if isinstance(group, AgentGroup):
                yield from (fault.under(f"agents.{place}") for fault in self._group_faults(group))
            else:
                yield Fault(field=f"agents.{place}", bound="must be an AgentGroup(...)", value=shown(group))

    def _settings_faults(self) -> Iterator[Fault]:
        settings = self.settings
        if not isinstance(settings, SimulationSettings):
            yield Fault(field="settings", bound="must be SimulationSettings(...)", value=shown(settings))
            return
        yield from (fault.under("settings") for fault in settings.validate())
        for name in ("seed", "parameters"):
            own, other = getattr(self, name), getattr(settings, name)
            if own is not None and other and own != other:
                yield Fault(
                    field=name, bound="must be the same as in the settings; give it in one place", value=shown(own)
                )

    def _group_faults(self, group: AgentGroup) -> Iterator[Fault]:
        yield from _name_faults("name", group.name)
        yield from _number_faults("count", group.count, 1, MAX_COUNT)
        yield from _mapping_faults("params", group.params)
        if not isinstance(group.initial_state, Mapping | pydantic.BaseModel):
            yield Fault(field="initial_state", bound="must be a mapping", value=shown(group.initial_state))
        brains: Any = self.brains
        kind: Any = group.kind
        if isinstance(brains, Brains) and not (isinstance(kind, str) and kind in brains):
            known = ", ".join(sorted(brains)) or "none"
            yield Fault(field="kind", bound=f"must be one of the brains ({known})", value=shown(kind))


def _name_faults(field: str, name: Any) -> Iterator[Fault]:
    if not isinstance(name, str):
        yield Fault(field=field, bound="must be text", value=shown(name))
    yield from name_faults(field, name)


def _number_faults(name: str, value: Any, low: int, high: int) -> Iterator[Fault]:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        yield Fault(field=name, bound=f"must be a whole number from {low} to {high}", value=shown(value))


def _mapping_faults(name: str, value: Any, limit: int = MAX_BYTES) -> Iterator[Fault]:
    if not isinstance(value, Mapping):
        yield Fault(field=name, bound="must be a mapping", value=shown(value))
    yield from json_faults(name, value, limit)


def _engine_faults(engine: Any) -> Iterator[Fault]:
    made = isinstance(engine, type) and not callable(getattr(engine, "update", None))
    if made or not callable(engine):
        bound = "must be a class with a method `update`, or a function that makes the engine, as in `lambda: engine`"
        yield Fault(field="engine", bound=bound, value=shown(engine))


def _schema_faults(schema: Any) -> Iterator[Fault]:
    try:
        StateForm(schema)
    except ValidationError as error:
        yield from faults_of(error)
