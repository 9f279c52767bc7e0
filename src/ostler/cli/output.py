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

_RIGHT = frozenset(
    [
        "UP",
        "RESTARTS",
        "CPU",
        "MEM",
        "AGE",
        "EXIT",
        "NUMBER",
        "COST",
        "TOKENS",
        "GENERATION",
        "SIZE",
        "WORKDIR",
        "VAULT",
        "LOGS",
        "TOTAL",
        "AGENTS",
        "TASKS",
    ]
)
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


#: A moment in UTC, as sentences of the daemon carry it.
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d(?::\d\d)?)(?:\.\d+)?(?:\+00:00|Z| UTC)")
#: A change of colour or weight, the only sequence of an agent that may reach a terminal.
_STYLE = re.compile(r"(\x1b\[[0-9;:]*m)")


def sentence(text: str) -> str:
    """A sentence of the daemon for the screen: its moments in the local time zone."""
    return plain(_MOMENT.sub(lambda match: local_time(f"{match[1]}T{match[2]}+00:00"), text))


def written_by_agent(text: str) -> str:
    """A line that an agent wrote: as it is for a pipe or a file; on a terminal only its colours are left."""
    if not sys.stdout.isatty():
        return text
    parts = _STYLE.split(text)
    styled = "".join(part if place % 2 else plain(part) for place, part in enumerate(parts))
    return f"{styled}\x1b[0m" if len(parts) > 1 else styled


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


def note(text: str) -> None:
    """Also from a handler of a signal, which may come in the midst of other output."""
    line = f"ostler: {sentence(text)}"
    try:
        click.echo(line, err=True)
    except RuntimeError:  # a stream is not entered twice
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


# --- times -------------------------------------------------------------------------------------------


def moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def seconds_since(text: str | None) -> float:
    when = moment(text)
    return 0.0 if when is None else max((datetime.now(UTC) - when).total_seconds(), 0.0)


def local_time(text: str | None) -> str:
    when = moment(text)
    return "" if when is None else f"{when.astimezone():%Y-%m-%d %H:%M:%S}"


def cost_text(dollars: float | None) -> str:
    return "-" if dollars is None else "<$0.01" if 0 < dollars < 0.005 else f"${dollars:.2f}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(text: str | None) -> str:
    """The first line of an error or a summary."""
    return (text or "").strip().split("\n", 1)[0].removesuffix("; its last lines:").removesuffix(":")


def short_path(path: str | os.PathLike[str]) -> str:
    """With ~ for the user's own directory."""
    text, own = os.fspath(path), os.path.expanduser("~")  # noqa: PTH111 - pathlib would be one more import
    return "~" + text[len(own) :] if own != "/" and (text == own or text.startswith(own + "/")) else text
