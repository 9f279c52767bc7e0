"""The columns of an exported table: found in the states, named so that no two are the same, and typed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from ostler.simulation.played import PlayedTurn

#: What stands in every row, before the state.
FIXED = ("turn", "agent", "number", "active", "decision")
#: The column of states that are no mappings.
WHOLE = "state"

_INT64 = range(-(2**63), 2**63)
#: Beyond it a float has not every whole number.
_EXACT = range(-(2**53), 2**53 + 1)
#: A field of a state, or one inside of it.
Way = tuple[str, ...]


class Type(StrEnum):
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    TEXT = "text"


_FIXED_TYPES = (Type.INT, Type.TEXT, Type.INT, Type.BOOL, Type.TEXT)


class Columns:
    """Learns from every state which columns there are; then knows their names and types."""

    def __init__(self) -> None:
        self._types: dict[Way, set[Type]] = {}
        self._headers: dict[Way, str] = {}
        self._taken = set(FIXED)
        #: Whole numbers that are too large for a float.
        self._large: set[Way] = set()

    def learn(self, state: Any) -> None:
        for way, value in flat(state):
            if way not in self._types:
                self._types[way] = set()
                self._headers[way] = self._free_header(way)
            if value is not None:
                self._types[way].add(_type_of(value))
                if isinstance(value, int) and value not in _EXACT:
                    self._large.add(way)

    def _free_header(self, way: Way) -> str:
        plain = ".".join(way)
        others = (f"state.{plain}_{number}" for number in itertools.count(1))
        name = next(name for name in itertools.chain((plain, f"state.{plain}"), others) if name not in self._taken)
        self._taken.add(name)
        return name

    def ways(self) -> tuple[Way, ...]:
        return tuple(self._types)

    def headers(self) -> tuple[str, ...]:
        return (*FIXED, *self._headers.values())

    def types(self) -> tuple[Type, ...]:
        return (*_FIXED_TYPES, *(self._type(way) for way in self._types))

    def _type(self, way: Way) -> Type:
        found = self._types[way]
        if len(found) == 1:
            return next(iter(found))
        mixed = found == {Type.INT, Type.FLOAT} and way not in self._large
        return Type.FLOAT if mixed else Type.TEXT


def rows_of(played: PlayedTurn, columns: Columns) -> Iterator[list[Any]]:
    """One row for each agent that is there after the turn; None where it has no such field."""
    ways = columns.ways()
    newcomers = _newcomers(played)
    for name, state in played.states.items():
        values = dict(flat(state))
        decided = name in played.decisions and name not in newcomers
        yield [
            played.turn,
            name,
            played.numbers.get(name),
            name not in played.paused,
            json_text(played.decisions[name]) if decided else None,
            *(values.get(way) for way in ways),
        ]


def _newcomers(played: PlayedTurn) -> frozenset[str]:
    """Who came at the end of the turn. One of them may have the name of one that decided and left."""
    return frozenset(
        one["resolved_name"]
        for one in played.operations
        if one.get("cause") == "agent" and "resolved_name" in one and one.get("done", True)
    )


def flat(state: Any) -> Iterator[tuple[Way, Any]]:
    """The fields of a state, and those one level deeper; what is deeper still is JSON, as is a state without fields."""
    if not isinstance(state, Mapping):
        yield (WHOLE,), _plain(state)
        return
    for name, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from (((name, inner), _plain(held)) for inner, held in value.items())
        else:
            yield (name,), _plain(value)


def fitted(value: Any, wanted: Type) -> Any:
    """The value as a column of this type has it."""
    if value is None or wanted in {Type.INT, Type.BOOL}:
        return value
    if wanted is Type.FLOAT:
        return float(value)
    # A lone half of a character has no place in UTF-8.
    return text_of(value).encode(errors="backslashreplace").decode()


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    return json_text(value) if isinstance(value, (Mapping, list, tuple)) else value


def _type_of(value: Any) -> Type:
    match value:
        case bool():
            return Type.BOOL
        case int():
            return Type.INT if value in _INT64 else Type.TEXT
        case float():
            return Type.FLOAT
        case _:
            return Type.TEXT
