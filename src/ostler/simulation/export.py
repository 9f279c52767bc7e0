"""Played turns as a file for other tools: JSON lines with everything, or CSV with a row per agent and turn."""

from __future__ import annotations

import csv
import itertools
import json
import os
import secrets
import stat
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from ostler.errors import ValidationError
from ostler.model.validation import fault
from ostler.simulation.history import PlayedTurn

FORMS = ("csv", "jsonl")
#: What stands in every row of a table, before the state.
_FIXED = ("turn", "agent", "number", "active", "decision")
#: A field of a state, or one inside it.
_Way = tuple[str, ...]
#: Called for each time that the turns are gone through; a table goes through them twice.
Turns = Callable[[], AsyncIterable[PlayedTurn]]


async def export_turns(turns: Turns, to: str | Path, form: str) -> int:
    """Write the turns into a file; the number of lines or rows. The file is replaced when all is written."""
    if form not in FORMS:
        raise fault("form", f"must be one of {', '.join(FORMS)}", form)
    path = _checked_place(Path(to))
    return await (_write_csv(turns, path) if form == "csv" else _write_lines(turns, path))


async def _write_lines(turns: Turns, path: Path) -> int:
    names = [one.name for one in fields(PlayedTurn)]
    count = 0
    with _replacing(path) as file:
        async for played in turns():
            file.write(_json({name: getattr(played, name) for name in names}) + "\n")
            count += 1
    return count


async def _write_csv(turns: Turns, path: Path) -> int:
    columns: dict[_Way, str] = {}
    taken = set(_FIXED)
    async for played in turns():
        for state in played.states.values():
            for way, _ in _flat(state):
                if way not in columns:
                    columns[way] = _free_header(way, taken)
                    taken.add(columns[way])
    count = 0
    with _replacing(path) as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow((*_FIXED, *columns.values()))
        async for played in turns():
            for row in _rows(played, columns):
                writer.writerow(["" if value is None else _text(value) for value in row])
                count += 1
    return count


def _rows(played: PlayedTurn, columns: Mapping[_Way, str]) -> Iterator[list[Any]]:
    """One row for each agent that takes part after the turn; empty where it has no such field."""
    # An agent that joined in this turn may have the name of one that decided and left.
    newcomers = {one.get("resolved_name") for one in played.operations if one.get("cause") == "agent"}
    for name, state in played.states.items():
        values = dict(_flat(state))
        decided = name in played.decisions and name not in newcomers
        decision = _json(played.decisions[name]) if decided else None
        fixed = [played.turn, name, played.numbers[name], name not in played.paused, decision]
        yield [*fixed, *(values.get(way) for way in columns)]


def _flat(state: Any) -> Iterator[tuple[_Way, Any]]:
    """The fields of a state, and those one level deeper; what is deeper is JSON."""
    for name, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from (((name, inner), held) for inner, held in value.items())
        else:
            yield (name,), value


def _free_header(way: _Way, taken: set[str]) -> str:
    plain = ".".join(way)
    others = (f"state.{plain}_{number}" for number in itertools.count(1))
    return next(name for name in itertools.chain((plain, f"state.{plain}"), others) if name not in taken)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# --- the file ----------------------------------------------------------------------------------------


def _checked_place(given: Path) -> Path:
    """Where the file stands: a link is followed, for what it leads to is to be replaced."""
    try:
        path = given.resolve()
        if path.is_dir() or not path.parent.is_dir():
            raise fault("to", "must be a file in a directory that exists; create that, or choose another", str(given))
        if path.exists() and not path.is_file():
            raise fault("to", "must be a regular file, not a device, a pipe or a socket", str(given))
    except (OSError, RuntimeError) as error:  # the latter tells of links in a circle
        raise _unusable(error, given) from error
    return path


def _unusable(error: Exception, given: Path) -> ValidationError:
    why = getattr(error, "strerror", None) or "its links lead in a circle"
    return fault("to", f"must be a file that can be written ({why}); choose another", str(given))


@contextmanager
def _replacing(path: Path) -> Iterator[IO[str]]:
    """A file that takes its place when it is complete and on the disk, and leaves nothing behind otherwise."""
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o666 if mode is None else 0o600)
        if mode is not None:
            os.fchmod(descriptor, mode)
    except OSError as error:
        raise _unusable(error, path) from error
    try:
        # A lone surrogate has no place in UTF-8 and becomes its escape.
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:  # noqa: PTH123 - it is open already
            yield file
            file.flush()
            os.fsync(descriptor)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
