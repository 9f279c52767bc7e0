"""One round of retention: find what is due with a reader, remove it with commands that look again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Protocol, TypeVar
from uuid import UUID

from ostler.model import Workspace
from ostler.policy import RetentionPolicy
from ostler.store.base import SweepResult
from ostler.store.commands import (
    Command,
    PruneAudit,
    PruneEvents,
    RemoveAnswers,
    RemoveInstances,
    RemoveTasks,
    RemoveWaits,
)
from ostler.store.kinds import Kind
from ostler.store.port import Session

R = TypeVar("R")


class _Commit(Protocol):
    def __call__(self, command: Command[R], /) -> Awaitable[R]: ...


class _Read(Protocol):
    def __call__(self, read: Callable[[Session], R], /) -> Awaitable[R]: ...


class Sweeper:
    def __init__(self, commit: _Commit, read: _Read, now: datetime, policy: RetentionPolicy) -> None:
        self._commit = commit
        self._read = read
        self._now = now
        self._policy = policy

    async def sweep(self) -> SweepResult:
        instances = await self._records(Kind.INSTANCE, RemoveInstances)
        tasks = await self._records(Kind.TASK, RemoveTasks)
        waits = await self._waits()
        events = await self._events()
        audit = await self._audit()
        answers = await self._answers()
        full = self._policy.batch
        return SweepResult(
            instances=instances,
            tasks=tasks,
            events=events,
            audit=audit,
            waits=waits,
            answers=answers,
            more=full in {instances, tasks, waits, events, answers} or audit >= full,
        )

    async def _records(self, kind: Kind, remove: type[RemoveInstances | RemoveTasks]) -> int:
        until = self._now - self._policy.finished
        keys = await self._read(lambda session: session.due(kind, until, self._policy.batch))
        if not keys:
            return 0
        return await self._commit(remove(ids=tuple(key[0] for key in keys), policy=self._policy))

    async def _waits(self) -> int:
        until = self._now - self._policy.finished
        keys = await self._read(lambda session: session.due(Kind.WAIT, until, self._policy.batch))
        if not keys:
            return 0
        return await self._commit(RemoveWaits(ids=tuple(key[0] for key in keys), before=until))

    async def _answers(self) -> int:
        until = self._now - self._policy.idempotency
        keys = await self._read(lambda session: session.due(Kind.IDEMPOTENCY, until, self._policy.batch))
        # Also with none, which writes nothing: so one who owns the store no more is told, whatever is due.
        return await self._commit(RemoveAnswers(keys=tuple((key[0], key[1]) for key in keys), before=until))

    async def _events(self) -> int:
        before = self._now - self._policy.events
        last = await self._read(lambda session: session.event_before(before, self._policy.batch))
        return await self._commit(PruneEvents(until=last)) if last else 0

    async def _audit(self) -> int:
        """By default the audit is kept for ever."""
        if self._policy.audit is None:
            return 0
        removed = 0
        after: tuple[UUID] | None = None
        while page := await self._workspaces(after):
            for workspace in page:
                removed += await self._audit_of(workspace, self._now - self._policy.audit)
            after = (page[-1].workspace_id,)
        return removed

    async def _workspaces(self, after: tuple[UUID] | None) -> Sequence[Workspace]:
        return await self._read(lambda session: session.listing(Kind.WORKSPACE, after, 100))

    async def _audit_of(self, workspace: Workspace, before: datetime) -> int:
        space = workspace.workspace_id
        last = await self._read(lambda session: session.audit_before(space, before, self._policy.batch))
        if not last:
            return 0
        entries = await self._read(lambda session: session.audit(space, last - 1, 1))
        if not entries or entries[0].number != last:  # it went before, in an earlier sweep
            return 0
        return await self._commit(PruneAudit(workspace_id=space, last=entries[0]))
