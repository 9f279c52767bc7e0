"""Finds the code of an agent in another process than the one that registered it: by module and name, never pickled."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from ostler.agents import AgentMaker
from ostler.agents.base import maker_of_callable
from ostler.errors import AgentInitializationError

#: The user's own script goes by this name, so that what stands under `if __name__ == "__main__"` does not run.
MAIN_NAME = "__ostler_main__"

_FOREIGN = ("site-packages", "dist-packages")
#: Ours are looked at by the manager, once: see `isolation.process.templates`.
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STANDARD = os.path.dirname(os.path.realpath(os.__file__)) + os.sep


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the code of an agent stands."""

    module: str
    #: The file; None for a module that is known only by its name.
    path: str | None = None
    #: It is the user's program itself.
    main: bool = False
    #: Of a program that was started with `python -m`: the package it belongs to.
    package: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Source:
        path, package = given.get("path"), given.get("package")
        return cls(
            module=str(given["module"]),
            path=None if path is None else os.path.abspath(str(path)),
            main=bool(given.get("main")),
            package=None if package is None else str(package),
        )


def load(source: Source) -> ModuleType:
    """Import it. Whatever goes wrong in the user's code comes out as it is."""
    if source.main:
        return _load_main(source)
    try:
        module = importlib.import_module(source.module)
    except ModuleNotFoundError as error:
        # Only when it is the module itself that is missing, or a package around it; not what it imports.
        missing = error.name or ""
        if source.path is None or not f"{source.module}.".startswith(f"{missing}."):
            raise
        return _load_file(source.module, source.path)
    if source.path is None or _same_file(module, source.path):
        return module
    return _load_file(source.module, source.path)


def _same_file(module: ModuleType, path: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(file) == os.path.realpath(path)


def _load_file(name: str, path: str) -> ModuleType:
    """Under the name it had where it was registered: its classes say that they come from there."""
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


def _load_main(source: Source) -> ModuleType:
    """The user's script as a module of another name, which is `__main__` too: what looks there finds its classes."""
    path = source.path
    if path is None:
        raise ImportError(
            "the agent is defined in a program that is no file; write its class into a module and import it from there"
        )
    code = SourceFileLoader(MAIN_NAME, path).get_code(MAIN_NAME)
    if code is None:
        raise ImportError(f"{path} is no Python file")
    module = ModuleType(MAIN_NAME)
    module.__file__ = path
    module.__package__ = source.package
    sys.modules[MAIN_NAME] = sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - it is the user's own program, in a process of its own
    return module


def maker_of(module: ModuleType, qualname: str) -> AgentMaker:
    """What makes the agent: a class, a function that answers one, or the maker of an agent that is a function."""
    where = getattr(module, "__file__", None) or module.__name__
    if "<" in qualname:
        raise AgentInitializationError(
            f"{qualname} in {where} has no name by which another process finds it; "
            "define it at the top of a module, with `def` or `class`"
        )
    value: Any = module
    for part in qualname.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise AgentInitializationError(f"{qualname} is not in {where} any more; register it again") from None
    if not callable(value):
        raise AgentInitializationError(f"{qualname} in {where} is neither a class nor a function")
    return maker_of_callable(value)


def source_files(source: Source, since_ns: int, now_ns: int) -> dict[str, tuple[int, int]]:
    """Time and size of every loaded file that may be edited: neither the standard library nor what was installed.

    What belongs to the agent itself, its module and the package of that, counts wherever it stands: it may be
    installed anew while its manager runs.

    One that was written while it was being loaded may have been read before; it counts as changed already.
    """
    files = {}
    for path in _loaded_files({source.module.partition(".")[0], (source.package or MAIN_NAME).partition(".")[0]}):
        try:
            status = os.stat(path)
        except OSError:
            continue
        unsure = since_ns <= status.st_mtime_ns <= now_ns
        files[path] = (0 if unsure else status.st_mtime_ns, status.st_size)
    return files


def _loaded_files(own: Collection[str]) -> Iterator[str]:
    """`own` are the packages that count wherever they stand."""
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        path = os.path.abspath(file)
        if not path.startswith(_OURS) and (name.partition(".")[0] in own or _may_be_edited(path)):
            yield path


def _may_be_edited(path: str) -> bool:
    if path.startswith(_STANDARD) or any(f"/{name}/" in path for name in _FOREIGN):
        return False
    return not os.path.realpath(path).startswith(_STANDARD)
