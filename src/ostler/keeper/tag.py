"""A tag that a process hands on to all it ever starts, through forks, new sessions and programs alike.

An environment can be cleared, a session left, a parent lost, and whoever is root may leave a control group. A bound
that was lowered is inherited by all that come after, and cannot be raised again. RLIMIT_LOCKS bounds nothing since
Linux 2.6 and nobody sets it, so its number is free to say whose a process is. `settle` puts it on.
"""

from __future__ import annotations

import resource

from ostler.keeper.digest import blake2b
from ostler.keeper.settle import RLIMIT_LOCKS

#: So the box of a template is called; no unit is, for those begin with the hexadecimal number of an instance.
TEMPLATE = "template-"
_BASE, _TOP = 1 << 62, (1 << 63) - 1


def tag_for(token: str, unit: str) -> int | None:
    """The same for every keeper of a home that was started alike; None where the bound is taken for something else.

    Tags can only be exchanged for lower ones: in an agent, which has one itself, those below it are left. Those of
    templates are all above those of units, for the forks of a template are units.
    """
    half = (_bound() - _BASE) // 2
    if half <= 0:
        return None
    digest = blake2b(f"{token}:{unit}".encode(), digest_size=8).digest()
    return _BASE + half * unit.startswith(TEMPLATE) + int.from_bytes(digest) % half


def tag_of(pid: int) -> int | None:
    """None when it has none of ours, is gone, or is not ours to look at."""
    try:
        found = resource.prlimit(pid, RLIMIT_LOCKS)[1]
    except (OSError, ValueError):
        return None
    return found if _BASE <= found < _bound() else None


def _bound() -> int:
    """What this process has itself."""
    found = resource.getrlimit(RLIMIT_LOCKS)[1]
    return _TOP if found == resource.RLIM_INFINITY else found
