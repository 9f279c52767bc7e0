"""The one contract of every store. Each method is documented here and nowhere else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self, TypeVar
from uuid import UUID

from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentInstance,
    Attempt,
    AuditEntry,
    AuditHead,
    AuditReport,
    Definition,
    Event,
    GetInstancesFilter,
    Lease,
    LifecycleStatistics,
    Principal,
    SimulationRun,
    SimulationTurn,
    Task,
    TaskFilter,
    Token,
    Wait,
    Workspace,
)
from ostler.policy import RetentionPolicy
from ostler.store.commands import Command
from ostler.store.port import Head

R = TypeVar("R")

#: The most rows that one page holds.
PAGE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """What one round of retention removed, and whether more was due than one batch takes."""

    instances: int = 0
    tasks: int = 0
    events: int = 0
    audit: int = 0
    waits: int = 0
    #: Kept for whoever asks again with the same key.
    answers: int = 0
    more: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPage:
    """Some events, and the cursor to go on from: every event up to it was looked at, also those not asked for."""

    events: tuple[Event, ...]
    cursor: int


class Store(ABC):
    """The only writer of records and events. Safe to use from several event loops and threads at once."""

    # --- life -----------------------------------------------------------------------------------

    @abstractmethod
    async def open(self) -> None:
        """Connect and bring the shape of the store up to date. A store of a newer program is refused.

        It may be written at once, unless another owner holds a lease: then every command is refused with
        `StaleWriterError` until `take_lease` or `adopt_epoch`, but for those about simulations, which are played by
        whoever comes, unless they say `by_owner`. Opening what is open is refused.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish what was accepted, then let go of everything. Closing twice is harmless."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- writing --------------------------------------------------------------------------------

    @abstractmethod
    async def commit(self, command: Command[R]) -> R:
        """Do it, durably. Returning means that the change, its event, its audit entry, its place in the quota
        and its idempotency row are on the disk together; raising an `OstlerError` means that none of them is,
        but for two: `OutcomeUnknownError`, when the connection was lost at the commit or the writer died, and
        `StoreFailedError`, when the disk failed at a sync. After these it is on the disk whole or not at all, and
        only reading tells which. Cancelling the caller does not undo a command that was already accepted.
        """

    @property
    def newest(self) -> int:
        """The number of the newest event that this store has committed since it was opened; 0 before the first.

        Whoever was answered finds it at or above the events of what they did.
        """
        return 0

    @abstractmethod
    def subscribe(self, listener: Callable[[int], None]) -> Callable[[], None]:
        """Be told that the log has grown: the listener gets the number of the newest event.

        It is called once after each commit of this store that added events, when they are durable and after
        those who asked for them were answered; on the thread that writes, so it must be quick and may not wait.
        One that raises is not called again. What others write into the same place is not told; for that, read.
        Returns what ends it. A subscription outlasts closing and opening.
        """

    @abstractmethod
    async def take_lease(self, owner: str, *, ttl: timedelta, steal: bool = False) -> Lease:
        """Become the owner: the epoch rises, this store writes with it from now on, and older owners are refused."""

    @abstractmethod
    async def renew_lease(self, *, ttl: timedelta) -> Lease:
        """Stay the owner for another while; `StaleWriterError` once somebody else has taken over."""

    @abstractmethod
    async def release_lease(self) -> None:
        """Step down, and write no more until the next lease; does nothing when this store holds none."""

    @abstractmethod
    async def get_lease(self) -> Lease | None:
        """The lease of whoever owns the store, also when it is over; None when the last owner has stepped down."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch that this store writes with."""

    @abstractmethod
    def adopt_epoch(self, epoch: int) -> None:
        """Write on behalf of the owner who holds this epoch: how the helpers of one owner share its lease."""

    @abstractmethod
    async def sweep(self, policy: RetentionPolicy | None = None) -> SweepResult:
        """Remove one bounded batch of what is due; call again while `more` is true."""

    # --- reading --------------------------------------------------------------------------------

    @abstractmethod
    async def head(self) -> Head:
        """Where the log stands: the newest number, and the last that is no longer kept."""

    @abstractmethod
    async def get_instance(self, instance_id: UUID) -> AgentInstance | None: ...

    @abstractmethod
    async def list_instances(
        self, wanted: GetInstancesFilter | None = None, workspace_id: UUID = HOME_WORKSPACE_ID
    ) -> list[AgentInstance]:
        """Those of one workspace that match, newest first."""

    @abstractmethod
    async def statistics(self, workspace_id: UUID = HOME_WORKSPACE_ID) -> LifecycleStatistics:
        """Totals of one workspace, in the same time for a thousand instances or a million."""

    @abstractmethod
    async def get_task(self, task_id: UUID) -> Task | None: ...

    @abstractmethod
    async def list_tasks(self, wanted: TaskFilter | None = None, workspace_id: UUID = HOME_WORKSPACE_ID) -> list[Task]:
        """Those of one workspace that match, newest first."""

    @abstractmethod
    async def read_page(
        self,
        after: int = 0,
        *,
        limit: int = PAGE,
        workspace_id: UUID | None = None,
        instance_id: UUID | None = None,
    ) -> EventPage:
        """Events with a number above `after`, in order, and the cursor for the next page.

        Follow with that cursor, not with the last event: in a quiet workspace it rises with the whole log, so that
        what retention takes from others is not missed here. `CursorGoneError` when some after `after` are no longer
        kept; not for one instance that came later than those, for it has lost nothing. `ValidationError` when it
        lies beyond the newest event.
        """

    async def read_events(
        self,
        after: int = 0,
        *,
        limit: int = PAGE,
        workspace_id: UUID | None = None,
        instance_id: UUID | None = None,
    ) -> list[Event]:
        """The events of one page."""
        page = await self.read_page(after, limit=limit, workspace_id=workspace_id, instance_id=instance_id)
        return list(page.events)

    def replay(
        self, after: int = 0, *, workspace_id: UUID | None = None, instance_id: UUID | None = None
    ) -> AsyncIterator[Event]:
        """Every event from a cursor to the end as it is when reached, a page at a time in constant memory."""
        return _replay(self, after, workspace_id, instance_id)

    @abstractmethod
    async def get_workspace(self, workspace_id: UUID) -> Workspace | None: ...

    @abstractmethod
    async def list_workspaces(self, after: UUID | None = None, limit: int = 100) -> list[Workspace]: ...

    @abstractmethod
    async def get_principal(self, principal_id: UUID) -> Principal | None: ...

    @abstractmethod
    async def find_token(self, token_hash: str) -> Token | None: ...

    @abstractmethod
    async def get_definition(self, definition_id: UUID) -> Definition | None: ...

    @abstractmethod
    async def list_definitions(self, after: UUID | None = None, limit: int = 100) -> list[Definition]: ...

    @abstractmethod
    async def list_attempts(self, instance_id: UUID, limit: int = PAGE, *, after: int = 0) -> list[Attempt]:
        """The starts of one instance, oldest first, with a number above `after`."""

    @abstractmethod
    async def open_attempts(self, limit: int = PAGE, *, after: Attempt | None = None) -> list[Attempt]:
        """Every start that has not ended, in the whole store; what recovery goes through.

        By instance and number. For the next page pass the last one.
        """

    @abstractmethod
    async def open_waits(
        self,
        *,
        due_until: datetime | None = None,
        limit: int = PAGE,
        after: Wait | None = None,
        instance_id: UUID | None = None,
    ) -> list[Wait]:
        """Waits that have not ended, of the whole store or of one instance, the earliest due first.

        For the next page pass the last one.
        """

    @abstractmethod
    async def get_wait(self, wait_id: UUID) -> Wait | None:
        """Open or ended; None when there was none, or it ended so long ago that it is no longer kept."""

    # --- simulations ----------------------------------------------------------------------------

    @abstractmethod
    async def get_run(self, run_id: UUID) -> SimulationRun | None: ...

    @abstractmethod
    async def list_runs(
        self, workspace_id: UUID = HOME_WORKSPACE_ID, *, before: UUID | None = None, limit: int = 100
    ) -> list[SimulationRun]:
        """Those of one workspace, newest first. For the next page pass the last id."""

    @abstractmethod
    async def get_turn(self, run_id: UUID, turn: int) -> SimulationTurn | None: ...

    @abstractmethod
    async def read_turns(self, run_id: UUID, *, after: int = -1, limit: int = 100) -> list[SimulationTurn]:
        """The turns of one run with a number above `after`, in order."""

    @abstractmethod
    async def whole_turn(self, run_id: UUID, until: int) -> SimulationTurn | None:
        """The newest turn up to that number whose body holds the complete state: where replaying begins."""

    # --- audit ----------------------------------------------------------------------------------

    @abstractmethod
    async def read_audit(
        self, workspace_id: UUID = HOME_WORKSPACE_ID, *, after: int = 0, limit: int = PAGE
    ) -> list[AuditEntry]: ...

    @abstractmethod
    async def list_chains(self, after: UUID | None = None, limit: int = 100) -> list[UUID]:
        """Every workspace that has a row, a ledger or an audit entry, by id: what there is to verify.

        `list_workspaces` knows only those that still have a row, and whoever tampers may take that too.
        """

    @abstractmethod
    async def audit_head(self, workspace_id: UUID = HOME_WORKSPACE_ID) -> AuditHead:
        """The end of the chain, to be kept somewhere else."""

    @abstractmethod
    async def verify_audit(
        self, workspace_id: UUID = HOME_WORKSPACE_ID, *, kept_head: AuditHead | None = None
    ) -> AuditReport:
        """Walk the chain and name every entry that was edited, removed, moved or put in.

        A workspace of which there is no row is a fault too.
        """


async def _replay(
    store: Store, after: int, workspace_id: UUID | None, instance_id: UUID | None
) -> AsyncIterator[Event]:
    cursor = after
    while (page := await store.read_page(cursor, workspace_id=workspace_id, instance_id=instance_id)).events:
        for event in page.events:
            yield event
        cursor = page.cursor
