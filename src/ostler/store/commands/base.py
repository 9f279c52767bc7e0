"""The shape of a command, and the rules that hold for all of them."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar
from uuid import UUID

from ostler.errors import IdempotencyConflictError, StaleWriterError, ValidationError, VersionConflictError
from ostler.model import Fault, Record, ValidationResult
from ostler.store.actor import SYSTEM, Actor
from ostler.store.commands.checking import kind_faults, optional_faults, word_faults
from ostler.store.kinds import IdempotencyRow, Kind
from ostler.store.unit import Unit

R_co = TypeVar("R_co", covariant=True)

MAX_KEY = 200
REPLAY_WINDOW = timedelta(hours=24)


@dataclass(frozen=True, kw_only=True, slots=True)
class Idempotency:
    """The caller's own key for one request: asked again with the same body, it gets the same answer."""

    key: str
    fingerprint: str

    @classmethod
    def of(cls, key: str, body: str) -> Idempotency:
        return cls(key=key, fingerprint=hashlib.sha256(body.encode()).hexdigest())


@dataclass(kw_only=True, eq=False)
class Command(Generic[R_co]):
    """Data that says what is wanted. `apply` is a pure function of the unit it is given."""

    #: What the audit calls it.
    action: ClassVar[str] = ""
    #: The record that an idempotent repetition is answered with; None where repeating is not offered.
    answered_with: ClassVar[type[Record] | None] = None
    #: Whether only the owner of the store may write it. Otherwise the command itself sees to it that one of several
    #: writers wins.
    fenced: ClassVar[bool] = True

    by: Actor = SYSTEM
    idempotency: Idempotency | None = None

    def validate(self) -> ValidationResult:
        """Checked before the command is queued, so that a fault writes nothing."""
        faults = list(self.faults())
        if self.by is not SYSTEM:
            faults += _actor_faults(self.by)
        if self.idempotency is not None:
            faults += _idempotency_faults(self.idempotency)
            if self.answered_with is None:
                faults.append(Fault(field="idempotency", bound=f"is not offered for {type(self).__name__}"))
        return ValidationResult(faults=tuple(faults))

    def faults(self) -> Iterator[Fault]:
        return iter(())

    @property
    def is_fenced(self) -> bool:
        """Whether this one is for the owner only; where its kind is not, a single one may be all the same."""
        return self.fenced

    @property
    def subject(self) -> str:
        """What the audit names as its object."""
        return ""

    @property
    def weight(self) -> int:
        """For how many it counts when commands share a commit."""
        return 1

    @abstractmethod
    def apply(self, unit: Unit) -> R_co:
        """Check, stage, and return the answer; raise an `OstlerError` to refuse."""


def _actor_faults(by: Any) -> Iterator[Fault]:
    if not isinstance(by, Actor):
        yield from kind_faults("by", by, Actor)
        return
    yield from word_faults("by.name", by.name)
    if by.correlation_id is not None:
        yield from word_faults("by.correlation_id", by.correlation_id)
    yield from optional_faults("by.principal_id", by.principal_id, UUID)


def _idempotency_faults(asked: Any) -> Iterator[Fault]:
    if not isinstance(asked, Idempotency):
        yield from kind_faults("idempotency", asked, Idempotency)
        return
    yield from _key_faults(asked.key)
    yield from word_faults("idempotency_fingerprint", asked.fingerprint, MAX_KEY)


def _key_faults(key: Any) -> Iterator[Fault]:
    if isinstance(key, str) and not 1 <= len(key) <= MAX_KEY:
        bound = f"must have 1 to {MAX_KEY} characters"
        yield Fault(field="idempotency_key", bound=bound, value=f"{len(key)} characters")
    else:
        yield from word_faults("idempotency_key", key)


def check_version(command: Command[Any], actual: int, expected: int | None) -> None:
    if expected is not None and actual != expected:
        raise VersionConflictError(
            f"{command.subject} is at version {actual}, not {expected}; read it again and decide anew"
        )


def check_attempt(command: Command[Any], current: int, claimed: int | None) -> None:
    if claimed is not None and claimed != current:
        raise StaleWriterError(
            f"{command.subject} is at attempt {current}; attempt {claimed} may not speak for it any more"
        )


def replayed(command: Command[Any], unit: Unit, workspace_id: UUID) -> Record | None:
    """The answer that was given before to the same key, if it still counts."""
    if command.idempotency is None or command.answered_with is None:
        return None
    row: IdempotencyRow | None = unit.get(Kind.IDEMPOTENCY, (workspace_id, command.idempotency.key))
    if row is None or unit.now - row.created_at >= REPLAY_WINDOW:
        return None
    conflict = IdempotencyConflictError(
        f"the idempotency key {command.idempotency.key!r} was already used with another request; use a new key"
    )
    if row.fingerprint != command.idempotency.fingerprint:
        raise conflict
    try:
        return command.answered_with.from_json(row.result_json)
    except ValidationError:
        raise conflict from None  # the same body, but to a request of another kind


def remember(command: Command[Any], unit: Unit, workspace_id: UUID, answer: Record) -> None:
    if command.idempotency is not None:
        unit.put(
            Kind.IDEMPOTENCY,
            IdempotencyRow(
                workspace_id=workspace_id,
                key=command.idempotency.key,
                fingerprint=command.idempotency.fingerprint,
                result_json=answer.to_json(),
                created_at=unit.now,
            ),
        )
