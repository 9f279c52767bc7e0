"""What was played, as a file for other tools: JSON Lines, CSV or Parquet.

JSON Lines has everything, one turn in a line. The two tables have one row for each agent that is there after a turn,
with one column for each field of its state.
"""

from __future__ import annotations

import csv
import importlib
import os
import secrets
import stat
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from ostler.errors import MissingExtraError, ValidationError
from ostler.model import Fault, shown
from ostler.simulation.exportcolumns import Columns, Type, fitted, json_text, rows_of, text_of
from ostler.simulation.played import PlayedTurn

#: Called once for each time that the turns are gone through; a table goes through them twice.
Turns = Callable[[], AsyncIterable[PlayedTurn]]

#: So many rows are held until they are written.
_BATCH = 8192


class ExportForm(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


async def export_turns(turns: Turns, to: str | Path, form: ExportForm | str) -> int:
    """Write the turns into a file, and answer how many lines or rows it has.

    Until all is written the file keeps its old content, or is not there.
    """
    path = _place(Path(to))
    match _form(form):
        case ExportForm.JSONL:
            return await _as_lines(turns, path)
        case ExportForm.CSV:
            return await _as_csv(turns, path)
        case ExportForm.PARQUET:
            return await _as_parquet(turns, path)


def _place(given: Path) -> Path:
    """Where the file stands in truth: a link is followed, for it is not the link that is to be replaced."""
    try:
        path = given.resolve()
        if path.is_dir() or not path.parent.is_dir():
            raise _refused("must be a file in a directory that exists; create that, or choose another", given)
        if path.exists() and not path.is_file():
            raise _refused("must be a regular file, not a device, a pipe or a socket; choose another", given)
    except (OSError, RuntimeError) as error:  # the latter is how Python tells of links that lead in a circle
        raise _unusable(error, given) from error
    return path


def _unusable(error: Exception, given: Path) -> ValidationError:
    why = getattr(error, "strerror", None) or "its links lead in a circle"
    return _refused(f"must be a file that can be written ({why}); choose another, or check who owns it", given)


def _refused(bound: str, given: Path) -> ValidationError:
    return ValidationError([Fault(field="to", bound=bound, value=shown(str(given)))])


def _form(given: str) -> ExportForm:
    if given not in set(ExportForm):
        raise ValidationError(
            [Fault(field="form", bound=f"must be one of {', '.join(ExportForm)}", value=shown(given))]
        )
    return ExportForm(given)


async def _as_lines(turns: Turns, path: Path) -> int:
    names = [field.name for field in fields(PlayedTurn)]
    count = 0
    with _whole_file(path) as raw, _text_in(raw) as file:
        async for played in turns():
            file.write(json_text({name: getattr(played, name) for name in names}) + "\n")
            count += 1
    return count


async def _as_csv(turns: Turns, path: Path) -> int:
    columns = await _columns(turns)
    count = 0
    with _whole_file(path) as raw, _text_in(raw) as file:
        # Both signs of this line end, so that a lone one in a text is put in quotes.
        writer = csv.writer(file, quoting=csv.QUOTE_MINIMAL, lineterminator="\r\n")
        writer.writerow(columns.headers())
        async for played in turns():
            for row in rows_of(played, columns):
                writer.writerow(["" if value is None else text_of(value) for value in row])
                count += 1
    return count


async def _as_parquet(turns: Turns, path: Path) -> int:
    arrow, parquet = _pyarrow()
    columns = await _columns(turns)
    types = {Type.BOOL: arrow.bool_(), Type.INT: arrow.int64(), Type.FLOAT: arrow.float64(), Type.TEXT: arrow.string()}
    kinds = columns.types()
    schema = arrow.schema([(header, types[kind]) for header, kind in zip(columns.headers(), kinds, strict=True)])
    count = 0

    def written(rows: list[list[Any]]) -> int:
        cells = [
            arrow.array([fitted(value, kind) for value in values], types[kind])
            for values, kind in zip(zip(*rows, strict=True), kinds, strict=True)
        ]
        writer.write_table(arrow.table(cells, schema=schema))
        return len(rows)

    with _whole_file(path) as raw, parquet.ParquetWriter(raw, schema) as writer:
        waiting: list[list[Any]] = []
        async for played in turns():
            waiting += rows_of(played, columns)
            if len(waiting) >= _BATCH:
                count += written(waiting)
                waiting = []
        if waiting:
            count += written(waiting)
    return count


def _pyarrow() -> tuple[Any, Any]:
    """Only now, because it is large and optional."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError("exporting Parquet", "parquet") from error


async def _columns(turns: Turns) -> Columns:
    columns = Columns()
    async for played in turns():
        for state in played.states.values():
            columns.learn(state)
    return columns


@contextmanager
def _text_in(raw: IO[bytes]) -> Iterator[IO[str]]:
    # Half a character that Unicode has no form for becomes its escape; in JSON that is even the same text.
    with open(raw.fileno(), "w", encoding="utf-8", errors="backslashreplace", newline="", closefd=False) as file:
        yield file


@contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place when it is complete and on the disk, and leaves nothing behind otherwise."""
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with _opened(part, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _opened(part: Path, path: Path) -> IO[bytes]:
    """With the mode of the file that it replaces, from the beginning: what only one might read stays so."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
        descriptor = os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else 0o600
        )
        if mode is not None:
            os.fchmod(descriptor, mode)
    except OSError as error:
        raise _unusable(error, path) from error
    return os.fdopen(descriptor, "wb")
