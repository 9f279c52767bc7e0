"""A few reading threads, each with its own connection: readers wait for no writer and for no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ostler.errors import StoreClosedError
from ostler.store.port import Session

R = TypeVar("R")

_THREADS = 4


class Readers:
    def __init__(self, open_session: Callable[[], Session]) -> None:
        self._open_session = open_session
        self._local = threading.local()
        self._sessions: list[Session] = []
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(_THREADS, thread_name_prefix="ostler-reader")

    async def run(self, read: Callable[[Session], R]) -> R:
        pool = self._pool
        if pool is None:
            raise StoreClosedError
        try:
            reading = asyncio.get_running_loop().run_in_executor(pool, self._with_session, read)
        except RuntimeError as error:  # closed by another thread since we looked
            raise StoreClosedError from error
        return await reading

    def look(self, read: Callable[[Session], R]) -> R:
        """The same for one who may block."""
        if self._pool is None:
            raise StoreClosedError
        return self._pool.submit(self._with_session, read).result()

    def _with_session(self, read: Callable[[Session], R]) -> R:
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._open_session()
            self._local.session = session
            with self._lock:
                self._sessions.append(session)
        return read(session)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)  # what was asked before is still answered
        for session in self._sessions:
            session.close()
        self._sessions.clear()
