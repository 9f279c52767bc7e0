"""What an observer is told beside events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from ostler.model.record import Record


class SuspendDepth(StrEnum):
    """How deep a pause goes."""

    HOLD = "hold"  #: finishes what it does, takes no more
    FREEZE = "freeze"  #: everything stops where it stands, and goes on there
    PARK = "park"  #: the process ends; workspace and record stay, and it starts fresh


@dataclass(frozen=True, kw_only=True)
class EventsMissed(Record):
    """The observer was too slow: so many events were dropped here. Read them again from `resume_after`."""

    instance_id: UUID | None
    count: int
    #: The number of the first event that was dropped.
    first_sequence: int

    @property
    def resume_after(self) -> int:
        """The cursor from which `observe(after=...)` or the store gives them all."""
        return self.first_sequence - 1
