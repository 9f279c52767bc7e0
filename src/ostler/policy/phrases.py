"""Moments and durations in the words of a sentence, also where the clock has been set back."""

from __future__ import annotations

from datetime import datetime, timedelta

_NOTHING = timedelta(0)
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def span(length: timedelta) -> str:
    """A duration in its two largest units: 1 h 2 min, 59 s. What is negative counts as nothing."""
    seconds = int(max(length, _NOTHING).total_seconds())
    if seconds == 0:
        return "less than 1 s"
    for place, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            whole, rest = divmod(seconds, size)
            finer = _UNITS[place + 1] if place + 1 < len(_UNITS) else None
            more = f" {rest // finer[0]} {finer[1]}" if finer and rest >= finer[0] else ""
            return f"{whole} {unit}{more}"
    return "less than 1 s"


def moment(when: datetime) -> str:
    return when.isoformat(sep=" ", timespec="seconds")


def since(when: datetime, now: datetime) -> str:
    """Since when, and for how long that is; a start that lies ahead comes from a clock that was set back."""
    if when > now:
        return f"since {moment(when)} (the clock has been set back since)"
    return f"since {moment(when)}, for {span(now - when)}"


def due(when: datetime, now: datetime) -> str:
    """When something is to happen, and how far off that is."""
    if when > now:
        return f"at {moment(when)}, in {span(when - now)}"
    return f"at {moment(when)}, which was {span(now - when)} ago"
