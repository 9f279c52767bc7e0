"""Rules for names, tags and longer text, and the folding that makes tags comparable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ostler.model.validation import Fault, named, shown

MAX_NAME = 200
MAX_TAG = 50
MAX_TAGS = 10
#: Of a reason that a caller gives.
MAX_REASON = 2000

_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"[A-Za-z0-9-]{1,50}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Control sequences of a terminal: those with parameters, strings up to their end, the rest of two or three characters.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*([@-~])|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~])")
#: Sequences that move the cursor, so that what follows is another word.
_MOVES = frozenset("ABCDEFGHadefjk")
_GAP = re.compile(r" {3,}")
#: Variables that say who an agent is; only Ostler sets them.
_OURS = "OSTLER_"


def fold_tags(tags: Sequence[str] | None) -> tuple[str, ...]:
    """Tags as they are stored: lower case, each once, in the order given."""
    return tuple(dict.fromkeys(tag.lower() for tag in tags or ()))


def clean_text(text: str) -> str:
    """Foreign text (an error, a reason) as every store can keep it: no NUL, no lone surrogate."""
    if "\0" not in text and text.isascii():
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def visible_text(line: str) -> str | None:
    """What a person reads of a line that a program drew on a terminal; None for nothing."""
    if "\x1b" not in line and "\b" not in line and "\r" not in line:
        return line
    text = _SEQUENCE.sub(lambda match: " " if match[1] in _MOVES else "", line)
    words = "".join(character if character.isprintable() else " " for character in text)
    return _GAP.sub("  ", words).rstrip() or None


def last_line(text: str) -> str:
    """The last line of foreign text in which something can be read, without control sequences."""
    for line in reversed(text.splitlines()):
        if words := (visible_text(line) or "").strip():
            return clean_text(words)
    return ""


def clipped(text: str, limit: int) -> str:
    """Foreign text, cleaned and cut to `limit`; the result says how much is missing."""
    if len(text) <= limit:
        return clean_text(text)
    return f"{clean_text(text[:limit])}… ({len(text) - limit} more characters)"


def name_faults(field: str, name: Any) -> Iterator[Fault]:
    if not isinstance(name, str):
        return
    if not 1 <= len(name) <= MAX_NAME:
        yield Fault(field=field, bound=f"must have 1 to {MAX_NAME} characters", value=f"{len(name)} characters")
    if not name.isprintable():
        yield Fault(field=field, bound="must be printable text on one line", value=shown(name))
    elif name != name.strip():
        yield Fault(field=field, bound="must not begin or end with a space", value=shown(name))


def plain_text_faults(field: str, text: Any, limit: int) -> Iterator[Fault]:
    """Longer text may hold line breaks, but nothing that a store cannot keep."""
    if not isinstance(text, str):
        return
    if len(text) > limit:
        yield Fault(field=field, bound=f"must have at most {limit} characters", value=f"{len(text)} characters")
    yield from unkeepable_faults(field, text)


def unkeepable_faults(field: str, text: str) -> Iterator[Fault]:
    """NUL, which PostgreSQL cannot keep, and lone surrogates, which UTF-8 cannot write."""
    if "\0" in text:
        yield Fault(field=field, bound="must not contain NUL")
    if _SURROGATE.search(text):
        yield Fault(field=field, bound="must be text without lone surrogates", value=shown(text))


def variable_faults(field: str, names: Iterable[str]) -> Iterator[Fault]:
    """Of names of environment variables."""
    for name in names:
        if not _VARIABLE.fullmatch(name):
            yield Fault(field=field, bound="must name variables by letters, digits and _", value=shown(name))
        elif name.startswith(_OURS):
            yield Fault(field=field, bound=f"must not name variables that begin with {_OURS}", value=shown(name))


def environment_faults(field: str, env: Mapping[str, str | None]) -> Iterator[Fault]:
    yield from variable_faults(field, env)
    for name, value in env.items():
        yield from unkeepable_faults(f"{field}.{named(name)}", value or "")


def tag_faults(field: str, tags: Sequence[str]) -> Iterator[Fault]:
    if len(tags) > MAX_TAGS:
        yield Fault(field=field, bound=f"must have at most {MAX_TAGS} entries", value=f"{len(tags)} entries")
    for index, tag in enumerate(tags):
        if not _TAG.fullmatch(tag):
            bound = f"must be 1 to {MAX_TAG} letters, digits and hyphens"
            yield Fault(field=f"{field}.{index}", bound=bound, value=shown(tag))
