"""What a reading session offers beyond the port: lists that can be read on from the last record seen."""

from __future__ import annotations

from abc import abstractmethod
from datetime import datetime
from uuid import UUID

from ostler.model import Attempt, Wait
from ostler.store.port import Session


class PagedSession(Session):
    @abstractmethod
    def attempts(self, instance_id: UUID | None, limit: int, after: tuple[UUID, int] | None = None) -> list[Attempt]:
        """All of one instance, or every open one of the store, in key order from beyond that key."""

    @abstractmethod
    def waits(self, due_until: datetime | None, limit: int, after: Wait | None = None) -> list[Wait]:
        """Open waits, the earliest due first and those without a time last; with a wait, only those behind it."""
