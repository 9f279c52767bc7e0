"""Removes what has been kept long enough, a bounded batch per command, the oldest first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model.access import HOME_WORKSPACE_ID, SYSTEM, Actor
from ostler.model.instance import AgentInstance
from ostler.model.types import micros
from ostler.policy.retention import RetentionPolicy
from ostler.store.attempts import get_attempt
from ostler.store.audit import PRUNED, get_chain, list_chains
from ostler.store.totals import count_ended
from ostler.store.transaction import Transaction
from ostler.store.waits import end_waits_of


@dataclass(frozen=True, slots=True)
class Swept:
    """What one command removed; `more` when a batch was full."""

    removed: int
    more: bool


def sweep(tx: Transaction, policy: RetentionPolicy) -> Swept:
    """One batch of everything that is due. Call it again while there is more."""
    counts = (
        _sweep_instances(tx, tx.now - policy.finished, policy.batch),
        _sweep_waits(tx, tx.now - policy.finished, policy.batch),
        _sweep_keys(tx, tx.now - policy.idempotency, policy.batch),
        _sweep_events(tx, tx.now - policy.events, policy.batch),
        *(
            _sweep_audit(tx, workspace_id, tx.now - policy.audit, policy.batch)
            for workspace_id in (list_chains(tx) if policy.audit is not None else ())
            if policy.audit is not None
        ),
    )
    return Swept(sum(counts), any(count >= policy.batch for count in counts))


def _sweep_instances(tx: Transaction, before: datetime, limit: int) -> int:
    """Ended instances with their tags, attempts and requests. Events and audit stay.

    One with an open attempt that was seen to start stays: something of it may live, and the row is all that knows it.
    So does one with an open wait, such as a pending restart.
    """
    rows = tx.fetch(
        """SELECT id, workspace_id FROM agent_instances AS i
           WHERE terminated_at IS NOT NULL AND terminated_at <= :before AND active = 0
           AND NOT EXISTS (SELECT 1 FROM attempts AS a
                           WHERE a.instance_id = i.id AND a.ended_at IS NULL AND a.handle_json IS NOT NULL)
           AND NOT EXISTS (SELECT 1 FROM waits AS w WHERE w.instance_id = i.id AND w.ended_at IS NULL)
           ORDER BY terminated_at, id LIMIT :limit""",
        before=before,
        limit=limit,
    )
    removed: dict[UUID, int] = {}
    for key, space in rows:
        _delete_instance(tx, key)
        workspace_id = space if isinstance(space, UUID) else UUID(bytes=space)
        removed[workspace_id] = removed.get(workspace_id, 0) + 1
    for workspace_id, count in removed.items():
        tx.audit(workspace_id, SYSTEM, "retention.instances", "records", detail=f"removed {count}")
    return len(rows)


def remove_instance(tx: Transaction, old: AgentInstance, *, by: Actor) -> None:
    """One ended instance, by hand. Its events and its audit stay."""
    tx.audit_refusal(old.workspace_id, by, "remove", f"instance:{old.instance_id}")
    row = tx.fetch_one("SELECT active FROM agent_instances WHERE id = :id", id=old.instance_id)
    if row is None or row[0]:
        raise InvalidOperationError(f"{old.name} is active or gone; it was not removed")
    last = get_attempt(tx, old.instance_id, old.attempt)
    if last is not None and last.may_live:
        raise InvalidOperationError(f"attempt {last.number} of {old.name} has not ended; it was not removed")
    end_waits_of(tx, old.instance_id, "removed")
    _delete_instance(tx, old.instance_id)
    tx.audit(old.workspace_id, by, "remove", f"instance:{old.instance_id}", detail=old.name)


def _delete_instance(tx: Transaction, key: Any) -> None:
    count_ended(tx, key, -1)
    for table in ("attempts", "requests", "agent_instance_tags"):
        tx.execute(f"DELETE FROM {table} WHERE instance_id = :id", id=key)
    tx.execute("DELETE FROM agent_instances WHERE id = :id", id=key)


def _sweep_waits(tx: Transaction, before: datetime, limit: int) -> int:
    return tx.execute(
        """DELETE FROM waits WHERE id IN (
             SELECT id FROM waits WHERE ended_at IS NOT NULL AND ended_at <= :before
             ORDER BY ended_at, id LIMIT :limit)""",
        before=before,
        limit=limit,
    )


def _sweep_keys(tx: Transaction, before: datetime, limit: int) -> int:
    """Not audited: the keys are a help to callers, and no record."""
    rows = tx.fetch(
        "SELECT workspace_id, key FROM idempotency_keys WHERE created_at <= :before ORDER BY created_at LIMIT :limit",
        before=before,
        limit=limit,
    )
    for workspace_id, key in rows:
        tx.execute(
            "DELETE FROM idempotency_keys WHERE workspace_id = :workspace_id AND key = :key",
            workspace_id=workspace_id,
            key=key,
        )
    return len(rows)


def _sweep_events(tx: Transaction, before: datetime, limit: int) -> int:
    """Always a prefix of the log, so that one number tells every cursor what is gone.

    An event that stands after a younger one, because the clock was set back, stays until that one goes.
    """
    rows = tx.fetch(
        """SELECT sequence, occurred_at FROM agent_instance_events WHERE sequence > :horizon
           ORDER BY sequence LIMIT :limit""",
        horizon=tx.pruned_until,
        limit=limit,
    )
    due = list(itertools.takewhile(lambda row: row[1] <= micros(before), rows))
    if not due:
        return 0
    until = int(due[-1][0])
    removed = tx.execute("DELETE FROM agent_instance_events WHERE sequence <= :until", until=until)
    tx.pruned_until = until
    tx.audit(HOME_WORKSPACE_ID, SYSTEM, "retention.events", "events", detail=f"removed up to {until}")
    return removed


def _sweep_audit(tx: Transaction, workspace_id: UUID, before: datetime, limit: int) -> int:
    """The hash of the last removed entry is kept, from which the rest still verifies."""
    anchor = get_chain(tx, workspace_id).anchor_number
    rows = tx.fetch(
        """SELECT number, hash FROM audit WHERE workspace_id = :id AND number > :anchor AND occurred_at <= :before
           ORDER BY number LIMIT :limit""",
        id=workspace_id,
        anchor=anchor,
        before=before,
        limit=limit,
    )
    # A prefix only: an entry that stands after a younger one stays until that one goes.
    rows = [row for position, row in enumerate(rows) if row[0] == anchor + 1 + position]
    if not rows:
        return 0
    last, digest = rows[-1]
    tx.execute("DELETE FROM audit WHERE workspace_id = :id AND number <= :last", id=workspace_id, last=last)
    tx.execute(
        "UPDATE workspaces SET anchor_number = :last, anchor_hash = :hash WHERE id = :id",
        id=workspace_id,
        last=last,
        hash=digest,
    )
    tx.audit(workspace_id, SYSTEM, PRUNED, "audit", detail=f"removed up to {last}")
    return len(rows)
