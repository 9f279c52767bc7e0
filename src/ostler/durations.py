"""Durations, moments and sizes: read as people write them, and written for files, sentences and tables."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
#: More than any range allows. Beyond them lie numbers that no timedelta and no int can be made of.
_LONGEST_SECONDS = 1e10
_LARGEST_MEGABYTES = 1e10
_PART = r"(\d+(?:\.\d+)?)\s*(ms|sec|s|min|m|h|d)"
_DURATION = re.compile(rf"(?:\s*{_PART})+\s*")
_DURATION_PART = re.compile(_PART)
#: How a duration is written in JSON: days, hours, minutes, seconds.
_ISO_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|m|g|t)i?b?\s*", re.IGNORECASE)
_MEGABYTES = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024}


# --- durations, read ---------------------------------------------------------------------------------


def parse_duration(value: Any) -> Any:
    """Read "30s", "1h 30min" or "500ms"; return anything else unchanged, for pydantic takes a number of seconds."""
    if isinstance(value, str) and _DURATION.fullmatch(value):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(value))
        return timedelta(seconds=min(seconds, _LONGEST_SECONDS))
    return value


def to_duration(value: timedelta | float | str) -> timedelta:
    """Read also a number of seconds and the form of JSON ("PT30S"). Raises `ValueError` for anything else."""
    parsed = parse_duration(value)
    if isinstance(parsed, timedelta):
        return parsed
    if isinstance(parsed, int | float) and not isinstance(parsed, bool):
        return timedelta(seconds=parsed)
    match = _ISO_DURATION.fullmatch(parsed) if isinstance(parsed, str) else None
    if match is None:
        raise ValueError(f"{value!r:.50} is no duration; write one such as 30s")
    days, hours, minutes, seconds = (float(number or 0) for number in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def parse_seconds(text: str) -> float | None:
    """The seconds of "90", "30s" or "1h 30min"; None for anything else."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parsed = parse_duration(text)
    return parsed.total_seconds() if isinstance(parsed, timedelta) else None


# --- durations, written ------------------------------------------------------------------------------


def write_duration(value: timedelta) -> str:
    """The shortest text that `parse_duration` reads back: "500ms", "30s", "5m", "7d"."""
    milliseconds = round(value / timedelta(milliseconds=1))
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s")):
        if milliseconds % size == 0 and (milliseconds or unit == "s"):
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def duration_text(value: timedelta) -> str:
    """The exact duration for a sentence, in one unit: 90 s, 5 min, 1 h."""
    seconds = value.total_seconds()
    for size, unit in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.12g} {unit}"
    return f"{seconds:.12g} s"


def span(length: timedelta) -> str:
    """The duration in its two largest units: 1 h 2 min, 59 s. A negative one counts as nothing."""
    return _largest_units(length.total_seconds(), 2) or "less than 1 s"


def rough_duration(seconds: float) -> str:
    """The duration for a table: one unit below a day, two above: 12 s, 4 min, 3 d 4 h."""
    return _largest_units(seconds, 1 if seconds < 86400 else 2) or "0 s"


def _largest_units(seconds: float, count: int) -> str:
    """Empty below one second. A unit that is zero counts, so 1 h 0 min 5 s is "1 h"."""
    rest, parts = max(int(seconds), 0), []
    first = next((place for place, (size, _) in enumerate(_UNITS) if rest >= size), len(_UNITS))
    for size, unit in _UNITS[first : first + count]:
        whole, rest = divmod(rest, size)
        if whole:
            parts.append(f"{whole} {unit}")
    return " ".join(parts)


# --- moments, written --------------------------------------------------------------------------------


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


# --- sizes -------------------------------------------------------------------------------------------


def parse_megabytes(value: Any) -> Any:
    """Read "256M" or "1.5G"; return anything else unchanged."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        return round(min(float(match[1]) * _MEGABYTES[match[2].lower()], _LARGEST_MEGABYTES))
    return value


def write_megabytes(value: int) -> str:
    """The shortest text that `parse_megabytes` reads back: "64M", "2G"."""
    for size, unit in ((1024 * 1024, "T"), (1024, "G")):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value}M"


def size_text(count: float) -> str:
    """A number of bytes for a table: 512 B, 64 M, 1.5 G."""
    for unit in ("B", "K", "M"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} G"
