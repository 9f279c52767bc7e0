"""The lease of the one owner. Its epoch fences every write: an older owner is refused."""

from __future__ import annotations

from datetime import timedelta

from ostler.errors import LeaseHeldError, StaleWriterError
from ostler.model.access import HOME_WORKSPACE_ID, SYSTEM
from ostler.model.attempt import Lease
from ostler.store.connection import headless
from ostler.store.record_table import RecordTable
from ostler.store.transaction import Reader, Transaction

OWNER = "owner"
LEASES = RecordTable(Lease, "leases")


def current_epoch(reader: Reader) -> int:
    row = reader.fetch_one("SELECT epoch FROM head")
    if row is None:
        raise headless("this store")
    return int(row[0])


def get_lease(reader: Reader) -> Lease | None:
    return LEASES.read_one(reader.fetch_one(f"{LEASES.select} WHERE name = :name", name=OWNER))


def take_lease(tx: Transaction, owner: str, *, ttl: timedelta, steal: bool) -> Lease:
    held = get_lease(tx)
    if held is not None and held.expires_at > tx.now and not steal:
        raise LeaseHeldError(f"{_owned(held)}; stop it first, or wait until then")
    lease = Lease(name=OWNER, owner=owner, epoch=tx.epoch + 1, acquired_at=tx.now, expires_at=tx.now + ttl)
    tx.execute("DELETE FROM leases WHERE name = :name", name=OWNER)
    LEASES.insert(tx, lease)
    tx.epoch = lease.epoch
    tx.audit(HOME_WORKSPACE_ID, SYSTEM, "lease.take", f"lease:{OWNER}", detail=f"{owner}, epoch {lease.epoch}")
    return lease


def renew_lease(tx: Transaction, lease: Lease, *, ttl: timedelta) -> Lease:
    _require_held(tx, lease)
    renewed = lease.evolve(expires_at=tx.now + ttl)
    tx.execute("UPDATE leases SET expires_at = :at WHERE name = :name", at=renewed.expires_at, name=OWNER)
    return renewed


def release_lease(tx: Transaction, lease: Lease) -> None:
    """The epoch rises, so that the former owner cannot go on writing by mistake."""
    _require_held(tx, lease)
    tx.execute("DELETE FROM leases WHERE name = :name", name=OWNER)
    tx.epoch += 1
    tx.audit(HOME_WORKSPACE_ID, SYSTEM, "lease.release", f"lease:{OWNER}", detail=f"{lease.owner}")


def stale_writer(tx: Transaction) -> StaleWriterError:
    """Why a store with another epoch may not write."""
    held = get_lease(tx)
    if held is not None and held.expires_at > tx.now:
        return StaleWriterError(f"{_owned(held)}; no other store may write")
    return StaleWriterError("this store gave up or lost the lease, so it may not write; take the lease first")


def _owned(held: Lease) -> str:
    return f"{held.owner} owns this store until {held.expires_at:%H:%M:%S} UTC"


def _require_held(tx: Transaction, lease: Lease) -> None:
    held = get_lease(tx)
    if held is None or held.epoch != lease.epoch:
        raise StaleWriterError(f"{lease.owner} is no longer the owner of this store; a newer one has taken over")
