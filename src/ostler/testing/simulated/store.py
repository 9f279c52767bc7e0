"""A store without a thread, over a database in memory that outlives it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ostler.errors import StoreBusyError, StoreClosedError, StoreError
from ostler.failpoints import FaultPoint, InjectedCrash, Seams
from ostler.store.connection import Connection
from ostler.store.sqlite import SqliteConnection
from ostler.store.store import Readers, Store, epoch_to_write
from ostler.store.transaction import Reader
from ostler.store.writer import LAZY_SECONDS, MAX_PENDING, Committer, Job, Writer, deliver, fail, read, resolve

#: The error that a commit (True) or a query (False) fails with now; None while the disk is well.
Trouble = Callable[[bool], StoreError | None]


class KeptDatabase:
    """One database in memory for several stores after one another, as a file is."""

    def __init__(self) -> None:
        self._connection = _KeptConnection(None)
        self._connection.migrate()

    def open_writer(self, fault: FaultPoint) -> Connection:
        del fault
        return self._connection

    def open_reader(self) -> Connection | None:
        return None

    @property
    def reader(self) -> Reader:
        """What is committed, for a look past every store."""
        return Reader(self._connection)


class _KeptConnection(SqliteConnection):
    def close(self) -> None:
        """The next store uses it."""


class InlineStore(Store):
    """Commands run on the event loop, in their order, a moment after they were submitted.

    Queries run on their own, as on a connection of their own: they see what is committed, not what is queued.
    """

    def __init__(
        self,
        database: KeptDatabase | None = None,
        seams: Seams | None = None,
        *,
        delay: Callable[[], float] = lambda: 0.001,
        trouble: Trouble = lambda _: None,
    ) -> None:
        """`delay` gives the seconds that a commit or a query takes."""
        super().__init__(database or KeptDatabase(), seams)
        self._delay = delay
        self._trouble = trouble

    async def open(self) -> None:
        self._writer = _InlineWriter(self._open_committer, self._seams.fault, self._delay, self._trouble)
        self._readers = Readers(self._database)
        self._epoch = await self.read(epoch_to_write, self._lease, self._seams.clock.wall())

    async def close(self) -> None:
        writer, self._writer, self._readers = self._writer, None, None
        if writer is not None:
            writer.close()

    def kill(self) -> None:
        """Its program has died: what is not committed never will be."""
        if isinstance(self._writer, _InlineWriter):
            self._writer.kill()


class _InlineWriter(Writer):
    def __init__(
        self,
        open_committer: Callable[[], tuple[Committer, Connection]],
        fault: FaultPoint,
        delay: Callable[[], float],
        trouble: Trouble,
    ) -> None:
        super().__init__(open_committer, fault)
        self._delay = delay
        self._trouble = trouble
        self._loop = asyncio.get_running_loop()
        self._inline, self._db = open_committer()
        self._queries: dict[Job, asyncio.TimerHandle] = {}
        self._jobs: list[Job] = []
        #: Being committed; what is submitted meanwhile goes into the next commit.
        self._batch: list[Job] = []
        self._timer: asyncio.TimerHandle | None = None
        self._killed = False

    def submit(self, job: Job) -> None:
        if self._closed:
            raise self._reason()
        if job.is_query:
            self._queries[job] = self._loop.call_later(self._delay(), self._read, job)
            return
        if len(self._jobs) >= MAX_PENDING:
            raise StoreBusyError
        self._jobs.append(job)
        self._plan()

    def _plan(self) -> None:
        """Begin a commit now; or, where only lazy commands wait, a little later."""
        if not self._batch and self._jobs:
            self._cancel_timer()
            lazy = all(job.lazy for job in self._jobs)
            self._timer = self._loop.call_later(LAZY_SECONDS if lazy else 0.0, self._begin)

    def _begin(self) -> None:
        self._batch, self._jobs = self._jobs, []
        self._timer = self._loop.call_later(self._delay(), self._commit)

    def _commit(self) -> None:
        jobs, self._batch = self._batch, []
        if (error := self._trouble(True)) is not None:
            fail(jobs, error)
            deliver(jobs)
        elif jobs:
            with contextlib.suppress(InjectedCrash):  # its program has died
                self._serve(self._inline, jobs)
        self._plan()

    def _read(self, job: Job) -> None:
        self._queries.pop(job).cancel()
        job.error = self._trouble(False)
        if job.error is None:
            read(self._db, job)
        resolve([job])

    def close(self) -> None:
        self._cancel_timer()
        while self._batch or self._jobs:
            self._batch, self._jobs = self._batch or self._jobs, self._jobs if self._batch else []
            self._commit()
        for job in list(self._queries):
            self._read(job)
        self._cancel_timer()
        self._closed = True

    def kill(self) -> None:
        self._closed = self._killed = True
        self._cancel_timer()
        for timer in self._queries.values():
            timer.cancel()
        left = [*self._batch, *self._jobs, *self._queries]
        self._jobs, self._batch, self._queries = [], [], {}
        self._db.rollback()
        fail(left, StoreClosedError())
        deliver(left)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
