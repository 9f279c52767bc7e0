"""Context data: what may be in it, and how an agent reads it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ostler.model.text import unkeepable_faults
from ostler.model.validation import Fault, named, shown

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32

#: Characters that some store cannot keep.
_UNKEEPABLE = re.compile("[\0\ud800-\udfff]")
_TOO_DEEP = f"must be nested at most {MAX_DEPTH} deep"


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
    if _is_plain(dict(data), limit):
        yield from _size_faults(field, data, limit)
        return
    # Every value costs a byte or more. This bounds the walk over lists that share their parts, which are short in
    # memory and endless as JSON.
    walk = itertools.islice(_item_faults((field,), dict(data)), limit + 2)
    first: dict[str, Fault] = {}
    for count, fault in enumerate(walk):
        if fault is not None:
            first.setdefault(fault.bound, fault)
        if count > limit:
            first.setdefault(_too_large(limit), Fault(field=field, bound=_too_large(limit)))
        if _TOO_DEEP in first:
            break
    yield from first.values() if first else _size_faults(field, data, limit)


def _is_plain(data: dict[Any, Any], limit: int) -> bool:
    """A quick look that is enough for nearly all data: nothing can be wrong with it but its size."""
    layer: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in layer:
            kind = type(item)
            if kind is str:
                if _UNKEEPABLE.search(item):
                    return False
            elif kind is list or kind is tuple:
                below.extend(item)
            elif kind is dict and all(type(key) is str for key in item):
                below.extend(item)
                below.extend(item.values())
            elif not (item is None or kind is int or kind is bool or (kind is float and math.isfinite(item))):
                return False
            if len(below) > limit:
                return False
        if not below:
            return True
        layer = below
    return False


def _item_faults(path: tuple[str, ...], item: Any) -> Iterator[Fault | None]:
    """The faults of a value and of those inside it; None for each value, so that the caller can count them."""
    yield None
    field = ".".join(path)
    match item:
        case str():
            yield from unkeepable_faults(field, item)
        case float() if not math.isfinite(item):
            yield Fault(field=field, bound="must be a finite number", value=shown(item))
        case dict() | list() | tuple() if len(path) > MAX_DEPTH:
            yield Fault(field=path[0], bound=_TOO_DEEP)
        case dict():
            for key, child in item.items():
                if isinstance(key, str):
                    yield from unkeepable_faults(f"{field}.{named(key)}", key)
                else:
                    yield Fault(field=field, bound="must have only text as keys", value=shown(key))
                yield from _item_faults((*path, named(key)), child)
        case list() | tuple():
            for index, child in enumerate(item):
                yield from _item_faults((*path, str(index)), child)
        case None | int() | float():
            pass
        case _:
            yield Fault(field=field, bound="must be a JSON value", value=shown(item))


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
