"""Times with their zone, and as whole microseconds without the rounding of floating point."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from ostler.model.bounds import Interval

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class _Aware:
    """Tells pydantic to refuse a time without its zone: such a one cannot be ordered among the others."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "tz_constraint": "aware"}


class _InUtc:
    """Tells pydantic to give and to write every time in UTC, whatever zone it was said in.

    A record that is made in Python keeps what it was given: making one changes nothing, and the moment is the same.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": _in_utc},
            "schema": handler(source),
            "serialization": {
                "type": "function-plain",
                "function": _in_utc,
                "return_schema": {"type": "datetime"},
                "when_used": "json",
            },
        }


def _in_utc(moment: Any) -> Any:
    """Bears what is no time, or has no zone: that is a fault, and told of elsewhere."""
    if not isinstance(moment, datetime) or moment.tzinfo is None or moment.tzinfo is UTC:
        return moment
    try:
        return moment.astimezone(UTC)
    except OverflowError:  # so near the end of the calendar that its hour in UTC lies beyond
        return moment


#: Far enough from the ends of the calendar that no zone and no store falls off them.
_RANGE = Interval(ge=datetime(1900, 1, 1, tzinfo=UTC), le=datetime(9000, 1, 1, tzinfo=UTC))

Moment = Annotated[datetime, _Aware(), _RANGE, _InUtc()]


def micros(moment: datetime) -> int:
    # Elsewhere two moments may be equal and an hour apart: of the hour that comes twice `==` knows nothing.
    return _utc_micros(moment) if moment.tzinfo is UTC else (moment - _EPOCH) // _MICROSECOND


@functools.lru_cache(maxsize=16)  # one commit writes the same moment into all of its rows
def _utc_micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(value: int) -> datetime:
    return _EPOCH + timedelta(microseconds=value)
