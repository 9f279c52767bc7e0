"""Builders for tests of the store: instances in every state, workspaces, waits; and short ways to read them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.clock import Clock, SystemClock
from ostler.failpoints import Seams
from ostler.ids import Uuid7Source
from ostler.model.access import HOME_WORKSPACE_ID, SYSTEM, Actor, Workspace
from ostler.model.attempt import AttemptOutcome
from ostler.model.audit import AuditEntry, AuditHead, AuditReport
from ostler.model.events import AgentErrorEvent, Event
from ostler.model.instance import AgentInstance
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import AgentState, SuspendDepth, Tier
from ostler.model.task import Task, TaskState
from ostler.model.text import fold_tags
from ostler.model.types import from_micros
from ostler.model.wait import Wait, WaitKind
from ostler.store import audit, events, instances, moves, workspaces
from ostler.store.attempts import AttemptEnd
from ostler.store.idempotency import IdempotencyKey
from ostler.store.instances import Failure, Finish
from ostler.store.moves import Move
from ostler.store.store import Store
from ostler.store.transaction import Reader, Transaction

HOME = HOME_WORKSPACE_ID
DEFINITION = UUID(int=0xD1)
ALICE = Actor(name="alice", principal_id=UUID(int=0xA11CE), correlation_id="c-1")
DAY = timedelta(days=1).total_seconds()
ENDED = AttemptEnd(outcome=AttemptOutcome.STOPPED)
IDS = Uuid7Source(SystemClock())
_NOTHING = from_micros(0)


@dataclass(frozen=True)
class Place:
    """Where the store of one test is."""

    kind: str
    #: A directory, an address, or `:memory:`.
    where: str

    @property
    def is_durable(self) -> bool:
        """Whether a second store sees the same content."""
        return self.kind != "memory"

    def store(self, seams: Seams | None = None) -> Store:
        return Store(self.where, seams)


# --- instances ---------------------------------------------------------------------------------------


def new_record(name: str | None = None, *, tags: Iterable[str] = (), **fields: Any) -> AgentInstance:
    """A record as a spawn reserves it."""
    known: dict[str, Any] = {
        "instance_id": IDS.new(),
        "definition_id": DEFINITION,
        "workspace_id": HOME,
        "state": AgentState.INITIALIZING,
        "created_at": _NOTHING,
        "updated_at": _NOTHING,
        "spawn_options": AgentSpawnOptions(name=name, tags=tuple(tags)),
        "tags": fold_tags(tuple(tags)),
        "name": name,
    }
    return AgentInstance(**{**known, **fields})


async def reserved(
    store: Store, name: str | None = None, *, by: Actor = ALICE, key: IdempotencyKey | None = None, **fields: Any
) -> AgentInstance:
    made, _ = await store.run(instances.reserve_instance, new_record(name, **fields), by=by, key=key)
    return made


async def readied(
    store: Store, one: AgentInstance, handle: Mapping[str, Any] | None = None, **fields: Any
) -> AgentInstance:
    enforcement = fields.pop("enforcement", {})
    changes = await store.run(
        instances.ready_instance, one, handle or {"pid": one.attempt}, enforcement, by=fields.pop("by", ALICE)
    )
    return one.evolve(**changes)


async def ready(store: Store, name: str | None = None, **fields: Any) -> AgentInstance:
    return await readied(store, await reserved(store, name, **fields))


async def moved(store: Store, old: AgentInstance, to: AgentState, **move: Any) -> AgentInstance:
    return old.evolve(**await store.run(moves.move_instance, old, Move(to=to, **move)))


async def suspended(store: Store, old: AgentInstance, depth: SuspendDepth = SuspendDepth.HOLD) -> AgentInstance:
    wait = new_wait(old, kind=WaitKind.RESUME, detail={"depth": depth.value})
    return old.evolve(**await store.run(instances.suspend_instance, old, wait, by=ALICE))


async def failed(store: Store, old: AgentInstance, message: str = "it fell", **fields: Any) -> AgentInstance:
    """`backoff` is the wait before its restart."""
    error: AgentErrorEvent = instances.error_event(old, message)
    failure = Failure(**{"end": ENDED, "error": error, "reason": message, **fields})
    return old.evolve(**await store.run(instances.fail_instance, old, failure))


async def finished(store: Store, old: AgentInstance, **fields: Any) -> AgentInstance:
    finish = Finish(**{"end": ENDED, "was_graceful": True, "by": ALICE, **fields})
    return old.evolve(**await store.run(instances.finish_instance, old, finish))


async def restarted(store: Store, old: AgentInstance, wait_id: UUID | None = None) -> AgentInstance:
    """A failed one starts again: by the policy with the wait of its backoff, else by hand."""
    changes = await store.run(instances.new_attempt, old, by=SYSTEM, reason="again", wait_id=wait_id)
    return old.evolve(**changes)


async def brought_to(store: Store, state: AgentState, name: str | None = None, **fields: Any) -> AgentInstance:
    """A fresh instance, taken to that state by the commands that the lifecycle uses."""
    one = await reserved(store, name, **fields)
    if state is AgentState.INITIALIZING:
        return one
    one = await readied(store, one)
    match state:
        case AgentState.READY:
            return one
        case AgentState.SUSPENDED:
            return await suspended(store, one)
        case AgentState.FAILED:
            return await failed(store, one)
        case AgentState.TERMINATING | AgentState.TERMINATED:
            one = await moved(store, one, AgentState.TERMINATING, act="terminate", by=ALICE)
            return one if state is AgentState.TERMINATING else await finished(store, one)
        case _:
            one = await moved(store, one, AgentState.PROCESSING)
            return one if state is AgentState.PROCESSING else await moved(store, one, AgentState.WAITING)


def new_wait(about: AgentInstance | None = None, **fields: Any) -> Wait:
    known: dict[str, Any] = {
        "wait_id": IDS.new(),
        "workspace_id": HOME if about is None else about.workspace_id,
        "instance_id": None if about is None else about.instance_id,
        "kind": WaitKind.AGENT,
        "created_at": _NOTHING,
    }
    return Wait(**{**known, **fields})


def new_task(clock: Clock, **fields: Any) -> Task:
    values: Mapping[str, Any] = {
        "task_id": IDS.new(),
        "workspace_id": HOME,
        "key": "",
        "state": TaskState.QUEUED,
        "task": "do it",
        "created_by": "",
        "created_at": clock.wall(),
        "updated_at": clock.wall(),
        **fields,
    }
    return Task(**values)


async def new_workspace(store: Store, tier: Tier, number: int = 2) -> UUID:
    space = UUID(int=(0x7000_8000 << 64) + number)
    workspace = Workspace(workspace_id=space, name=f"space {number}", tier=tier, created_at=_NOTHING)
    await store.run(workspaces.put_workspace, workspace)
    return space


def do_nothing(_: Transaction) -> None:
    """A command that succeeds."""


# --- reading -----------------------------------------------------------------------------------------


async def current(store: Store, instance: AgentInstance | UUID) -> AgentInstance:
    instance_id = instance if isinstance(instance, UUID) else instance.instance_id
    found = await store.read(moves.get_instance, instance_id)
    assert found is not None, f"instance {instance_id} is gone"
    return found


async def whole_log(store: Store, after: int = 0, **wanted: Any) -> list[Event]:
    found: list[Event] = []
    while True:
        page = await store.read(events.read_events, after, **wanted)
        found += page.events
        if not page.events:
            return found
        after = page.cursor


async def newest(store: Store) -> int:
    return await store.read(events.newest_sequence)


async def entries(store: Store, space: UUID = HOME, **wanted: Any) -> list[AuditEntry]:
    return await store.read(audit.list_entries, space, **wanted)


async def audit_head(store: Store, space: UUID = HOME) -> AuditHead:
    chain = await store.read(audit.get_chain, space)
    return AuditHead(workspace_id=space, number=chain.number, hash=chain.hash)


async def verified(store: Store, space: UUID = HOME, kept: AuditHead | None = None) -> AuditReport:
    return await store.read(audit.verify, space, kept)


async def seen(store: Store, space: UUID = HOME) -> tuple[int, AuditHead, int]:
    """What a command that writes nothing leaves as it was: the log, the audit, the places taken."""
    return await newest(store), await audit_head(store, space), await store.read(places_taken, space)


def places_taken(reader: Reader, space: UUID = HOME) -> int:
    row = reader.fetch_one("SELECT active FROM workspaces WHERE id = :id", id=space)
    return -1 if row is None else int(row[0])


def count(table: str, where: str = "1 = 1") -> Callable[[Reader], int]:
    """A query that counts rows."""

    def counted(reader: Reader) -> int:
        return int(reader.fetch(f"SELECT count(*) FROM {table} WHERE {where}")[0][0])

    return counted
