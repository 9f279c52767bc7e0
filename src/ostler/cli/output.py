"""Results on standard output, as text that no terminal obeys: control characters leave as escapes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

_GAP = "  "


def plain(text: str) -> str:
    """The text with everything escaped that a terminal would act upon or hide."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the last one is left ragged."""
    lines = [list(head), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        click.echo(_GAP.join(padded).rstrip())


def as_json(value: Any) -> None:
    click.echo(_safe(json.dumps(value, indent=2, ensure_ascii=False)))


def as_json_line(value: Any) -> None:
    click.echo(_safe(json.dumps(value, ensure_ascii=False)))


def _safe(text: str) -> str:
    """JSON that means the same: only strings can hold such characters, and there an escape stands for them."""
    return "".join(
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1] for character in text
    )


def note(sentence: str) -> None:
    """Talk goes to standard error, so that a pipe carries only results."""
    click.echo(f"ostler: {plain(sentence)}", err=True)
