"""Types of record fields: ranges, times in UTC, durations and sizes as people write them.

Pydantic reads these marks when a record is first validated. None of them imports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Any

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: The largest count that every database can hold in an ordinary column.
MAX_COUNT = 2**31 - 1


class Interval:
    """The range of a field. It equals `annotated_types.Interval`, which takes 5 ms to import."""

    __slots__ = ("ge", "le")
    __is_annotated_types_grouped_metadata__ = True

    def __init__(self, *, ge: Any = None, le: Any = None) -> None:
        self.ge = ge
        self.le = le

    def __iter__(self) -> Iterator[Any]:
        from annotated_types import Ge, Le  # noqa: PLC0415 - only a validation needs it

        if self.ge is not None:
            yield Ge(self.ge)
        if self.le is not None:
            yield Le(self.le)


class Parsed:
    """Runs `parse` before the value is validated. `parse` returns what it does not know unchanged."""

    def __init__(
        self,
        parse: Callable[[Any], Any],
        *,
        expects: str = "",
        write: Callable[[Any], str] = str,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        self._parse = parse
        #: What a person may write, as it follows "must be"; empty where the type says it.
        self.expects = expects
        #: A value as a person writes it.
        self.write = write
        #: What a JSON Schema admits beside the type.
        self._schema = schema

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": self._parse},
            "schema": handler(source),
        }

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        plain: dict[str, Any] = handler(core)
        return plain if self._schema is None else {"anyOf": [dict(self._schema), plain]}


# --- times -------------------------------------------------------------------------------------------


class _Utc:
    """Refuses a time without its zone, and turns every time into UTC."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": _in_utc},
            "schema": {**handler(source), "tz_constraint": "aware"},
        }


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is UTC else moment.astimezone(UTC)


#: A time with its zone; far enough from the ends of the calendar for every zone and every database.
Moment = Annotated[datetime, Interval(ge=datetime(1900, 1, 1, tzinfo=UTC), le=datetime(9000, 1, 1, tzinfo=UTC)), _Utc()]


def micros(moment: datetime) -> int:
    """Microseconds since 1970 UTC, as the store keeps times."""
    return _utc_micros(moment if moment.tzinfo is UTC else moment.astimezone(UTC))


@lru_cache(maxsize=16)  # one commit writes the same time into all of its rows
def _utc_micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(value: int) -> datetime:
    return _EPOCH + timedelta(microseconds=value)


# --- durations and sizes -----------------------------------------------------------------------------

_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
#: More than any range allows. Beyond them lie numbers that no timedelta and no int can be made of.
_LONGEST_SECONDS = 1e10
_LARGEST_MEGABYTES = 1e10
_DURATION = re.compile(r"(?:\s*\d+(?:\.\d+)?\s*(?:ms|s|sec|min|m|h|d))+\s*")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|sec|s|min|m|h|d)")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|m|g|t)i?b?\s*", re.IGNORECASE)
_MEGABYTES = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024}


def parse_duration(value: Any) -> Any:
    """Read "30s", "1h 30min" or "500ms"; return anything else unchanged, for pydantic takes a number of seconds."""
    if isinstance(value, str) and _DURATION.fullmatch(value):
        seconds = sum(float(n) * _SECONDS[unit] for n, unit in _DURATION_PART.findall(value))
        return timedelta(seconds=min(seconds, _LONGEST_SECONDS))
    return value


def parse_megabytes(value: Any) -> Any:
    """Read "256M" or "1.5G"; return anything else unchanged."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        return round(min(float(match[1]) * _MEGABYTES[match[2].lower()], _LARGEST_MEGABYTES))
    return value


def write_duration(value: timedelta) -> str:
    """The shortest text that `parse_duration` reads back: "500ms", "30s", "5m", "7d"."""
    milliseconds = round(value / timedelta(milliseconds=1))
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s")):
        if milliseconds % size == 0 and (milliseconds or unit == "s"):
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def write_megabytes(value: int) -> str:
    """The shortest text that `parse_megabytes` reads back: "64M", "2G"."""
    for size, unit in ((1024 * 1024, "T"), (1024, "G")):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value}M"


Duration = Annotated[
    timedelta, Parsed(parse_duration, write=write_duration, schema={"type": ["string", "number"], "examples": ["30s"]})
]
Megabytes = Annotated[
    int,
    Parsed(
        parse_megabytes,
        expects="a size such as 512M",
        write=write_megabytes,
        schema={"type": "string", "examples": ["512M"]},
    ),
]
