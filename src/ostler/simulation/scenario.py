"""A run before it begins: who takes part, by which rules, for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any

import pydantic
from pydantic_core import from_json

from ostler.errors import ValidationError
from ostler.model.context import json_faults
from ostler.model.record import Record, record
from ostler.model.simulation import MAX_SCENARIO_BYTES, SimulationSettings
from ostler.model.text import name_faults
from ostler.model.types import MAX_COUNT, Interval
from ostler.model.validation import Fault, shown
from ostler.simulation.brains import Brains
from ostler.simulation.schema import StateForm, write_json
from ostler.simulation.view import MergeEngine

Count = Annotated[int, Interval(ge=1, le=MAX_COUNT)]


@record
class AgentGroup(Record):
    """Some agents of one kind; the second gets the name with `_1` behind it."""

    name: str
    #: One of the scenario's brains.
    kind: str
    count: Count = 1
    #: What their brains are made with.
    params: Mapping[str, Any] = field(default_factory=dict)
    #: Checked when the agents join: a schema may take it for something else than JSON.
    initial_state: pydantic.SkipValidation[Mapping[str, Any]] = field(default_factory=dict)

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from json_faults("params", self.params)


@record
class Scenario(Record):
    """Constructing one never raises; `checked()` raises with every fault."""

    name: str
    #: `Brains`, or a mapping from kinds to classes or functions that make a brain.
    brains: Any = field(default_factory=Brains)
    agents: tuple[AgentGroup, ...] = ()
    #: How many turns a run has.
    turns: Count = 10
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    #: Makes the engine, once for each run.
    engine: pydantic.SkipValidation[Callable[[], Any]] = MergeEngine
    #: The Pydantic model of every state; None: plain dicts.
    schema: pydantic.SkipValidation[type[pydantic.BaseModel] | None] = None
    global_state: Mapping[str, Any] = field(default_factory=dict)
    #: Where it came from, to resume a run from; JSON values.
    source: Mapping[str, Any] | None = None

    def checked(self) -> Scenario:
        """A copy whose values are what a resumed run reads; raises `ValidationError` with every fault."""
        checked = Record.checked(self)
        brains = self.brains if isinstance(self.brains, Brains) else Brains(self.brains)
        return checked.evolve(brains=brains, global_state=from_json(write_json(dict(self.global_state))))

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from json_faults("global_state", self.global_state, MAX_SCENARIO_BYTES)
        yield from json_faults("source", self.source, MAX_SCENARIO_BYTES)
        is_other_class = isinstance(self.engine, type) and not callable(getattr(self.engine, "update", None))
        if is_other_class or not callable(self.engine):
            bound = "must be a class with a method `update`, or a function that makes the engine"
            yield Fault(field="engine", bound=bound, value=shown(self.engine))
        yield from _faults_of(lambda: StateForm(self.schema))
        if isinstance(self.brains, Mapping):
            yield from _faults_of(lambda: Brains(self.brains))
        elif not isinstance(self.brains, Brains):
            yield Fault(field="brains", bound="must be Brains({...}), or a mapping", value=shown(self.brains))
            return
        kinds = sorted(map(str, self.brains))
        for place, group in enumerate(self.agents):
            yield from (fault.under(f"agents.{place}") for fault in group.rules())
            if group.kind not in kinds:
                bound = f"must be one of the brains ({', '.join(kinds) or 'none'})"
                yield Fault(field=f"agents.{place}.kind", bound=bound, value=shown(group.kind))


def _faults_of(make: Callable[[], object]) -> Iterator[Fault]:
    try:
        make()
    except ValidationError as error:
        yield from (fault for fault in error.faults if isinstance(fault, Fault))
