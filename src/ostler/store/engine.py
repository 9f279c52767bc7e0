"""The store over any session: the writer, the readers, and the contract put together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar
from uuid import UUID

from ostler.errors import (
    CursorGoneError,
    StoreClosedError,
    StoreError,
    ValidationError,
    WorkspaceNotFoundError,
)
from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentInstance,
    AgentSpawnedEvent,
    AuditEntry,
    AuditHead,
    AuditReport,
    Event,
    Fault,
    GetInstancesFilter,
    Lease,
    LifecycleStatistics,
    Task,
    TaskFilter,
    shown,
)
from ostler.model.validation import whole_number
from ostler.policy import RetentionPolicy, plan
from ostler.store.auditing import AuditWalk
from ostler.store.base import PAGE, EventPage, SweepResult
from ostler.store.commands import Command, ReleaseLease, RenewLease, TakeLease
from ostler.store.commands.checking import kind_faults, optional_faults, record_faults, require
from ostler.store.commands.leases import OWNER
from ostler.store.kinds import Kind, Ledger
from ostler.store.life import Backend, Life, Lifelike, Seams
from ostler.store.listeners import Listener, Listeners
from ostler.store.lookups import Lookups, bounded, counted, require_id
from ostler.store.port import EventWindow, Head, Session
from ostler.store.retention import Sweeper

R = TypeVar("R")

_HIGHEST = 2**63 - 1
#: No owner ever has this epoch, so whatever is written with it is refused.
_REFUSED = -1


class EngineStore(Lookups):
    """`new_life` says how commands are carried out between open and close: by threads, if nothing else is said."""

    def __init__(
        self,
        backend: Backend,
        seams: Seams | None = None,
        *,
        new_life: Callable[[Backend, Seams, Listeners], Lifelike] = Life,
    ) -> None:
        self._backend = backend
        self._seams = seams or Seams()
        self._new_life = new_life
        self._listeners = Listeners()
        self._door = threading.Lock()
        self._life: Lifelike | None = None
        self._lease: Lease | None = None
        self._epoch = _REFUSED

    # --- life -----------------------------------------------------------------------------------

    async def open(self) -> None:
        with self._door:
            if self._life is not None:
                raise StoreError("this store is open already; close it first, or make another one for the same place")
            life = self._life = self._new_life(self._backend, self._seams, self._listeners)
        try:
            self._epoch = await life.open(self._epoch_to_write)
        except BaseException:
            if self._life is life:
                self._life = None
            raise

    def _epoch_to_write(self, session: Session) -> int:
        """The current one, unless somebody else owns the store: then a newcomer looks only, until it takes over."""
        head = session.head()  # before the lease: whoever takes it in between makes this epoch an old one
        held: Lease | None = session.load(Kind.LEASE, (OWNER,))
        ours = held is not None and self._lease is not None and held.epoch == self._lease.epoch
        if held is None or ours or held.expires_at <= self._seams.clock.wall():
            return head.epoch
        return _REFUSED

    async def close(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            await life.close()

    def _living(self) -> Lifelike:
        if self._life is None:
            raise StoreClosedError
        return self._life

    # --- writing --------------------------------------------------------------------------------

    async def commit(self, command: Command[R]) -> R:
        if not isinstance(command, Command):
            require(kind_faults("command", command, Command))
        command.validate().require()
        return await self._living().submit(command, self._epoch)

    @property
    def newest(self) -> int:
        return self._listeners.newest

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self._listeners.add(listener)

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
        if self._lease is not None:
            await self.commit(ReleaseLease(lease=self._lease))
            self._lease, self._epoch = None, _REFUSED

    @property
    def epoch(self) -> int:
        return self._epoch

    def adopt_epoch(self, epoch: int) -> None:
        require(kind_faults("epoch", epoch, int))
        self._epoch = epoch

    async def sweep(self, policy: RetentionPolicy | None = None) -> SweepResult:
        wanted = RetentionPolicy() if policy is None else policy
        require(record_faults("policy", wanted, RetentionPolicy))
        return await Sweeper(self.commit, self._read, self._seams.clock.wall(), wanted).sweep()

    # --- reading --------------------------------------------------------------------------------

    async def _read(self, read: Callable[[Session], R]) -> R:
        return await self._living().read(read)

    async def head(self) -> Head:
        return await self._read(lambda session: session.head())

    async def get_instance(self, instance_id: UUID) -> AgentInstance | None:
        require_id("instance_id", instance_id)
        found: AgentInstance | None = await self._load(Kind.INSTANCE, instance_id)
        return found

    async def list_instances(
        self, wanted: GetInstancesFilter | None = None, workspace_id: UUID = HOME_WORKSPACE_ID
    ) -> list[AgentInstance]:
        chosen = GetInstancesFilter.all() if wanted is None else wanted
        require(record_faults("wanted", chosen, GetInstancesFilter))
        require_id("workspace_id", workspace_id)
        return await self._read(lambda session: session.instances(workspace_id, chosen))

    async def statistics(self, workspace_id: UUID = HOME_WORKSPACE_ID) -> LifecycleStatistics:
        require_id("workspace_id", workspace_id)
        found = await self._read(lambda session: session.totals(workspace_id))
        if found is None:
            raise WorkspaceNotFoundError
        workspace, ledger = found
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
        require_id("workspace_id", workspace_id)
        return await self._read(lambda session: session.ledger(workspace_id)) or Ledger(workspace_id=workspace_id)

    async def get_task(self, task_id: UUID) -> Task | None:
        require_id("task_id", task_id)
        found: Task | None = await self._load(Kind.TASK, task_id)
        return found

    async def list_tasks(self, wanted: TaskFilter | None = None, workspace_id: UUID = HOME_WORKSPACE_ID) -> list[Task]:
        chosen = TaskFilter() if wanted is None else wanted
        require(record_faults("wanted", chosen, TaskFilter))
        require_id("workspace_id", workspace_id)
        return await self._read(lambda session: session.tasks(workspace_id, chosen))

    async def read_page(
        self,
        after: int = 0,
        *,
        limit: int = PAGE,
        workspace_id: UUID | None = None,
        instance_id: UUID | None = None,
    ) -> EventPage:
        after = _cursor(after)
        require(optional_faults("workspace_id", workspace_id, UUID))
        require(optional_faults("instance_id", instance_id, UUID))
        window = EventWindow(after=after, limit=bounded(limit), workspace_id=workspace_id, instance_id=instance_id)

        def read(session: Session) -> tuple[int, list[Event], Head]:
            # Where the log ended is read first, for what comes later is not on this page; the horizon is read last,
            # so that what retention took meanwhile is noticed and never silently skipped.
            newest = session.head().sequence
            return newest, session.events(window), session.head()

        newest, events, head = await self._read(read)
        if after < head.horizon and not (instance_id is not None and _from_its_beginning(events)):
            raise CursorGoneError(cursor=after, horizon=head.horizon)
        if after > head.sequence:
            bound = f"lies beyond the newest event {head.sequence}; it belongs to another store or a later copy"
            raise ValidationError([Fault(field=f"cursor {after}", bound=bound)])
        last = events[-1].sequence if events else after
        # Asked for both, a session looks for the instance; it is in one workspace, and another's is not shown.
        shown = tuple(event for event in events if workspace_id is None or event.workspace_id == workspace_id)
        return EventPage(events=shown, cursor=last if len(events) == window.limit else max(last, newest))

    # --- audit ----------------------------------------------------------------------------------

    async def read_audit(
        self, workspace_id: UUID = HOME_WORKSPACE_ID, *, after: int = 0, limit: int = PAGE
    ) -> list[AuditEntry]:
        require_id("workspace_id", workspace_id)
        start, most = counted("after", after), bounded(limit)
        return await self._read(lambda session: session.audit(workspace_id, start, most))

    async def audit_head(self, workspace_id: UUID = HOME_WORKSPACE_ID) -> AuditHead:
        ledger = await self._ledger(workspace_id)
        return AuditHead(workspace_id=workspace_id, number=ledger.audit_number, hash=ledger.audit_hash)

    async def verify_audit(
        self, workspace_id: UUID = HOME_WORKSPACE_ID, *, kept_head: AuditHead | None = None
    ) -> AuditReport:
        require_id("workspace_id", workspace_id)
        require(optional_faults("kept_head", kept_head, AuditHead))
        return await AuditWalk(self._read, workspace_id).verify(kept_head)


def _from_its_beginning(events: list[Event]) -> bool:
    """Of one instance: where its very first event is still kept, so are all that follow, whatever others lost."""
    return bool(events) and isinstance(events[0], AgentSpawnedEvent)


def _cursor(after: int) -> int:
    number = whole_number(after)
    if number is None or not 0 <= number <= _HIGHEST:
        raise ValidationError([Fault(field="after", bound="must be 0 or the number of an event", value=shown(after))])
    return number
