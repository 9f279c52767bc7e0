"""Which agent a process belongs to, from outside: by what it cannot change about itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

from ostler.isolation.process.launch import KEEPER
from ostler.keeper import tree
from ostler.keeper.protocol import TOKEN
from ostler.keeper.tag import tag_for, tag_of


def speaker_of(pid: int, home: Path, live: Iterable[tuple[UUID, int]]) -> tuple[UUID, int] | None:
    """The instance and the attempt whose process this is; None where it belongs to no agent of the home.

    Its environment only says where to look first: the tag decides, which is inherited and cannot be exchanged for one
    of the tags of other agents.
    """
    try:
        token = (home / KEEPER / TOKEN).read_text().strip()
    except OSError:
        return None
    home_token, _, unit = (tree.mark_of(pid) or "").partition(":")
    tag = tag_of(pid)
    if home_token == token and unit and tag == tag_for(token, unit):
        found = _attempt(unit)
        if found is not None:
            return found
    if tag is None:
        return None
    return next((one for one in live if tag == tag_for(token, f"{one[0].hex}.{one[1]}")), None)


def _attempt(unit: str) -> tuple[UUID, int] | None:
    number, _, rest = unit.partition(".")
    attempt = rest.partition(".")[0]
    try:
        return UUID(hex=number), int(attempt)
    except ValueError:
        return None
