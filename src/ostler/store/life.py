"""The life of an open store: how its database is reached, and the threads that it holds from open to close."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ostler.errors import StoreClosedError, StoreError
from ostler.seams import Clock, FaultPoint, IdSource, SystemClock, Uuid7Source, no_fault
from ostler.store.batch import Batch, Submission
from ostler.store.commands import Command
from ostler.store.listeners import Listeners
from ostler.store.port import Session
from ostler.store.readers import Readers
from ostler.store.writer import Desk, Writer, deliver

R = TypeVar("R")
S = TypeVar("S", bound=Session)

_FORKED = "this store was opened by another process; open it again in this one"
_VIEW = "this store was opened for reading only; open it with open_store to change it"


@dataclass(frozen=True, kw_only=True)
class Seams:
    """What a store is given from outside, so that tests can drive it."""

    clock: Clock = field(default_factory=SystemClock)
    #: Where chance comes from; None draws a seed from the system.
    chance: random.Random | None = None
    #: None makes rising ids from the clock and chance.
    ids: IdSource | None = None
    fault: FaultPoint = no_fault


@dataclass(frozen=True, kw_only=True)
class Backend:
    """How to reach one kind of database."""

    #: Opens the writing session, migrating first. Called on the writer's thread. None: there is nothing to write with.
    open_writer: Callable[[FaultPoint], Session] | None
    open_reader: Callable[[], Session]

    @classmethod
    def migrating(
        cls,
        open_writer: Callable[[], S],
        migrate: Callable[[S, FaultPoint], None],
        open_reader: Callable[[], Session],
    ) -> Backend:
        """One whose shape is brought up to date when it is opened for writing."""

        def opened(fault: FaultPoint) -> Session:
            session = open_writer()
            try:
                migrate(session, fault)
            except BaseException:
                session.close()
                raise
            return session

        return cls(open_writer=opened, open_reader=open_reader)


class Lifelike(Protocol):
    """From one `open` of a store to its `close`: what carries its commands out and answers its questions."""

    async def open(self, look: Callable[[Session], R]) -> R:
        """Bring everything up and take a first look."""
        ...

    async def close(self) -> None:
        """Finish what was accepted, then let go of everything."""
        ...

    def submit(self, command: Command[R], epoch: int) -> Awaitable[R]:
        """Accept a command that was checked; await its outcome, which comes also when nobody does."""
        ...

    def read(self, read: Callable[[Session], R]) -> Awaitable[R]: ...


class Life:
    """The usual one: a thread that writes, a few that read, and the process that they belong to."""

    def __init__(self, backend: Backend, seams: Seams, listeners: Listeners) -> None:
        self._backend = backend
        self._seams = seams
        self._ids = seams.ids or Uuid7Source(seams.clock, seams.chance)
        self._process = os.getpid()
        desk = Desk(seams.fault, listeners, deliver)
        self._writer = None if backend.open_writer is None else Writer(self._open_batch, desk)
        self._readers = Readers(backend.open_reader)
        self._door = threading.Lock()
        self._up = False
        self._over = False

    def _open_batch(self) -> tuple[Batch, Session]:
        if self._backend.open_writer is None:
            raise StoreError(_VIEW)
        session = self._backend.open_writer(self._seams.fault)
        return Batch(session, self._seams.clock, self._ids, self._seams.fault), session

    async def open(self, look: Callable[[Session], R]) -> R:
        try:
            return await asyncio.to_thread(self._start, look)
        except asyncio.CancelledError:
            # It may be up already, or still be coming up; nobody waits for it any more.
            threading.Thread(target=self._stop, name="ostler-closing").start()
            raise

    async def close(self) -> None:
        # Shielded: a caller that is cancelled in the middle leaves no thread behind.
        await asyncio.shield(asyncio.to_thread(self._stop))

    def submit(self, command: Command[R], epoch: int) -> Awaitable[R]:
        self._require_up()
        if self._writer is None:
            raise StoreError(_VIEW)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._writer.submit(Submission(command, epoch, loop, future))
        return future

    def read(self, read: Callable[[Session], R]) -> Awaitable[R]:
        self._require_up()
        return self._readers.run(read)

    def _start(self, look: Callable[[Session], R]) -> R:
        """Blocks; whoever fails here or is not waited for leaves nothing."""
        if self._writer is not None:
            self._writer.start()
        try:
            seen = self._readers.look(look)
        except BaseException:
            self._take_down()
            raise
        with self._door:
            self._up = not self._over
        if not self._up:  # closed, or its caller cancelled, while it was coming up
            self._take_down()
            raise StoreClosedError
        return seen

    def _require_up(self) -> None:
        if os.getpid() != self._process:
            # A fork copies neither the writer's thread nor the right to use its connection: this would wait for ever.
            raise StoreClosedError(_FORKED)
        if not self._up:
            raise StoreClosedError

    def _stop(self) -> None:
        """Blocks until all is down; called while it is coming up, it only says so to whoever is bringing it up."""
        if os.getpid() != self._process:
            return  # the connections are the other process's, and to close them here would break them there
        with self._door:
            up, self._up, self._over = self._up, False, True
        if up:
            self._take_down()

    def _take_down(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._readers.close()
