"""Commands about one start of an instance: what was really started, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model import Attempt, AttemptOutcome, Fault, clipped
from ostler.model.context import json_faults
from ostler.store.commands.base import Command, check_attempt
from ostler.store.commands.checking import count_faults, kind_faults, optional_faults
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
        yield from json_faults("identity", self.identity)

    @property
    def subject(self) -> str:
        return f"instance:{self.instance_id}"

    def apply(self, unit: Unit) -> Attempt:
        record = unit.instance(self.instance_id)
        check_attempt(self, record.attempt, self.attempt)
        old: Attempt = unit.get(Kind.ATTEMPT, (self.instance_id, self.attempt))
        if not old.is_open:
            raise InvalidOperationError(f"attempt {self.attempt} of {self.subject} has ended already")
        if old.identity is not None:
            if old.identity == self.identity:
                return old
            raise InvalidOperationError(f"attempt {self.attempt} of {self.subject} has an identity already")
        new = old.evolve(identity=self.identity, started_at=unit.now)
        unit.put(Kind.ATTEMPT, new)
        return new


@dataclass(kw_only=True, eq=False)
class EndAttempt(Command[Attempt]):
    """How a start ended. Saying it twice changes nothing; the first word counts."""

    action: ClassVar[str] = "attempt.end"

    instance_id: UUID
    attempt: int
    outcome: AttemptOutcome
    detail: str | None = None

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("instance_id", self.instance_id, UUID)
        yield from count_faults("attempt", self.attempt)
        yield from optional_faults("detail", self.detail, str)
        yield from kind_faults("outcome", self.outcome, AttemptOutcome)

    @property
    def subject(self) -> str:
        return f"instance:{self.instance_id}"

    def apply(self, unit: Unit) -> Attempt:
        unit.instance(self.instance_id)
        old: Attempt | None = unit.get(Kind.ATTEMPT, (self.instance_id, self.attempt))
        if old is None:
            raise InvalidOperationError(f"{self.subject} never had an attempt {self.attempt}")
        if not old.is_open:
            return old
        detail = clipped(self.detail, MAX_DETAIL) if self.detail else None
        new = old.evolve(ended_at=unit.now, outcome=self.outcome, detail=detail)
        unit.put(Kind.ATTEMPT, new)
        unit.audit(self.by, self.action, self.subject, detail=f"attempt {self.attempt}: {self.outcome}")
        return new
