"""A store in memory: the real rules over plain dictionaries. For users' tests and for simulation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from ostler.errors import StoreError
from ostler.model import (
    ACTIVE_STATES,
    HOME_WORKSPACE_ID,
    AgentInstance,
    Attempt,
    AuditEntry,
    Event,
    GetInstancesFilter,
    SimulationRun,
    SimulationTurn,
    Task,
    TaskFilter,
    Tier,
    Token,
    Wait,
    Workspace,
    from_micros,
)
from ostler.store import Backend, EngineStore, Seams
from ostler.store.eventrows import event_of
from ostler.store.filters import matches
from ostler.store.kinds import Key, Kind, Ledger
from ostler.store.port import AUDIT_FIELDS, Changes, EventWindow, Head, Prune, Session, WaitWindow

#: Later than any time a wait may have, so that those without one come last.
_NEVER = datetime.max.replace(tzinfo=UTC)


class MemoryTables:
    """What a database file would hold. Keep it to open the same content again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.writing = threading.Lock()
        self.head = Head(commit_number=0, sequence=0, horizon=0, epoch=0)
        self.rows: dict[Kind, dict[Key, Any]] = {kind: {} for kind in Kind}
        self.events: list[Event] = []
        self.audit: dict[UUID, list[AuditEntry]] = {}
        home = Workspace(workspace_id=HOME_WORKSPACE_ID, name="home", tier=Tier.ENTERPRISE, created_at=from_micros(0))
        self.rows[Kind.WORKSPACE][HOME_WORKSPACE_ID,] = home


class MemorySession(Session):
    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._pending: Changes | None = None
        self._events: list[Event] = []
        self._audit: list[AuditEntry] = []
        self._inside = False

    # --- writing --------------------------------------------------------------------------------

    def begin(self) -> Head:
        self._tables.writing.acquire()
        self._inside = True
        return self._tables.head

    def save(self, changes: Changes) -> None:
        for change in changes.rows:
            if change.kind is Kind.TOKEN and change.new is not None:
                self._require_own_hash(change.new)
        # Whatever could still refuse is made here: a commit that has begun cannot fail halfway.
        self._events = [event_of(row) for row in changes.events]
        self._audit = [AuditEntry(**dict(zip(AUDIT_FIELDS, row, strict=True))) for row in changes.audit]
        self._pending = changes

    def _require_own_hash(self, token: Token) -> None:
        known = self.token(token.token_hash)
        if known is not None and known.token_id != token.token_id:
            raise StoreError(f"the hash of the token {token.token_id} belongs to another")

    def commit(self) -> None:
        tables, changes = self._tables, self._pending
        with tables.lock:
            if changes is not None:
                for change in changes.rows:
                    if change.new is None:
                        tables.rows[change.kind].pop(change.key, None)
                    else:
                        tables.rows[change.kind][change.key] = change.new
                tables.events += self._events
                for entry in self._audit:
                    tables.audit.setdefault(entry.workspace_id, []).append(entry)
                for prune in changes.prune:
                    self._prune(prune)
                tables.head = changes.head
        self.rollback()

    def _prune(self, prune: Prune) -> None:
        tables, until = self._tables, prune.until
        if prune.table == "turns":
            turns = tables.rows[Kind.SIMULATION_TURN]
            for key in [key for key in turns if key[0] == prune.owner_id and key[1] >= until]:
                del turns[key]
        elif prune.owner_id is not None:
            kept = [entry for entry in tables.audit.get(prune.owner_id, []) if entry.number > until]
            tables.audit[prune.owner_id] = kept
        else:
            tables.events = [event for event in tables.events if event.sequence > until]

    def rollback(self) -> None:
        self._pending = None
        if self._inside:
            self._inside = False
            self._tables.writing.release()

    def close(self) -> None:
        self.rollback()

    # --- reading --------------------------------------------------------------------------------

    def load(self, kind: Kind, key: Key) -> Any:
        with self._tables.lock:
            found = self._tables.rows[kind].get(key)
        return found.copy() if isinstance(found, Ledger) else found

    def head(self) -> Head:
        with self._tables.lock:
            return self._tables.head

    def _all(self, kind: Kind) -> list[Any]:
        with self._tables.lock:
            return list(self._tables.rows[kind].values())

    def instances(self, workspace_id: UUID, wanted: GetInstancesFilter) -> list[AgentInstance]:
        found = [one for one in self._all(Kind.INSTANCE) if one.workspace_id == workspace_id and _fits(one, wanted)]
        return _page(found, lambda one: one.instance_id, wanted)

    def tasks(self, workspace_id: UUID, wanted: TaskFilter) -> list[Task]:
        found = [one for one in self._all(Kind.TASK) if one.workspace_id == workspace_id and _task_fits(one, wanted)]
        return _page(found, lambda one: one.task_id, wanted)

    def ledger(self, workspace_id: UUID) -> Ledger | None:
        found: Ledger | None = self.load(Kind.LEDGER, (workspace_id,))
        return found

    def totals(self, workspace_id: UUID) -> tuple[Workspace, Ledger] | None:
        with self._tables.lock:
            workspace = self._tables.rows[Kind.WORKSPACE].get((workspace_id,))
            ledger = self._tables.rows[Kind.LEDGER].get((workspace_id,)) or Ledger(workspace_id=workspace_id)
        return None if workspace is None else (workspace, ledger.copy())

    def events(self, window: EventWindow) -> list[Event]:
        with self._tables.lock:
            first = max(0, window.after - self._tables.head.horizon)
            later = self._tables.events[first:]
        found: list[Event] = []
        for event in later:
            if len(found) == window.limit:
                break
            if _seen_in(event, window):
                found.append(event)
        return found

    def audit(self, workspace_id: UUID, after: int, limit: int) -> list[AuditEntry]:
        with self._tables.lock:
            entries = list(self._tables.audit.get(workspace_id, []))
        return [entry for entry in entries if entry.number > after][:limit]

    def chain_from(self, first: UUID) -> UUID | None:
        with self._tables.lock:
            rows = self._tables.rows
            known = {key[0] for kind in (Kind.WORKSPACE, Kind.LEDGER) for key in rows[kind]} | set(self._tables.audit)
        return min((one for one in known if one >= first), default=None)

    def attempts(self, instance_id: UUID | None, limit: int, after: tuple[UUID, int] | None = None) -> list[Attempt]:
        every: list[Attempt] = self._all(Kind.ATTEMPT)
        wanted = [one for one in every if (one.is_open if instance_id is None else one.instance_id == instance_id)]
        beyond = [one for one in wanted if after is None or (one.instance_id, one.number) > after]
        return sorted(beyond, key=lambda one: (one.instance_id, one.number))[:limit]

    def waits(self, window: WaitWindow) -> list[Wait]:
        found = [one for one in self._all(Kind.WAIT) if one.ended_at is None and _waits_in(one, window)]
        return sorted(found, key=_when_due)[: window.limit]

    def due(self, kind: Kind, until: datetime, limit: int) -> list[Key]:
        ended = {
            Kind.INSTANCE: self._ended_instances,
            Kind.TASK: self._ended_tasks,
            Kind.WAIT: self._ended_waits,
            Kind.IDEMPOTENCY: self._given_answers,
        }
        return [key for at, key in sorted(ended[kind]()) if at <= until][:limit]

    def _ended_instances(self) -> list[tuple[datetime, Key]]:
        held = {wait.instance_id for wait in self._all(Kind.WAIT) if wait.ended_at is None}
        held |= {one.instance_id for one in self._all(Kind.ATTEMPT) if one.is_open and one.identity is not None}
        return [
            (one.terminated_at, (one.instance_id,))
            for one in self._all(Kind.INSTANCE)
            if one.terminated_at is not None and one.instance_id not in held
        ]

    def _ended_tasks(self) -> list[tuple[datetime, Key]]:
        tasks: list[Task] = self._all(Kind.TASK)
        needed = {one for task in tasks if not task.is_finished for one in task.dependencies}
        needed |= {wait.task_id for wait in self._all(Kind.WAIT) if wait.ended_at is None}
        return [(one.updated_at, (one.task_id,)) for one in tasks if one.is_finished and one.task_id not in needed]

    def _ended_waits(self) -> list[tuple[datetime, Key]]:
        return [(one.ended_at, (one.wait_id,)) for one in self._all(Kind.WAIT) if one.ended_at is not None]

    def _given_answers(self) -> list[tuple[datetime, Key]]:
        return [(one.created_at, (one.workspace_id, one.key)) for one in self._all(Kind.IDEMPOTENCY)]

    def event_before(self, moment: datetime, limit: int) -> int:
        with self._tables.lock:
            oldest = self._tables.events[:limit]
        return _last_before(((event.sequence, event.occurred_at) for event in oldest), moment)

    def audit_before(self, workspace_id: UUID, moment: datetime, limit: int) -> int:
        oldest = self.audit(workspace_id, 0, limit)
        return _last_before(((entry.number, entry.occurred_at) for entry in oldest), moment)

    def listing(self, kind: Kind, after: Key | None, limit: int) -> Sequence[Any]:
        with self._tables.lock:
            keys = sorted(key for key in self._tables.rows[kind] if after is None or key > after)
            return [self._tables.rows[kind][key] for key in keys[:limit]]

    def token(self, token_hash: str) -> Token | None:
        return next((one for one in self._all(Kind.TOKEN) if one.token_hash == token_hash), None)

    def runs(self, workspace_id: UUID, before: UUID | None, limit: int) -> list[SimulationRun]:
        found = [one for one in self._all(Kind.SIMULATION_RUN) if one.workspace_id == workspace_id]
        earlier = [one for one in found if before is None or one.run_id < before]
        return sorted(earlier, key=lambda one: one.run_id, reverse=True)[:limit]

    def turns(self, run_id: UUID, after: int, limit: int) -> list[SimulationTurn]:
        last = self._last_turn(run_id)
        return list(itertools.islice(self._numbered(run_id, range(max(after + 1, 0), last + 1)), limit))

    def whole_turn(self, run_id: UUID, until: int) -> SimulationTurn | None:
        numbers = range(min(until, self._last_turn(run_id)), -1, -1)
        return next((turn for turn in self._numbered(run_id, numbers) if turn.whole), None)

    def _last_turn(self, run_id: UUID) -> int:
        run: SimulationRun | None = self.load(Kind.SIMULATION_RUN, (run_id,))
        return -1 if run is None else run.turn

    def _numbered(self, run_id: UUID, numbers: range) -> Iterator[SimulationTurn]:
        """Those that there are; by number, so that a long run is not gone through for a few of its turns."""
        for number in numbers:
            turn: SimulationTurn | None = self.load(Kind.SIMULATION_TURN, (run_id, number))
            if turn is not None:
                yield turn


def _fits(one: AgentInstance, wanted: GetInstancesFilter) -> bool:
    if wanted.state is None and not wanted.include_terminated and one.state not in ACTIVE_STATES:
        return False
    return (
        wanted.state in {None, one.state}
        and wanted.health_state in {None, one.health.state}
        and (wanted.tag is None or wanted.tag.lower() in one.tags)
        and wanted.definition_id in {None, one.definition_id}
        and wanted.owner_id in {None, one.owner_id}
        and (wanted.name_pattern is None or matches(wanted.name_pattern, one.name))
    )


def _task_fits(one: Task, wanted: TaskFilter) -> bool:
    return (
        wanted.state in {None, one.state}
        and (wanted.tag is None or wanted.tag.lower() in one.tags)
        and wanted.definition_id in {None, one.definition_id}
        and (wanted.created_from is None or one.created_at >= wanted.created_from)
        and (wanted.created_until is None or one.created_at < wanted.created_until)
    )


def _page(found: list[Any], key: Callable[[Any], UUID], wanted: GetInstancesFilter | TaskFilter) -> list[Any]:
    newest_first = sorted(found, key=key, reverse=True)
    if wanted.before is not None:
        newest_first = [one for one in newest_first if key(one) < wanted.before]
    return newest_first[wanted.offset : wanted.offset + wanted.limit]


def _when_due(wait: Wait) -> tuple[datetime, UUID]:
    return wait.due_at or _NEVER, wait.wait_id


def _waits_in(wait: Wait, window: WaitWindow) -> bool:
    return (
        window.instance_id in {None, wait.instance_id}
        and (window.due_until is None or (wait.due_at is not None and wait.due_at <= window.due_until))
        and (window.after is None or _when_due(wait) > _when_due(window.after))
    )


def _seen_in(event: Event, window: EventWindow) -> bool:
    if window.instance_id is not None:
        return getattr(event, "instance_id", None) == window.instance_id
    return window.workspace_id is None or event.workspace_id == window.workspace_id


def _last_before(numbered: Iterable[tuple[int, datetime]], moment: datetime) -> int:
    last = 0
    for number, at in numbered:
        if at >= moment:
            break
        last = number
    return last


def memory_store(seams: Seams | None = None, tables: MemoryTables | None = None) -> EngineStore:
    """A store that keeps nothing beyond its tables; pass the same tables to open the same content again."""
    return EngineStore(memory_backend(tables or MemoryTables()), seams)


def memory_backend(tables: MemoryTables) -> Backend:
    return Backend(open_writer=lambda _fault: MemorySession(tables), open_reader=lambda: MemorySession(tables))
