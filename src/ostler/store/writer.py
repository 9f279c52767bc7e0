"""The one writer: a thread that commits whatever has queued, and answers each caller when it is durable.

While one commit is being synced more commands queue; the next commit takes them all. So a single caller pays for one
sync, and many callers share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ostler.clock import Clock
from ostler.errors import (
    OutcomeUnknownError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreFailedError,
)
from ostler.failpoints import FaultPoint
from ostler.ids import IdSource
from ostler.model.events import Event
from ostler.store.connection import Connection
from ostler.store.leases import stale_writer
from ostler.store.transaction import Reader, Transaction

_MAX_BATCH = 512
#: More than this waiting means that callers should slow down.
MAX_PENDING = 10_000
#: A lazy command starts a commit of its own after this long: what a short call writes first goes with its answer.
LAZY_SECONDS = 0.05
_DIED = "the writer of the store died; whether this was written is known only after a restart"
_log = logging.getLogger("ostler.store")

Listener = Callable[[Sequence[Event]], None]


@dataclass(slots=True, eq=False)
class Job:
    """One command or query on its way to the database and back."""

    work: Callable[[Any], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    #: The epoch of the store that submits it; None for one that is not fenced, such as one that takes the lease.
    epoch: int | None = None
    lazy: bool = False
    is_query: bool = False
    result: Any = None
    error: BaseException | None = None


class Committer:
    """Runs a batch of jobs in one transaction and tells each job the truth about its own command."""

    def __init__(self, db: Connection, clock: Clock, ids: IdSource, fault: FaultPoint) -> None:
        self._db = db
        self._clock = clock
        self._ids = ids
        self._fault = fault
        #: Why nothing is written any more. A disk that failed once is not tried again: a retried sync reports success
        #: for pages that were lost.
        self.failure: StoreError | None = None

    def run(self, jobs: list[Job]) -> list[Event]:
        """Fills `result` or `error` of every job; returns the events that were committed."""
        if self.failure is not None:
            fail(jobs, self.failure)
            return []
        try:
            return self._commit(jobs)
        except Exception as error:  # noqa: BLE001 - the batch failed as a whole; the writer goes on
            self._db.rollback()
            fail(jobs, self._note(error))
            return []
        except BaseException:
            fail(jobs, OutcomeUnknownError(_DIED))
            raise

    def _commit(self, jobs: list[Job]) -> list[Event]:
        self._fault("store.begin.before")
        tx = Transaction(self._db, self._db.begin(), self._clock.wall(), self._ids)
        self._fault("store.begin.after")
        for job in jobs:
            if job.is_query:
                read(self._db, job)
            elif job.epoch not in {None, tx.epoch}:
                job.error = stale_writer(tx)
            else:
                self._run_command(tx, job)
        tx.flush()
        self._fault("store.commit.before")
        self._db.commit()
        self._fault("store.commit.after")
        return tx.events

    def _run_command(self, tx: Transaction, job: Job) -> None:
        self._fault("store.save.before")
        tx.begin_command()
        try:
            job.result = job.work(tx)
        except Exception as error:
            # A full disk ends the whole transaction: the savepoint is gone, and the next command would commit alone.
            if not self._db.in_transaction:
                raise
            tx.refuse(error)
            job.error = error
            if isinstance(error, StoreFailedError):
                raise
        else:
            tx.accept()
        self._fault("store.save.after")

    def _note(self, error: Exception) -> Exception:
        if isinstance(error, OSError):
            error = StoreFailedError(f"{StoreFailedError.sentence()} ({error})")
        failed = error.__cause__ if isinstance(error, OutcomeUnknownError) else error
        if isinstance(failed, StoreFailedError):
            self.failure = failed
        # Each caller gets a copy, and not every error of another package can be copied.
        return error if isinstance(error, StoreError) else StoreError(f"{StoreError.sentence()} ({error!r})")


class Writer:
    """Owns the thread, the queue and the writing connection."""

    def __init__(self, open_committer: Callable[[], tuple[Committer, Connection]], fault: FaultPoint) -> None:
        self._open = open_committer
        self._fault = fault
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._committer: Committer | None = None
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._listeners: tuple[Listener, ...] = ()
        #: The number of the last event that this store committed.
        self.newest = 0
        self._thread = threading.Thread(target=self._work, name="ostler-writer", daemon=True)

    def start(self) -> None:
        """Open the database on the writer's own thread; what fails there is raised here."""
        self._thread.start()
        error = self._started.get()
        if error is not None:
            self._closed = True
            raise error

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call it with the events of each commit, on the writer's thread, after the callers were answered."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple(registered for registered in self._listeners if registered is not listener)

        return unsubscribe

    def submit(self, job: Job) -> None:
        if self._queue.qsize() >= MAX_PENDING:
            raise StoreBusyError
        with self._lock:  # no job may slip in between the last look into the queue and the end
            if self._closed:
                raise self._reason()
            self._queue.put(job)

    def close(self) -> None:
        """Finish what is queued, then stop."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _reason(self) -> StoreError:
        failure = None if self._committer is None else self._committer.failure
        return StoreClosedError() if failure is None else copy.copy(failure)

    def _work(self) -> None:
        try:
            self._committer, db = self._open()
        except BaseException as error:  # noqa: BLE001 - raised by start()
            self._started.put(error)
            return
        self._started.put(None)
        try:
            while jobs := self._next():
                self._serve(self._committer, jobs)
        except BaseException as error:  # noqa: BLE001 - told to every later caller
            _log.exception("the writer of the store died")
            self._committer.failure = StoreFailedError(f"the writer of the store died ({error!r}); restart to recover")
        finally:
            with self._lock:
                self._closed = True
            with contextlib.suppress(StoreError):
                db.close()
            self._refuse_rest()

    def _serve(self, committer: Committer, jobs: list[Job]) -> None:
        try:
            events = committer.run(jobs)
            self._fault("store.ack.before")
        except BaseException:
            deliver(jobs)
            raise
        if events:
            self.newest = events[-1].sequence
        deliver(jobs)
        self._fault("store.ack.after")
        for listener in self._listeners if events else ():
            try:
                listener(events)
            except BaseException:  # noqa: BLE001 - the commit stands, and the writer goes on
                _log.exception("a subscriber of the store failed")

    def _next(self) -> list[Job]:
        """Wait for work. Lazy jobs wait a little for one that is not; a batch then takes all that has queued."""
        jobs: list[Job] = []
        deadline = 0.0
        while len(jobs) < _MAX_BATCH:
            try:
                if not jobs:
                    job = self._queue.get()
                elif deadline:
                    job = self._queue.get(timeout=max(deadline - time.monotonic(), 0.0))
                else:
                    job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                if jobs:
                    self._queue.put(None)  # seen too early: what came before it is committed first
                break
            if not jobs and job.lazy:
                deadline = time.monotonic() + LAZY_SECONDS
            elif not job.lazy:
                deadline = 0.0
            jobs.append(job)
        return jobs

    def _refuse_rest(self) -> None:
        rest: list[Job] = []
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                rest.append(job)
        fail(rest, self._reason())
        deliver(rest)


def read(db: Connection, job: Job) -> None:
    """A query that goes through the writer, because a database in memory has only one connection."""
    db.execute("SAVEPOINT query", {})
    try:
        job.result = job.work(Reader(db))
    except Exception as error:  # noqa: BLE001 - delivered to its caller
        job.error = error
    db.execute("ROLLBACK TO SAVEPOINT query", {})  # a query writes nothing
    db.execute("RELEASE SAVEPOINT query", {})


def fail(jobs: list[Job], error: BaseException) -> None:
    """Each caller gets an error object of its own: a traceback grows with every raise."""
    for job in jobs:
        job.result, job.error = None, copy.copy(error)


def deliver(jobs: list[Job]) -> None:
    """Wake every waiting loop once, with all of its answers."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a loop that has closed has no callers left; the commit stands
            loop.call_soon_threadsafe(resolve, mine)


def resolve(jobs: list[Job]) -> None:
    for job in jobs:
        if job.future.done():  # the caller was cancelled; the commit stands
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
