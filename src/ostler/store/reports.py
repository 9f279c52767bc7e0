"""What happens to a live instance without ending it: calls, waits of the agent, health, progress, signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostler.errors import InvalidOperationError, ValidationError, VersionConflictError
from ostler.model.attempt import Request
from ostler.model.events import AgentErrorEvent, AgentHealthChangedEvent, AgentProgressEvent, AgentSignalEvent
from ostler.model.instance import AgentHealthStatus, AgentInstance, AgentMetrics
from ostler.model.states import HealthState
from ostler.model.wait import Wait
from ostler.store.attempts import get_attempt
from ostler.store.moves import (
    INSTANCES,
    Changes,
    Move,
    about,
    get_instance,
    move_instance,
    require_attempt,
    subject,
    update_row,
)
from ostler.store.requests import RequestEnd, begin_request, end_request
from ostler.store.transaction import Transaction
from ostler.store.waits import open_wait


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnd:
    """What is written when a request was answered."""

    #: The row of a request that has an id.
    request: RequestEnd | None = None
    #: What it raised, where the agent goes on.
    error: AgentErrorEvent | None = None
    #: The last message that the agent said before; while that is not committed this is not either.
    after: int = 0


def begin_call(tx: Transaction, old: AgentInstance, move: Move | None, request: Request | None) -> Changes:
    """A request was handed to the agent: its row, and the move to processing where there is one."""
    changes = _moved(tx, old, move)
    if request is not None:
        begin_request(tx, request)
    return changes


def end_call(tx: Transaction, old: AgentInstance, move: Move | None, end: CallEnd) -> Changes:
    """A request was answered: its row, its error, and the move to waiting where there is one."""
    if end.after:
        _require_heard(tx, old, end.after)
    if end.error is not None:
        tx.emit(end.error.evolve(version=require_attempt(tx, old)))
    changes = _moved(tx, old, move)
    if end.request is not None:
        end_request(tx, end.request)
    return changes


def _require_heard(tx: Transaction, old: AgentInstance, number: int) -> None:
    """Messages are committed in their order, and before the answer that follows them."""
    require_attempt(tx, old)
    attempt = get_attempt(tx, old.instance_id, old.attempt)
    if attempt is None or attempt.heard < number:
        raise VersionConflictError(f"what {subject(old)} said before is not written yet; write that first")


def open_agent_wait(tx: Transaction, old: AgentInstance, move: Move | None, wait: Wait) -> tuple[Wait, Changes]:
    """The agent waits for an answer: the wait and the move to waiting are one commit."""
    opened = open_wait(tx, wait, attempt=old.attempt)
    return opened, _moved(tx, old, move)


def _moved(tx: Transaction, old: AgentInstance, move: Move | None) -> Changes:
    """The move, which is a fence; or the fence alone."""
    if move is not None:
        return move_instance(tx, old, move)
    require_attempt(tx, old)
    return {}


def report_health(tx: Transaction, old: AgentInstance, health: AgentHealthStatus) -> Changes:
    """Healthy again: the restarts are forgiven."""
    healthy = health.state is HealthState.HEALTHY
    changes: Changes = {"restart_count": 0, "failing_since": None} if healthy else {}
    columns = {**changes, "health_json": INSTANCES.dump("health", health), "health_state": health.state}
    version = update_row(tx, old, columns)
    if health.state is not old.health.state:
        tx.emit(
            AgentHealthChangedEvent(
                **about(old, version),
                previous_health=old.health.state,
                new_health=health.state,
                details=health.details,
            )
        )
    return {**changes, "health": health, "version": version, "updated_at": tx.now}


def report_progress(
    tx: Transaction,
    old: AgentInstance,
    fraction: float | None,
    message: str | None,
    details: Mapping[str, Any] | None,
) -> None:
    version = require_attempt(tx, old)
    tx.emit(AgentProgressEvent(**about(old, version), fraction=fraction, message=message, details=details))


def report_signals(
    tx: Transaction,
    old: AgentInstance,
    signals: Sequence[tuple[str, Mapping[str, Any] | None]],
    after: int,
    heard: int,
    metrics: AgentMetrics | None = None,
) -> list[str]:
    """Signals in their order: those after message `after`, up to message `heard`, so that a repeat is recognised.

    One that cannot be written takes no other with it; the answer says what was lost.
    """
    version = require_attempt(tx, old)
    _require_heard(tx, old, after)
    lost: list[str] = []
    for name, payload in signals:
        try:
            tx.emit(AgentSignalEvent(**about(old, version), name=name, payload=payload))
        except (ValidationError, TypeError, ValueError) as error:
            lost.append(f"signal {name!a}: {error}")
    tx.execute(
        "UPDATE attempts SET heard = :heard WHERE instance_id = :id AND number = :number AND heard < :heard",
        id=old.instance_id,
        number=old.attempt,
        heard=heard,
    )
    if metrics is not None:  # the tokens that the messages told of
        text = INSTANCES.dump("metrics", metrics)
        tx.execute("UPDATE agent_instances SET metrics_json = :text WHERE id = :id", text=text, id=old.instance_id)
    return lost


def add_signal(tx: Transaction, about_instance: AgentInstance, name: str, payload: Mapping[str, Any] | None) -> None:
    """A signal that reached us beside the agent's own channel. Only the last attempt of an instance is heard."""
    record = get_instance(tx, about_instance.instance_id)
    if record is None or record.attempt != about_instance.attempt:
        raise InvalidOperationError("the attempt that says this has ended, so it is not heard any more")
    tx.emit(AgentSignalEvent(**about(record, record.version), name=name, payload=payload))
