"""A definition file while it is read: its data, where each key stands, and everything that is wrong with it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ostler.errors import DefinitionError
from ostler.model.faults import named, shown

MAX_BYTES = 256 * 1024
#: A file of nothing but mistakes says so and stops there.
MAX_FAULTS = 100

#: Where a value stands: the keys on the way to it, and the index inside a list.
Trail = tuple[str | int, ...]

_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFault:
    """One mistake in a file: where it stands, which key it is about, what is wrong. Line 0 is the file as a whole."""

    path: str
    line: int
    bound: str
    key: str = ""
    value: str = ""

    @property
    def message(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        said = f"{self.key} {self.bound}" if self.key else self.bound
        return f"{place}: {said}" + (f", was {self.value}" if self.value else "")


class Page:
    """What the readers of YAML and TOML fill, and what the checks ask and blame."""

    def __init__(self, path: str) -> None:
        self.path = path if path.isprintable() else ascii(path)
        self.data: Mapping[str, Any] = {}
        self.lines: dict[Trail, int] = {}
        self.faults: list[FileFault] = []
        self._blamed: set[Trail] = set()

    def fail(self, line: int, sentence: str) -> None:
        """Something is wrong with the text itself, not with one key."""
        self.faults.append(FileFault(path=self.path, line=line, bound=sentence))

    def stop(self, line: int, sentence: str) -> NoReturn:
        """Nothing more can be read: raise what is known so far."""
        self.fail(line, sentence)
        raise self._error()

    def blame(self, trail: Trail, bound: str, value: str = "") -> None:
        """Something is wrong with a key."""
        self._blamed.add(trail)
        self.faults.append(
            FileFault(path=self.path, line=self.line(trail), key=dotted(trail), bound=bound, value=value)
        )

    def blame_value(self, trail: Trail, bound: str) -> None:
        """The same, and show what stands there."""
        self.blame(trail, bound, shown(self.at(trail)) if self.holds(trail) else "")

    def is_blamed(self, trail: Trail) -> bool:
        """Whether this key, or what stands in or around it, was complained about already."""
        return any(one[: len(trail)] == trail or trail[: len(one)] == one for one in self._blamed)

    def line(self, trail: Trail) -> int:
        """Of the key; of what it stands in where it is not written itself."""
        for length in range(len(trail), 0, -1):
            if trail[:length] in self.lines:
                return self.lines[trail[:length]]
        return 1 if self.lines else 0

    def at(self, trail: Trail) -> Any:
        found: Any = self.data
        for part in trail:
            try:
                found = found[part]
            except (KeyError, IndexError, TypeError):
                return _MISSING
        return found

    def holds(self, trail: Trail) -> bool:
        return self.at(trail) is not _MISSING

    def settle(self) -> None:
        """Raise one `DefinitionError` with every fault, in the order of the lines."""
        if self.faults:
            raise self._error()

    def _error(self) -> DefinitionError:
        ordered = sorted(self.faults, key=lambda fault: fault.line)
        if len(ordered) > MAX_FAULTS:
            rest = FileFault(path=self.path, line=0, bound=f"{len(ordered) - MAX_FAULTS} more faults are not shown")
            ordered = [*ordered[:MAX_FAULTS], rest]
        return DefinitionError(ordered)


def dotted(trail: Trail) -> str:
    return ".".join(named(str(part)) for part in trail)


def read_text(page: Page, path: Path, *, follow: bool = True) -> tuple[str, bytes]:
    """The text of a file with plain line ends, and its bytes; raises the `DefinitionError` if there is none.

    Opened without waiting, for a pipe under that name would wait for ever.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
        with open(handle, "rb") as file:  # noqa: PTH123 - it is open already
            regular = stat.S_ISREG(os.fstat(handle).st_mode)
            raw = file.read(MAX_BYTES + 1) if regular else b""
    except (OSError, ValueError) as error:
        page.stop(0, f"cannot be read: {getattr(error, 'strerror', None) or error}; check the path and who owns it")
    if not regular:
        page.stop(0, "is not a regular file")
    if len(raw) > MAX_BYTES:
        page.stop(0, f"is larger than {MAX_BYTES // 1024} KiB")
    return _decoded(page, raw), raw


def _decoded(page: Page, raw: bytes) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        page.stop(raw.count(b"\n", 0, error.start) + 1, "this is not UTF-8 text; save the file as UTF-8")
    if "\0" in text:
        page.stop(text.count("\n", 0, text.index("\0")) + 1, "there is a NUL character; remove it")
    return text.replace("\r\n", "\n")
