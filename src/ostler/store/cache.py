"""Rows in memory: those of what lives, so that a command need not ask the database for what it wrote a moment ago."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any
from uuid import UUID

from ostler.model import INACTIVE_STATES
from ostler.store.kinds import Key, Kind
from ostler.store.port import Changes, Head

#: More rows than this are kept only within one commit. Ten thousand agents at work have twice as many.
MOST_ROWS = 30_000
ABSENT: Any = object()

#: Where a row is found in memory. A UUID is hashed by Python code and its number is not, and rows are looked for
#: several times in every command.
Slot = tuple[Kind, Key | int]

#: Which rows nobody is likely to ask for again. Other kinds are few, and are kept.
_IS_OVER: Mapping[Kind, Callable[[Any], bool]] = MappingProxyType(
    {
        Kind.INSTANCE: lambda row: row.state in INACTIVE_STATES,
        Kind.ATTEMPT: lambda row: row.ended_at is not None,
        Kind.WAIT: lambda row: row.ended_at is not None,
        Kind.TASK: lambda row: row.is_finished,
        # Written once, and asked for only by one who asks twice.
        Kind.IDEMPOTENCY: lambda _: True,
        # Large, and never changed.
        Kind.SIMULATION_TURN: lambda _: True,
    }
)


def slot_of(kind: Kind, key: Key) -> Slot:
    return (kind, key[0].int) if len(key) == 1 and isinstance(key[0], UUID) else (kind, key)


class Cache:
    """Records as last committed, valid while nobody else has written.

    The running unit of work writes into it as commands are accepted. When its commit fails, all is forgotten.
    """

    def __init__(self) -> None:
        self.rows: dict[Slot, Any] = {}
        #: What had to be read since the last look; a command that was refused may have asked for what is long over.
        self.loaded: list[Slot] = []
        self._commit_number = -1

    def check(self, head: Head) -> None:
        """Before a unit of work begins: one that runs counts on every row that it has seen."""
        if head.commit_number != self._commit_number:
            self.forget()
            return
        for slot in self.loaded:
            is_over = _IS_OVER.get(slot[0])
            if is_over is not None and ((row := self.rows.get(slot)) is None or is_over(row)):
                self.rows.pop(slot, None)
        self.loaded.clear()
        if len(self.rows) > MOST_ROWS:
            for slot in list(islice(self.rows, len(self.rows) - MOST_ROWS // 2)):
                del self.rows[slot]

    def forget(self) -> None:
        self.rows.clear()
        self.loaded.clear()
        self._commit_number = -1

    def committed(self, changes: Changes) -> None:
        if changes.prune:
            self.forget()  # rows went by range, without being named one by one
        for change in changes.rows:
            is_over = _IS_OVER.get(change.kind)
            if is_over is not None and (change.new is None or is_over(change.new)):
                self.rows.pop(slot_of(change.kind, change.key), None)
        self._commit_number = changes.head.commit_number
