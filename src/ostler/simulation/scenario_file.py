"""A scenario from a file, TOML or YAML: every fault at once, each with its line."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic_core import from_json

from ostler.agents.base import Agent
from ostler.definitions.load import Page, read_text
from ostler.definitions.parse import Document, UnreadableError, read_toml, read_yaml
from ostler.errors import (
    AgentInitializationError,
    DefinitionError,
    FaultLike,
    InvalidOperationError,
    ValidationError,
)
from ostler.isolation.process.sources import source_of
from ostler.model.context import json_faults
from ostler.model.record import Record, record
from ostler.model.simulation import MAX_SEED, SimulationRun, SimulationSettings
from ostler.model.states import IsolationLevel
from ostler.model.types import MAX_COUNT, Interval
from ostler.model.validation import Fault, shown
from ostler.simulation.brains import Brains, ManagedKind
from ostler.simulation.scenario import AgentGroup, Scenario
from ostler.simulation.scenario_code import CodeError, CodeLoader
from ostler.simulation.schema import StateForm, write_json
from ostler.simulation.view import MergeEngine

_KINDS = (".toml", ".yaml", ".yml")
_LEVELS = (IsolationLevel.NONE, IsolationLevel.THREAD, IsolationLevel.PROCESS)
_Count = Annotated[int, Interval(ge=1, le=MAX_COUNT)]
_Table = Mapping[str, Any]


@record
class _Group(Record):
    name: str
    kind: str
    count: _Count = 1
    params: _Table = field(default_factory=dict)
    state: _Table = field(default_factory=dict)


@record
class _File(Record):
    """The keys of a scenario file."""

    name: str
    turns: _Count = 10
    seed: Annotated[int, Interval(ge=0, le=MAX_SEED)] = 0
    engine: str | None = None
    state: str | None = None
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    parameters: _Table = field(default_factory=dict)
    global_state: _Table = field(default_factory=dict)
    brains: _Table = field(default_factory=dict)
    agents: tuple[_Group, ...] = ()


# --- loading -----------------------------------------------------------------------------------------


def load_scenario(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Read a scenario; raises one `DefinitionError` with every fault.

    `overrides` puts other values at dotted keys: `{"parameters.tax": 0.2, "agents.0.count": 5, "seed": 3}`.
    """
    page = Page(str(path))
    return _load(page, _source(page, path), overrides or {}, begun=False)


def scenario_of_run(
    run: SimulationRun, *, file: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Scenario:
    """The scenario with which a run began; its code is read from where it stands.

    `file` says where the scenario stands now: its own text counts then, with the overrides of the run.
    """
    source = run.scenario
    if source is None or "text" not in source:
        raise InvalidOperationError(
            f"run {run.run_id} was begun by a program, not from a scenario file; resume it by that program"
        )
    page = Page(str(source["path"] if file is None else file))
    found = source if file is None else _source(page, file)
    return _load(page, found, {**(source.get("overrides") or {}), **(overrides or {})}, begun=True)


def _source(page: Page, path: str | Path) -> dict[str, Any]:
    whole = Path(path).absolute()
    if whole.suffix.lower() not in _KINDS:
        page.stop(0, f"is not taken for a scenario; give a file whose name ends in {', '.join(_KINDS)}")
    kind = "toml" if whole.suffix.lower() == ".toml" else "yaml"
    return {"path": str(whole), "kind": kind, "text": read_text(page, whole)}


def _load(page: Page, source: Mapping[str, Any], overrides: Mapping[str, Any], *, begun: bool) -> Scenario:
    """`begun`: for a run that has a history; whether its agents are too many is for its state to say."""
    for one in json_faults("overrides", overrides):
        page.stop(0, one.message)
    overrides = from_json(write_json(dict(overrides)))
    written = page.read(read_toml if source["kind"] == "toml" else _read_yaml, source["text"])
    builder = _Builder(written, overrides, Path(source["path"]).parent)
    scenario = builder.build({**source, "overrides": overrides}, begun=begun)
    beside, faults = Page("override"), list[FaultLike]()  # what was given beside the file stands in none of its lines
    for fault in builder.faults:
        (beside if _is_override(fault.field, overrides, written) else page).blame([fault])
    for one_page in (page, beside):
        try:
            one_page.settle()
        except DefinitionError as error:
            faults += error.faults
    if faults:
        raise DefinitionError(faults)
    return scenario


def _read_yaml(text: str) -> Document:
    try:
        return read_yaml(text)
    except UnreadableError as error:  # that reader speaks of front matter; here it is the whole file
        raise UnreadableError(error.line, error.sentence.replace("the front matter", "the file")) from error


def _is_override(key: str, overrides: Iterable[str], written: Any) -> bool:
    if any(f"{key}.".startswith(f"{one}.") for one in overrides):
        return True
    for part in key.split("."):
        if isinstance(written, list) and part.isdigit() and int(part) < len(written):
            written = written[int(part)]
        elif isinstance(written, Mapping) and part in written:
            written = written[part]
        else:
            return any(one.startswith(f"{key}.") for one in overrides)
    return False


def put_at(data: Any, key: str, value: Any) -> None:
    """Put a value at a dotted key; mappings on the way are made, entries of lists must exist."""
    *way, last = key.split(".")
    for part in way:
        data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
    data[int(last) if isinstance(data, list) else last] = value


# --- building ----------------------------------------------------------------------------------------


class _Builder:
    """Looks at everything although something was wrong before, so that all faults come at once."""

    def __init__(self, written: Mapping[str, Any], overrides: Mapping[str, Any], directory: Path) -> None:
        self.faults: list[Fault] = []
        self._data: Any = from_json(write_json(written))
        self._code = CodeLoader(directory)
        parameters = written.get("parameters")
        for key, value in overrides.items():
            room, _, name = key.partition(".")
            if room == "parameters" and (why := _unknown(name.partition(".")[0], parameters)):
                self._blame(key, why)
                continue
            try:
                put_at(self._data, key, value)
            except (AttributeError, LookupError, TypeError, ValueError):
                self._blame(key, "cannot be set: what it stands in has no such place")

    def build(self, source: Mapping[str, Any], *, begun: bool) -> Scenario:
        file = _File(name="unnamed")
        try:
            file = _File.from_dict(self._data)
        except ValidationError as error:
            self._take(one for one in error.faults if isinstance(one, Fault))
        given = self._data.get("settings")
        for name in ("seed", "parameters"):
            if isinstance(given, Mapping) and name in given:
                self._blame(f"settings.{name}", f"must stand at the top of the file: {name} = …")
        # In the order of a file: code that fails is blamed on the first key that names it.
        engine, schema, brains = self._engine(), self._schema(), self._brains()
        self._check_groups(schema, brains)
        scenario = Scenario(
            name=file.name,
            brains=Brains(brains),
            agents=tuple(
                AgentGroup(name=one.name, kind=one.kind, count=one.count, params=one.params, initial_state=one.state)
                for one in file.agents
            ),
            turns=file.turns,
            settings=file.settings.evolve(seed=file.seed, parameters=file.parameters),
            engine=engine,
            schema=schema,
            global_state=file.global_state,
            source=source,
        )
        self._take(scenario.faults())
        wanted, most = sum(group.count for group in scenario.agents), scenario.settings.max_agents
        if wanted > most and not begun:
            advice = "raise settings.max_agents, or have fewer"
            self._blame("agents", f"are {wanted}, but there may be {most} at a time; {advice}")
        return scenario

    def _take(self, faults: Iterable[Fault]) -> None:
        for one in faults:
            key = one.field.replace("initial_state", "state").replace("settings.parameters", "parameters")
            self._blame(key, one.bound, one.value)

    def _blame(self, key: str, bound: str, value: str = "") -> None:
        """Unless this key, or what stands in or around it, was blamed already."""
        known = [f"{one.field}." for one in self.faults]
        if not any(f"{key}.".startswith(one) or one.startswith(f"{key}.") for one in known):
            self.faults.append(Fault(field=key, bound=bound, value=value))

    def _find(self, key: str, target: Any) -> Any:
        try:
            return None if target is None else self._code.find(target)
        except CodeError as error:
            self._blame(key, f"names {target}, but {error}")
            return None

    def _engine(self) -> Callable[[], Any]:
        target = self._data.get("engine")
        found = self._find("engine", target)
        if found is None:
            return MergeEngine
        if not callable(found) or (isinstance(found, type) and not hasattr(found, "update")):
            bound = "must name a class with a method `update`, or a function that makes one"
            self._blame("engine", bound, shown(target))
        maker: Callable[[], Any] = found
        return maker

    def _schema(self) -> type[pydantic.BaseModel] | None:
        target = self._data.get("state")
        found = self._find("state", target)
        if found is None or (isinstance(found, type) and issubclass(found, pydantic.BaseModel)):
            return found
        self._blame("state", "must name a Pydantic model class", shown(target))
        return None

    def _brains(self) -> dict[str, Callable[..., Any]]:
        written = self._data.get("brains")
        # One that was blamed is there all the same, or its kind would be called unknown too.
        entries = written.items() if isinstance(written, Mapping) else ()
        return {name: self._brain(f"brains.{name}", one) or MergeEngine for name, one in entries}

    def _brain(self, key: str, written: Any) -> Callable[..., Any] | None:
        if isinstance(written, Mapping):
            return self._managed(key, written)
        found = self._find(key, written)
        if found is None:
            return None
        if not callable(found):
            self._blame(key, "must name a class, or a function that makes a brain", shown(written))
        elif isinstance(found, type) and not (
            issubclass(found, Agent) or any(hasattr(one, "decide") or "__call__" in vars(one) for one in found.__mro__)
        ):
            self._blame(key, "must name a class with a method `decide`; write one", shown(written))
        maker: Callable[..., Any] = found
        return maker

    def _managed(self, key: str, written: Mapping[str, Any]) -> Callable[..., Any] | None:
        for name in written.keys() - {"agent", "isolation"}:
            self._blame(f"{key}.{name}", "is not known; there are agent and isolation")
        if "agent" not in written:
            self._blame(key, 'must name its class: agent = "module:Class"')
            return None
        level = written.get("isolation", IsolationLevel.PROCESS)
        if level not in _LEVELS:
            self._blame(f"{key}.isolation", f"must be one of {', '.join(_LEVELS)}", shown(level))
        found = self._find(f"{key}.agent", written["agent"])
        if found is None:
            return None
        if not (isinstance(found, type) and issubclass(found, Agent)):
            self._blame(f"{key}.agent", "must name a subclass of ostler.Agent", shown(written["agent"]))
        elif level == IsolationLevel.PROCESS:
            try:
                source_of(found)
            except AgentInitializationError as error:
                self._blame(f"{key}.agent", f"cannot run in a process of its own: {error}")
        return ManagedKind(found, level)

    def _check_groups(self, schema: Any, brains: Mapping[str, Callable[..., Any]]) -> None:
        """What only shows when the parts are seen together."""
        written = self._data.get("agents")
        form = StateForm(schema)
        for place, one in enumerate(written if isinstance(written, list) else ()):
            if not isinstance(one, Mapping):
                continue
            kind, params, state = one.get("kind"), one.get("params", {}), one.get("state", {})
            if isinstance(state, Mapping):
                self._take(form.make(state, f"agents.{place}.state")[1])
            if isinstance(kind, str) and kind not in brains:
                bound = f"must be one of the brains ({', '.join(sorted(brains)) or 'none'})"
                self._blame(f"agents.{place}.kind", bound, shown(kind))
            maker = brains.get(str(kind), MergeEngine)
            if maker is not MergeEngine and isinstance(params, Mapping) and (why := _misfit(maker, params)):
                self._blame(f"agents.{place}.params", f"do not fit the brain {kind}: {why}")


def _unknown(name: str, parameters: Any) -> str:
    """Why this cannot be set: a misspelt parameter would be one that no code reads. Empty when it can."""
    if not name or not isinstance(parameters, Mapping) or not parameters or name in parameters:
        return ""
    close = difflib.get_close_matches(name, parameters, n=1)
    meant = f"did you mean parameters.{close[0]}? If not" if close else "if it is one"
    return f"is not among the parameters; {meant}, write it into the file first"


def _misfit(maker: Callable[..., Any], params: Mapping[str, Any]) -> str:
    """Why it cannot be called with these; empty when it can, or when that cannot be told."""
    try:
        inspect.signature(maker).bind(**params)
    except TypeError as error:
        return str(error)
    except ValueError:
        return ""
    return ""
