"""Played turns as a file for other tools: JSON lines with everything, or CSV with a row per agent and turn."""

from __future__ import annotations

import csv
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from ostler.model.validation import fault
from ostler.simulation.history import PlayedTurn

FORMS = ("csv", "jsonl")
#: What stands in every row of a table, before the state.
_FIXED = ("turn", "agent", "number", "active", "decision")
#: Called for each time that the turns are gone through; a table goes through them twice.
Turns = Callable[[], AsyncIterable[PlayedTurn]]


async def export_turns(turns: Turns, to: str | Path, form: str) -> int:
    """Write the turns into a file; the number of lines or rows. The file is replaced when all is written."""
    if form not in FORMS:
        raise fault("form", f"must be one of {', '.join(FORMS)}", form)
    path = Path(to)
    _require_file(path)
    return await (_write_csv(turns, path) if form == "csv" else _write_lines(turns, path))


async def _write_lines(turns: Turns, path: Path) -> int:
    names = [field.name for field in fields(PlayedTurn)]
    count = 0
    with _replace(path) as file:
        async for played in turns():
            file.write(_json({name: getattr(played, name) for name in names}) + "\n")
            count += 1
    return count


async def _write_csv(turns: Turns, path: Path) -> int:
    columns: dict[str, None] = {}
    async for played in turns():
        for state in played.states.values():
            columns |= dict.fromkeys(_flat(state))
    count = 0
    with _replace(path) as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow((*_FIXED, *columns))
        async for played in turns():
            for row in _rows(played, columns):
                writer.writerow(["" if value is None else _text(value) for value in row])
                count += 1
    return count


def _rows(played: PlayedTurn, columns: Mapping[str, None]) -> Iterator[list[Any]]:
    """One row for each agent that takes part after the turn; empty where it has no such field."""
    # An agent that joined in this turn may have the name of one that decided and left.
    joined = {operation.get("resolved_name") for operation in played.operations if operation.get("cause") == "agent"}
    for name, state in played.states.items():
        values = _flat(state)
        decision = _json(played.decisions[name]) if name in played.decisions and name not in joined else None
        fixed = [played.turn, name, played.numbers[name], name not in played.paused, decision]
        yield [*fixed, *(values.get(column) for column in columns)]


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a state: its fields, and those one level deeper; what is deeper is JSON."""
    columns: dict[str, Any] = {}
    for name, value in state.items():
        inner = value.items() if isinstance(value, Mapping) and value else ()
        columns |= {f"{name}.{key}": entry for key, entry in inner} or {name: value}
    return {f"state.{column}" if column in _FIXED else column: value for column, value in columns.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _require_file(path: Path) -> None:
    # `os.path`, because `pathlib` raises for a name that is too long.
    if os.path.isdir(path) or not os.path.isdir(path.parent):  # noqa: PTH112 - as above
        raise fault("to", "must be a file in a directory that exists; create that, or choose another", str(path))
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - as above
        raise fault("to", "must be a regular file, not a device, a pipe or a socket", str(path))


@contextmanager
def _replace(path: Path) -> Iterator[IO[str]]:
    """A file that takes the place of `path`, or of what it links to, when it is complete."""
    target = path.resolve()
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        # A lone surrogate has no place in UTF-8 and becomes its escape.
        with part.open("x", encoding="utf-8", errors="backslashreplace", newline="") as file:
            if target.exists():
                shutil.copymode(target, part)
            yield file
        part.replace(target)
    except OSError as error:
        raise fault("to", f"must be a file that can be written ({error.strerror})", str(path)) from error
    finally:
        part.unlink(missing_ok=True)
