"""Instances: reserved, suspended, failed, started anew, terminated.

Each function is one command: record, event, audit, quota and the rows beside them change in one commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model.access import SYSTEM, Actor
from ostler.model.attempt import AttemptOutcome
from ostler.model.events import AgentErrorEvent, AgentRestartingEvent, AgentSpawnedEvent, AgentTerminatedEvent
from ostler.model.instance import AgentHealthStatus, AgentInstance, AgentMetrics
from ostler.model.states import AgentState, Enforcement, SuspendDepth
from ostler.model.text import MAX_REASON, clipped
from ostler.model.types import MAX_COUNT
from ostler.model.wait import Wait, WaitKind
from ostler.policy.quota import plan, slot_error
from ostler.store.attempts import AttemptEnd, add_attempt, end_attempt, get_attempt, start_attempt
from ostler.store.idempotency import IdempotencyKey, find_answer, keep_answer
from ostler.store.moves import (
    INSTANCES,
    Changes,
    Move,
    about,
    apply_move,
    emit_move,
    get_instance,
    mismatch,
    move_instance,
    require_attempt,
    subject,
)
from ostler.store.requests import lose_requests
from ostler.store.totals import count_ended
from ostler.store.transaction import Transaction
from ostler.store.waits import WAITS, end_wait, end_waits_of
from ostler.store.workspaces import require_workspace

_MAX_ERROR = 8000
_MAX_TYPE = 500
_MAX_TRACE = 32_000


# --- spawn -------------------------------------------------------------------------------------------


def reserve_instance(
    tx: Transaction, instance: AgentInstance, *, by: Actor, key: IdempotencyKey | None = None
) -> tuple[AgentInstance, bool]:
    """Intent first: the record, its place in the plan and its first attempt, before any process exists.

    The same key gives the instance that it made before, and False.
    """
    space = instance.workspace_id
    tx.audit_refusal(space, by, "spawn", f"definition:{instance.definition_id}")
    answer = find_answer(tx, space, key, "spawn")
    if answer is not None:
        before = get_instance(tx, UUID(answer))
        if before is not None:
            return before, False
    _take_place(tx, space)
    reserved = instance.evolve(created_at=tx.now, updated_at=tx.now)
    INSTANCES.insert(
        tx,
        reserved,
        active=1,
        health_state=reserved.health.state,
        name_key=None if reserved.name is None else reserved.name.casefold(),
    )
    tx.execute_many(
        """INSERT INTO agent_instance_tags (instance_id, tag, workspace_id, active)
           VALUES (:instance_id, :tag, :workspace_id, 1)""",
        [{"instance_id": reserved.instance_id, "tag": tag, "workspace_id": space} for tag in reserved.tags],
    )
    add_attempt(tx, reserved)
    keep_answer(tx, space, key, "spawn", str(reserved.instance_id))
    tx.audit(space, by, "spawn", subject(reserved), detail=f"{reserved.name} of definition {reserved.definition_id}")
    return reserved, True


def ready_instance(
    tx: Transaction, old: AgentInstance, handle: Mapping[str, Any], enforcement: Mapping[str, Enforcement], *, by: Actor
) -> Changes:
    """What was started is known now. The first time, this is the spawn."""
    first = old.enforcement is None
    columns = {"enforcement_json": INSTANCES.dump("enforcement", enforcement)}
    changes = apply_move(tx, old, Move(to=AgentState.READY, by=by, reason="it is initialised"), columns)
    start_attempt(tx, old.instance_id, old.attempt, handle)
    if first:
        tx.count(old.workspace_id, {"spawned": 1})
        tx.emit(
            AgentSpawnedEvent(
                **about(old, changes["version"]),
                definition_id=old.definition_id,
                user_id=old.owner_id,
                options=old.spawn_options,
                name=old.name,
            ),
            by,
        )
    return {**changes, "enforcement": enforcement}


# --- moves -------------------------------------------------------------------------------------------


def suspend_instance(tx: Transaction, old: AgentInstance, wait: Wait, *, by: Actor, catch_up: bool = False) -> Changes:
    """The wait says how deep the suspension is and when it ends by itself. A deeper one replaces it."""
    depth = str((wait.detail or {}).get("depth", ""))
    changes: Changes = {}
    if old.state is AgentState.SUSPENDED:
        require_attempt(tx, old)
        end_waits_of(tx, old.instance_id, "replaced", kinds={WaitKind.RESUME})
        tx.audit(old.workspace_id, by, "suspend", subject(old), detail=depth)
    else:
        reason = f"{depth}: {wait.reason}" if wait.reason else depth
        freezing = depth == SuspendDepth.FREEZE
        to = AgentState.SUSPENDED
        move = Move(to=to, by=by, reason=reason, act="suspend", freezing=freezing, catch_up=catch_up)
        changes = move_instance(tx, old, move)
    WAITS.insert(tx, wait)
    return changes


def resume_instance(tx: Transaction, old: AgentInstance, to: AgentState, *, by: Actor, reason: str) -> Changes:
    freezing = to is AgentState.PROCESSING
    return move_instance(tx, old, Move(to=to, by=by, reason=reason, act="resume", freezing=freezing))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How an attempt failed, and whether it is followed by another."""

    end: AttemptEnd
    error: AgentErrorEvent
    reason: str
    #: The wait before the restart. Without one the failure is final until a restart by hand.
    backoff: Wait | None = None
    restarting: AgentRestartingEvent | None = None


def fail_instance(tx: Transaction, old: AgentInstance, failure: Failure, *, catch_up: bool = False) -> Changes:
    """Nothing of the attempt lives any more."""
    message = clipped(failure.error.error_message, _MAX_ERROR)
    fields = {"error_message": message, "failing_since": old.failing_since or tx.now}
    move = Move(
        to=AgentState.FAILED,
        reason=failure.reason,
        catch_up=catch_up,
        is_final=failure.backoff is None,
        ended_at=failure.end.ended_at,
    )
    changes = apply_move(tx, old, move, fields)
    _end_attempt(tx, old, failure.end, failure.reason)
    tx.emit(failure.error.evolve(version=changes["version"]))
    if failure.backoff is not None:
        WAITS.insert(tx, failure.backoff.evolve(reason=_clipped(failure.backoff.reason, MAX_REASON)))
    if failure.restarting is not None:
        reason = _clipped(failure.restarting.reason, MAX_REASON)
        tx.emit(failure.restarting.evolve(version=changes["version"], reason=reason))
    return {**changes, **fields}


def new_attempt(tx: Transaction, old: AgentInstance, *, by: Actor, reason: str, wait_id: UUID | None = None) -> Changes:
    """A failed instance starts again, with a place in the plan taken anew.

    With the wait of its backoff it is a restart by the policy: the wait ends exactly once, and the restart is counted.
    Without it the restart is by hand, and spends no retry.
    """
    tx.audit_refusal(old.workspace_id, by, "restart", subject(old))
    if old.state is not AgentState.FAILED:
        raise InvalidOperationError(
            f"{subject(old)} is {old.state}, not failed", current=old.state, wanted=AgentState.INITIALIZING
        )
    if wait_id is not None:
        ended = end_wait(tx, wait_id, "restarted")
        if ended.instance_id != old.instance_id:
            raise InvalidOperationError(f"the wait {wait_id} is not of {subject(old)}")
    else:
        end_waits_of(tx, old.instance_id, "restarted", kinds={WaitKind.BACKOFF})
    _require_ended(tx, old)
    _take_place(tx, old.workspace_id)
    tx.execute("UPDATE agent_instance_tags SET active = 1 WHERE instance_id = :id", id=old.instance_id)
    return _start_again(tx, old, by, reason, counted=wait_id is not None)


def restart_instance(
    tx: Transaction, old: AgentInstance, end: AttemptEnd, *, by: Actor, reason: str, catch_up: bool = False
) -> Changes:
    """A restart by hand of a living instance: through failed in one commit, keeping its place and its retries."""
    tx.audit_refusal(old.workspace_id, by, "restart", subject(old))
    apply_move(tx, old, Move(to=AgentState.FAILED, by=by, reason=reason, catch_up=catch_up, keeps_place=True))
    _end_attempt(tx, old, end, reason)
    failed = old.evolve(state=AgentState.FAILED, terminated_at=tx.now)
    return _start_again(tx, failed, by, reason, counted=False)


def unpark_instance(tx: Transaction, old: AgentInstance, *, by: Actor) -> Changes:
    """A parked instance comes back: a new attempt, suspended until it is ready."""
    tx.audit_refusal(old.workspace_id, by, "resume", subject(old))
    if old.state is not AgentState.SUSPENDED:
        raise InvalidOperationError(f"{subject(old)} is {old.state}, not parked", current=old.state)
    _require_ended(tx, old)
    changes = _add_attempt(tx, old, {"health": AgentHealthStatus()})
    tx.audit(old.workspace_id, by, "resume", subject(old), detail=f"attempt {changes['attempt']}")
    return changes


def park_instance(tx: Transaction, old: AgentInstance, end: AttemptEnd) -> None:
    """The process of a parked instance has ended."""
    require_attempt(tx, old)
    end_attempt(tx, old.instance_id, old.attempt, end)
    lose_requests(tx, old.instance_id, "the agent was parked")
    end_waits_of(tx, old.instance_id, "the agent was parked", kinds=set(WaitKind) - {WaitKind.RESUME})


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """How an instance was terminated."""

    #: None where no attempt was open.
    end: AttemptEnd | None
    was_graceful: bool
    #: Its name in the audit; None where the intent to terminate stands there already.
    act: str | None = None
    by: Actor = SYSTEM
    reason: str | None = None
    final_state: Mapping[str, Any] | None = None
    metrics: AgentMetrics | None = None


def finish_instance(tx: Transaction, old: AgentInstance, finish: Finish, *, catch_up: bool = False) -> Changes:
    """Terminated: nothing of it lives."""
    failed = old.state is AgentState.FAILED
    ended_at = old.terminated_at if failed else None if finish.end is None else finish.end.ended_at
    move = Move(
        to=AgentState.TERMINATED,
        by=finish.by,
        reason=finish.reason,
        act=finish.act,
        catch_up=catch_up,
        is_final=True,
        ended_at=ended_at,
        metrics=finish.metrics,
    )
    changes = move_instance(tx, old, move)
    if finish.final_state is not None:
        text = INSTANCES.dump("final_state", finish.final_state)
        tx.execute("UPDATE agent_instances SET final_state_json = :text WHERE id = :id", text=text, id=old.instance_id)
        changes["final_state"] = finish.final_state
    if finish.end is not None:
        end_attempt(tx, old.instance_id, old.attempt, finish.end)
    lose_requests(tx, old.instance_id, "the agent was terminated")
    end_waits_of(tx, old.instance_id, "terminated")
    tx.count(old.workspace_id, {"terminated": 1})
    terminated = AgentTerminatedEvent(
        **about(old, changes["version"]),
        final_state=AgentState.TERMINATED,
        was_graceful=finish.was_graceful,
        reason=finish.reason,
        uptime=old.evolve(terminated_at=changes["terminated_at"]).uptime(tx.now),
        **_used(finish.metrics or old.metrics),
    )
    tx.emit(terminated, finish.by)
    return changes


def _used(metrics: AgentMetrics | None) -> dict[str, Any]:
    if metrics is None:
        return {}
    return {"tokens": metrics.tokens_used, "cost_usd": (metrics.custom or {}).get("cost_usd")}


# --- inside ------------------------------------------------------------------------------------------


def _take_place(tx: Transaction, workspace_id: UUID) -> None:
    """One more active instance, as a conditional write: never a count followed by an insert."""
    tier = require_workspace(tx, workspace_id).tier
    maximum = plan(tier).max_concurrent
    taken = tx.execute(
        "UPDATE workspaces SET active = active + 1 WHERE id = :id AND active < :maximum",
        id=workspace_id,
        maximum=MAX_COUNT if maximum is None else maximum,
    )
    if not taken:
        row = tx.fetch_one("SELECT active FROM workspaces WHERE id = :id", id=workspace_id)
        raise slot_error(tier, int(row[0]) if row else 0)


def _require_ended(tx: Transaction, old: AgentInstance) -> None:
    """At most one live attempt: one that was seen to start must be known to have ended. An open intent is closed."""
    last = get_attempt(tx, old.instance_id, old.attempt)
    if last is not None and last.may_live:
        raise InvalidOperationError(
            f"attempt {last.number} of {subject(old)} was started and has not ended; end it first", current=old.state
        )
    end_attempt(tx, old.instance_id, old.attempt, AttemptEnd(outcome=AttemptOutcome.UNKNOWN))


def _end_attempt(tx: Transaction, old: AgentInstance, end: AttemptEnd, reason: str) -> None:
    end_attempt(tx, old.instance_id, old.attempt, end)
    lose_requests(tx, old.instance_id, reason)
    end_waits_of(tx, old.instance_id, "the agent has ended", kinds=set(WaitKind) - {WaitKind.BACKOFF})


def _start_again(tx: Transaction, failed: AgentInstance, by: Actor, reason: str, *, counted: bool) -> Changes:
    down = max(tx.now - (failed.terminated_at or tx.now), timedelta(0))
    changes: Changes = {
        "state": AgentState.INITIALIZING,
        "terminated_at": None,
        "error_message": None,
        "downtime": failed.downtime + down,
        "health": AgentHealthStatus(),
        "restart_count": failed.restart_count + counted,
        "lifetime_restarts": failed.lifetime_restarts + counted,
    }
    started = _add_attempt(tx, failed, changes)
    tx.count(failed.workspace_id, {"restarts": 1})
    move = Move(to=AgentState.INITIALIZING, by=by, reason=reason)
    emit_move(tx, failed.evolve(attempt=started["attempt"]), failed.state, move, started["version"])
    tx.audit(failed.workspace_id, by, "restart", subject(failed), detail=f"attempt {started['attempt']}: {reason}")
    return started


def _add_attempt(tx: Transaction, old: AgentInstance, changes: Changes) -> Changes:
    number = old.attempt + 1
    columns: Changes = {"new_attempt": number, "active": 1}
    for name, value in changes.items():
        match name:
            case "downtime":
                columns["downtime_us"] = value
            case "health":
                columns["health_json"], columns["health_state"] = INSTANCES.dump("health", value), value.state
            case _:
                columns[name] = value
    assignments = ", ".join(f"{'attempt' if name == 'new_attempt' else name} = :{name}" for name in columns)
    count_ended(tx, old.instance_id, -1)
    rows = tx.fetch(
        f"""UPDATE agent_instances SET {assignments}, version = version + 1, updated_at = :now
            WHERE id = :id AND attempt = :attempt AND state = :old_state RETURNING version""",
        id=old.instance_id,
        attempt=old.attempt,
        old_state=old.state,
        now=tx.now,
        **columns,
    )
    if not rows:
        raise mismatch(tx, old)
    add_attempt(tx, old.evolve(attempt=number))
    return {**changes, "attempt": number, "version": int(rows[0][0]), "updated_at": tx.now}


def error_event(
    old: AgentInstance,
    message: str,
    *,
    exception_type: str | None = None,
    stack_trace: str | None = None,
    is_recoverable: bool = False,
) -> AgentErrorEvent:
    return AgentErrorEvent(
        **about(old),
        error_message=clipped(message, _MAX_ERROR),
        exception_type=_clipped(exception_type, _MAX_TYPE),
        stack_trace=_clipped(stack_trace, _MAX_TRACE),
        is_recoverable=is_recoverable,
    )


def _clipped(text: str | None, limit: int) -> str | None:
    return None if text is None else clipped(text, limit)


def restarting_event(old: AgentInstance, **more: Any) -> AgentRestartingEvent:
    return AgentRestartingEvent(**about(old), **more)
