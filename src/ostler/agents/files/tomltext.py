"""TOML as plain data with line numbers.

The parser of Python gives the data and no lines, so a small scanner finds where each key stands. It may be simple,
for the parser refuses what is not TOML. It runs first, because a key of a hundred thousand dots would cost the
parser all memory: up to the first mistake both see the same keys, and beyond it the parser does not go.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import tomllib
from datetime import date, datetime, time
from typing import Any

from ostler.agents.files.page import Page, Trail

MAX_DEPTH = 32

_AT_LINE = re.compile(r" \(at line (\d+), column \d+\)$")
_KEY = re.compile(r"""[ \t]*(?P<key>"(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*(?P<dot>\.?)""")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' "|'''" r".*?'{3,5}" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'",
    re.DOTALL,
)
_GAP = re.compile(r"(?:[\s,]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_BARE = re.compile(r"[^,\]}\n#]*")


class _TooDeepError(Exception):
    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _LostError(Exception):
    """This is not TOML; the parser will say so."""


def read_toml(page: Page, text: str) -> None:
    try:
        _Scanner(text, page.lines).scan()
        page.data = _plain(tomllib.loads(text))
    except _TooDeepError as error:
        page.stop(error.line, f"this is nested more than {MAX_DEPTH} deep")
    except tomllib.TOMLDecodeError as error:
        where = _AT_LINE.search(str(error))
        line = int(where[1]) if where else text.count("\n") + 1
        page.stop(line, f"this is not TOML: {_AT_LINE.sub('', str(error)).removesuffix(' (at end of document)')}")
    except RecursionError:
        page.stop(1, "this is nested too deep")
    except ValueError:
        page.stop(1, "a number has too many digits")


def _plain(value: Any) -> Any:
    """TOML knows dates, JSON does not: they become text."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    return value.isoformat() if isinstance(value, (datetime, date, time)) else value


def _unquoted(raw: str) -> str:
    if raw[0] not in "\"'":
        return raw
    try:
        return next(iter(tomllib.loads(f"{raw} = 0")))
    except tomllib.TOMLDecodeError:
        raise _LostError from None


class _Scanner:
    def __init__(self, text: str, lines: dict[Trail, int]) -> None:
        self._text = text
        self._lines = lines
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self._at = 0
        #: How many tables of an array of tables there were, by the trail of the array.
        self._counts: dict[Trail, int] = {}

    def scan(self) -> None:
        with contextlib.suppress(_LostError):
            self._scan()

    def _scan(self) -> None:
        table: Trail = ()
        self._gap()
        while char := self._here():
            if char == "[":
                table = self._header()
            else:
                self._pair(table)
            self._gap()

    def _header(self) -> Trail:
        start = self._at
        several = self._text.startswith("[[", start)
        self._at += 2 if several else 1
        parts = self._keys()
        self._expect("]]" if several else "]")
        trail: Trail = ()
        for number, part in enumerate(parts, 1):
            trail = (*trail, part)
            self._note(trail, start)
            if several and number == len(parts):
                self._counts[trail] = self._counts.get(trail, 0) + 1
            if trail in self._counts:
                trail = (*trail, self._counts[trail] - 1)
                self._note(trail, start)
        return trail

    def _pair(self, table: Trail) -> None:
        start = self._at
        trail = table
        for part in self._keys():
            trail = (*trail, part)
            self._note(trail, start)
        self._expect("=")
        self._value(trail)

    def _value(self, trail: Trail) -> None:
        self._at = self._after(_BLANK)
        match self._here():
            case '"' | "'":
                end = self._after(_STRING)
                if end == self._at:
                    raise _LostError
                self._at = end
            case "[":
                self._list(trail)
            case "{":
                self._at += 1
                self._gap()
                while self._here() not in {"}", ""}:
                    self._pair(trail)
                    self._gap()
                self._expect("}")
            case _:
                self._at = self._after(_BARE)

    def _list(self, trail: Trail) -> None:
        self._at += 1
        self._gap()
        index = 0
        while self._here() not in {"]", ""}:
            start = self._at
            self._note((*trail, index), start)
            self._value((*trail, index))
            if self._at == start:
                raise _LostError
            self._gap()
            index += 1
        self._expect("]")

    def _keys(self) -> list[str]:
        parts = []
        while found := _KEY.match(self._text, self._at):
            self._at = found.end()
            parts.append(_unquoted(found["key"]))
            if not found["dot"]:
                break
        return parts

    def _expect(self, sign: str) -> None:
        if not self._text.startswith(sign, self._at):
            raise _LostError
        self._at += len(sign)

    def _gap(self) -> None:
        self._at = self._after(_GAP)

    def _after(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        return found.end() if found else self._at

    def _here(self) -> str:
        return self._text[self._at : self._at + 1]

    def _note(self, trail: Trail, offset: int) -> None:
        line = bisect.bisect_right(self._starts, offset)
        if len(trail) > MAX_DEPTH:
            raise _TooDeepError(line)
        self._lines.setdefault(trail, line)
