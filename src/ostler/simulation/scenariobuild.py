"""From the page of a scenario file to the scenario: its keys are read, its code is found, its parts held together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from ostler.agents import Agent
from ostler.agents.files.checking import checked
from ostler.agents.files.keys import Key
from ostler.agents.files.page import Page, Trail
from ostler.agents.files.tracing import blame_record
from ostler.errors import AgentInitializationError
from ostler.isolation.process.sources import source_of
from ostler.model import Fault, IsolationLevel
from ostler.simulation.brains import Brains, ManagedMaker
from ostler.simulation.engine import Engine, MergeEngine
from ostler.simulation.scenario import AgentGroup, Scenario
from ostler.simulation.scenariocode import CodeError, Shelf
from ostler.simulation.scenariofit import brain_misfit, engine_misfit, has, misfit
from ostler.simulation.scenariokeys import FREE, FREE_OF_GROUP, GROUP, SCENARIO
from ostler.simulation.schema import StateForm
from ostler.simulation.settings import OnFailure, OnIdle, SimulationSettings

_WORDS: Mapping[str, type[OnFailure | OnIdle]] = {"on_error": OnFailure, "on_timeout": OnFailure, "on_idle": OnIdle}


def build_scenario(page: Page, shelf: Shelf, source: Mapping[str, Any], *, begun: bool = False) -> Scenario:
    """What is wrong is blamed on the page, which the caller settles. `begun`: for a run that has a history."""
    draft = _Draft(
        page=page, shelf=shelf, values=_checked(page, SCENARIO, (), (*FREE, GROUP.name)), groups=_groups(page)
    )
    scenario, factories = draft.scenario(source)
    blame_record(page, scenario.validate(), SCENARIO, ())
    blame_record(page, _whole_faults(scenario, factories), SCENARIO, ())
    if not begun:
        blame_record(page, _crowd_faults(scenario), SCENARIO, ())
    return scenario


# --- reading ------------------------------------------------------------------------------------------


def _checked(page: Page, key: Key, trail: Trail, free: tuple[str, ...]) -> dict[str, Any]:
    """What the table can read; of the keys that are free it is only told when they are no tables."""
    whole, here = page.data, page.at(trail)
    if not isinstance(here, Mapping):
        page.blame_value(trail, "must be keys with values")
        return {}
    for name in free:
        if name in here and name != GROUP.name and not isinstance(here[name], Mapping):
            page.blame_value((*trail, name), "must be keys with values; write some, or remove the key")
    page.data = _cut(whole, trail, free)
    try:
        return checked(page, key, trail)
    finally:
        page.data = whole


def _cut(value: Any, trail: Trail, free: tuple[str, ...]) -> Any:
    """The same value without some keys at one place of it."""
    if not trail:
        return {name: inner for name, inner in value.items() if name not in free}
    first, rest = trail[0], trail[1:]
    inner = _cut(value[first], rest, free)
    if isinstance(value, list):
        return [inner if place == first else other for place, other in enumerate(value)]
    return {**value, first: inner}


def _groups(page: Page) -> tuple[AgentGroup, ...]:
    written = page.data.get(GROUP.name, [])
    if not isinstance(written, list):
        page.blame_value((GROUP.name,), "must be a list; in TOML each entry begins with [[agents]]")
        return ()
    return tuple(_group(page, place, one) for place, one in enumerate(written))


def _group(page: Page, place: int, written: Any) -> AgentGroup:
    trail = (GROUP.name, place)
    values = _checked(page, GROUP, trail, FREE_OF_GROUP)
    for name in ("name", "kind"):
        if name not in values and not page.is_blamed((*trail, name)):
            page.blame((*trail, name), "is missing; every entry of agents has one")
    params, state = (
        written[name] if isinstance(written, Mapping) and isinstance(written.get(name), Mapping) else {}
        for name in FREE_OF_GROUP
    )
    return AgentGroup(
        name=values.get("name", "unnamed"),
        kind=values.get("kind", ""),
        count=values.get("count", 1),
        params=params,
        initial_state=state,
    )


# --- building -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    page: Page
    shelf: Shelf
    values: Mapping[str, Any]
    groups: tuple[AgentGroup, ...]

    def scenario(self, source: Mapping[str, Any]) -> tuple[Scenario, Mapping[str, Callable[..., Any]]]:
        page, values = self.page, self.values
        if "name" not in values and not page.is_blamed(("name",)):
            page.blame(("name",), "is missing; a scenario has one")
        settings = dict(values.get("settings", {}))
        for name in settings.keys() & _WORDS.keys():
            settings[name] = _WORDS[name](settings[name])
        given = {name: values[name] for name in ("turns", "seed") if name in values}
        free = {name: page.data[name] for name in FREE if isinstance(page.data.get(name), Mapping)}
        # In the order in which a file has them: code that fails is blamed on the first key that names it.
        engine, schema, factories = self._engine(), self._schema(), self._factories()
        scenario = Scenario(
            name=values.get("name", "unnamed"),
            brains=Brains(factories),
            agents=self.groups,
            settings=SimulationSettings(**settings),
            engine=engine,
            schema=schema,
            source=source,
            **given,
            **free,
        )
        return scenario, factories

    def _factories(self) -> dict[str, Callable[..., Any]]:
        written = self.page.data.get("brains")
        # One that was blamed is there all the same, or its kind would be called unknown too.
        known: dict[str, Callable[..., Any]] = dict.fromkeys(written if isinstance(written, Mapping) else (), _blamed)
        for kind, one in self.values.get("brains", {}).items():
            trail = ("brains", kind)
            made = self._managed(trail, one) if isinstance(one, Mapping) else self._brain(trail, one)
            if made is not None:
                known[kind] = made
        return known

    def _code(self, trail: Trail, target: str) -> Any:
        try:
            return self.shelf.find(target)
        except CodeError as error:
            self.page.blame(trail, f"names {target}, but {error}")
            return None

    def _brain(self, trail: Trail, target: str) -> Callable[..., Any] | None:
        found = self._code(trail, target)
        if found is None:
            return None
        if not callable(found):
            self.page.blame_value(trail, "must name a class, or a function that makes a brain")
            return None
        if unfit := brain_misfit(found):
            self.page.blame(trail, f"names {target}, {unfit}")
            return None
        maker: Callable[..., Any] = found
        return maker

    def _managed(self, trail: Trail, one: Mapping[str, Any]) -> Callable[..., Any] | None:
        if "agent" not in one:
            if not self.page.is_blamed((*trail, "agent")):
                self.page.blame(trail, 'must name its class: agent = "module:Class"')
            return None
        inner = (*trail, "agent")
        found = self._code(inner, one["agent"])
        if found is None:
            return None
        if not (isinstance(found, type) and issubclass(found, Agent)):
            self.page.blame_value(inner, "must name a subclass of ostler.Agent")
            return None
        level = IsolationLevel(one.get("isolation", IsolationLevel.PROCESS))
        unfit = _unfindable(found) if level is IsolationLevel.PROCESS else ""
        if unfit:
            self.page.blame(inner, unfit)
        return ManagedMaker(definition=found, isolation=level)

    def _engine(self) -> Callable[[], Engine]:
        found = self._code(("engine",), self.values["engine"]) if "engine" in self.values else None
        if found is None:
            return MergeEngine
        if not callable(found) or (isinstance(found, type) and not has(found, "update")):
            self.page.blame_value(("engine",), "must name a class with a method `update`, or a function that makes one")
        elif unfit := misfit(found, {}):
            self.page.blame_value(("engine",), f"is made without arguments, but there is {unfit}")
        elif unfit := engine_misfit(found):
            self.page.blame(("engine",), f"names {self.values['engine']}, {unfit}")
        maker: Callable[..., Any] = found
        return maker

    def _schema(self) -> type[pydantic.BaseModel] | None:
        found = self._code(("state",), self.values["state"]) if "state" in self.values else None
        if found is None or (isinstance(found, type) and issubclass(found, pydantic.BaseModel)):
            return found
        self.page.blame_value(("state",), "must name a Pydantic model class")
        return None


def _blamed(**params: Any) -> Any:
    """Stands for a brain that was found wrong. A file with a fault makes no scenario, so nobody calls it."""
    raise AssertionError(params)


def _unfindable(found: type[Agent]) -> str:
    """Why another process would not find this class; empty when it does."""
    if found.__module__ not in sys.modules:
        return f"stands in another module; name it there: {found.__module__}:{found.__qualname__}"
    try:
        source_of(found)
    except AgentInitializationError as error:
        return f"cannot live in a process of its own: {error}"
    return ""


def _whole_faults(scenario: Scenario, factories: Mapping[str, Callable[..., Any]]) -> Iterator[Fault]:
    """What only shows when the parts are seen together."""
    form = StateForm(scenario.schema)
    for place, group in enumerate(scenario.agents):
        yield from form.make(group.initial_state, f"agents.{place}.state")[1]
        factory = factories.get(group.kind)
        if factory is not None and (unfit := misfit(factory, group.params)):
            yield Fault(field=f"agents.{place}.params", bound=f"do not fit the brain {group.kind}: {unfit}")


def _crowd_faults(scenario: Scenario) -> Iterator[Fault]:
    """Whether all have room who are there at the beginning."""
    wanted, most = sum(group.count for group in scenario.agents), scenario.settings.max_agents
    if wanted > most:
        bound = f"are {wanted}, but there may be {most} at a time; raise settings.max_agents, or have fewer"
        yield Fault(field="agents", bound=bound)
