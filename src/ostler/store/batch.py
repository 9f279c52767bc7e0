"""A list of commands as one transaction, and what each of them came to."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostler.errors import (
    AuthorizationError,
    DamagedRowError,
    IdempotencyConflictError,
    InvalidOperationError,
    LicenseError,
    OstlerError,
    StaleWriterError,
    StoreBusyError,
    StoreError,
    StoreFailedError,
    StoreFullError,
)
from ostler.model import Lease
from ostler.seams import Clock, FaultPoint, IdSource
from ostler.store.cache import Cache
from ostler.store.commands import Command
from ostler.store.commands.leases import OWNER
from ostler.store.kinds import Kind
from ostler.store.port import OutOfStepError, Session
from ostler.store.unit import Unit

#: Refusals that are acts worth remembering; the rest is ordinary contention or a slip.
_AUDITED = (
    LicenseError,
    AuthorizationError,
    InvalidOperationError,
    IdempotencyConflictError,
    StaleWriterError,
)
#: What would meet every command alike, so that trying them one by one helps nobody.
_NOT_ONE_COMMANDS_FAULT = (StoreFailedError, StoreFullError, StoreBusyError, OSError)


@dataclass(slots=True)
class Submission:
    command: Command[Any]
    epoch: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


Outcome = tuple[Submission, Any, BaseException | None]


class Batch:
    """Runs a list of commands as one transaction; knows nothing of threads or loops."""

    def __init__(self, session: Session, clock: Clock, ids: IdSource, fault: FaultPoint) -> None:
        self._session = session
        self._clock = clock
        self._ids = ids
        self._fault = fault
        self._cache = Cache()
        #: From here on it is the database that knows whether a transaction stands.
        self._committing = False
        #: What ended the last run before all of it was done.
        self.broken: Exception | None = None
        #: The newest event that the last run made durable; 0 for none.
        self.newest = 0

    def run(self, submissions: Sequence[Submission]) -> list[Outcome]:
        self.broken, self.newest = None, 0
        try:
            return self._attempt(submissions)
        except _NOT_ONE_COMMANDS_FAULT:
            raise
        except OutOfStepError:
            # Somebody wrote past our cache; what is really there decides, once more.
            return self._one_by_one(submissions)
        except Exception:
            if self._committing or len(submissions) == 1:
                raise
            # The database took offence at one of them before anything was committed: find it, spare the rest.
            return self._one_by_one(submissions)

    def _one_by_one(self, submissions: Sequence[Submission]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for place, submission in enumerate(submissions):
            try:
                outcomes += self._attempt([submission])
            except _NOT_ONE_COMMANDS_FAULT as error:
                # Those before it are durable and must not be told otherwise.
                self.broken = error
                return outcomes + refused(submissions[place:], error)
            except Exception as error:  # noqa: BLE001 - handed to the one caller whose command it is
                outcomes.append((submission, None, error))
        return outcomes

    def _attempt(self, submissions: Sequence[Submission]) -> list[Outcome]:
        self._committing = False
        try:
            self._fault("store.begin.before")
            head = self._session.begin()
            self._fault("store.begin.after")
            self._cache.check(head)
            unit = Unit(self._session, head, self._cache, self._clock.wall(), self._ids)
            outcomes = [self._apply(unit, submission) for submission in submissions]
            changes = unit.changes()
            if changes is None:
                self._session.rollback()
                return outcomes
            self._fault("store.save.before")
            self._session.save(changes)
            self._fault("store.save.after")
            self._fault("store.commit.before")
            self._committing = True
            self._session.commit()
            self._fault("store.commit.after")
            self._cache.committed(changes)
            if changes.events:
                self.newest = changes.head.sequence
        except BaseException:
            self._recover()
            raise
        return outcomes

    def _recover(self) -> None:
        self._cache.forget()
        self._session.rollback()

    def _apply(self, unit: Unit, submission: Submission) -> Outcome:
        command = submission.command
        unit.start()
        try:
            if command.is_fenced and submission.epoch != unit.epoch:
                return submission, None, StaleWriterError(_shut_out(unit, submission.epoch))
            answer = command.apply(unit)
        except DamagedRowError as error:  # one row that this command needs; the transaction is as good as before
            unit.start()
            return submission, None, error
        except StoreError:
            raise  # the database spoke, not the command: this transaction is of no further use
        except OstlerError as error:
            workspace_id = unit.workspace_id
            unit.start()
            if isinstance(error, _AUDITED) and command.action and workspace_id is not None:
                unit.workspace_id = workspace_id
                unit.audit(command.by, command.action, command.subject, type(error).__name__, str(error))
                unit.accept()
                error.noted = True
            return submission, None, error
        except Exception as error:  # noqa: BLE001 - a mistake in one command is not the others' fault
            unit.start()
            return submission, None, error
        unit.accept()
        return submission, answer, None


def _shut_out(unit: Unit, epoch: int) -> str:
    """Who may write instead, and how to come to write again."""
    held: Lease | None = unit.get(Kind.LEASE, (OWNER,))
    if held is not None and held.expires_at > unit.now:
        return (
            f"{held.owner} owns this store until {held.expires_at:%H:%M:%S} UTC, with epoch {held.epoch}, so nobody "
            "else may write; stop it first, or wait, and open the store again"
        )
    if epoch < 0:
        return "this store was opened beside an owner, or has stepped down, so it may not write; open it again"
    return (
        f"another owner has taken over since (epoch {unit.epoch}, this one has {epoch}); open the store again to write"
    )


def refused(submissions: Sequence[Submission], error: Exception) -> list[Outcome]:
    return [(submission, None, again(error)) for submission in submissions]


def again(error: Exception) -> Exception:
    """A copy for each who is told: one that is raised twice carries the traces of both."""
    twin = copy.copy(error)
    twin.__cause__, twin.__traceback__ = error.__cause__, None
    return twin
