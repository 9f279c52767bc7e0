"""Which agent a process belongs to, from outside: by what it cannot change about itself."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

from ostler.home import KEEPER
from ostler.keeper import tree
from ostler.keeper.protocol import TOKEN
from ostler.keeper.rlimit_tag import RLIMIT_LOCKS, tag_for, tag_of


def is_agent(pid: int, home: Path) -> bool:
    """Whether the process may belong to an agent; also where it has ended already, so that it cannot be examined.

    The keeper lowers the bound that carries the tag; every process of an agent inherits it and cannot raise it again. A
    process with the same bound as ours, or with none, was started by a person.
    """
    try:
        bound, own = (resource.prlimit(process, RLIMIT_LOCKS)[1] for process in (pid, 0))
    except ProcessLookupError:
        return True
    except PermissionError:  # of root, and our agents cannot become root
        return False
    if bound not in {own, resource.RLIM_INFINITY}:
        return True
    token = _token(home)  # where the bound is too low to carry tags, only the environment is left to look at
    return tag_for("", "") is None and token is not None and (tree.mark_of(pid) or "").startswith(f"{token}:")


def speaker_of(pid: int, home: Path, units: Mapping[str, tuple[UUID, int]]) -> tuple[UUID, int] | None:
    """The instance and the attempt whose process this is; None where it belongs to no agent of the home.

    `units`: instance and attempt of the live agents, by the names of their units. The environment of the process only
    says where to look first: the tag decides, which is inherited and cannot be exchanged for the tag of another agent.
    """
    token = _token(home)
    if token is None:
        return None
    home_token, _, unit = (tree.mark_of(pid) or "").partition(":")
    tag = tag_of(pid)
    if home_token == token and unit and tag == tag_for(token, unit):
        attempt = _attempt(unit)
        if attempt is not None:
            return attempt
    if tag is None:
        return None
    return next((attempt for unit, attempt in units.items() if tag == tag_for(token, unit)), None)


def _token(home: Path) -> str | None:
    try:
        return (home / KEEPER / TOKEN).read_text().strip()
    except OSError:
        return None


def _attempt(unit: str) -> tuple[UUID, int] | None:
    number, _, rest = unit.partition(".")
    attempt = rest.partition(".")[0]
    try:
        return UUID(hex=number), int(attempt)
    except ValueError:
        return None
