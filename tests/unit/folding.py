"""What must hold of any store at any time: the log folds to the records, and totals, waits and chains agree with them.

Each check gives what is wrong as sentences, so that a test shows all of it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from uuid import UUID

from ostler.model.events import (
    AgentEvent,
    AgentHealthChangedEvent,
    AgentStateChangedEvent,
    AgentWaitEndedEvent,
    AgentWaitOpenedEvent,
    Event,
)
from ostler.model.instance import AgentInstance
from ostler.model.states import ACTIVE_STATES, INACTIVE_STATES, AgentState, AgentStateTransitions, HealthState
from ostler.model.wait import WaitKind
from ostler.store import attempts, audit, events, workspaces
from ostler.store.moves import INSTANCES
from ostler.store.transaction import Reader
from ostler.store.waits import WAITS


@dataclass(slots=True)
class Folded:
    """What the log alone tells about one instance."""

    state: AgentState = AgentState.INITIALIZING
    health: HealthState = HealthState.UNKNOWN
    attempt: int = 1
    version: int = 0


def invariant_faults(reader: Reader) -> list[str]:
    """Everything that is checked here. An empty list is what a test wants to see."""
    log = all_events(reader)
    records = all_instances(reader)
    return [
        *sequence_faults(log, events.newest_sequence(reader)),
        *move_faults(log),
        *record_faults(fold(log), records),
        *(fault for record in records for fault in attempt_faults(reader, record)),
        *wait_faults(reader, log, {record.instance_id: record for record in records}),
        *quota_faults(reader, records),
        *audit_faults(reader, records),
    ]


def all_events(reader: Reader, instance_id: UUID | None = None) -> list[Event]:
    found: list[Event] = []
    while page := events.read_events(reader, found[-1].sequence if found else 0, instance_id=instance_id).events:
        found += page
    return found


def all_instances(reader: Reader) -> list[AgentInstance]:
    return INSTANCES.read(reader.fetch(f"{INSTANCES.select} ORDER BY id"))


def fold(log: Iterable[Event]) -> dict[UUID, Folded]:
    known: dict[UUID, Folded] = {}
    for event in log:
        if not isinstance(event, AgentEvent):
            continue
        one = known.setdefault(event.instance_id, Folded())
        one.version = max(one.version, event.version)
        match event:
            case AgentStateChangedEvent():
                one.state, one.attempt = event.new_state, event.attempt
                if event.new_state is AgentState.INITIALIZING:
                    one.health = HealthState.UNKNOWN
            case AgentHealthChangedEvent():
                one.health = event.new_health
    return known


def sequence_faults(log: Iterable[Event], newest: int) -> Iterator[str]:
    """The log has no gap and ends where the head says."""
    expected = 0
    for event in log:
        expected += 1
        if event.sequence != expected:
            yield f"event {expected} should come next, {event.sequence} does"
            expected = event.sequence
    if expected != newest:
        yield f"the log ends at {expected}, the head says {newest}"


def move_faults(log: Iterable[Event]) -> Iterator[str]:
    """Every move is legal, and begins where the one before it ended. No attempt goes back."""
    known: dict[UUID, tuple[AgentState, int]] = {}
    for event in log:
        if not isinstance(event, AgentStateChangedEvent):
            continue
        before, attempt = known.get(event.instance_id, (AgentState.INITIALIZING, 1))
        told = f"event {event.sequence} moves {event.instance_id} from {event.previous_state} to {event.new_state}"
        if event.previous_state is not before:
            yield f"{told}, but it was {before}"
        # The log does not say which moves a freeze or a thaw made, so theirs are admitted everywhere.
        if not AgentStateTransitions.is_valid(event.previous_state, event.new_state, freezing=True):
            yield f"{told}, which is no legal move"
        if event.attempt < attempt:
            yield f"{told} at attempt {event.attempt}, after attempt {attempt}"
        known[event.instance_id] = (event.new_state, max(event.attempt, attempt))


def record_faults(folded: dict[UUID, Folded], records: Iterable[AgentInstance]) -> Iterator[str]:
    for record in records:
        seen = folded.get(record.instance_id, Folded(version=record.version))
        pairs: dict[str, tuple[object, object]] = {
            "state": (seen.state, record.state),
            "health": (seen.health, record.health.state),
        }
        if record.state is not AgentState.SUSPENDED:  # the return of a parked one has a new attempt and no move yet
            pairs["attempt"] = (seen.attempt, record.attempt)
        for name, (told, held) in pairs.items():
            if told != held:
                yield f"instance {record.instance_id}: the log gives {name} {told}, the table has {held}"
        if seen.version > record.version:
            yield f"instance {record.instance_id}: the log has version {seen.version}, the table {record.version}"
        if (record.terminated_at is not None) != (record.state in INACTIVE_STATES):
            yield f"instance {record.instance_id} is {record.state} and ended at {record.terminated_at}"


def attempt_faults(reader: Reader, record: AgentInstance) -> Iterator[str]:
    rows = attempts.list_attempts(reader, record.instance_id)
    opened = [one.number for one in rows if one.is_open]
    if [one.number for one in rows] != list(range(1, record.attempt + 1)):
        yield f"instance {record.instance_id} is at attempt {record.attempt}, its rows are {[o.number for o in rows]}"
    if any(number != record.attempt for number in opened):
        yield f"instance {record.instance_id} is at attempt {record.attempt}, and {opened} are open"
    if record.state in INACTIVE_STATES and opened:
        yield f"instance {record.instance_id} is {record.state}, and its attempts {opened} are open"


def wait_faults(reader: Reader, log: Iterable[Event], records: dict[UUID, AgentInstance]) -> Iterator[str]:
    """A wait ends once, and with its instance; a suspension and a restart have exactly one."""
    opened = Counter(one.wait_id for one in log if isinstance(one, AgentWaitOpenedEvent))
    ended = Counter(one.wait_id for one in log if isinstance(one, AgentWaitEndedEvent))
    kinds: Counter[tuple[UUID, WaitKind]] = Counter()
    for wait in WAITS.read(reader.fetch(f"{WAITS.select} ORDER BY id")):
        told = wait.kind not in {WaitKind.RESUME, WaitKind.BACKOFF}
        if told and (opened[wait.wait_id], ended[wait.wait_id]) != (1, int(wait.ended_at is not None)):
            yield f"wait {wait.wait_id} was opened {opened[wait.wait_id]} and ended {ended[wait.wait_id]} times"
        if wait.ended_at is None and wait.instance_id is not None:
            kinds[wait.instance_id, wait.kind] += 1
            state = records[wait.instance_id].state
            if told and state in INACTIVE_STATES:
                yield f"instance {wait.instance_id} is {state} and waits for an answer ({wait.wait_id})"
    for instance_id, record in records.items():
        pauses, backoffs = kinds[instance_id, WaitKind.RESUME], kinds[instance_id, WaitKind.BACKOFF]
        ending = record.state is AgentState.TERMINATING and pauses == 1
        if pauses != (record.state is AgentState.SUSPENDED) and not ending:
            yield f"instance {instance_id} is {record.state} and has {pauses} suspensions written down"
        if backoffs > (record.state is AgentState.FAILED):
            yield f"instance {instance_id} is {record.state} and has {backoffs} restarts written down"


def audit_faults(reader: Reader, records: list[AgentInstance]) -> Iterator[str]:
    """The chains are sound; a spawn and a termination stand there once."""
    acts: Counter[tuple[str, str]] = Counter()
    for space in audit.list_chains(reader):
        yield from audit.verify(reader, space).faults
        after = 0
        while page := audit.list_entries(reader, space, after=after):
            acts.update((one.subject, one.action) for one in page if one.outcome == "ok")
            after = page[-1].number
    for record in records:
        subject = f"instance:{record.instance_id}"
        ended = record.state in {AgentState.TERMINATING, AgentState.TERMINATED}
        if acts[subject, "spawn"] != 1 or acts[subject, "terminate"] != ended:
            yield (
                f"instance {record.instance_id} is {record.state}; the audit has it spawned "
                f"{acts[subject, 'spawn']} times, terminated {acts[subject, 'terminate']} times"
            )


def quota_faults(reader: Reader, records: list[AgentInstance]) -> Iterator[str]:
    for space in workspaces.list_workspaces(reader):
        mine = [one for one in records if one.workspace_id == space.workspace_id]
        active = sum(one.state in ACTIVE_STATES for one in mine)
        row = reader.fetch_one("SELECT active FROM workspaces WHERE id = :id", id=space.workspace_id)
        flagged = reader.fetch_one(
            "SELECT count(*) FROM agent_instances WHERE workspace_id = :id AND active = 1", id=space.workspace_id
        )
        if row is None or flagged is None or not row[0] == flagged[0] == active:
            yield f"workspace {space.name}: {active} are active, {flagged} are marked so, its plan counts {row}"
