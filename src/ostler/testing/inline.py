"""A store without threads: the same commands, batches and tables, carried out on the caller's own loop.

For simulation under a loop whose time is virtual: what happens depends on nothing but the order of the calls.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ostler.errors import StoreBusyError, StoreClosedError, StoreError, StoreFailedError
from ostler.seams import InjectedCrash, Uuid7Source
from ostler.store import Backend, EngineStore, Seams
from ostler.store.batch import Batch, Outcome, Submission
from ostler.store.commands import Command
from ostler.store.listeners import Listeners
from ostler.store.port import Session
from ostler.store.writer import CRASHED, MAX_PENDING, Desk, resolve
from ostler.testing.memory import MemoryTables, memory_backend

R = TypeVar("R")

#: Called with each command before it is carried out; what it raises, the store seems to have met.
Trouble = Callable[[Command[Any]], None]


def inline_store(
    tables: MemoryTables | None = None, seams: Seams | None = None, before_commit: Trouble | None = None
) -> EngineStore:
    """A store in memory for one event loop. Pass the same tables to open the same content again.

    A commit is applied one step of the loop after it was asked for and answered one step later, one at a time
    in the order of asking; a read takes one step. `before_commit` may raise `StoreBusyError` or
    `StoreFullError` to refuse that one command, `StoreFailedError` to break the store for good. For ids that are
    the same in every run, give the seams a seeded `chance`.
    """
    return EngineStore(
        memory_backend(tables or MemoryTables()),
        seams,
        new_life=functools.partial(InlineLife, before_commit=before_commit),
    )


class _Troubled(Batch):
    """A batch that meets trouble before it begins."""

    before_commit: Trouble | None = None

    def run(self, submissions: Sequence[Submission]) -> list[Outcome]:
        if self.before_commit is not None:
            for submission in submissions:
                self.before_commit(submission.command)
        return super().run(submissions)


class InlineLife:
    """Like the usual one, with a step of the loop in the place of a thread."""

    def __init__(
        self, backend: Backend, seams: Seams, listeners: Listeners, *, before_commit: Trouble | None = None
    ) -> None:
        self._backend = backend
        self._seams = seams
        self._trouble = before_commit
        self._desk = Desk(seams.fault, listeners, resolve)
        self._queue: deque[Submission] = deque()
        self._batch: Batch | None = None
        self._sessions: tuple[Session, ...] = ()
        self._over = False

    async def open(self, look: Callable[[Session], R]) -> R:
        await asyncio.sleep(0)
        if self._over:  # closed while it was coming up
            raise StoreClosedError
        if self._backend.open_writer is None:
            raise StoreError("there is nothing to write with")
        seams = self._seams
        ids = seams.ids or Uuid7Source(seams.clock, seams.chance)
        writing, reading = self._backend.open_writer(seams.fault), self._backend.open_reader()
        self._sessions = (writing, reading)
        batch = _Troubled(writing, seams.clock, ids, seams.fault)
        batch.before_commit = self._trouble
        self._batch = batch
        return look(reading)

    async def close(self) -> None:
        self._over = True
        while self._queue:
            self._serve_next()
        for session in self._sessions:
            session.close()

    def submit(self, command: Command[R], epoch: int) -> Awaitable[R]:
        self._desk.require_sound()
        self._require_up()
        if len(self._queue) >= MAX_PENDING:
            raise StoreBusyError
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._queue.append(Submission(command, epoch, loop, future))
        loop.call_soon(self._serve_next)
        return future

    def read(self, read: Callable[[Session], R]) -> Awaitable[R]:
        self._require_up()
        return self._read(read)

    async def _read(self, read: Callable[[Session], R]) -> R:
        await asyncio.sleep(0)
        return read(self._sessions[1])

    def _require_up(self) -> None:
        if self._batch is None or self._over:
            raise StoreClosedError

    def _serve_next(self) -> None:
        if self._batch is None or not self._queue:  # closing was quicker
            return
        try:
            self._desk.serve(self._batch, [self._queue.popleft()])
        except InjectedCrash:
            self._desk.failure = StoreFailedError(CRASHED)
