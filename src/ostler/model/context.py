"""Context data: what may be in it, and how an agent reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ostler.model.text import unkeepable_faults
from ostler.model.validation import Fault, named, shown

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32


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
    first: dict[str, Fault] = {}
    for fault in _item_faults(field, dict(data), limit):
        first.setdefault(fault.bound, fault)
    yield from first.values() if first else _size_faults(field, data, limit)


def _item_faults(field: str, data: dict[Any, Any], limit: int) -> Iterator[Fault]:
    """Value by value; nothing more after one that is too deep or beyond the size.

    Every value costs a byte or more. This bounds the walk over lists that share their parts, which are short in memory
    and endless as JSON.
    """
    values: list[tuple[tuple[Any, ...], Any]] = [((field,), data)]
    count = 1
    while values:
        path, value = values.pop()
        kind = type(value)
        if value is None or kind is int or kind is bool:
            continue
        if isinstance(value, dict | list | tuple):
            count += len(value)
            if len(path) > MAX_DEPTH or count > limit:
                bound = _too_large(limit) if count > limit else f"must be nested at most {MAX_DEPTH} deep"
                yield Fault(field=field, bound=bound)
                return
            if isinstance(value, dict):
                yield from _key_faults(path, value)
            children = value.items() if isinstance(value, dict) else enumerate(value)
            values.extend(reversed([((*path, key), child) for key, child in children]))
        elif isinstance(value, str):
            yield from unkeepable_faults(_dotted(path), value)
        elif isinstance(value, float) and not math.isfinite(value):
            yield Fault(field=_dotted(path), bound="must be a finite number", value=shown(value))
        elif not isinstance(value, int | float):
            yield Fault(field=_dotted(path), bound="must be a JSON value", value=shown(value))


def _key_faults(path: tuple[Any, ...], data: dict[Any, Any]) -> Iterator[Fault]:
    for key in data:
        if isinstance(key, str):
            yield from unkeepable_faults(_dotted((*path, key)), key)
        else:
            yield Fault(field=_dotted(path), bound="must have only text as keys", value=shown(key))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(named(str(part)) for part in path)


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
