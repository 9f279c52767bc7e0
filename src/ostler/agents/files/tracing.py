"""Faults of a record, told in the words of the file: the key that was written, its line, and what stood there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ostler.agents.files.checking import leaves
from ostler.agents.files.keys import Key
from ostler.agents.files.page import Page, Trail
from ostler.model.faults import Fault

#: The keys that fill each field of a record, and where they would stand.
_Places = Mapping[str, list[tuple[Key, Trail]]]


def blame_record(page: Page, faults: Iterable[Fault], table: Key, trail: Trail) -> None:
    """`trail` is where the keys of the table stand on the page. A key that was blamed before is not blamed twice."""
    places: dict[str, list[tuple[Key, Trail]]] = {}
    for key, inner in leaves(table):
        places.setdefault(key.field, []).append((key, (*trail, *inner)))
    words = {field.rpartition(".")[2]: rows[-1][0].name for field, rows in places.items()}
    # A value that was not written follows from one that was; the latter is to blame, where anything is.
    for fault in sorted(faults, key=lambda fault: _unwritten(page, places, fault)):
        rows, rest = _rows(places, fault.field.split("."))
        if not rows:
            _blame_plain(page, fault)
            continue
        key, full = next((row for row in rows if page.holds(row[1])), rows[-1])
        target = _written(page, (*full, *rest), full)
        if page.is_blamed(target) or (page.faults and _unwritten(page, places, fault)):
            continue
        bound = _said(fault.bound, key, words)
        if len(target) < len(full):
            bound = f"({key.name}) {bound}"
        if rest or not page.holds(target) or isinstance(page.at(target), (Mapping, list)):
            page.blame(target, bound, fault.value)
        else:
            # "64G" says more to its author than the 65536 that the record has made of it.
            page.blame_value(target, bound)


def _unwritten(page: Page, places: _Places, fault: Fault) -> bool:
    """Whether the fault is about the value of a key that is not in the file."""
    rows, _ = _rows(places, fault.field.split("."))
    return bool(rows and fault.value) and not any(page.holds(_written(page, trail, trail)) for _, trail in rows)


def _rows(places: _Places, parts: list[str]) -> tuple[list[tuple[Key, Trail]], list[str | int]]:
    """The keys that fill a field, or the record that it is in; and what of the field is left."""
    for length in range(len(parts), 0, -1):
        rows = places.get(".".join(parts[:length]))
        if rows:
            return rows, [int(part) if part.isdigit() else part for part in parts[length:]]
    return [], []


def _written(page: Page, precise: Trail, key: Trail) -> Trail:
    """The part of the way that the user can find in the file.

    A short form has no inner keys, so the key itself is named; a key that is missing from a long form is named
    although it is not there.
    """
    if page.holds(precise):
        return precise
    for length in range(len(key), 0, -1):
        if page.holds(key[:length]) or isinstance(page.at(key[: length - 1]), Mapping):
            return key[:length]
    return key


def _said(bound: str, key: Key, words: Mapping[str, str]) -> str:
    for field, word in words.items():
        # Names of one word are words of the language as well; the sentence may mean those.
        if "_" in field:
            bound = re.sub(rf"\b{field}\b", word, bound)
    return f"{bound} {key.unit}" if key.unit and bound.startswith("must be") else bound


def _blame_plain(page: Page, fault: Fault) -> None:
    """A field that is no key of the table: the name, the description, or a key of another tool."""
    parts = fault.field.removeprefix("extra.").split(".")
    trail = tuple(int(part) if part.isdigit() else part for part in parts)
    if not page.is_blamed(trail):
        page.blame(trail, fault.bound, fault.value)
