"""The code that a scenario file names: it stands beside the file, or is installed.

Two scenarios may each have a `model.py`, and an edited file may be loaded again. So a module beside a file is loaded
under a name made of its place and its content, unless the plain name already means this very file. While it is loaded,
imports find the other modules beside it; a module should therefore import them at its top, not inside functions.
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
from pathlib import Path
from types import ModuleType
from typing import Any

from ostler.agents.failures import error_text
from ostler.model.text import clipped

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_OWN_NAME = re.compile(r"^ostler_scenario_[0-9a-f]{16}_")
_MAX_SAID = 300
_loading = threading.RLock()


class CodeError(Exception):
    """The code is not there, or fails; the text says which, and where."""


class CodeLoader:
    """The modules of one scenario file: each is loaded once, so that all names of the file mean the same classes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._modules: dict[str, ModuleType | None] = {}

    def find(self, target: object) -> Any:
        """What "module:Name" names. A module that fails raises `CodeError` once, and is None from then on."""
        if not isinstance(target, str) or not _TARGET.fullmatch(target):
            raise CodeError('it must be written as "module:Name"')
        named, _, path = target.partition(":")
        found: Any = self._module(named)
        where = named
        for part in path.split(".") if found is not None else ():
            held, found = found, getattr(found, part, None)
            if found is None:
                close = difflib.get_close_matches(part, [name for name in dir(held) if not name.startswith("_")], n=1)
                raise CodeError(f"there is no {part} in {where}" + (f"; did you mean {close[0]}?" if close else ""))
            where = f"{where}:{part}"
        return found

    def _module(self, named: str) -> ModuleType | None:
        if named in self._modules:
            return self._modules[named]
        self._modules[named] = None
        top, _, rest = named.partition(".")
        beside = next(
            (path for path in (self._directory / f"{top}.py", self._directory / top / "__init__.py") if path.is_file()),
            None,
        )
        try:
            if beside is None or _is_imported_as(top, beside):
                module = importlib.import_module(named)
            else:
                with _loading, _neighbours(self._directory):
                    module = _load_file(top, beside)
                    module = importlib.import_module(f"{module.__name__}.{rest}") if rest else module
        except (Exception, SystemExit) as error:  # importing runs the user's code
            raise CodeError(self._sentence(named, error)) from error
        self._modules[named] = module
        return module

    def _sentence(self, named: str, error: BaseException) -> str:
        if isinstance(error, ModuleNotFoundError):
            missing = _OWN_NAME.sub("", error.name or "")
            if missing and f"{named}.".startswith(f"{missing}."):  # the module itself, not one that it imports
                file = f"{named.replace('.', '/')}.py"
                return f"there is no {file} in {self._directory}, and no module {named} is installed"
        said = clipped(" ".join(error_text(error).split()), _MAX_SAID)
        return f"the module {named} cannot be imported: {said}{_line(error, self._directory)}"


def _is_imported_as(top: str, path: Path) -> bool:
    """Whether the plain name leads to this very file."""
    held = sys.modules.get(top)
    try:
        spec = getattr(held, "__spec__", None) if held is not None else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve()


def _load_file(top: str, path: Path) -> ModuleType:
    raw = path.read_bytes()
    place = hashlib.sha256(b"\0".join((str(path.resolve()).encode(), raw))).hexdigest()[:16]
    name = f"ostler_scenario_{place}_{top}"
    if name in sys.modules:
        return sys.modules[name]
    within = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=within)
    if spec is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # Compiled here: the cache of Python takes a file for unchanged that was edited twice within a second.
        exec(compile(raw, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the user's own code
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _neighbours(directory: Path) -> Iterator[None]:
    """Let imports find what stands in the directory; afterwards neither it nor its modules stay."""
    files = {path.stem for path in directory.glob("*.py")} | {
        path.parent.name for path in directory.glob("*/__init__.py")
    }
    names = files - sys.stdlib_module_names - {"ostler", "__main__"}

    def take_out() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}

    hidden = take_out()
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # the code may have removed it itself
            sys.path.remove(str(directory))
        take_out()
        sys.modules.update(hidden)


def _line(error: BaseException, directory: Path) -> str:
    """The deepest line of the user's own. A syntax error tells its line itself."""
    own = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(str(directory))]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
