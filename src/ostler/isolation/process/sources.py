"""Where the code of an agent stands, so that another process finds it again: by module and name, never by pickle."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ostler.agents import AgentMaker
from ostler.agents.base import FunctionMaker, PythonMaker
from ostler.errors import AgentInitializationError

_MOVE = "define it at the top of a module, so that another process can import it"


def source_of(maker: AgentMaker) -> Mapping[str, Any]:
    """`{module, path, qualname, main}`. Raises `AgentInitializationError` for what no other process can find."""
    if isinstance(maker, PythonMaker):  # from a definition file: it is imported only where it lives
        named, _, path_in_it = maker.target.partition(":")
        return {"module": named, "path": maker.file, "qualname": path_in_it, "main": False}
    made_by = maker.function if isinstance(maker, FunctionMaker) else maker
    module, qualname = getattr(made_by, "__module__", None), getattr(made_by, "__qualname__", None)
    if not module or not qualname:
        raise AgentInitializationError(
            f"{made_by!r:.100} has no name by which another process finds it; register a class or a function that is "
            "defined at the top of a module"
        )
    if "<lambda>" in qualname:
        raise AgentInitializationError(f"a lambda cannot be found by another process; give it a name and {_MOVE}")
    if "<locals>" in qualname:
        raise AgentInitializationError(f"{qualname} is defined inside a function; {_MOVE}")
    held = sys.modules.get(module)
    if held is None or _attribute(held, qualname) is not made_by:
        raise AgentInitializationError(f"{module}:{qualname} is not what is found under that name; {_MOVE}")
    if module == "__main__":
        return _of_script(held, qualname)
    path = getattr(held, "__file__", None)
    return {"module": module, "path": _absolute(path), "qualname": qualname, "main": False}


def _of_script(script: ModuleType, qualname: str) -> Mapping[str, Any]:
    """A class of the program that runs. `python -m` knows the module's true name; else there is only its file."""
    path = getattr(script, "__file__", None)
    if path is None or not Path(path).is_file():
        raise AgentInitializationError(
            f"{qualname} was typed in or read from standard input, where no other process can read it; {_MOVE}"
        )
    spec = getattr(script, "__spec__", None)
    name = getattr(spec, "name", None) or "__main__"
    package = getattr(spec, "parent", None)
    return {"module": name, "path": _absolute(path), "qualname": qualname, "main": True, "package": package}


def _attribute(module: ModuleType, qualname: str) -> Any:
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def import_path() -> list[str]:
    """What this program imports from. An empty entry means the directory it was started in."""
    return [str(Path(entry).absolute()) for entry in sys.path]
