"""Whether code that a scenario names can be called as a run will call it; asked before the run begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from ostler.agents import Agent

_DECIDE = ("view",)
_UPDATE = ("state", "decisions", "world")


def has(found: type, method: str) -> bool:
    # On the class itself: `type` has a `__call__` of its own.
    return any(method in vars(one) for one in found.__mro__) and callable(getattr(found, method))


def brain_misfit(found: Any) -> str:
    """Why this class makes no brains; empty when it does. What a function makes only a call would tell."""
    if not isinstance(found, type):
        return ""
    if has(found, "decide"):
        return _method_misfit(found, "decide", _DECIDE)
    if issubclass(found, Agent):
        return ""
    return (
        _method_misfit(found, "__call__", _DECIDE)
        if has(found, "__call__")
        else "which has no method `decide`; write one"
    )


def engine_misfit(found: Any) -> str:
    """The same of an engine whose class has `update`."""
    return _method_misfit(found, "update", _UPDATE) if isinstance(found, type) else ""


def misfit(maker: Callable[..., Any], params: Mapping[str, Any]) -> str:
    """Why it cannot be called with these; empty when it can, or when nobody knows."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(**params)
    except TypeError as error:
        return str(error)
    return ""


def _method_misfit(found: type, name: str, wanted: tuple[str, ...]) -> str:
    held = inspect.getattr_static(found, name)
    if isinstance(held, FunctionType):
        given = ("self", *wanted)
    elif isinstance(held, staticmethod | classmethod):
        given = wanted
    else:
        return ""  # whatever it is, only a call would tell
    try:
        inspect.signature(getattr(found, name)).bind(*given)
    except TypeError as error:
        return f"whose method `{name}` must take {', '.join(wanted)}, but there is {error}"
    except ValueError:
        return ""
    return ""
