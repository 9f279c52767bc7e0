"""Types of record fields: ranges, times in UTC, durations and sizes as people write them.

Pydantic reads these marks when a record is first validated. None of them imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Any

from ostler.durations import parse_duration, parse_megabytes, write_duration, write_megabytes

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
#: Megabytes of output for each second.
OutputRate = Annotated[Megabytes, Interval(ge=1, le=1024)]
DEFAULT_RATE = 2
