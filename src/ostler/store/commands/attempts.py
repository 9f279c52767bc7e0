"""Commands about one start of an instance: what was really started, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model import AgentInstance, Attempt, AttemptOutcome, Fault, clipped
from ostler.store.actor import Actor
from ostler.store.commands.base import Command, check_attempt
from ostler.store.commands.checking import as_kept, count_faults, kind_faults, mapping_faults, optional_faults
from ostler.store.kinds import Kind
from ostler.store.unit import Unit

#: The last words of a process may be long; so much of them is kept.
MAX_DETAIL = 10_000


@dataclass(kw_only=True, eq=False)
class RecordIdentity(Command[Attempt]):
    """The second half of intent first: what was really started."""

    action: ClassVar[str] = "identity"

    instance_id: UUID
    attempt: int
    identity: Mapping[str, Any] = field(default_factory=dict)

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("instance_id", self.instance_id, UUID)
        yield from count_faults("attempt", self.attempt)
        yield from mapping_faults("identity", self.identity)

    @property
    def subject(self) -> str:
        return f"instance:{self.instance_id}"

    def apply(self, unit: Unit) -> Attempt:
        record = unit.instance(self.instance_id)
        check_attempt(self, record.attempt, self.attempt)
        return identify(unit, record, self.identity)


def identify(unit: Unit, record: AgentInstance, identity: Mapping[str, Any]) -> Attempt:
    """Say what the current attempt really started."""
    old: Attempt = unit.get(Kind.ATTEMPT, (record.instance_id, record.attempt))
    name = f"attempt {old.number} of instance:{record.instance_id}"
    kept = as_kept(identity)
    if not old.is_open:
        raise InvalidOperationError(f"{name} has ended already")
    if old.identity is not None:
        if old.identity == kept:
            return old
        raise InvalidOperationError(f"{name} has an identity already")
    new = old.evolve(identity=kept, started_at=unit.now)
    unit.put(Kind.ATTEMPT, new)
    return new


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """How a start ended."""

    outcome: AttemptOutcome
    detail: str | None = None

    def faults(self, prefix: str = "") -> Iterator[Fault]:
        yield from kind_faults(f"{prefix}outcome", self.outcome, AttemptOutcome)
        yield from optional_faults(f"{prefix}detail", self.detail, str)

    def close(self, unit: Unit, by: Actor, old: Attempt) -> Attempt:
        """The first word counts; one that has ended stays as it is."""
        if not old.is_open:
            return old
        detail = clipped(self.detail, MAX_DETAIL) if self.detail else None
        new = old.evolve(ended_at=unit.now, outcome=self.outcome, detail=detail)
        unit.put(Kind.ATTEMPT, new)
        subject = f"instance:{old.instance_id}"
        unit.audit(by, EndAttempt.action, subject, detail=f"attempt {old.number}: {self.outcome}")
        return new


@dataclass(kw_only=True, eq=False)
class EndAttempt(Command[Attempt]):
    """How a start ended. Saying it twice changes nothing; the first word counts."""

    action: ClassVar[str] = "attempt.end"

    instance_id: UUID
    attempt: int
    outcome: AttemptOutcome
    detail: str | None = None

    @property
    def _end(self) -> AttemptEnd:
        return AttemptEnd(outcome=self.outcome, detail=self.detail)

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("instance_id", self.instance_id, UUID)
        yield from count_faults("attempt", self.attempt)
        yield from self._end.faults()

    @property
    def subject(self) -> str:
        return f"instance:{self.instance_id}"

    def apply(self, unit: Unit) -> Attempt:
        unit.instance(self.instance_id)
        old: Attempt | None = unit.get(Kind.ATTEMPT, (self.instance_id, self.attempt))
        if old is None:
            raise InvalidOperationError(f"{self.subject} never had an attempt {self.attempt}")
        return self._end.close(unit, self.by, old)
