"""Verifying an audit chain while others write to it and retention takes from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar
from uuid import UUID

from ostler.model import AuditEntry, AuditHead, AuditReport
from ostler.store.base import PAGE
from ostler.store.chain import ChainCheck
from ostler.store.kinds import Kind, Ledger
from ostler.store.port import Session

R = TypeVar("R")

_LOWEST = -(2**63)


class _Read(Protocol):
    def __call__(self, read: Callable[[Session], R], /) -> Awaitable[R]: ...


class AuditWalk:
    def __init__(self, read: _Read, workspace_id: UUID) -> None:
        self._read = read
        self._space = workspace_id

    async def verify(self, kept_head: AuditHead | None) -> AuditReport:
        while True:
            ledger = await self._ledger()
            report = await self._walk(ledger, kept_head)
            if report.is_sound or (await self._ledger()).anchor_number == ledger.anchor_number:
                return report
            # Retention took entries while we walked, so what was missed may be no fault. Each further look needs
            # another sweep in between, so this ends.

    async def _walk(self, ledger: Ledger, kept_head: AuditHead | None) -> AuditReport:
        check = ChainCheck(ledger)
        cursor = _LOWEST  # rows below the anchor, or below the first, would be a fault too
        beyond: list[AuditEntry] = []
        while entries := await self._entries(cursor):
            # What was written since the ledger was read belongs to the next verification.
            known = [entry for entry in entries if entry.number <= ledger.audit_number]
            beyond = entries[len(known) :]
            check.feed(known)
            if kept_head is not None:
                for entry in known:
                    check.compare(kept_head, entry)
            if len(known) < len(entries):
                break
            cursor = entries[-1].number
        if beyond:
            check.beyond(beyond, await self._ledger())
        if await self._read(lambda session: session.load(Kind.WORKSPACE, (self._space,))) is None:
            check.say("there is no row of this workspace itself: it was removed, or its id is wrong")
        return check.report(kept_head)

    async def _ledger(self) -> Ledger:
        return await self._read(lambda session: session.ledger(self._space)) or Ledger(workspace_id=self._space)

    async def _entries(self, after: int) -> list[AuditEntry]:
        return await self._read(lambda session: session.audit(self._space, after, PAGE))
