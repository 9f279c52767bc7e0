"""Packages that offer a name and load the module behind it at its first use.

The process of an agent needs few of the names that a package offers, and its start waits for every import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def opener(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. `modules`: by module, its names, with spaces in between.

    A module is one of the package, or a full name that begins with "ostler.". A loaded name stays in the package, so
    each is looked up once.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        module = module_of.get(name)
        if module is None and name in modules:
            return import_module(f"{package}.{name}")
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        is_full = module.startswith("ostler.")
        value = getattr(import_module(module if is_full else f"{package}.{module}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return load, names
