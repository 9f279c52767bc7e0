"""One move of an instance: compared with the row, checked by the table of legal moves, told to the log.

The fence is the attempt (and the epoch of the store): a write of an earlier attempt is refused. Commands return the
fields that changed, because the actor of the instance may hold changes that are not committed yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.errors import DamagedRowError, InvalidOperationError, StaleWriterError, VersionConflictError
from ostler.model.access import SYSTEM, Actor
from ostler.model.events import AgentStateChangedEvent
from ostler.model.instance import AgentInstance, AgentMetrics
from ostler.model.states import INACTIVE_STATES, AgentState, AgentStateTransitions, legal_path
from ostler.model.text import clipped
from ostler.model.wait import WaitKind
from ostler.store.record_table import RecordTable
from ostler.store.totals import count_ended
from ostler.store.transaction import Reader, Transaction
from ostler.store.waits import end_waits_of

INSTANCES = RecordTable(AgentInstance, "agent_instances", renamed={"instance_id": "id"})
Changes = dict[str, Any]
_MAX_REASON = 2000
#: A move from suspended to one of these ends the suspension, and so its wait.
_RESUMED = frozenset({AgentState.READY, AgentState.PROCESSING})


def get_instance(reader: Reader, instance_id: UUID) -> AgentInstance | None:
    return INSTANCES.read_one(reader.fetch_one(f"{INSTANCES.select} WHERE id = :id", id=instance_id))


def subject(instance: AgentInstance) -> str:
    return f"instance:{instance.instance_id}"


def about(old: AgentInstance, version: int | None = None) -> dict[str, Any]:
    """What every event of an instance carries."""
    return {
        "workspace_id": old.workspace_id,
        "instance_id": old.instance_id,
        "attempt": old.attempt,
        "version": old.version if version is None else version,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One move of an instance, and what is written with it."""

    to: AgentState
    by: Actor = SYSTEM
    reason: str | None = None
    #: Its name in the audit; None for a move that is no act, such as one between processing and waiting.
    act: str | None = None
    #: It is a freeze or a thaw, which may stop and go on in mid-work.
    freezing: bool = False
    #: The row may have fallen behind, because the store could not write; it takes the legal steps that it missed.
    catch_up: bool = False
    #: Nothing follows but, perhaps, a restart by hand.
    is_final: bool = False
    #: A restart by hand passes through failed without giving up its place in the plan.
    keeps_place: bool = False
    #: When it ended, where that is known better than by the time of the commit.
    ended_at: datetime | None = None
    metrics: AgentMetrics | None = None


def move_instance(tx: Transaction, old: AgentInstance, move: Move) -> Changes:
    if move.act is not None:
        tx.audit_refusal(old.workspace_id, move.by, move.act, subject(old))
    changes = apply_move(tx, old, move)
    if move.act is not None:
        detail = f"{old.state} to {move.to}" + (f": {move.reason}" if move.reason else "")
        tx.audit(old.workspace_id, move.by, move.act, subject(old), detail=detail)
    return changes


def apply_move(tx: Transaction, old: AgentInstance, move: Move, columns: Mapping[str, Any] | None = None) -> Changes:
    """Compare and set, without reading; on a mismatch see what the row says."""
    state = old.state
    ends = move.to in INACTIVE_STATES
    terminated_at = (move.ended_at or tx.now) if ends else None
    fields = {
        "state": move.to,
        "terminated_at": terminated_at,
        "active": not ends or move.keeps_place,
        **(columns or {}),
        **({} if move.metrics is None else {"metrics_json": INSTANCES.dump("metrics", move.metrics)}),
    }
    if ends:
        count_ended(tx, old.instance_id, -1)  # one that has failed before is counted as such
    legal = _is_legal(state, move)
    version = update_row(tx, old, fields, state) if legal else None
    if version is None and move.catch_up:
        state = _catch_up(tx, old, move.to)
        legal = _is_legal(state, move)
        version = update_row(tx, old, fields, state) if legal else None
    if not legal:
        raise InvalidOperationError(
            f"{subject(old)} is {state} and cannot become {move.to}", current=state, wanted=move.to
        )
    if version is None:
        raise mismatch(tx, old)
    if ends:
        count_ended(tx, old.instance_id, 1)
    if ends and state not in INACTIVE_STATES and not move.keeps_place:
        tx.execute("UPDATE workspaces SET active = active - 1 WHERE id = :id", id=old.workspace_id)
        tx.execute("UPDATE agent_instance_tags SET active = 0 WHERE instance_id = :id", id=old.instance_id)
    if state is AgentState.SUSPENDED and move.to in _RESUMED:
        end_waits_of(tx, old.instance_id, "resumed", kinds={WaitKind.RESUME})
    emit_move(tx, old, state, move, version)
    changes = {"state": move.to, "terminated_at": terminated_at, "version": version, "updated_at": tx.now}
    return changes if move.metrics is None else {**changes, "metrics": move.metrics}


def _is_legal(state: AgentState, move: Move) -> bool:
    """A failed instance starts again with a new attempt and a place taken anew, which no move does."""
    valid = AgentStateTransitions.is_valid(state, move.to, freezing=move.freezing)
    return valid and move.to is not AgentState.INITIALIZING


def emit_move(tx: Transaction, old: AgentInstance, state: AgentState, move: Move, version: int) -> None:
    event = AgentStateChangedEvent(
        **about(old, version),
        previous_state=state,
        new_state=move.to,
        reason=None if move.reason is None else clipped(move.reason, _MAX_REASON),
        is_final=move.is_final,
    )
    tx.emit(event, move.by)


def update_row(
    tx: Transaction, old: AgentInstance, columns: Mapping[str, Any], state: AgentState | None = None
) -> int | None:
    """The new version; None where the row is in another state. Without `state` the row must be active."""
    assignments = ", ".join(f"{name} = :{name}" for name in columns)
    fence = " AND active = 1" if state is None else " AND state = :old_state"
    values = {} if state is None else {"old_state": state}
    rows = tx.fetch(
        f"""UPDATE agent_instances SET {assignments}, version = version + 1, updated_at = :now
            WHERE id = :id AND attempt = :attempt{fence} RETURNING version""",
        id=old.instance_id,
        attempt=old.attempt,
        now=tx.now,
        **columns,
        **values,
    )
    if not rows and state is None:
        raise mismatch(tx, old)
    return int(rows[0][0]) if rows else None


def _catch_up(tx: Transaction, old: AgentInstance, to: AgentState) -> AgentState:
    """Take the row to the last state before `to`, over legal moves that could not be written when they happened."""
    row = get_instance(tx, old.instance_id)
    if row is None or row.attempt != old.attempt:
        raise mismatch(tx, old)
    path = legal_path(row.state, to)
    state = row.state
    for step in path[:-1]:
        version = update_row(tx, old, {"state": step}, state)
        if version is None:
            raise mismatch(tx, old)
        emit_move(tx, old, state, Move(to=step, reason="written late: the store could not write"), version)
        state = step
    return state


def mismatch(tx: Transaction, old: AgentInstance) -> Exception:
    """The row is not what the caller holds; say what differs."""
    row = get_instance(tx, old.instance_id)
    if row is None:
        return DamagedRowError(
            f"the row of {subject(old)} is gone: the database was changed under this program; restore it from a backup"
        )
    if row.attempt != old.attempt:
        return StaleWriterError(f"{subject(old)} is at attempt {row.attempt}, attempt {old.attempt} may not write")
    return VersionConflictError(f"{subject(old)} is {row.state}, not {old.state}; read it again and decide anew")


def require_attempt(tx: Transaction, old: AgentInstance) -> int:
    """The fence of a command that does not change the row; returns the version of the row."""
    row = tx.fetch_one("SELECT attempt, version FROM agent_instances WHERE id = :id", id=old.instance_id)
    if row is None or row[0] != old.attempt:
        raise mismatch(tx, old)
    return int(row[1])
