"""Times with their zone, and as whole microseconds without the rounding of floating point."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from annotated_types import Interval

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class _Aware:
    """Tells pydantic to refuse a time without its zone: such a one cannot be ordered among the others."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "tz_constraint": "aware"}


#: Far enough from the ends of the calendar that no zone and no store falls off them.
_RANGE = Interval(ge=datetime(1900, 1, 1, tzinfo=UTC), le=datetime(9000, 1, 1, tzinfo=UTC))

Moment = Annotated[datetime, _Aware(), _RANGE]


def micros(moment: datetime) -> int:
    # Elsewhere two moments may be equal and an hour apart: of the hour that comes twice `==` knows nothing.
    return _utc_micros(moment) if moment.tzinfo is UTC else (moment - _EPOCH) // _MICROSECOND


@functools.lru_cache(maxsize=16)  # one commit writes the same moment into all of its rows
def _utc_micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(value: int) -> datetime:
    return _EPOCH + timedelta(microseconds=value)
