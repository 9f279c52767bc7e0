"""The audit chain of the caller's workspace."""

from __future__ import annotations

from typing import Any

from ostler.api.context import Handlers, ManagerOf, Number
from ostler.model.validation import fault
from ostler.store import audit as chains


async def list_entries(manager: ManagerOf, limit: Number = 100) -> list[dict[str, Any]]:
    if limit < 1:
        raise fault("limit", "must be at least 1", limit)
    count = min(limit, 1000)
    entries = await manager.store.read(chains.last_entries, manager.principal.workspace_id, count)
    return [entry.to_dict() for entry in entries]


async def verify(manager: ManagerOf) -> dict[str, Any]:
    report = await manager.store.read(chains.verify, manager.principal.workspace_id)
    return {**report.to_dict(), "is_sound": report.is_sound}


HANDLERS: Handlers = {
    "audit": list_entries,
    "verify_audit": verify,
}
