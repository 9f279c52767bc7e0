"""Who a command acts for."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    name: str = "system"
    principal_id: UUID | None = None
    correlation_id: str | None = None


SYSTEM = Actor()
