"""The one writer: a thread that commits whatever has queued, and acknowledges it only when it is durable.

While one commit is being synced, more commands queue; the next commit takes them all. So a lone caller pays
for one sync, and many callers share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from ostler.errors import (
    OutcomeUnknownError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreFailedError,
)
from ostler.seams import FaultPoint, InjectedCrash
from ostler.store.batch import Batch, Outcome, Submission, again, refused
from ostler.store.listeners import Listeners
from ostler.store.port import Session

#: When so much is in a commit, it takes no more; one command may be more by itself.
_MAX_BATCH = 512
#: More than this waiting means that the caller should slow down.
MAX_PENDING = 10_000
_DIED = "the writer died; whether this was written is known only after a restart"
CRASHED = "the writer died at an injected fault"


class Desk:
    """Has batches run, and tells each caller the truth about its own command; knows nothing of threads."""

    def __init__(self, fault: FaultPoint, listeners: Listeners, deliver: Callable[[list[Outcome]], None]) -> None:
        self._fault = fault
        self._listeners = listeners
        self._deliver = deliver
        #: Why nothing is written any more.
        self.failure: StoreError | None = None

    def require_sound(self) -> None:
        if self.failure is not None:
            raise again(self.failure)

    def serve(self, batch: Batch, submissions: list[Submission]) -> None:
        if self.failure is not None:  # these were queued before it broke
            self._deliver(refused(submissions, self.failure))
            return
        try:
            outcomes = batch.run(submissions)
            self._note(batch.broken)
            self._fault("store.ack.before")
        except Exception as error:  # noqa: BLE001 - the writer outlives whatever one batch does to it
            outcomes = refused(submissions, self._note(error) or error)
        except BaseException:
            self._deliver(refused(submissions, OutcomeUnknownError(_DIED)))
            raise
        self._listeners.newest = batch.newest or self._listeners.newest
        self._deliver(outcomes)
        try:
            self._fault("store.ack.after")
        except Exception as error:  # noqa: BLE001 - they were answered, and what they were told stands
            self._note(error)
        if batch.newest:
            # After the answers: who follows the log must not be ahead of who wrote it.
            self._listeners.tell(batch.newest)

    def _note(self, error: Exception | None) -> StoreError | None:
        """The disk lied once. Never try again on the same file: say so, and refuse from now on."""
        if isinstance(error, StoreFailedError):
            self.failure = error
        elif isinstance(error, OSError):
            self.failure = StoreFailedError(f"{StoreFailedError.sentence()} ({error})")
        return self.failure


class Writer:
    """Owns the thread and the queue."""

    def __init__(self, open_batch: Callable[[], tuple[Batch, Session]], desk: Desk) -> None:
        self._open_batch = open_batch
        self._desk = desk
        self._queue: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
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
        self._desk.require_sound()
        if self._closed:
            raise StoreClosedError
        if self._queue.qsize() >= MAX_PENDING:
            raise StoreBusyError
        with self._door:  # nobody slips in between the last look into the queue and the end
            if self._closed:
                self._desk.require_sound()
                raise StoreClosedError
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
                self._desk.serve(batch, submissions)
        except InjectedCrash:
            self._desk.failure = StoreFailedError(CRASHED)
        finally:
            with self._door:
                self._closed = True
            session.close()
            self._drain()

    def _next(self) -> list[Submission] | None:
        first = self._queue.get()
        if first is None:
            return None
        batch, room = [first], _MAX_BATCH - first.command.weight
        while room > 0:
            try:
                more = self._queue.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._queue.put(None)  # seen too early: first what came before it
                break
            batch.append(more)
            room -= more.command.weight
        return batch

    def _drain(self) -> None:
        left: list[Outcome] = []
        while True:
            try:
                submission = self._queue.get_nowait()
            except queue.Empty:
                break
            if submission is not None:
                left += refused([submission], self._desk.failure or StoreClosedError())
        deliver(left)


def deliver(outcomes: list[Outcome]) -> None:
    """Wake every waiting loop once, with all of its answers."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, mine in by_loop.items():
        # A loop may close at any moment, even this one: its callers have gone, the commit stands.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, mine)


def resolve(outcomes: list[Outcome]) -> None:
    for submission, answer, error in outcomes:
        if submission.future.done():  # the caller has gone; the commit stands
            continue
        if error is not None:
            submission.future.set_exception(error)
        else:
            submission.future.set_result(answer)
