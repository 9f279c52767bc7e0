"""A scenario from a file, TOML or YAML: every fault at once, each with its line.

The code that it names stands beside the file or is installed; the folder of the file is added to `sys.path`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic_core import from_json

from ostler.agents.base import Agent
from ostler.agents.failures import error_text
from ostler.definitions.load import CheckedFile, read_text
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
from ostler.model.text import clipped
from ostler.model.types import Interval
from ostler.model.validation import Fault, shown
from ostler.simulation.brains import Brains, ManagedKind
from ostler.simulation.scenario import AgentGroup, Count, Scenario
from ostler.simulation.schema import StateForm, write_json
from ostler.simulation.view import MergeEngine

_SUFFIXES = (".toml", ".yaml", ".yml")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_MAX_ERROR = 300
_Table = Mapping[str, Any]
R = TypeVar("R", bound=Record)


@record
class _Group(Record):
    name: str
    kind: str
    count: Count = 1
    params: _Table = field(default_factory=dict)
    state: _Table = field(default_factory=dict)


@record
class _ManagedBrain(Record):
    agent: str
    isolation: Literal["none", "thread", "process"] = "process"


@record
class _File(Record):
    """The keys of a scenario file."""

    name: str
    turns: Count = 10
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
    page = CheckedFile(str(path))
    return _load(page, _read_source(page, path), overrides or {}, has_history=False)


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
    page = CheckedFile(str(source["path"] if file is None else file))
    overrides = {**(source.get("overrides") or {}), **(overrides or {})}
    return _load(page, source if file is None else _read_source(page, file), overrides, has_history=True)


def _read_source(page: CheckedFile, path: str | Path) -> dict[str, Any]:
    whole = Path(path).absolute()
    if whole.suffix.lower() not in _SUFFIXES:
        page.stop(0, f"is not taken for a scenario; give a file whose name ends in {', '.join(_SUFFIXES)}")
    kind = "toml" if whole.suffix.lower() == ".toml" else "yaml"
    return {"path": str(whole), "kind": kind, "text": read_text(page, whole)}


def _load(page: CheckedFile, source: Mapping[str, Any], overrides: Mapping[str, Any], *, has_history: bool) -> Scenario:
    for fault in json_faults("overrides", overrides):
        page.stop(0, fault.message)
    overrides = from_json(write_json(dict(overrides)))
    written = page.read(read_toml if source["kind"] == "toml" else _read_yaml, source["text"])
    builder = _Builder(written, overrides, Path(source["path"]).parent)
    scenario = builder.build({**source, "overrides": overrides}, has_history=has_history)
    override_page, faults = CheckedFile("override"), list[FaultLike]()  # an override stands in no line of the file
    for fault in builder.faults:
        is_override = any(_overlap(fault.field, key) for key in overrides)
        (override_page if is_override else page).add_faults([fault])
    for blamed in (page, override_page):
        try:
            blamed.raise_faults()
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


def _overlap(key: str, other: str) -> bool:
    """Whether one of two dotted keys stands in the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def put_at(data: Any, key: str, value: Any) -> None:
    """Put a value at a dotted key; mappings on the way are made, entries of lists must exist."""
    *parents, last = key.split(".")
    for part in parents:
        data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
    data[int(last) if isinstance(data, list) else last] = value


# --- code --------------------------------------------------------------------------------------------


class _CodeError(Exception):
    """The code is not there, or fails; the text says which, and where."""


def _look_up(module: ModuleType, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        parent, value = value, getattr(value, part, None)
        if value is None:
            close = difflib.get_close_matches(part, [name for name in dir(parent) if not name.startswith("_")], n=1)
            guess = f"; did you mean {close[0]}?" if close else ""
            raise _CodeError(f"there is no {part} in {module.__name__}{guess}")
    return value


def _import(name: str, directory: Path) -> ModuleType:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            file = f"{name.replace('.', '/')}.py"
            raise _CodeError(f"there is no {file} in {directory}, and no module {name} is installed") from error
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == directory
        ]
        line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        reason = clipped(" ".join(error_text(error).split()), _MAX_ERROR)
        raise _CodeError(f"the module {name} cannot be imported: {reason}{line}") from error
    beside, loaded = directory / f"{name.replace('.', '/')}.py", Path(getattr(module, "__file__", None) or "")
    if beside.is_file() and not beside.samefile(loaded):
        raise _CodeError(f"this program has loaded {name} from {loaded} before; load this scenario in another program")
    return module


# --- building ----------------------------------------------------------------------------------------


class _Builder:
    """Looks at everything although something was wrong before, so that all faults come at once."""

    def __init__(self, written: Mapping[str, Any], overrides: Mapping[str, Any], directory: Path) -> None:
        self.faults: list[Fault] = []
        self._data: Any = from_json(write_json(written))
        self._directory = directory
        #: None: it fails, and the first key that names it was blamed.
        self._modules: dict[str, ModuleType | None] = {}
        parameters = written.get("parameters")
        for key, value in overrides.items():
            table, _, name = key.partition(".")
            if table == "parameters" and (reason := _unknown_parameter(name.partition(".")[0], parameters)):
                self._blame(key, reason)
                continue
            try:
                put_at(self._data, key, value)
            except (AttributeError, LookupError, TypeError, ValueError):
                self._blame(key, "cannot be set: what it stands in has no such place")

    def build(self, source: Mapping[str, Any], *, has_history: bool) -> Scenario:
        """With a history, whether there are too many agents is for the state of the run to say."""
        file = self._read(_File, self._data) or _File(name="unnamed")
        settings = self._data.get("settings")
        for name in ("seed", "parameters"):
            if isinstance(settings, Mapping) and name in settings:
                self._blame(f"settings.{name}", f"must stand at the top of the file: {name} = …")
        # In the order of a file, for code that fails.
        engine = self._find("engine", self._data.get("engine")) or MergeEngine
        schema = self._find("state", self._data.get("state"))
        brains = self._brains()
        self._check_groups(schema, brains)
        scenario = Scenario(
            name=file.name,
            brains=Brains(brains),
            agents=tuple(
                AgentGroup(
                    name=group.name,
                    kind=group.kind,
                    count=group.count,
                    params=group.params,
                    initial_state=group.state,
                )
                for group in file.agents
            ),
            turns=file.turns,
            settings=file.settings.evolve(seed=file.seed, parameters=file.parameters),
            engine=engine,
            schema=schema,
            global_state=file.global_state,
            source=source,
        )
        self._take(scenario.validate())
        count, most = sum(group.count for group in scenario.agents), scenario.settings.max_agents
        if count > most and not has_history:
            advice = "raise settings.max_agents, or have fewer"
            self._blame("agents", f"are {count}, but there may be {most} at a time; {advice}")
        return scenario

    def _read(self, cls: type[R], values: Mapping[str, Any], key: str = "") -> R | None:
        try:
            return cls.from_dict(values)
        except ValidationError as error:
            self._take(fault.under(key) if key else fault for fault in error.faults if isinstance(fault, Fault))
            return None

    def _take(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            key = fault.field.replace("initial_state", "state").replace("settings.parameters", "parameters")
            key = "state" if key == "schema" else key
            self._blame(key, fault.bound, fault.value)

    def _blame(self, key: str, bound: str, value: str = "") -> None:
        """Unless this key, or what stands in or around it, was blamed already."""
        if not any(_overlap(key, fault.field) for fault in self.faults):
            self.faults.append(Fault(field=key, bound=bound, value=value))

    def _find(self, key: str, target: Any) -> Any:
        if target is None:
            return None
        if not isinstance(target, str) or not _TARGET.fullmatch(target):
            self._blame(key, f'names {target}, but it must be written as "module:Name"')
            return None
        name, _, path = target.partition(":")
        try:
            if name not in self._modules:
                self._modules[name] = None
                self._modules[name] = _import(name, self._directory)
            module = self._modules[name]
            return None if module is None else _look_up(module, path)
        except _CodeError as error:
            self._blame(key, f"names {target}, but {error}")
            return None

    def _brains(self) -> dict[str, Callable[..., Any]]:
        written = self._data.get("brains")
        # One that was blamed is there all the same, or its kind would be called unknown too.
        entries = written.items() if isinstance(written, Mapping) else ()
        return {kind: self._brain(f"brains.{kind}", target) or MergeEngine for kind, target in entries}

    def _brain(self, key: str, target: Any) -> Callable[..., Any] | None:
        if isinstance(target, Mapping):
            return self._managed(key, target)
        maker: Any = self._find(key, target)
        if maker is not None and not callable(maker):
            self._blame(key, "must name a class, or a function that makes a brain", shown(target))
        elif isinstance(maker, type) and not (
            issubclass(maker, Agent) or any(hasattr(cls, "decide") or "__call__" in vars(cls) for cls in maker.__mro__)
        ):
            self._blame(key, "must name a class with a method `decide`; write one", shown(target))
        checked: Callable[..., Any] | None = maker
        return checked

    def _managed(self, key: str, written: Mapping[str, Any]) -> Callable[..., Any] | None:
        entry = self._read(_ManagedBrain, written, key)
        agent = self._find(f"{key}.agent", written.get("agent"))
        if agent is None:
            return None
        if not (isinstance(agent, type) and issubclass(agent, Agent)):
            self._blame(f"{key}.agent", "must name a subclass of ostler.Agent", shown(written["agent"]))
        elif entry is not None and entry.isolation == "process":
            try:
                source_of(agent)
            except AgentInitializationError as error:
                self._blame(f"{key}.agent", f"cannot run in a process of its own: {error}")
        return None if entry is None else ManagedKind(agent, entry.isolation)

    def _check_groups(self, schema: Any, brains: Mapping[str, Callable[..., Any]]) -> None:
        """What only shows when the parts are seen together."""
        written = self._data.get("agents")
        is_model = isinstance(schema, type) and issubclass(schema, pydantic.BaseModel)
        form = StateForm(schema if is_model else None)
        for place, group in enumerate(written if isinstance(written, list) else ()):
            if not isinstance(group, Mapping):
                continue
            kind, params, state = group.get("kind"), group.get("params", {}), group.get("state", {})
            if isinstance(state, Mapping):
                self._take(form.make(state, f"agents.{place}.state")[1])
            if isinstance(kind, str) and kind not in brains:
                bound = f"must be one of the brains ({', '.join(sorted(brains)) or 'none'})"
                self._blame(f"agents.{place}.kind", bound, shown(kind))
            maker = brains.get(str(kind), MergeEngine)
            if maker is not MergeEngine and isinstance(params, Mapping):
                try:
                    inspect.signature(maker).bind(**params)
                except TypeError as error:
                    self._blame(f"agents.{place}.params", f"do not fit the brain {kind}: {error}")
                except ValueError:
                    pass  # it has no signature to compare with


def _unknown_parameter(name: str, parameters: Any) -> str:
    """Why this cannot be set: a misspelt parameter would be one that no code reads. Empty when it can."""
    if not name or not isinstance(parameters, Mapping) or not parameters or name in parameters:
        return ""
    close = difflib.get_close_matches(name, parameters, n=1)
    guess = f"did you mean parameters.{close[0]}? If not" if close else "if it is one"
    return f"is not among the parameters; {guess}, write it into the file first"
