"""Holds what was written against the table of keys: every mistake is blamed, what is well-formed is returned."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ostler.agents.files.forms import FORMS, Form
from ostler.agents.files.keys import Key
from ostler.agents.files.page import Page, Trail
from ostler.model.faults import shown


class _Absent:
    """What stands for a value that could not be read."""


_ABSENT = _Absent()


def checked(page: Page, key: Key, trail: Trail) -> dict[str, Any]:
    """The values under a mapping of the page, read by their forms; those that cannot be read are left out."""
    value = _value(page, key, page.at(trail), trail)
    return value if isinstance(value, dict) else {}


def _value(page: Page, key: Key, written: Any, trail: Trail) -> Any:
    if written is None:
        page.blame(trail, "has no value; write one, or remove the key")
        return _ABSENT
    if isinstance(written, Mapping):
        if key.keys:
            return _keys(page, key, written, trail)
        if key.each is not None:
            return _named(page, key, key.each, written, trail)
    if key.form is Form.CHOICE:
        return _choice(page, key, written, trail)
    rule = FORMS[key.form]
    try:
        return rule.read(written)
    except ValueError:
        page.blame_value(trail, f"must be {rule.hint}")
        return _ABSENT


def _choice(page: Page, key: Key, written: Any, trail: Trail) -> Any:
    word = "no" if written is False and "no" in key.choices else written
    if isinstance(word, str) and word in key.choices:
        return str(word)
    page.blame_value(trail, f"must be one of {', '.join(key.choices)}")
    return _ABSENT


def _keys(page: Page, key: Key, written: Mapping[str, Any], trail: Trail) -> dict[str, Any]:
    known = key.by_name
    found = {}
    for name, value in written.items():
        if name not in known:
            page.blame((*trail, name), f"is not known{nearest(name, key)}")
            continue
        read = _value(page, known[name], value, (*trail, name))
        if read is not _ABSENT:
            found[name] = read
    return found


def _named(page: Page, key: Key, each: Key, written: Mapping[str, Any], trail: Trail) -> dict[str, Any]:
    read = {}
    for name, value in written.items():
        if key.names and not re.fullmatch(key.names, name):
            page.blame((*trail, name), f"must be {key.names_hint}")
        else:
            read[name] = _value(page, each, value, (*trail, name))
    return {name: value for name, value in read.items() if value is not _ABSENT}


def nearest(name: str, key: Key) -> str:
    """The end of a sentence about an unknown key: what was probably meant."""
    close = difflib.get_close_matches(name.lower().replace("_", "-"), list(key.by_name), n=1)
    if close:
        return f"; did you mean {close[0]}?"
    deeper = next((f"{inner.name}.{name}" for inner in key.keys if name in inner.by_name), "")
    if deeper:
        return f"; did you mean {deeper}?"
    return f"; known are {', '.join(key.by_name)}" if len(key.keys) <= 10 else ""


def leaves(key: Key, trail: Trail = ()) -> Iterator[tuple[Key, Trail]]:
    """Every key of the table that carries a value of its own, with the way to it."""
    for inner in key.keys:
        here = (*trail, inner.name)
        if inner.keys:
            yield from leaves(inner, here)
        else:
            yield inner, here


def required_one(page: Page, values: Mapping[str, Any], names: tuple[str, ...], trail: Trail) -> bool:
    """Whether exactly one of these keys is there; blames what they stand in if not."""
    found = [name for name in names if name in values]
    if len(found) == 1:
        return True
    if not page.is_blamed(trail):
        page.blame(trail, f"must have exactly one of {', '.join(names)}" + (f", has {shown(found)}" if found else ""))
    return False
