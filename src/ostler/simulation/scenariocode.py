"""The code that a scenario file names. It stands beside the file, or is installed.

Two scenarios may each have a `model.py`, and an edited one may be loaded again. So a module from beside a file goes by
a name made of its place and its content, unless the plain name means this very file already. While it is loaded,
imports find the other modules beside it; afterwards neither they nor the directory stay where others would find them.
A module should therefore import its neighbours at its top, not inside of functions.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ostler.agents.failures import error_text
from ostler.model import clipped
from ostler.simulation.foreign import is_call_off

_LOADING = threading.RLock()
_MAX_SAID = 300
_DIGITS = 16
_PREFIX = re.compile(rf"^ostler_scenario_[0-9a-f]{{{_DIGITS}}}_")


class CodeError(Exception):
    """The code is not there, or fails; the text says which, and where."""


@dataclass(slots=True)
class Shelf:
    """The modules of one load: each is loaded once, so that all names of the file mean the same classes."""

    directory: Path
    _loaded: dict[str, ModuleType | CodeError] = field(default_factory=dict)

    def find(self, target: str) -> Any:
        """What "module:Name" names. A module that fails does so once; the second time the answer is None."""
        named, _, path = target.partition(":")
        again = named in self._loaded
        found: Any = self._module(named)
        if isinstance(found, CodeError):
            if again:
                return None
            raise found
        for part in path.split("."):
            held = found
            found = getattr(held, part, None)
            if found is None:
                raise CodeError(f"there is no {part} in {_where(named, held)}{_nearest(part, held)}")
        return found

    def _module(self, named: str) -> ModuleType | CodeError:
        if named not in self._loaded:
            try:
                self._loaded[named] = self._load(named)
            except CodeError as error:
                self._loaded[named] = error
        return self._loaded[named]

    def _load(self, named: str) -> ModuleType:
        top, _, rest = named.partition(".")
        beside = _file_of(self.directory, top)
        try:
            if beside is None or _means(top, beside):
                return importlib.import_module(named)
            with _LOADING, _neighbours(self.directory):
                package = _from_file(top, beside)
                return importlib.import_module(f"{package.__name__}.{rest}") if rest else package
        except BaseException as error:  # importing runs foreign code
            if is_call_off(error):
                raise
            raise CodeError(self._sentence(named, error)) from error

    def _sentence(self, named: str, error: BaseException) -> str:
        if isinstance(error, ModuleNotFoundError) and _is_itself(named, error.name or ""):
            file = f"{named.replace('.', '/')}.py"
            return f"there is no {file} in {self.directory}, and no module {named} is installed"
        said = clipped(" ".join(error_text(error).split()), _MAX_SAID)
        return f"the module {named} cannot be imported: {said}{_line(error, self.directory)}"


def _file_of(directory: Path, top: str) -> Path | None:
    for path in (directory / f"{top}.py", directory / top / "__init__.py"):
        if path.is_file():
            return path
    return None


def _means(top: str, path: Path) -> bool:
    """Whether the plain name leads to this very file: whoever imports it elsewhere then has the same classes."""
    held = sys.modules.get(top)
    try:
        spec = getattr(held, "__spec__", None) if held is not None else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve()


def _from_file(top: str, path: Path) -> ModuleType:
    raw = path.read_bytes()
    place = hashlib.sha256(b"\0".join((str(path.resolve()).encode(), raw))).hexdigest()[:_DIGITS]
    name = f"ostler_scenario_{place}_{top}"
    held = sys.modules.get(name)
    if held is not None:
        return held
    within = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=within)
    if spec is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Compiled here: the cache of Python takes a file for unchanged that was edited twice within a second.
        exec(compile(raw, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the user's own code
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _neighbours(directory: Path) -> Iterator[None]:
    """Let imports find what stands in the directory, and nothing else of the same name."""
    place = str(directory)
    names = _names_in(directory)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    sys.path.insert(0, place)
    # What Python found in the directory before may be older than the files.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # the code may have removed it itself
            sys.path.remove(place)
        for name in list(sys.modules):
            if name.partition(".")[0] in names:
                del sys.modules[name]
        sys.modules.update(hidden)


def _names_in(directory: Path) -> frozenset[str]:
    """Modules that stand there. Those of Python, Ostler and the program itself stay what they are."""
    files = {path.stem for path in directory.glob("*.py")}
    packages = {path.parent.name for path in directory.glob("*/__init__.py")}
    return frozenset(files | packages) - sys.stdlib_module_names - {"ostler", "__main__"}


def _is_itself(named: str, missing: str) -> bool:
    """Whether the module itself is missing, or a package around it; not something that it imports."""
    plain = _PREFIX.sub("", missing)
    return bool(plain) and f"{named}.".startswith(f"{plain}.")


def _line(error: BaseException, directory: Path) -> str:
    """The deepest line of the user's own; of a file that is no Python, the line where it stops to be."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    place = str(directory)
    own = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(place)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _where(named: str, held: Any) -> str:
    return named if isinstance(held, ModuleType) else f"{named}:{getattr(held, '__qualname__', '?')}"


def _nearest(part: str, held: Any) -> str:
    close = difflib.get_close_matches(part, [name for name in dir(held) if not name.startswith("_")], n=1)
    return f"; did you mean {close[0]}?" if close else ""
