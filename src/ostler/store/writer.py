"""The one writer: a thread that commits whatever has queued, and acknowledges it only when it is durable.

While one commit is being synced, more commands queue; the next commit takes them all. So a lone caller pays
for one sync, and many callers share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ostler.errors import (
    AuthorizationError,
    IdempotencyConflictError,
    InvalidOperationError,
    LicenseError,
    OstlerError,
    OutcomeUnknownError,
    StaleWriterError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreFailedError,
    StoreFullError,
)
from ostler.seams import Clock, FaultPoint, IdSource, InjectedCrash
from ostler.store.commands import Command, TakeLease
from ostler.store.port import Session
from ostler.store.sqlsession import OutOfStepError
from ostler.store.unit import Cache, Unit

_MAX_BATCH = 512
#: More than this waiting means that the caller should slow down.
MAX_PENDING = 10_000
_DIED = "the writer died; whether this was written is known only after a restart"
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

    def run(self, submissions: Sequence[Submission]) -> list[Outcome]:
        self.broken = None
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
                return outcomes + _refused(submissions[place:], error)
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
            if submission.epoch != unit.epoch and not isinstance(command, TakeLease):
                message = f"epoch {submission.epoch} has ended, {unit.epoch} owns this store; this one may not write"
                return submission, None, StaleWriterError(message)
            answer = command.apply(unit)
        except StoreError:
            raise  # the database spoke, not the command: this transaction is of no further use
        except OstlerError as error:
            workspace_id = unit.workspace_id
            unit.start()
            if isinstance(error, _AUDITED) and command.action and workspace_id is not None:
                unit.workspace_id = workspace_id
                unit.audit(command.by, command.action, command.subject, type(error).__name__, str(error))
                unit.accept()
            return submission, None, error
        except Exception as error:  # noqa: BLE001 - a mistake in one command is not the others' fault
            unit.start()
            return submission, None, error
        unit.accept()
        return submission, answer, None


class Writer:
    """Owns the thread and the queue."""

    def __init__(self, open_batch: Callable[[], tuple[Batch, Session]], fault: FaultPoint) -> None:
        self._open_batch = open_batch
        self._fault = fault
        self._queue: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._failure: StoreError | None = None
        self._closed = False
        self._door = threading.Lock()
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ostler-writer", daemon=True)

    def start(self) -> None:
        """Open the store on the writer's own thread; what goes wrong there is raised here."""
        self._thread.start()
        error = self._started.get()
        if error is not None:
            self._closed = True
            raise error

    def submit(self, submission: Submission) -> None:
        if self._failure is not None:
            raise _again(self._failure)
        if self._closed:
            raise StoreClosedError
        if self._queue.qsize() >= MAX_PENDING:
            raise StoreBusyError
        with self._door:  # nobody slips in between the last look into the queue and the end
            if self._closed:
                raise _again(self._failure or StoreClosedError())
            self._queue.put(submission)

    def close(self) -> None:
        """Finish what is queued, then stop."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            batch, session = self._open_batch()
        except BaseException as error:  # noqa: BLE001 - handed over to whoever called start()
            self._started.put(error)
            return
        self._started.put(None)
        try:
            while (submissions := self._next()) is not None:
                self._run(batch, submissions)
        except InjectedCrash:
            self._failure = StoreFailedError("the writer died at an injected fault")
        finally:
            with self._door:
                self._closed = True
            session.close()
            self._drain()

    def _next(self) -> list[Submission] | None:
        first = self._queue.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < _MAX_BATCH:
            try:
                more = self._queue.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._queue.put(None)  # seen too early: first what came before it
                break
            batch.append(more)
        return batch

    def _run(self, batch: Batch, submissions: list[Submission]) -> None:
        if self._failure is not None:  # these were queued before it broke
            _deliver(_refused(submissions, self._failure))
            return
        try:
            outcomes = batch.run(submissions)
            self._note(batch.broken)
            self._fault("store.ack.before")
        except Exception as error:  # noqa: BLE001 - the writer outlives whatever one batch does to it
            outcomes = _refused(submissions, self._note(error) or error)
        except BaseException:
            _deliver(_refused(submissions, OutcomeUnknownError(_DIED)))
            raise
        _deliver(outcomes)

    def _note(self, error: Exception | None) -> StoreError | None:
        """The disk lied once. Never try again on the same file: say so, and refuse from now on."""
        if isinstance(error, StoreFailedError):
            self._failure = error
        elif isinstance(error, OSError):
            self._failure = StoreFailedError(f"{StoreFailedError.__doc__} ({error})")
        return self._failure

    def _drain(self) -> None:
        left: list[Outcome] = []
        while True:
            try:
                submission = self._queue.get_nowait()
            except queue.Empty:
                break
            if submission is not None:
                left += _refused([submission], self._failure or StoreClosedError())
        _deliver(left)


def _refused(submissions: Sequence[Submission], error: Exception) -> list[Outcome]:
    return [(submission, None, _again(error)) for submission in submissions]


def _again(error: Exception) -> Exception:
    """A copy for each who is told: one that is raised twice carries the traces of both."""
    twin = copy.copy(error)
    twin.__cause__, twin.__traceback__ = error.__cause__, None
    return twin


def _deliver(outcomes: list[Outcome]) -> None:
    """Wake every waiting loop once, with all of its answers."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, mine in by_loop.items():
        # A loop may close at any moment, even this one: its callers have gone, the commit stands.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, mine)


def _resolve(outcomes: list[Outcome]) -> None:
    for submission, answer, error in outcomes:
        if submission.future.done():  # the caller has gone; the commit stands
            continue
        if error is not None:
            submission.future.set_exception(error)
        else:
            submission.future.set_result(answer)
