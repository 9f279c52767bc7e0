"""The text of a turn: what its digest covers, and whether what is read is still what was written.

The digest of a turn covers what happened and what changed, and the digest before it. It says nothing about what may
differ between equal histories: the words of errors, and the whole state that stands now and then in the place of the
changes. Where a text has such a thing, a seal at its end covers all of it.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any
from uuid import UUID

from ostler.errors import HistoryBrokenError
from ostler.model import SimulationTurn

_SEAL = "seal"
#: Where the value came from in the text: from the comma before its name to its end.
_Part = tuple[Any, int, int]
_read = json.JSONDecoder().raw_decode


def digest_of(before: str, happened: str, changes: str) -> str:
    """`happened` is the beginning of the body, up to what differs between equal histories."""
    return sha256(f'{before}\n{happened},"changes":{changes}}}'.encode()).hexdigest()


def sealed(body: str, digest: str) -> str:
    return f'{body[:-1]},"{_SEAL}":"{_seal(body[:-1], digest)}"}}'


def _seal(text: str, digest: str) -> str:
    return sha256(f"{digest}\n{text}".encode()).hexdigest()


def opened(row: SimulationTurn, before: str) -> dict[str, Any]:
    """What the body of a turn says; `HistoryBrokenError` when it is not what was written after this digest."""
    try:
        parts = _parts(row.body)
        body = {name: value for name, (value, _, _) in parts.items()}
        sound = body["turn"] == row.turn and ("whole" in parts) is row.whole and _is_sound(row, parts, before)
    except (ValueError, LookupError, RecursionError):
        sound = False
    if not sound:
        raise broken(row)
    return body


def _is_sound(row: SimulationTurn, parts: dict[str, _Part], before: str) -> bool:
    text = row.body
    if _SEAL in parts:
        value, start, _ = parts[_SEAL]
        if value != _seal(text[:start], row.digest):
            return False
    if row.whole:
        return True  # without the changes nobody can tell more; the next turn shows whether the digest is the right one
    _, start, _ = parts["notes"]
    _, changes, end = parts["changes"]
    return digest_of(before, text[:start], text[changes + len(',"changes":') : end]) == row.digest


def _parts(text: str) -> dict[str, _Part]:
    """Every value at the top and its place, at the price of reading it once. We write no spaces, so none are read."""
    found: dict[str, _Part] = {}
    at = 0
    while text[at] == ("," if at else "{"):
        name, colon = _read(text, at + 1)
        value, end = _read(text, colon + 1)
        found[name] = (value, at, end)
        at = end
    if text[at:] != "}":
        raise ValueError(at)
    return found


def broken(row: SimulationTurn) -> HistoryBrokenError:
    return HistoryBrokenError(f"turn {row.turn} of run {row.run_id} is not as it was written; {_cure(row.turn)}")


def missing(run_id: UUID, turn: int) -> HistoryBrokenError:
    return HistoryBrokenError(f"turn {turn} of run {run_id} is missing from the store; {_cure(turn)}")


def _cure(turn: int) -> str:
    earlier = f", or fork the run at turn {turn - 1} or before" if turn else ""
    return f"restore the home from a backup{earlier}"
