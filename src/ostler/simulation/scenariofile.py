"""A scenario from a file, TOML or YAML: what it says is checked as a whole, and the code that it names is loaded."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ostler.agents.files.page import FileFault, Page, Trail, dotted, read_text
from ostler.agents.files.tomltext import read_toml
from ostler.agents.files.yamltext import read_yaml
from ostler.errors import DefinitionError, InvalidOperationError
from ostler.model import SimulationRun
from ostler.model.context import json_faults
from ostler.simulation.checking import require_kind
from ostler.simulation.scenario import Scenario
from ostler.simulation.scenariobuild import build_scenario
from ostler.simulation.scenariocode import Shelf

Kind = Literal["toml", "yaml"]

_KINDS: Mapping[str, Kind] = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
_OVERRIDE = "override"
_PARAMETERS = "parameters"


def load_scenario(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Read a scenario; raises one `DefinitionError` that carries every fault.

    `overrides` puts other values at dotted keys: `{"parameters.tax": 0.2, "agents.0.count": 5, "seed": 3}`.
    """
    page = Page(str(path))
    kind = _kind(page, Path(path))
    text, _ = read_text(page, Path(path))
    whole = Path(path).absolute()
    source = {"path": str(whole), "kind": kind, "text": text, "overrides": overrides or {}}
    return _load(page, source, whole.parent)


def load_scenario_text(
    text: str,
    *,
    path_label: str,
    kind: Kind,
    directory: str | Path,
    overrides: Mapping[str, Any] | None = None,
    begun: bool = False,
) -> Scenario:
    """The same from a text that was kept. `directory` is where the code stands that it names.

    With `begun`, it is for a run that has a history: whether its agents are too many is for its state to say.
    """
    source = {"path": path_label, "kind": kind, "text": text, "overrides": overrides or {}}
    return _load(Page(path_label), source, Path(directory).absolute(), begun=begun)


def scenario_of_run(
    run: SimulationRun, *, file: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Scenario:
    """The scenario with which a run began, for whoever goes on with it; its code is read from where it stands.

    `file` is where the scenario stands now, when that is no longer where it stood: its own text counts then, with the
    overrides of the run, and its code stands beside it.
    """
    require_kind("run", run, SimulationRun)
    source = run.scenario
    if source is None or "text" not in source:
        raise InvalidOperationError(
            f"run {run.run_id} was begun by a program, not from a scenario file; resume it by that program"
        )
    path, text, kind = Path(source["path"]), source["text"], source["kind"]
    if file is not None:
        path = Path(file).absolute()
        page = Page(str(file))
        kind = _kind(page, path)
        text, _ = read_text(page, path)
    return load_scenario_text(
        text,
        path_label=str(path),
        kind=kind,
        directory=path.parent,
        overrides={**(source.get("overrides") or {}), **(overrides or {})},
        begun=True,
    )


def _kind(page: Page, path: Path) -> Kind:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        page.stop(0, f"is not taken for a scenario; give a file whose name ends in {', '.join(_KINDS)}")
    return kind


def _load(page: Page, source: dict[str, Any], directory: Path, *, begun: bool = False) -> Scenario:
    for fault in json_faults("overrides", source["overrides"]):
        page.stop(0, fault.message)
    overrides = source["overrides"] = _copy(dict(source["overrides"]))
    _read(page, source["text"], source["kind"])
    _override(page, overrides)
    scenario = build_scenario(page, Shelf(directory), source, begun=begun)
    written = frozenset(map(dotted, page.lines))
    page.faults[:] = [_placed(fault, overrides, written) for fault in page.faults]
    page.settle()
    return scenario


def _read(page: Page, text: str, kind: Kind) -> None:
    if kind == "toml":
        read_toml(page, text)
        return
    try:
        read_yaml(page, text, 1)
    except DefinitionError as error:
        # That reader knows YAML as the front matter of something; here it is the whole.
        faults = (one for one in error.faults if isinstance(one, FileFault))
        whole = [replace(one, bound=one.bound.replace("the front matter", "the file")) for one in faults]
        raise DefinitionError(whole) from None


def _override(page: Page, overrides: Mapping[str, Any]) -> None:
    data, parameters = _copy(page.data), page.data.get(_PARAMETERS)
    for key, value in _copy(overrides).items():
        trail: Trail = tuple(key.split("."))
        if trail[0] == _PARAMETERS and len(trail) > 1 and (unknown := _unknown(str(trail[1]), parameters)):
            page.blame(trail, unknown)
            continue
        try:
            put_at(data, key, value)
        except (AttributeError, LookupError, TypeError, ValueError):
            page.blame(trail, "cannot be set: what it stands in has no such place")
    page.data = data


def put_at(data: Any, key: str, value: Any) -> None:
    """Put a value at a dotted key; mappings on the way are made, entries of lists must be there."""
    *way, last = key.split(".")
    for part in way:
        data = data[_place(part)] if isinstance(data, list) else data.setdefault(part, {})
    data[_place(last) if isinstance(data, list) else last] = value


def _place(part: str) -> int:
    if not (part.isascii() and part.isdecimal()):
        raise LookupError(part)
    return int(part)


def _unknown(name: str, parameters: Any) -> str:
    """Why this cannot be set; a misspelt parameter would be one that nobody reads. Empty when it can."""
    if not isinstance(parameters, Mapping) or not parameters or name in parameters:
        return ""
    close = difflib.get_close_matches(name, parameters, n=1)
    meant = f"did you mean {_PARAMETERS}.{close[0]}? If not" if close else "if it is one"
    return f"is not among the parameters; {meant}, write it into the file first"


def _copy(value: Any) -> Any:
    """What the caller holds, what is kept and what a run changes are three things."""
    return json.loads(json.dumps(value))


def _placed(fault: FileFault, overrides: Iterable[str], written: frozenset[str]) -> FileFault:
    """What was given beside the file stands in none of its lines."""
    about = f"{fault.key}."
    ours = any(about.startswith(f"{key}.") for key in overrides)
    made = fault.key not in written and any(key.startswith(about) for key in overrides)
    return replace(fault, path=_OVERRIDE, line=0) if ours or made else fault
