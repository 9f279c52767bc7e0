"""Tables that fit the terminal: columns are shortened or left out as they declare it. In a pipe nothing is cut."""

from __future__ import annotations

import os
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import click

from ostler.cli.output import as_json, has_colour, note, plain

_GAP = "  "
_ELLIPSIS = "…"
_NARROWEST = 20
_USUAL = 80
_COLOURED = frozenset({"STATE", "HEALTH"})
_COLOURS = {
    "processing": "green",
    "ready": "green",
    "running": "green",
    "waiting": "cyan",
    "suspended": "yellow",
    "failed": "red",
    "terminating": "yellow",
    "unhealthy": "red",
    "degraded": "yellow",
}


class Column(NamedTuple):
    """What a column shows of an item, and what becomes of it where the terminal is too narrow for the table."""

    head: str
    cell: Callable[[Any], str]
    #: Shortened with an ellipsis down to this width; 0: never.
    least: int = 0
    #: Its turn to be left out, the lowest first; 0: it is never left out.
    leaves: int = 0
    is_number: bool = False
    #: Only where one of its cells has something in it.
    if_any: bool = False
    #: Only with `-o wide`.
    only_wide: bool = False
    #: The width of most cells, for a list that goes on: its first lines may have narrower ones.
    usual: int = 0


class Table:
    """Items as lines of cells. Every line fits into `width`; without a width nothing is cut."""

    def __init__(
        self, columns: Sequence[Column], items: Iterable[Any], width: int | None = None, *, wide: bool = False
    ) -> None:
        listed, self._width = list(items), None if wide else width
        shown = [column for column in columns if wide or not column.only_wide]
        cells = {column: [_cell(column, item) for item in listed] for column in shown}
        shown = [column for column in shown if not column.if_any or any(cells[column])]
        natural = {column: max(column.usual, *map(width_of, (column.head, *cells[column]))) for column in shown}
        self._widths = natural if self._width is None else _fitted(natural, self._width)
        self._rows = [[cells[column][number] for column in self._widths] for number in range(len(listed))]

    def lines(self, *, colour: bool = False) -> list[str]:
        """The heads, then a line for each item."""
        heads = self._line([column.head for column in self._widths], colour=False)
        return [heads, *(self._line(row, colour=colour) for row in self._rows)]

    def line(self, item: Any, *, colour: bool = False) -> str:
        """One item more, in the same columns: for a list that goes on."""
        return self._line([_cell(column, item) for column in self._widths], colour=colour)

    def _line(self, cells: Sequence[str], *, colour: bool) -> str:
        parts = []
        for (column, width), cell in zip(self._widths.items(), cells, strict=True):
            text = cell if self._width is None else crop(cell, width)
            space = " " * (width - width_of(text))  # none where a later cell is wider
            padded = space + text if column.is_number else text + space
            has_colour = colour and cell in _COLOURS and column.head in _COLOURED
            parts.append(click.style(padded, fg=_COLOURS[cell]) if has_colour else padded)
        return _GAP.join(parts).rstrip()


def _cell(column: Column, item: Any) -> str:
    return plain(column.cell(item))


def _fitted(natural: dict[Column, int], width: int) -> dict[Column, int]:
    """The columns that stay, each with its width: what is over after the least of each goes to the narrowest first."""
    widths = {column: min(size, column.least or size) for column, size in natural.items()}
    for column in sorted((column for column in natural if column.leaves), key=lambda column: column.leaves):
        if _total(widths) <= width:
            break
        del widths[column]
    while _total(widths) > width and max(widths.values()) > 1:  # also what else is never shortened
        widths[max(widths, key=lambda column: widths[column])] -= 1
    for _ in range(width - _total(widths)):
        cut = [column for column, size in widths.items() if size < natural[column]]
        if not cut:
            break
        widths[min(cut, key=lambda column: widths[column])] += 1
    last = next(reversed(widths))
    if not last.is_number:
        widths[last] += max(width - _total(widths), 0)  # a later line may be longer
    return widths


def _total(widths: dict[Column, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def width_of(text: str) -> int:
    """How many cells of a terminal the text takes."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


def _character_width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1


def crop(text: str, width: int) -> str:
    """The text in so many cells; an ellipsis says that there is more."""
    if width_of(text) <= width:
        return text
    left, taken = width - 1, 0
    for place, character in enumerate(text):
        taken += _character_width(character)
        if taken > left:
            return text[:place].rstrip() + _ELLIPSIS
    return text


def terminal_width() -> int | None:
    """The width of the terminal that standard output is; None for a pipe or a file."""
    if not sys.stdout.isatty():
        return None
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        columns = 0
    return max(columns or _USUAL, _NARROWEST)


def fit_line(head: str, text: str, *tail: str, usual: int = 40) -> str:
    """One line between others like it; only the text is shortened where the terminal is too narrow for it."""
    end, width = "".join(f"   {part}" for part in tail if part), terminal_width()
    if width is not None:
        text = crop(text, max(width - width_of(head) - width_of(end), _NARROWEST))
    space = " " * (usual - width_of(text)) if width is None or width > width_of(head) + usual + width_of(end) else ""
    return f"{head}{text}{space if end else ''}{end}".rstrip()


# --- printing ----------------------------------------------------------------------------------------


def show(
    items: Sequence[dict[str, Any]], form: str, columns: Sequence[Column], name: str = "name", *, empty: str
) -> None:
    """A list in the form that was asked for: table, wide, json, jsonl or name. `empty` is said of an empty table."""
    match form:
        case "json":
            as_json(list(items))
        case "jsonl":
            for item in items:
                as_json(item, indent=None)
        case "name":
            for item in items:
                click.echo(plain(str(item.get(name) or "")))
        case _ if items:
            print_table(columns, items, wide=form == "wide")
        case _:
            note(empty)


def print_table(columns: Sequence[Column], items: Iterable[Any], *, wide: bool = False) -> None:
    for line in Table(columns, items, terminal_width(), wide=wide).lines(colour=has_colour()):
        click.echo(line)


def print_facts(heads: tuple[str, str], facts: Sequence[tuple[str, str]]) -> None:
    """A name and a value on each line; what is longer than the terminal goes on below, between words."""
    lines, width = [heads, *facts], terminal_width()
    label = max(len(name) for name, _ in lines) + len(_GAP)
    for name, value in lines:
        line = f"{plain(name):<{label}}{plain(value)}".rstrip()
        if width is not None and width_of(line) > width > label + _NARROWEST:
            below = " " * label
            line = textwrap.fill(line, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)
        click.echo(line)
