"""Boxes of which something lived on after all in them was struck: an uninterruptible sleep, a group that others froze.

An instance with such a box is not at its end, however long its main process has been dead, and whichever manager
started it. The keeper knows them by the records of those ends; here they are known by instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID


class Remains:
    def __init__(self) -> None:
        self._boxes: set[str] = set()

    def note(self, box: str, left: Iterable[Any] | None) -> None:
        """How the last blow to it went; what is gone is forgotten."""
        if left:
            self._boxes.add(box)
        else:
            self._boxes.discard(box)

    def read(self, status: Mapping[str, Any]) -> None:
        """From the keeper's word on a unit. Others in the same box may have gone without a trace."""
        record = status.get("exit") or {}
        if record.get("left"):
            self._boxes.add(str(status.get("box")))

    def of(self, instance_id: UUID) -> list[str]:
        """The boxes of all its starts, the oldest first."""
        mine = [box for box in self._boxes if box.startswith(f"{instance_id.hex}.")]
        return sorted(mine, key=lambda box: int(box.rpartition(".")[2]))
