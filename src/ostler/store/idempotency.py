"""Idempotency keys: the same key with the same request gets the same answer, for one verb, for 24 hours."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from ostler.errors import IdempotencyConflictError
from ostler.model.validation import fault
from ostler.store.transaction import Transaction

MAX_KEY = 200
LIFETIME = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """The caller's key for one request."""

    key: str
    fingerprint: str

    @classmethod
    def of(cls, key: str, body: str) -> IdempotencyKey:
        if not 1 <= len(key) <= MAX_KEY or not key.isprintable():
            raise fault("idempotency_key", f"must be 1 to {MAX_KEY} printable characters", key)
        return cls(key, hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest())


def find_answer(tx: Transaction, workspace_id: UUID, key: IdempotencyKey | None, action: str) -> str | None:
    """The answer that was kept for this key; None where the request is new."""
    if key is None:
        return None
    row = tx.fetch_one(
        """SELECT action, fingerprint, answer_json, created_at FROM idempotency_keys
           WHERE workspace_id = :workspace_id AND key = :key AND created_at > :oldest""",
        workspace_id=workspace_id,
        key=key.key,
        oldest=tx.now - LIFETIME,
    )
    if row is None:
        return None
    if row[0] != action or row[1] != key.fingerprint:
        used = f"the key {key.key!a} was used for {row[0]}" if row[0] != action else f"the key {key.key!a} was used"
        raise IdempotencyConflictError(f"{used} with another request; use a new key")
    return str(row[2])


def keep_answer(tx: Transaction, workspace_id: UUID, key: IdempotencyKey | None, action: str, answer: str) -> None:
    if key is None:
        return
    tx.execute(
        "DELETE FROM idempotency_keys WHERE workspace_id = :workspace_id AND key = :key",
        workspace_id=workspace_id,
        key=key.key,
    )
    tx.execute(
        """INSERT INTO idempotency_keys (workspace_id, key, action, fingerprint, answer_json, created_at)
           VALUES (:workspace_id, :key, :action, :fingerprint, :answer, :now)""",
        workspace_id=workspace_id,
        key=key.key,
        action=action,
        fingerprint=key.fingerprint,
        answer=answer,
        now=tx.now,
    )
