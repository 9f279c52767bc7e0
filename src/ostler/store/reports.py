"""What happens to a live instance without ending it: calls, waits of the agent, health, progress, signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostler.model.events import AgentErrorEvent, AgentHealthChangedEvent, AgentProgressEvent, AgentSignalEvent
from ostler.model.instance import AgentHealthStatus, AgentInstance, AgentMetrics
from ostler.model.ledger import Request, Wait
from ostler.model.states import HealthState
from ostler.store.moves import INSTANCES, Changes, Move, about, move_instance, require_attempt, update_row
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


def begin_call(tx: Transaction, old: AgentInstance, move: Move | None, request: Request | None) -> Changes:
    """A request was handed to the agent: its row, and the move to processing where there is one."""
    require_attempt(tx, old)
    if request is not None:
        begin_request(tx, request)
    return {} if move is None else move_instance(tx, old, move)


def end_call(tx: Transaction, old: AgentInstance, move: Move | None, end: CallEnd) -> Changes:
    """A request was answered: its row, its error, and the move to waiting where there is one."""
    version = require_attempt(tx, old)
    if end.request is not None:
        end_request(tx, end.request)
    if end.error is not None:
        tx.emit(end.error.evolve(version=version))
    return {} if move is None else move_instance(tx, old, move)


def open_agent_wait(tx: Transaction, old: AgentInstance, move: Move | None, wait: Wait) -> tuple[Wait, Changes]:
    """The agent waits for an answer: the wait and the move to waiting are one commit."""
    require_attempt(tx, old)
    known = open_wait(tx, wait, attempt=old.attempt)
    return known, {} if move is None else move_instance(tx, old, move)


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
    heard: int,
    metrics: AgentMetrics | None = None,
) -> None:
    """Signals in their order. `heard` is the number of the last message, so that a repeat is recognised."""
    version = require_attempt(tx, old)
    for name, payload in signals:
        tx.emit(AgentSignalEvent(**about(old, version), name=name, payload=payload))
    if not heard:
        return
    tx.execute(
        "UPDATE attempts SET heard = :heard WHERE instance_id = :id AND number = :number AND heard < :heard",
        id=old.instance_id,
        number=old.attempt,
        heard=heard,
    )
    if metrics is not None:  # the tokens that the messages told of
        text = INSTANCES.dump("metrics", metrics)
        tx.execute("UPDATE agent_instances SET metrics_json = :text WHERE id = :id", text=text, id=old.instance_id)
