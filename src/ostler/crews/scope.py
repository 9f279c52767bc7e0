"""A scope that can be cancelled: that of the supervisor, and below it one for each generation of a member."""

from __future__ import annotations

import asyncio
from weakref import WeakSet

from ostler.tasks.attempt import CREW_STOPPED


class Scope:
    """Cancelling it cancels those below it; those beside it go on."""

    def __init__(self, parent: Scope | None = None) -> None:
        self.cancelled = asyncio.Event()
        #: Set by the second request: what has not ended yet is ended at once.
        self.forced = asyncio.Event()
        self.reason = CREW_STOPPED
        self._children: WeakSet[Scope] = WeakSet()
        if parent is not None:
            parent.adopt(self)
            if parent.cancelled.is_set():
                self.cancel(parent.reason, force=parent.forced.is_set())

    def adopt(self, child: Scope) -> None:
        self._children.add(child)

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    def cancel(self, reason: str = CREW_STOPPED, *, force: bool = False) -> None:
        """The agent is asked to end; its task goes back to the queue and has spent nothing."""
        if not self.is_cancelled:
            self.reason = reason
        self.cancelled.set()
        if force:
            self.forced.set()
        for child in tuple(self._children):
            child.cancel(reason, force=force)
