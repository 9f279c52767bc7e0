"""Who owns the store. Each new owner raises the epoch, and with it shuts every older one out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from ostler.errors import LeaseHeldError, StaleWriterError
from ostler.model import HOME_WORKSPACE_ID, Fault, Lease
from ostler.store.commands.base import Command
from ostler.store.commands.checking import flag_faults, kind_faults, record_faults, word_faults
from ostler.store.kinds import Kind
from ostler.store.unit import Unit

OWNER = "owner"
MAX_TTL = timedelta(days=3650)


@dataclass(kw_only=True, eq=False)
class TakeLease(Command[Lease]):
    """Become the owner. `steal` is for one who holds the lock on the home directory and so knows the other is dead."""

    action: ClassVar[str] = "lease.take"
    #: Who takes over cannot have the epoch yet.
    fenced: ClassVar[bool] = False

    owner: str
    ttl: timedelta = timedelta(seconds=30)
    steal: bool = False

    def faults(self) -> Iterator[Fault]:
        yield from _ttl_faults(self.ttl)
        if self.owner == "":
            yield Fault(field="owner", bound="is required")
        yield from word_faults("owner", self.owner)
        yield from flag_faults("steal", self.steal)

    @property
    def subject(self) -> str:
        return f"lease:{OWNER}"

    def apply(self, unit: Unit) -> Lease:
        unit.workspace(HOME_WORKSPACE_ID)
        held: Lease | None = unit.get(Kind.LEASE, (OWNER,))
        if held is not None and held.owner != self.owner and held.expires_at > unit.now and not self.steal:
            raise LeaseHeldError(
                f"{held.owner} owns this store until {held.expires_at:%H:%M:%S} UTC; stop it first, or wait"
            )
        epoch = unit.epoch + 1
        lease = Lease(name=OWNER, owner=self.owner, epoch=epoch, acquired_at=unit.now, expires_at=unit.now + self.ttl)
        unit.put(Kind.LEASE, lease)
        unit.raise_epoch(epoch)
        unit.audit(self.by, self.action, self.subject, detail=f"{self.owner}, epoch {epoch}")
        return lease


@dataclass(kw_only=True, eq=False)
class RenewLease(Command[Lease]):
    """Stay the owner. Refused as soon as another has taken over."""

    action: ClassVar[str] = "lease.renew"

    lease: Lease
    ttl: timedelta = timedelta(seconds=30)

    def faults(self) -> Iterator[Fault]:
        yield from record_faults("lease", self.lease, Lease)
        yield from _ttl_faults(self.ttl)

    def apply(self, unit: Unit) -> Lease:
        _require_held(unit, self.lease)
        lease = self.lease.evolve(expires_at=unit.now + self.ttl)
        unit.put(Kind.LEASE, lease)
        return lease


@dataclass(kw_only=True, eq=False)
class ReleaseLease(Command[None]):
    """Step down. The epoch rises, so that the one who stepped down cannot go on writing by mistake."""

    action: ClassVar[str] = "lease.release"

    lease: Lease

    def faults(self) -> Iterator[Fault]:
        return record_faults("lease", self.lease, Lease)

    @property
    def subject(self) -> str:
        return f"lease:{OWNER}"

    def apply(self, unit: Unit) -> None:
        unit.workspace(HOME_WORKSPACE_ID)
        _require_held(unit, self.lease)
        unit.remove(Kind.LEASE, (OWNER,))
        unit.raise_epoch(unit.epoch + 1)
        unit.audit(self.by, self.action, self.subject, detail=f"{self.lease.owner}, epoch {self.lease.epoch}")


def _ttl_faults(ttl: timedelta) -> Iterator[Fault]:
    if not isinstance(ttl, timedelta):
        yield from kind_faults("ttl", ttl, timedelta)
    elif not timedelta(0) < ttl <= MAX_TTL:
        yield Fault(
            field="ttl", bound="must be more than 0 s and at most 3650 days", value=f"{ttl.total_seconds():g} s"
        )


def _require_held(unit: Unit, lease: Lease) -> None:
    held: Lease | None = unit.get(Kind.LEASE, (OWNER,))
    if held is None or held.epoch != lease.epoch:
        raise StaleWriterError(f"{lease.owner} is no longer the owner of this store; a newer one has taken over")
