"""Results on standard output, talk on standard error; control characters leave as escapes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

_RIGHT = frozenset({"UP", "RESTARTS", "CPU", "MEM", "AGE", "EXIT", "NUMBER", "COST", "TOKENS", "GENERATION"})
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_COLOURS = {
    "processing": "green",
    "ready": "green",
    "waiting": "cyan",
    "suspended": "yellow",
    "failed": "red",
    "terminating": "yellow",
    "unhealthy": "red",
    "degraded": "yellow",
}


def plain(text: str) -> str:
    """The text with everything escaped that a terminal would act upon or hide."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character == "\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def has_colour() -> bool:
    """Colour only on a terminal, and never where NO_COLOR asks for none."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; numbers stand to the right."""
    lines = [list(head), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    colour = has_colour()
    for number, line in enumerate(lines):
        cells = []
        for name, cell, width in zip(head, line, widths, strict=True):
            padded = cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            if colour and number and cell in _COLOURS:
                padded = click.style(padded, fg=_COLOURS[cell])
            cells.append(padded)
        click.echo("  ".join(cells).rstrip())


def show(items: Sequence[dict[str, Any]], form: str, head: Sequence[str], row: Any, name: str = "name") -> None:
    """A list in the form that was asked for: table, json, jsonl or name."""
    match form:
        case "json":
            as_json(list(items))
        case "jsonl":
            for item in items:
                as_json(item, indent=None)
        case "name":
            for item in items:
                click.echo(plain(str(item.get(name) or "")))
        case _:
            table(head, [row(item) for item in items])


def as_json(value: Any, *, indent: int | None = 2) -> None:
    """In ASCII: an escape means the same, and no terminal acts upon it."""
    click.echo(json.dumps(value, indent=indent))


def note(sentence: str) -> None:
    """Also from a handler of a signal, which may come in the midst of other output."""
    line = f"ostler: {plain(sentence)}"
    try:
        click.echo(line, err=True)
    except RuntimeError:  # a stream is not entered twice
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


# --- times and sizes ---------------------------------------------------------------------------------


def rough_duration(seconds: float) -> str:
    """One unit below a day, two above: 12 s, 4 min, 3 d 4 h."""
    left = max(int(seconds), 0)
    for place, (size, unit) in enumerate(_UNITS):
        if left >= size:
            whole, rest = divmod(left, size)
            more = f" {rest // 3600} h" if place == 0 and rest >= 3600 else ""
            return f"{whole} {unit}{more}"
    return "0 s"


def moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def seconds_since(text: str | None) -> float:
    when = moment(text)
    return 0.0 if when is None else max((datetime.now(UTC) - when).total_seconds(), 0.0)


def local_time(text: str | None) -> str:
    when = moment(text)
    return "" if when is None else f"{when.astimezone():%Y-%m-%d %H:%M:%S}"


def size_text(count: float) -> str:
    for unit in ("B", "K", "M", "G"):
        if count < 1024 or unit == "G":
            return f"{count:.0f} {unit}" if unit in {"B", "K", "M"} else f"{count:.1f} {unit}"
        count /= 1024
    return ""


_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> float | None:
    """A duration as people write it, in seconds; None where it is none."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _DURATION_PART.findall(text)
    if not parts or _DURATION_PART.sub("", text).strip():
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def short_path(path: str | os.PathLike[str]) -> str:
    """With ~ for the user's own directory."""
    text, own = os.fspath(path), os.path.expanduser("~")  # noqa: PTH111 - pathlib would be one more import
    return "~" + text[len(own) :] if own != "/" and (text == own or text.startswith(own + "/")) else text
