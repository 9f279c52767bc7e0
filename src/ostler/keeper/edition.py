"""Which code a keeper runs: a manager whose own copy differs asks it to take the new one."""

from __future__ import annotations

import os

from ostler.keeper.digest import blake2b


def edition() -> str:
    """A hash of the sources of the keeper, as they are on the disk now."""
    home = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no pathlib here
    found = blake2b()
    for name in sorted(os.listdir(home)):  # noqa: PTH208 - no pathlib here
        if name.endswith(".py"):
            with open(os.path.join(home, name), "rb") as file:  # noqa: PTH118, PTH123 - no pathlib here
                found.update(name.encode() + b"\0" + file.read() + b"\0")
    return found.hexdigest()[:16]
