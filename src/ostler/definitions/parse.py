"""YAML and TOML as plain data, with the lines of their keys. Nothing is constructed, no alias is followed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from types import MappingProxyType
from typing import Any

from ostler.model.validation import named

#: In bytes. The parser of YAML is plain Python and needs a second for this.
MAX_FRONT = 64 * 1024
MAX_DEPTH = 32
_TOO_DEEP = f"this is nested more than {MAX_DEPTH} deep"

#: The keys on the way to a value, and the index inside a list.
KeyPath = tuple[str | int, ...]


@dataclass(kw_only=True, slots=True)
class Document:
    data: dict[str, Any]
    #: The line of a key by its path with dots.
    lines: Mapping[str, int]
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


def read_yaml(text: str, first_line: int = 1, what: str = "the front matter") -> Document:
    """YAML 1.2 with the core schema. `first_line` is the line of the file on which the text begins."""
    if len(text.encode()) > MAX_FRONT:
        raise UnreadableError(first_line, f"{what} is larger than {MAX_FRONT // 1024} KiB")
    text = _PROSE.sub(_quoted, text)
    walk = _YamlWalk(text, first_line)
    try:
        root = _composed(text, first_line)
        data = {} if root is None else walk.value(root, (), first_line)
    except RecursionError:
        raise UnreadableError(first_line, _TOO_DEEP) from None
    if not isinstance(data, dict):
        raise UnreadableError(first_line, f"{what} must be keys with values, such as name: fixer")
    return Document(data=data, lines=walk.lines, duplicates=walk.duplicates)


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
        raise UnreadableError(line + first_line, _yaml_problem(error.problem or "", error.context or "")) from error
    except YAMLError as error:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) if isinstance(position, int) else 0
        sentence = "there is a character that YAML does not allow; remove it"
        raise UnreadableError(line + first_line, sentence) from error


def _yaml_problem(problem: str, context: str) -> str:
    if "'\\t'" in problem:
        return "a tab stands where YAML wants spaces; indent with spaces"
    if problem == "mapping values are not allowed here":
        return "this is not YAML: a second ': ' in a line, or a wrong indent; put a value that holds ': ' in quotes"
    return f"this is not YAML: {' '.join(f'{context} {problem}'.split())}"


class _YamlWalk:
    """Makes plain data of nodes."""

    def __init__(self, text: str, first_line: int) -> None:
        self.lines: dict[str, int] = {}
        self.duplicates: list[tuple[int, str]] = []
        self._text = text
        self._first = first_line
        self._visited: set[int] = set()

    def value(self, node: Any, path: KeyPath, line: int) -> Any:
        """`line` is that of the key, or of the item."""
        if id(node) in self._visited:
            raise UnreadableError(line, "an alias is not read; write the value out")
        self._visited.add(id(node))
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
        line = self.lines[dotted(path)] = node.start_mark.line + self._first
        return self.value(node, path, line)

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, child in node.value:
            line = key.start_mark.line + self._first
            if key.id != "scalar" or id(key) in self._visited:
                raise UnreadableError(line, "a key must be plain text")
            self._visited.add(id(key))
            here = (*path, key.value)
            name = dotted(here)
            if key.value in data:
                self.duplicates.append((line, f"{name} stands already on line {self.lines[name]}"))
                continue
            self.lines[name] = line
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
_STRING_OR_REMARK = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' "|'''" r".*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'|#[^\n]*",
    re.DOTALL,
)
#: The beginning of a line that names a table or a key; strings are masked.
_TABLE_OR_KEY = re.compile(r"^[ \t]*(?:\[(?P<many>\[)?(?P<table>[^\[\]\n]+)\]|(?P<key>[\w. \t-]+)=)", re.MULTILINE)
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{MAX_DEPTH}}}")


def read_toml(text: str) -> Document:
    masked = _STRING_OR_REMARK.sub(_mask, text)
    if deep := _DEEP_KEY.search(masked):  # a key of a hundred thousand dots would cost the parser all memory
        raise UnreadableError(text.count("\n", 0, deep.start()) + 1, _TOO_DEEP)
    try:
        data = _json_values(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        position = _AT_LINE.search(str(error))
        line = int(position[1]) if position else text.count("\n") + 1
        problem = _AT_LINE.sub("", str(error)).removesuffix(" (at end of document)")
        raise UnreadableError(line, f"this is not TOML: {problem}") from error
    except RecursionError:
        raise UnreadableError(1, _TOO_DEEP) from None
    except ValueError:
        raise UnreadableError(1, "a number has too many digits") from None
    return Document(data=data, lines=_toml_lines(text, masked))


def _mask(match: re.Match[str]) -> str:
    """As long as it was, with its line ends: a remark as blanks, a string as one word."""
    return re.sub(r"[^\n]", " " if match[0][0] == "#" else "_", match[0])


def _json_values(value: Any) -> Any:
    """TOML has dates, JSON does not: they become text."""
    if isinstance(value, dict):
        return {key: _json_values(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_json_values(child) for child in value]
    return value.isoformat() if isinstance(value, (datetime, date, time)) else value


def _toml_lines(text: str, masked: str) -> dict[str, int]:
    """The first line of each table and of each key that begins a line; the text is known to be TOML.

    What stands inside a list or an inline table has no line of its own: the key around it has.
    """
    lines: dict[str, int] = {}
    lengths: dict[KeyPath, int] = {}  # of each array of tables, so far
    table: KeyPath = ()
    line, counted = 1, 0
    for match in _TABLE_OR_KEY.finditer(masked):
        start, end = match.span("table" if match["table"] else "key")
        line, counted = line + text.count("\n", counted, start), start
        keys, path = _toml_keys(text[start:end]), () if match["table"] else table
        for number, key in enumerate(keys, 1):
            path = (*path, key)
            lines.setdefault(dotted(path), line)
            if match["many"] and number == len(keys):
                lengths[path] = lengths.get(path, 0) + 1
            if path in lengths:
                path = (*path, lengths[path] - 1)
                lines.setdefault(dotted(path), line)
        table = path if match["table"] else table
    return lines


def _toml_keys(written: str) -> KeyPath:
    """The parts of a dotted key, of which some may be quoted."""
    try:
        value: Any = tomllib.loads(f"{written} = 0")
    except tomllib.TOMLDecodeError:  # an item of a list that looks like a key
        return ()
    keys: list[str] = []
    while isinstance(value, dict):
        keys.extend(value)
        value = value[keys[-1]]
    return tuple(keys)
