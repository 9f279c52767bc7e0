"""A scenario from a file, TOML or YAML: every fault at once, each with its line."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic_core import from_json

from ostler.agents.base import Agent
from ostler.agents.files.page import FileFault, Page, Trail, dotted, read_text
from ostler.agents.files.tomltext import read_toml
from ostler.agents.files.yamltext import read_yaml
from ostler.errors import AgentInitializationError, DefinitionError, InvalidOperationError, ValidationError
from ostler.isolation.process.sources import source_of
from ostler.model.context import json_faults
from ostler.model.faults import Fault, shown
from ostler.model.record import Record, record
from ostler.model.simulation import MAX_SEED, SimulationRun, SimulationSettings
from ostler.model.states import IsolationLevel
from ostler.model.types import MAX_COUNT, Interval
from ostler.simulation.brains import Brains, ManagedKind
from ostler.simulation.scenario import AgentGroup, Scenario
from ostler.simulation.scenario_code import CodeError, CodeLoader
from ostler.simulation.schema import StateForm, write_json
from ostler.simulation.view import MergeEngine

_KINDS = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
_OVERRIDE = "override"
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
    return _load(page, {**_source(page, path), "overrides": overrides or {}}, begun=False)


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
    changed = {**(source.get("overrides") or {}), **(overrides or {})}
    page = Page(str(source["path"] if file is None else file))
    found = source if file is None else _source(page, file)
    return _load(page, {**found, "overrides": changed}, begun=True)


def _source(page: Page, path: str | Path) -> dict[str, Any]:
    whole = Path(path).absolute()
    kind = _KINDS.get(whole.suffix.lower())
    if kind is None:
        page.stop(0, f"is not taken for a scenario; give a file whose name ends in {', '.join(_KINDS)}")
    return {"path": str(whole), "kind": kind, "text": read_text(page, whole)[0]}


def _load(page: Page, source: dict[str, Any], *, begun: bool) -> Scenario:
    """`begun`: for a run that has a history; whether its agents are too many is for its state to say."""
    for one in json_faults("overrides", source["overrides"]):
        page.stop(0, one.message)
    source["overrides"] = overrides = from_json(write_json(dict(source["overrides"])))
    if source["kind"] == "toml":
        read_toml(page, source["text"])
    else:
        _read_yaml(page, source["text"])
    _override(page, overrides)
    scenario = _Builder(page, Path(source["path"]).parent).build(source, begun=begun)
    written = frozenset(map(dotted, page.lines))
    page.faults[:] = [_placed(one, overrides, written) for one in page.faults]
    page.settle()
    return scenario


def _read_yaml(page: Page, text: str) -> None:
    try:
        read_yaml(page, text, 1)
    except DefinitionError as error:  # that reader speaks of front matter; here it is the whole file
        faults = [one for one in error.faults if isinstance(one, FileFault)]
        raise DefinitionError(
            [replace(one, bound=one.bound.replace("the front matter", "the file")) for one in faults]
        ) from None


# --- overrides ---------------------------------------------------------------------------------------


def _override(page: Page, overrides: Mapping[str, Any]) -> None:
    data: Any = from_json(write_json(page.data))
    parameters = page.data.get("parameters")
    for key, value in overrides.items():
        trail: Trail = tuple(key.split("."))
        if trail[0] == "parameters" and len(trail) > 1 and (why := _unknown(str(trail[1]), parameters)):
            page.blame(trail, why)
            continue
        try:
            put_at(data, key, value)
        except (AttributeError, LookupError, TypeError, ValueError):
            page.blame(trail, "cannot be set: what it stands in has no such place")
    page.data = data


def put_at(data: Any, key: str, value: Any) -> None:
    """Put a value at a dotted key; mappings on the way are made, entries of lists must exist."""
    *way, last = key.split(".")
    for part in way:
        data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
    data[int(last) if isinstance(data, list) else last] = value


def _unknown(name: str, parameters: Any) -> str:
    """Why this cannot be set: a misspelt parameter would be one that no code reads. Empty when it can."""
    if not isinstance(parameters, Mapping) or not parameters or name in parameters:
        return ""
    close = difflib.get_close_matches(name, parameters, n=1)
    meant = f"did you mean parameters.{close[0]}? If not" if close else "if it is one"
    return f"is not among the parameters; {meant}, write it into the file first"


def _placed(fault: FileFault, overrides: Iterable[str], written: frozenset[str]) -> FileFault:
    """What was given beside the file stands in none of its lines."""
    about = f"{fault.key}."
    ours = any(about.startswith(f"{key}.") for key in overrides)
    made = fault.key not in written and any(key.startswith(about) for key in overrides)
    return replace(fault, path=_OVERRIDE, line=0) if ours or made else fault


# --- building ----------------------------------------------------------------------------------------


class _Builder:
    """Looks at everything although something was wrong before, so that all faults come at once."""

    def __init__(self, page: Page, directory: Path) -> None:
        self._page = page
        self._code = CodeLoader(directory)

    def build(self, source: Mapping[str, Any], *, begun: bool) -> Scenario:
        page = self._page
        file = _File(name="unnamed")
        try:
            file = _File.from_dict(page.data)
        except ValidationError as error:
            self._blame(one for one in error.faults if isinstance(one, Fault))
        given = page.data.get("settings")
        for name in ("seed", "parameters"):
            if isinstance(given, Mapping) and name in given:
                page.blame(("settings", name), f"must stand at the top of the file: {name} = …")
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
        self._blame(scenario.faults())
        wanted, most = sum(group.count for group in scenario.agents), scenario.settings.max_agents
        if wanted > most and not begun:
            advice = "raise settings.max_agents, or have fewer"
            page.blame(("agents",), f"are {wanted}, but there may be {most} at a time; {advice}")
        return scenario

    def _blame(self, faults: Iterable[Fault]) -> None:
        for one in faults:
            parts = one.field.replace("initial_state", "state").removeprefix("settings.parameters").split(".")
            trail: Trail = tuple(int(part) if part.isdigit() else part for part in parts if part)
            if not self._page.is_blamed(trail):
                self._page.blame(trail, one.bound, one.value)

    def _find(self, trail: Trail) -> Any:
        target = self._page.at(trail)
        try:
            return self._code.find(target)
        except CodeError as error:
            if not self._page.is_blamed(trail):
                self._page.blame(trail, f"names {target}, but {error}")
            return None

    def _engine(self) -> Callable[[], Any]:
        found = self._find(("engine",)) if self._page.holds(("engine",)) else None
        if found is None:
            return MergeEngine
        if not callable(found) or (isinstance(found, type) and not hasattr(found, "update")):
            self._page.blame_value(
                ("engine",), "must name a class with a method `update`, or a function that makes one"
            )
        maker: Callable[[], Any] = found
        return maker

    def _schema(self) -> type[pydantic.BaseModel] | None:
        found = self._find(("state",)) if self._page.holds(("state",)) else None
        if found is None or (isinstance(found, type) and issubclass(found, pydantic.BaseModel)):
            return found
        self._page.blame_value(("state",), "must name a Pydantic model class")
        return None

    def _brains(self) -> dict[str, Callable[..., Any]]:
        written = self._page.data.get("brains")
        names = list(written) if isinstance(written, Mapping) else []
        # One that was blamed is there all the same, or its kind would be called unknown too.
        return {name: self._brain(("brains", name)) or MergeEngine for name in names}

    def _brain(self, trail: Trail) -> Callable[..., Any] | None:
        page = self._page
        if isinstance(page.at(trail), Mapping):
            return self._managed(trail)
        found = self._find(trail)
        if found is None:
            return None
        if not callable(found):
            page.blame_value(trail, "must name a class, or a function that makes a brain")
        elif isinstance(found, type) and not (
            issubclass(found, Agent) or any(hasattr(one, "decide") or "__call__" in vars(one) for one in found.__mro__)
        ):
            page.blame_value(trail, "must name a class with a method `decide`; write one")
        maker: Callable[..., Any] = found
        return maker

    def _managed(self, trail: Trail) -> Callable[..., Any] | None:
        page = self._page
        written = page.at(trail)
        for name in written.keys() - {"agent", "isolation"}:
            page.blame((*trail, name), "is not known; there are agent and isolation")
        if "agent" not in written:
            page.blame(trail, 'must name its class: agent = "module:Class"')
            return None
        level = written.get("isolation", IsolationLevel.PROCESS)
        if level not in _LEVELS:
            page.blame_value((*trail, "isolation"), f"must be one of {', '.join(_LEVELS)}")
        found = self._find((*trail, "agent"))
        if found is None:
            return None
        if not (isinstance(found, type) and issubclass(found, Agent)):
            page.blame_value((*trail, "agent"), "must name a subclass of ostler.Agent")
        elif level == IsolationLevel.PROCESS:
            try:
                source_of(found)
            except AgentInitializationError as error:
                page.blame((*trail, "agent"), f"cannot run in a process of its own: {error}")
        return ManagedKind(found, level)

    def _check_groups(self, schema: Any, brains: Mapping[str, Callable[..., Any]]) -> None:
        """What only shows when the parts are seen together."""
        written = self._page.data.get("agents")
        form = StateForm(schema)
        for place, one in enumerate(written if isinstance(written, list) else ()):
            if not isinstance(one, Mapping):
                continue
            if isinstance(one.get("state", {}), Mapping):
                self._blame(form.make(one.get("state", {}), f"agents.{place}.state")[1])
            kind, params = one.get("kind"), one.get("params", {})
            if isinstance(kind, str) and kind not in brains:
                bound = f"must be one of the brains ({', '.join(sorted(brains)) or 'none'})"
                self._blame([Fault(field=f"agents.{place}.kind", bound=bound, value=shown(kind))])
            maker = brains.get(str(kind), MergeEngine)
            if maker is not MergeEngine and isinstance(params, Mapping) and (why := _misfit(maker, params)):
                self._blame([Fault(field=f"agents.{place}.params", bound=f"do not fit the brain {kind}: {why}")])


def _misfit(maker: Callable[..., Any], params: Mapping[str, Any]) -> str:
    """Why it cannot be called with these; empty when it can, or when that cannot be told."""
    try:
        inspect.signature(maker).bind(**params)
    except TypeError as error:
        return str(error)
    except ValueError:
        return ""
    return ""
