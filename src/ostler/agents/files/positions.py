"""YAML and TOML as plain data, with the line of every key and item. Nothing is constructed, no alias is followed."""

from __future__ import annotations

import bisect
import contextlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from types import MappingProxyType
from typing import Any

from ostler.model.faults import named

#: The parser of YAML is plain Python and needs a second for so much.
MAX_FRONT = 64 * 1024
MAX_DEPTH = 32
_TOO_DEEP = f"this is nested more than {MAX_DEPTH} deep"

#: The keys on the way to a value, and the index inside a list.
KeyPath = tuple[str | int, ...]


@dataclass(kw_only=True, slots=True)
class Positions:
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    #: Line and sentence for each key that is written twice; the first one counts.
    duplicates: list[tuple[int, str]] = field(default_factory=list)


class UnreadableError(Exception):
    """The text is neither YAML nor TOML as it is read here."""

    def __init__(self, line: int, sentence: str) -> None:
        super().__init__(sentence)
        self.line = line
        self.sentence = sentence


def dotted(path: KeyPath) -> str:
    """The path as a `Fault` names its field."""
    return ".".join(named(str(part)) for part in path)


# --- YAML --------------------------------------------------------------------------------------------

_TAG = re.compile(r"(?:&\S+\s+)?!(\S*)")
_CORE = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq"))
_TEXT_TAGS = frozenset({"", "!str", "<tag:yaml.org,2002:str>"})
_WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_REAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: Mapping[str, bool | None] = MappingProxyType(
    dict.fromkeys(("", "~", "null", "Null", "NULL"))
    | dict.fromkeys(("true", "True", "TRUE"), True)
    | dict.fromkeys(("false", "False", "FALSE"), False)
)
_PROSE = re.compile(r"^description:[ \t]+([^\s'\"|>\[{&*!%@`#].*)$", re.MULTILINE)


def read_yaml(text: str, first_line: int = 1) -> Positions:
    """YAML 1.2 with the core schema. `first_line` is the line of the file on which the text begins."""
    if len(text.encode()) > MAX_FRONT:
        raise UnreadableError(first_line, f"the front matter is larger than {MAX_FRONT // 1024} KiB")
    text = _PROSE.sub(_quoted, text)
    walk = _YamlWalk(text, first_line)
    try:
        root = _composed(text, first_line)
        data = {} if root is None else walk.value(root, (), first_line)
    except RecursionError:
        raise UnreadableError(first_line, _TOO_DEEP) from None
    if not isinstance(data, dict):
        raise UnreadableError(first_line, "the front matter must be keys with values, such as name: fixer")
    walk.found.data = data
    return walk.found


def _quoted(prose: re.Match[str]) -> str:
    """Other tools write a description that holds ": " without quotes."""
    text = prose[1].rstrip()
    if ": " not in text and not text.endswith(":"):
        return prose[0]
    return "description: '" + text.replace("'", "''") + "'"


def _composed(text: str, first_line: int) -> Any:
    """The nodes of the text; None where it is empty."""
    # Every program that names a definition would pay for these imports at the top.
    from ruamel.yaml import YAML  # noqa: PLC0415 - few programs read a file
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415 - few programs read a file

    try:
        return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = min(mark.line if mark else 0, text.count("\n"))
        raise UnreadableError(line + first_line, _said(error.problem or "", error.context or "")) from error
    except YAMLError as error:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) if isinstance(position, int) else 0
        sentence = "there is a character that YAML does not allow; remove it"
        raise UnreadableError(line + first_line, sentence) from error


def _said(problem: str, context: str) -> str:
    if "'\\t'" in problem:
        return "a tab stands where YAML wants spaces; indent with spaces"
    if problem == "mapping values are not allowed here":
        return "this is not YAML: a second ': ' in a line, or a wrong indent; put a value that holds ': ' in quotes"
    return f"this is not YAML: {' '.join(f'{context} {problem}'.split())}"


class _YamlWalk:
    """Makes plain data of nodes."""

    def __init__(self, text: str, first_line: int) -> None:
        self.found = Positions()
        self._text = text
        self._first = first_line
        self._met: set[int] = set()

    def value(self, node: Any, path: KeyPath, line: int) -> Any:
        """`line` is that of the key, or of the item."""
        if id(node) in self._met:
            raise UnreadableError(line, "an alias is not read; write the value out")
        self._met.add(id(node))
        if len(path) > MAX_DEPTH:
            raise UnreadableError(line, _TOO_DEEP)
        tag = _TAG.match(self._text, node.start_mark.index)
        if tag is not None and tag[1] and str(node.tag) not in _CORE:
            raise UnreadableError(line, f"the tag {named(str(node.tag))} is not read; write a plain value")
        match node.id:
            case "mapping":
                return self._mapping(node, path)
            case "sequence":
                return [self._item(child, (*path, index)) for index, child in enumerate(node.value)]
        as_text = node.style is not None or (tag is not None and tag[1] in _TEXT_TAGS)
        return node.value if as_text else _scalar(node.value, line)

    def _item(self, node: Any, path: KeyPath) -> Any:
        line = self.found.lines[path] = node.start_mark.line + self._first
        return self.value(node, path, line)

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, child in node.value:
            line = key.start_mark.line + self._first
            if key.id != "scalar" or id(key) in self._met:
                raise UnreadableError(line, "a key must be plain text")
            self._met.add(id(key))
            here = (*path, key.value)
            if key.value in data:
                sentence = f"{dotted(here)} stands already on line {self.found.lines[here]}"
                self.found.duplicates.append((line, sentence))
                continue
            self.found.lines[here] = line
            data[key.value] = self.value(child, here, line)
        return data


def _scalar(text: str, line: int) -> Any:
    """A plain scalar: `no` is text, `010` is ten, a date is text."""
    if text in _WORDS:
        return _WORDS[text]
    if _WHOLE.fullmatch(text):
        try:
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        except ValueError:
            raise UnreadableError(line, "this number has too many digits") from None
    if _REAL.fullmatch(text):
        return float(re.sub(r"\.(?=[iInN])", "", text))
    return text


# --- TOML --------------------------------------------------------------------------------------------

_AT_LINE = re.compile(r" \(at line (\d+), column \d+\)$")
_KEY = re.compile(r"""[ \t]*(?P<key>"(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*(?P<dot>\.?)""")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' "|'''" r".*?'{3,5}" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'",
    re.DOTALL,
)
_GAP = re.compile(r"(?:[\s,]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_BARE = re.compile(r"[^,\]}\n#]*")


class _LostError(Exception):
    """This is not TOML; the parser will say so."""


def read_toml(text: str) -> Positions:
    """The parser of Python gives the data and no lines, so a scanner finds where each key stands.

    The scanner may be simple, for the parser refuses what is not TOML. It runs first, because a key of a hundred
    thousand dots would cost the parser all memory: up to the first mistake both see the same keys.
    """
    found = Positions()
    try:
        _Scanner(text, found.lines).scan()
        found.data = _plain(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        where = _AT_LINE.search(str(error))
        line = int(where[1]) if where else text.count("\n") + 1
        said = _AT_LINE.sub("", str(error)).removesuffix(" (at end of document)")
        raise UnreadableError(line, f"this is not TOML: {said}") from error
    except RecursionError:
        raise UnreadableError(1, _TOO_DEEP) from None
    except ValueError:
        raise UnreadableError(1, "a number has too many digits") from None
    return found


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
    def __init__(self, text: str, lines: dict[KeyPath, int]) -> None:
        self._text = text
        self._lines = lines
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self._at = 0
        #: How many tables of an array of tables there were, by the path of the array.
        self._counts: dict[KeyPath, int] = {}

    def scan(self) -> None:
        with contextlib.suppress(_LostError):
            self._scan()

    def _scan(self) -> None:
        table: KeyPath = ()
        self._gap()
        while char := self._here():
            if char == "[":
                table = self._header()
            else:
                self._pair(table)
            self._gap()

    def _header(self) -> KeyPath:
        start = self._at
        several = self._text.startswith("[[", start)
        self._at += 2 if several else 1
        parts = self._keys()
        self._expect("]]" if several else "]")
        path: KeyPath = ()
        for number, part in enumerate(parts, 1):
            path = (*path, part)
            self._note(path, start)
            if several and number == len(parts):
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
                self._note(path, start)
        return path

    def _pair(self, table: KeyPath) -> None:
        start = self._at
        path = table
        for part in self._keys():
            path = (*path, part)
            self._note(path, start)
        self._expect("=")
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._at = self._after(_BLANK)
        match self._here():
            case '"' | "'":
                end = self._after(_STRING)
                if end == self._at:
                    raise _LostError
                self._at = end
            case "[":
                self._list(path)
            case "{":
                self._at += 1
                self._gap()
                while self._here() not in {"}", ""}:
                    self._pair(path)
                    self._gap()
                self._expect("}")
            case _:
                self._at = self._after(_BARE)

    def _list(self, path: KeyPath) -> None:
        self._at += 1
        self._gap()
        index = 0
        while self._here() not in {"]", ""}:
            start = self._at
            self._note((*path, index), start)
            self._value((*path, index))
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

    def _note(self, path: KeyPath, offset: int) -> None:
        line = bisect.bisect_right(self._starts, offset)
        if len(path) > MAX_DEPTH:
            raise UnreadableError(line, _TOO_DEEP)
        self._lines.setdefault(path, line)
