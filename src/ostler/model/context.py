"""Context data: what may be in it, and how an agent reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ostler.model.faults import Fault, named, shown
from ostler.model.text import unkeepable_faults

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32

_TOO_DEEP = f"must be nested at most {MAX_DEPTH} deep"
_Path = tuple[str, ...]


def context_faults(field: str, context: Any) -> Iterator[Fault]:
    if not isinstance(context, Mapping):
        return
    folded: dict[str, str] = {}
    for key in context:
        first = folded.setdefault(key.casefold(), key) if isinstance(key, str) else key
        if first != key:
            bound = f"must not differ from {named(first)} by case alone"
            yield Fault(field=f"{field}.{named(key)}", bound=bound)
    yield from json_faults(field, context)


def json_faults(field: str, data: Any, limit: int = MAX_BYTES) -> Iterator[Fault]:
    """What keeps a mapping from being stored as JSON and read back the same; the first of each kind."""
    if not isinstance(data, Mapping):
        return
    found: dict[str, Fault] = {}
    too_large = _too_large(limit)
    for count, (path, item) in enumerate(_walk((field,), dict(data))):
        # Every value costs a byte or more. This bounds the walk over lists that share their parts, which are
        # short in memory and endless as JSON.
        if count > limit:
            found.setdefault(too_large, Fault(field=field, bound=too_large))
        for fault in _item_faults(path, item):
            found.setdefault(fault.bound, fault)
        if too_large in found or _TOO_DEEP in found:
            break
    yield from found.values() if found else _size_faults(field, data, limit)


def _walk(path: _Path, value: Any) -> Iterator[tuple[_Path, Any]]:
    """Every value and its path; without recursion, because the caller chooses the depth."""
    stack = [(path, value)]
    while stack:
        path, item = stack.pop()
        yield path, item
        if isinstance(item, dict):
            stack.extend(((*path, named(key)), child) for key, child in item.items())
        elif isinstance(item, (list, tuple)):
            stack.extend(((*path, str(index)), child) for index, child in enumerate(item))


def _item_faults(path: _Path, item: Any) -> Iterator[Fault]:
    field = ".".join(path)
    match item:
        case str():
            yield from unkeepable_faults(field, item)
        case float() if not math.isfinite(item):
            yield Fault(field=field, bound="must be a finite number", value=shown(item))
        case dict() | list() | tuple() if len(path) > MAX_DEPTH:
            yield Fault(field=path[0], bound=_TOO_DEEP)
        case dict():
            yield from _key_faults(field, item)
        case None | int() | float() | list() | tuple():
            pass
        case _:
            yield Fault(field=field, bound="must be a JSON value", value=shown(item))


def _key_faults(field: str, item: dict[Any, Any]) -> Iterator[Fault]:
    for key in item:
        if isinstance(key, str):
            yield from unkeepable_faults(f"{field}.{named(key)}", key)
        else:
            yield Fault(field=field, bound="must have only text as keys", value=shown(key))


def _too_large(limit: int) -> str:
    return f"must be at most {limit // 1024} KiB as JSON; pass a path to larger data"


def _size_faults(field: str, data: Mapping[str, Any], limit: int) -> Iterator[Fault]:
    try:
        size = len(json.dumps(dict(data), ensure_ascii=False).encode())
    except ValueError:
        yield Fault(field=field, bound="must not hold whole numbers of thousands of digits")
        return
    if size > limit:
        yield Fault(field=field, bound=_too_large(limit), value=f"{size // 1024} KiB")


class ContextData(Mapping[str, Any]):
    """Context data as an agent reads it: keys in any case, shown as they were written."""

    __slots__ = ("_keys", "_values")

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self._values = dict(data or {})
        self._keys: dict[str, str] = {}
        for key in self._values:
            self._keys.setdefault(key.casefold(), key)

    def __getitem__(self, key: str) -> Any:
        return self._values[self._keys[key.casefold()]]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.casefold() in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"ContextData({self._values!r})"
