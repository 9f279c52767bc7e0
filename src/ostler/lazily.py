"""Packages that offer a name without loading the module behind it until somebody asks for it.

A process that holds an agent needs few of the names that its rooms offer, and what is loaded there is waited for by
whoever starts the first one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def opener(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. `homes`: by module, the names that it holds, with spaces in between.

    What was found stays in the package, so each name is looked for once.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        home = home_of.get(name)
        if home is None and name in homes:
            return import_module(f"{package}.{name}")
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return find, names
