"""`Store`: commands in the order of their submission, queries beside them, and the lease of the one owner."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from ostler.aio import finish
from ostler.errors import MissingExtraError, NotFoundError, StaleWriterError, StoreClosedError, StoreError
from ostler.failpoints import FaultPoint, Seams
from ostler.home import DATABASE_FILE
from ostler.model.attempt import Lease
from ostler.model.validation import fault
from ostler.store import leases
from ostler.store.connection import Connection, require_current
from ostler.store.sqlite import SqliteConnection
from ostler.store.transaction import Reader, Transaction
from ostler.store.writer import Committer, Job, Listener, Writer

P = ParamSpec("P")
R = TypeVar("R")

MEMORY = ":memory:"
_POSTGRES = ("postgresql://", "postgres://")
_READERS = 2
#: No owner has this epoch, so what is written with it is refused.
_NOT_OWNER = -1


class Database(Protocol):
    """How to reach one database."""

    def open_writer(self, fault: FaultPoint) -> Connection:
        """Migrate, and return the connection that writes."""
        ...

    def open_reader(self) -> Connection | None:
        """None: queries go through the writer."""
        ...


class Store:
    """A home directory (SQLite), a `postgresql://` address, or `:memory:`. Use it with `async with`.

    What is acknowledged is durable. Commands run in the order in which they were submitted.
    """

    def __init__(self, where: str | os.PathLike[str] | Database, seams: Seams | None = None) -> None:
        self._seams = seams or Seams()
        self._database = database_at(where) if isinstance(where, str | os.PathLike) else where
        self._writer: Writer | None = None
        self._readers: Readers | None = None
        self._process = os.getpid()
        self._opening = False
        self._lease: Lease | None = None
        self._epoch = _NOT_OWNER

    # --- open and close --------------------------------------------------------------------------

    async def open(self) -> None:
        if self._writer is not None or self._opening:
            raise StoreError("this store is open already; close it first, or make another one for the same place")
        self._process, self._opening = os.getpid(), True
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_all))
        try:
            self._writer, self._readers = await asyncio.shield(opening)
            self._epoch = await self.read(epoch_to_write, self._lease, self._seams.clock.wall())
        except BaseException:
            if self._writer is None:
                # It may still be coming up; it is closed as soon as it is, with no caller left to wait for it.
                opening.add_done_callback(_close_late)
            await self.close()
            raise
        finally:
            self._opening = False

    async def close(self) -> None:
        """Finish what was submitted, then stop. Safe to call twice."""
        writer, readers, self._writer, self._readers = self._writer, self._readers, None, None
        if writer is None or readers is None or os.getpid() != self._process:
            return  # in a forked child the connections belong to the parent
        await finish(asyncio.to_thread(_close_all, writer, readers))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open_all(self) -> tuple[Writer, Readers]:
        writer = Writer(self._open_committer, self._seams.fault)
        writer.start()
        try:
            return writer, Readers(self._database)
        except BaseException:
            writer.close()
            raise

    def _open_committer(self) -> tuple[Committer, Connection]:
        db = self._database.open_writer(self._seams.fault)
        return Committer(db, self._seams.clock, self._seams.id_source(), self._seams.fault), db

    def _require_open(self) -> tuple[Writer, Readers]:
        if os.getpid() != self._process:
            raise StoreClosedError("this store was opened by another process; open it again in this one")
        if self._writer is None or self._readers is None:
            raise StoreClosedError
        return self._writer, self._readers

    # --- writing and reading ---------------------------------------------------------------------

    def submit(
        self, command: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[R]:
        """Queue a command; the future ends when it is durable or refused, whether or not a caller waits for it.

        A command is a function of the transaction and frozen values. It does not await and uses no clock of its own.
        """
        return self._submit(partial(_call, command, args, kwargs), lazy=False)

    def submit_lazy(
        self, command: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[R]:
        """As `submit`, in its place, but it starts no commit of its own for 10 ms: it rides on the next one."""
        return self._submit(partial(_call, command, args, kwargs), lazy=True)

    async def run(self, command: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Durable when this returns. A cancelled caller does not undo it."""
        return await self.submit(command, *args, **kwargs)

    async def run_unfenced(
        self, command: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As `run`, also while another owner holds the lease. For commands whose rows have a fence of their own."""
        return await self._submit(partial(_call, command, args, kwargs), lazy=False, fenced=False)

    async def read(self, query: Callable[Concatenate[Reader, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """A function of a connection that cannot write, on a thread of its own."""
        writer, readers = self._require_open()
        work = partial(_call, query, args, kwargs)
        if readers.through_writer:
            loop = asyncio.get_running_loop()
            job = Job(work, loop, loop.create_future(), is_query=True)
            writer.submit(job)
            result: R = await job.future
            return result
        return await readers.run(work)

    def _submit(self, work: Callable[[Transaction], R], *, lazy: bool, fenced: bool = True) -> asyncio.Future[R]:
        writer, _ = self._require_open()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        writer.submit(Job(work, loop, future, epoch=self._epoch if fenced else None, lazy=lazy))
        return future

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call it with the events of each commit of this store, on the writer's thread. Returns how to end that."""
        return self._require_open()[0].subscribe(listener)

    @property
    def newest(self) -> int:
        """The number of the last event that this store committed; 0 before the first."""
        return 0 if self._writer is None else self._writer.newest

    # --- the lease of the owner ------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    async def take_lease(self, owner: str, *, ttl: timedelta, steal: bool = False) -> Lease:
        """Become the owner. Raises `LeaseHeldError` while another one holds the lease, unless `steal`."""
        writer, _ = self._require_open()
        loop = asyncio.get_running_loop()
        work = partial(_call, leases.take_lease, (owner,), {"ttl": ttl, "steal": steal})
        job = Job(work, loop, loop.create_future())
        writer.submit(job)
        lease: Lease = await job.future
        self._lease, self._epoch = lease, lease.epoch
        return lease

    @property
    def lease(self) -> Lease | None:
        return self._lease

    async def own_without_lease(self) -> int:
        """Write under the present epoch. Only for a caller that knows by other means that it is the one owner."""
        self._epoch = await self.read(leases.current_epoch)
        return self._epoch

    async def renew_lease(self, *, ttl: timedelta) -> Lease:
        self._lease = await self.run(leases.renew_lease, self._held_lease(), ttl=ttl)
        return self._lease

    async def release_lease(self) -> None:
        if self._lease is not None:
            await self.run(leases.release_lease, self._lease)
            self._lease, self._epoch = None, _NOT_OWNER

    def _held_lease(self) -> Lease:
        if self._lease is None:
            raise StaleWriterError("this store holds no lease; take one first")
        return self._lease


class Readers:
    """A few threads, each with its own connection: a query waits for no writer and blocks no event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._local = threading.local()
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        first = database.open_reader()
        self.through_writer = first is None
        self._spare = first
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="ostler-reader")

    async def run(self, work: Callable[[Reader], R]) -> R:
        try:
            reading = asyncio.get_running_loop().run_in_executor(self._pool, self._read, work)
        except RuntimeError as error:  # closed since the caller looked
            raise StoreClosedError from error
        return await reading

    def _read(self, work: Callable[[Reader], R]) -> R:
        reader: Reader | None = getattr(self._local, "reader", None)
        if reader is None:
            with self._lock:
                connection, self._spare = self._spare, None
            if connection is None:
                connection = self._database.open_reader()
            if connection is None:
                raise StoreClosedError
            with self._lock:
                self._connections.append(connection)
            reader = self._local.reader = Reader(connection)
        return work(reader)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for connection in (*self._connections, *([self._spare] if self._spare is not None else [])):
            connection.close()


def _close_all(writer: Writer, readers: Readers) -> None:
    writer.close()
    readers.close()


def _close_late(opening: asyncio.Future[tuple[Writer, Readers]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=_close_all, args=opening.result(), name="ostler-closing").start()


def _call(function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any], connection: Any) -> R:
    return function(connection, *args, **kwargs)


def epoch_to_write(reader: Reader, own: Lease | None, now: Any) -> int:
    """The current epoch, unless another owner holds the lease: then a newcomer only reads."""
    current = leases.current_epoch(reader)  # before the lease: an owner that comes in between makes it an old one
    held = leases.get_lease(reader)
    ours = held is not None and own is not None and held.epoch == own.epoch
    return current if held is None or ours or held.expires_at <= now else _NOT_OWNER


# --- from a place to a database ----------------------------------------------------------------------


class SqliteDatabase:
    def __init__(self, path: Path) -> None:
        self.path = path

    def open_writer(self, fault: FaultPoint) -> Connection:
        connection = SqliteConnection(self.path, create=True)
        try:
            connection.migrate(fault)
        except BaseException:
            connection.close()
            raise
        return connection

    def open_reader(self) -> Connection | None:
        return SqliteConnection(self.path, read_only=True)


class MemoryDatabase:
    """Lives as long as the store is open."""

    def open_writer(self, fault: FaultPoint) -> Connection:
        connection = SqliteConnection(None)
        connection.migrate(fault)
        return connection

    def open_reader(self) -> Connection | None:
        return None


class PostgresDatabase:
    def __init__(self, address: str) -> None:
        self._address = address
        try:
            self._module = importlib.import_module("ostler.store.postgres")
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("psycopg"):
                raise MissingExtraError("a PostgreSQL store", "postgres") from error
            raise

    def open_writer(self, fault: FaultPoint) -> Connection:
        connection: Connection = self._module.PostgresConnection(self._address)
        try:
            self._module.PostgresConnection.migrate(connection, fault)
        except BaseException:
            connection.close()
            raise
        return connection

    def open_reader(self) -> Connection | None:
        connection: Connection = self._module.PostgresConnection(self._address, read_only=True)
        return connection


@contextmanager
def view(where: str | os.PathLike[str]) -> Iterator[Reader]:
    """Look at a store without changing it, beside its owner; it must exist."""
    database = database_at(where)
    if isinstance(database, SqliteDatabase) and not database.path.exists():
        raise NotFoundError(f"there is no home at {database.path.parent}; start something there, or name another")
    connection = database.open_reader()
    if connection is None:
        raise StoreError("a store in memory can be looked at only by the program that opened it")
    try:
        require_current(connection.stored_version())
        yield Reader(connection)
    finally:
        connection.close()


def database_at(where: str | os.PathLike[str]) -> Database:
    text = place_text(where)
    if text == MEMORY:
        return MemoryDatabase()
    if text.startswith(_POSTGRES):
        return PostgresDatabase(text)
    if is_address(text):
        bound = "must be a directory, :memory:, or an address that begins with postgresql://"
        raise fault("store", bound, text.split("://", maxsplit=1)[0] + "://…")
    return SqliteDatabase(home_path(where) / DATABASE_FILE)


def home_path(where: str | os.PathLike[str]) -> Path:
    """The directory that is meant; `~` is the user's own."""
    try:
        return Path(place_text(where)).expanduser()
    except RuntimeError as error:
        raise fault("store", "must be a directory that can be found; this user has none", where) from error


def is_address(where: str | os.PathLike[str]) -> bool:
    """Whether it names a database rather than a directory."""
    text = place_text(where)
    return "://" in text or text == MEMORY


def place_text(where: object) -> str:
    """An empty text would be the current directory, and fill it with files that the user does not expect there."""
    text = os.fspath(where) if isinstance(where, str | os.PathLike) else None
    if not isinstance(text, str):  # a path may also be bytes
        raise fault("store", "must be a directory or a postgresql:// address, as a text or a Path", where)
    if not text.strip():
        raise fault("store", "is empty; name a directory, such as ~/.ostler", where)
    if "\0" in text:
        raise fault("store", "has a NUL in it, which no path may have; name another", where)
    return text
