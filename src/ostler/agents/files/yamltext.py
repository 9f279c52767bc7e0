"""The front matter: YAML 1.2 as plain data with its line numbers.

Only the events of the parser are used. Nothing is constructed from a tag, an alias is refused, and the depth is
bounded, so a file cannot run code, fold out to gigabytes or overflow the stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ostler.agents.files.page import Page, Trail, dotted

#: The parser is plain Python and needs a second for so much.
MAX_FRONT = 64 * 1024
MAX_DEPTH = 32

_TAGS = frozenset({f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq")})
_TEXT_TAG = "tag:yaml.org,2002:str"
_WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_REAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NONE = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_COLON = "mapping values are not allowed here"
_PROSE = re.compile(r"description:[ \t]+([^\s'\"|>\[{&*!%@`#].*)")


class _StopReadingError(Exception):
    def __init__(self, line: int, sentence: str) -> None:
        super().__init__(sentence)
        self.line = line
        self.sentence = sentence


@dataclass(slots=True)
class _Frame:
    """A mapping or a list that is being filled."""

    value: Any
    trail: Trail
    #: The key whose value comes next; None in a list, and before a key.
    key: str | None = None
    #: Keys that were written twice: their second value is read and dropped.
    dropping: bool = False
    lines: dict[str, int] = field(default_factory=dict)


def read_yaml(page: Page, text: str, first_line: int) -> None:
    """Fill the page. `first_line` is the line of the file on which the text begins."""
    if len(text.encode()) > MAX_FRONT:
        page.stop(first_line, f"the front matter is larger than {MAX_FRONT // 1024} KiB")
    try:
        found = _Builder(page, first_line).build(_events(_quoted_prose(text)))
    except _StopReadingError as stop:
        page.stop(stop.line + first_line, stop.sentence)
    if isinstance(found, dict):
        page.data = found
    elif found is not None:
        page.stop(first_line, "the front matter must be keys with values, such as name: fixer")


def _events(text: str) -> Iterator[Any]:
    # Every program that names a definition would pay for these imports at the top.
    from ruamel.yaml import YAML  # noqa: PLC0415 - few programs read a file
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415 - few programs read a file

    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        raise _StopReadingError(min(line, text.count("\n")), _sentence(error.problem, error.context)) from error
    except YAMLError as error:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) if isinstance(position, int) else 0
        raise _StopReadingError(line, "there is a character that YAML does not allow; remove it") from error


def _sentence(problem: str | None, context: str | None) -> str:
    said = problem or context or "it cannot be read"
    if "'\\t'" in said:
        return "a tab stands where YAML wants spaces; indent with spaces"
    if said == _COLON:
        return "this is not YAML: a second ': ' in a line, or a wrong indent; put a value that holds ': ' in quotes"
    return f"this is not YAML: {' '.join(said.split())}" + (f" {context}" if problem and context else "")


def _quoted_prose(text: str) -> str:
    """Other tools bear a description that holds ': ', and write such files themselves; so it is put in quotes."""

    def quoted(found: re.Match[str]) -> str:
        prose = found[1].rstrip()
        if ": " not in prose and not prose.endswith(":"):
            return found[0]
        return "description: '" + prose.replace("'", "''") + "'"

    return re.sub(rf"^{_PROSE.pattern}$", quoted, text, flags=re.MULTILINE)


class _Builder:
    def __init__(self, page: Page, first_line: int) -> None:
        self._page = page
        self._first = first_line
        self._frames: list[_Frame] = []
        self._root: Any = None
        self._documents = 0

    def build(self, events: Iterator[Any]) -> Any:
        for event in events:
            line = event.start_mark.line
            match type(event).__name__:
                case "MappingStartEvent":
                    self._open(event, {}, line)
                case "SequenceStartEvent":
                    self._open(event, [], line)
                case "MappingEndEvent" | "SequenceEndEvent":
                    self._frames.pop()
                case "ScalarEvent":
                    self._scalar(event, line)
                case "AliasEvent":
                    raise _StopReadingError(line, f"the alias *{event.anchor} is not read; write the value out")
                case "DocumentStartEvent":
                    self._documents += 1
                    if self._documents > 1:
                        raise _StopReadingError(line, "a second document begins here; the front matter is one")
                case _:
                    pass
        return self._root

    def _open(self, event: Any, value: Any, line: int) -> None:
        self._tag(event, line)
        if self._wants_key():
            raise _StopReadingError(line, "a key must be plain text")
        if len(self._frames) >= MAX_DEPTH:
            raise _StopReadingError(line, f"this is nested more than {MAX_DEPTH} deep")
        self._frames.append(_Frame(value=value, trail=self._place(value, line)))

    def _scalar(self, event: Any, line: int) -> None:
        tag = self._tag(event, line)
        if self._wants_key():
            self._take_key(str(event.value), line)
            return
        plain = event.style is None and tag != _TEXT_TAG
        self._place(self._resolved(event.value, line) if plain else event.value, line)

    def _tag(self, event: Any, line: int) -> str | None:
        if event.tag is None:
            return None
        tag = str(event.tag)
        if tag not in _TAGS and tag != "!":
            raise _StopReadingError(line, f"the tag {tag!a} is not read; write a plain value")
        return _TEXT_TAG if tag == "!" else tag

    def _wants_key(self) -> bool:
        top = self._frames[-1] if self._frames else None
        return top is not None and isinstance(top.value, dict) and top.key is None

    def _take_key(self, key: str, line: int) -> None:
        top = self._frames[-1]
        top.key = key
        top.dropping = key in top.lines
        if top.dropping:
            first = top.lines[key] + self._first
            self._page.fail(line + self._first, f"{dotted((*top.trail, key))} stands already on line {first}")
        else:
            top.lines[key] = line

    def _place(self, value: Any, line: int) -> Trail:
        """Put it where it belongs; the answer is its trail."""
        if not self._frames:
            self._root = value
            return ()
        top = self._frames[-1]
        if isinstance(top.value, list):
            trail: Trail = (*top.trail, len(top.value))
            top.value.append(value)
            self._page.lines.setdefault(trail, line + self._first)
            return trail
        key, top.key = str(top.key), None
        trail = (*top.trail, key)
        if not top.dropping:
            top.value[key] = value
            self._page.lines.setdefault(trail, top.lines[key] + self._first)
        return trail

    @staticmethod
    def _resolved(text: str, line: int) -> Any:
        """A plain scalar by the core schema of YAML 1.2: `no` is text, `010` is ten, a date is text."""
        if text in _NONE:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        try:
            if _WHOLE.fullmatch(text):
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        except ValueError as error:
            raise _StopReadingError(line, "this number has too many digits") from error
        if _REAL.fullmatch(text):
            return float(re.sub(r"\.(?=[iInN])", "", text))
        return text
