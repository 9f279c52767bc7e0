"""The store over any session: the writer, the readers, and the contract put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from ostler.errors import CursorGoneError, StoreClosedError, ValidationError, WorkspaceNotFoundError
from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentInstance,
    Attempt,
    AuditEntry,
    AuditHead,
    AuditReport,
    Definition,
    Event,
    Fault,
    GetInstancesFilter,
    Lease,
    LifecycleStatistics,
    Principal,
    Task,
    TaskFilter,
    Token,
    Wait,
    Workspace,
)
from ostler.policy import RetentionPolicy, plan
from ostler.seams import Clock, FaultPoint, IdSource, SystemClock, Uuid7Source, no_fault
from ostler.store.base import Store, SweepResult
from ostler.store.chain import ChainCheck
from ostler.store.commands import Command, ReleaseLease, RenewLease, TakeLease
from ostler.store.kinds import Kind, Ledger
from ostler.store.port import EventWindow, Head, Session
from ostler.store.readers import Readers
from ostler.store.retention import Sweeper
from ostler.store.writer import Batch, Submission, Writer

R = TypeVar("R")
S = TypeVar("S", bound=Session)

_PAGE = 1000
_LOWEST = -(2**63)


@dataclass(frozen=True, kw_only=True)
class Seams:
    """What a store is given from outside, so that tests can drive it."""

    clock: Clock = field(default_factory=SystemClock)
    ids: IdSource | None = None
    fault: FaultPoint = no_fault


@dataclass(frozen=True, kw_only=True)
class Backend:
    """How to reach one kind of database."""

    #: Opens the writing session, migrating first. Called on the writer's thread.
    open_writer: Callable[[FaultPoint], Session]
    open_reader: Callable[[], Session]

    @classmethod
    def migrating(
        cls, open_writer: Callable[[], S], migrate: Callable[[S, FaultPoint], None], open_reader: Callable[[], Session]
    ) -> Backend:
        """One whose shape is brought up to date when it is opened for writing."""

        def opened(fault: FaultPoint) -> Session:
            session = open_writer()
            try:
                migrate(session, fault)
            except BaseException:
                session.close()
                raise
            return session

        return cls(open_writer=opened, open_reader=open_reader)


class EngineStore(Store):
    def __init__(self, backend: Backend, seams: Seams | None = None) -> None:
        self._backend = backend
        self._seams = seams or Seams()
        self._ids = self._seams.ids or Uuid7Source(self._seams.clock)
        self._writer: Writer | None = None
        self._readers: Readers | None = None
        self._lease: Lease | None = None
        self._epoch = 0

    # --- life -----------------------------------------------------------------------------------

    async def open(self) -> None:
        writer = Writer(self._open_batch, self._seams.fault)
        await asyncio.to_thread(writer.start)
        self._writer = writer
        self._readers = Readers(self._backend.open_reader)
        self._epoch = (await self.head()).epoch

    def _open_batch(self) -> tuple[Batch, Session]:
        session = self._backend.open_writer(self._seams.fault)
        return Batch(session, self._seams.clock, self._ids, self._seams.fault), session

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        readers, self._readers = self._readers, None
        if writer is not None:
            await asyncio.to_thread(writer.close)
        if readers is not None:
            await asyncio.to_thread(readers.close)

    # --- writing --------------------------------------------------------------------------------

    async def commit(self, command: Command[R]) -> R:
        command.validate().require()
        if self._writer is None:
            raise StoreClosedError
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._writer.submit(Submission(command, self._epoch, loop, future))
        return await future

    async def take_lease(self, owner: str, *, ttl: timedelta, steal: bool = False) -> Lease:
        lease = await self.commit(TakeLease(owner=owner, ttl=ttl, steal=steal))
        self._lease, self._epoch = lease, lease.epoch
        return lease

    async def renew_lease(self, *, ttl: timedelta) -> Lease:
        if self._lease is None:
            raise StoreClosedError("this store holds no lease; take one first")
        self._lease = await self.commit(RenewLease(lease=self._lease, ttl=ttl))
        return self._lease

    async def release_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await self.commit(ReleaseLease(lease=lease))

    @property
    def epoch(self) -> int:
        return self._epoch

    def adopt_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    async def sweep(self, policy: RetentionPolicy | None = None) -> SweepResult:
        wanted = policy or RetentionPolicy()
        wanted.validate().require()
        return await Sweeper(self.commit, self._read, self._seams.clock.wall(), wanted).sweep()

    # --- reading --------------------------------------------------------------------------------

    async def _read(self, read: Callable[[Session], R]) -> R:
        if self._readers is None:
            raise StoreClosedError
        return await self._readers.run(read)

    async def _load(self, kind: Kind, *key: Any) -> Any:
        return await self._read(lambda session: session.load(kind, key))

    async def head(self) -> Head:
        return await self._read(lambda session: session.head())

    async def get_instance(self, instance_id: UUID) -> AgentInstance | None:
        found: AgentInstance | None = await self._load(Kind.INSTANCE, instance_id)
        return found

    async def list_instances(
        self, wanted: GetInstancesFilter | None = None, workspace_id: UUID = HOME_WORKSPACE_ID
    ) -> list[AgentInstance]:
        chosen = wanted or GetInstancesFilter.all()
        chosen.validate().require()
        return await self._read(lambda session: session.instances(workspace_id, chosen))

    async def statistics(self, workspace_id: UUID = HOME_WORKSPACE_ID) -> LifecycleStatistics:
        workspace = await self.get_workspace(workspace_id)
        if workspace is None:
            raise WorkspaceNotFoundError
        ledger = await self._ledger(workspace_id)
        return LifecycleStatistics(
            active_instances=ledger.active,
            by_state=ledger.states,
            by_health=ledger.healths,
            max_concurrent=plan(workspace.tier).max_concurrent,
            total_spawned=ledger.spawned,
            total_terminated=ledger.terminated,
            average_uptime=ledger.average_uptime(self._seams.clock.wall()),
            total_restarts=ledger.restarts,
        )

    async def _ledger(self, workspace_id: UUID) -> Ledger:
        found = await self._read(lambda session: session.ledger(workspace_id))
        return found or Ledger(workspace_id=workspace_id)

    async def get_task(self, task_id: UUID) -> Task | None:
        found: Task | None = await self._load(Kind.TASK, task_id)
        return found

    async def list_tasks(self, wanted: TaskFilter | None = None, workspace_id: UUID = HOME_WORKSPACE_ID) -> list[Task]:
        chosen = wanted or TaskFilter()
        chosen.validate().require()
        return await self._read(lambda session: session.tasks(workspace_id, chosen))

    async def read_events(
        self,
        after: int = 0,
        *,
        limit: int = _PAGE,
        workspace_id: UUID | None = None,
        instance_id: UUID | None = None,
    ) -> list[Event]:
        window = EventWindow(after=after, limit=_bounded(limit), workspace_id=workspace_id, instance_id=instance_id)

        def read(session: Session) -> tuple[list[Event], Head]:
            # The head is read last: what retention took meanwhile is noticed, never silently skipped.
            return session.events(window), session.head()

        events, head = await self._read(read)
        if after < head.horizon:
            raise CursorGoneError(cursor=after, horizon=head.horizon)
        # Asked for both, a session looks for the instance; it is in one workspace, and another's is not shown.
        return [event for event in events if workspace_id is None or event.workspace_id == workspace_id]

    async def get_workspace(self, workspace_id: UUID) -> Workspace | None:
        found: Workspace | None = await self._load(Kind.WORKSPACE, workspace_id)
        return found

    async def list_workspaces(self, after: UUID | None = None, limit: int = 100) -> list[Workspace]:
        return await self._listing(Kind.WORKSPACE, after, limit)

    async def get_principal(self, principal_id: UUID) -> Principal | None:
        found: Principal | None = await self._load(Kind.PRINCIPAL, principal_id)
        return found

    async def find_token(self, token_hash: str) -> Token | None:
        found: Token | None = await self._read(lambda session: session.token(token_hash))
        return found

    async def get_definition(self, definition_id: UUID) -> Definition | None:
        found: Definition | None = await self._load(Kind.DEFINITION, definition_id)
        return found

    async def list_definitions(self, after: UUID | None = None, limit: int = 100) -> list[Definition]:
        return await self._listing(Kind.DEFINITION, after, limit)

    async def _listing(self, kind: Kind, after: UUID | None, limit: int) -> list[Any]:
        key = None if after is None else (after,)
        most = _bounded(limit)
        return list(await self._read(lambda session: session.listing(kind, key, most)))

    async def list_attempts(self, instance_id: UUID, limit: int = _PAGE) -> list[Attempt]:
        most = _bounded(limit)
        return await self._read(lambda session: session.attempts(instance_id, most))

    async def open_attempts(self, limit: int = _PAGE) -> list[Attempt]:
        most = _bounded(limit)
        return await self._read(lambda session: session.attempts(None, most))

    async def open_waits(self, *, due_until: datetime | None = None, limit: int = _PAGE) -> list[Wait]:
        most = _bounded(limit)
        return await self._read(lambda session: session.waits(due_until, most))

    # --- audit ----------------------------------------------------------------------------------

    async def read_audit(
        self, workspace_id: UUID = HOME_WORKSPACE_ID, *, after: int = 0, limit: int = _PAGE
    ) -> list[AuditEntry]:
        most = _bounded(limit)
        return await self._read(lambda session: session.audit(workspace_id, after, most))

    async def audit_head(self, workspace_id: UUID = HOME_WORKSPACE_ID) -> AuditHead:
        ledger = await self._ledger(workspace_id)
        return AuditHead(workspace_id=workspace_id, number=ledger.audit_number, hash=ledger.audit_hash)

    async def verify_audit(
        self, workspace_id: UUID = HOME_WORKSPACE_ID, *, kept_head: AuditHead | None = None
    ) -> AuditReport:
        ledger = await self._ledger(workspace_id)
        check = ChainCheck(ledger)
        cursor = _LOWEST  # rows below the anchor, or below the first, would be a fault too
        beyond: list[AuditEntry] = []
        while entries := await self.read_audit(workspace_id, after=cursor):
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
            check.beyond(beyond, await self._ledger(workspace_id))
        return check.report(kept_head)


def _bounded(limit: int) -> int:
    """A page has at least one row, and never more than a reader can bear."""
    if limit < 1:
        raise ValidationError([Fault(field="limit", bound="must be at least 1", value=str(limit))])
    return min(limit, _PAGE)
