"""Exactly one manager per home: a lock on the directory, and a lease in the store that outlives a crash by seconds."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from ostler.errors import LeaseHeldError, StaleWriterError, StoreError
from ostler.isolation.forks import keep_from_children
from ostler.lifecycle.settings import LifecycleSettings
from ostler.seams import Clock
from ostler.store import Store

LOCK_FILE = "manager.lock"


class HomeLock:
    """Held as long as this process lives, whatever way it ends. Who holds it knows that no other manager runs here."""

    def __init__(self, home: Path) -> None:
        self._path = home / LOCK_FILE
        self._descriptor: int | None = None
        keep_from_children(self)

    def take(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"{self._path.parent} cannot be used as a home ({error.strerror}); choose one that you may write"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 100).decode(errors="replace").strip()
            os.close(descriptor)
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise LeaseHeldError(
                f"{who} manages the home {self._path.parent}; close it first, or use another home"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                # Not by closing alone: whoever has a copy of the descriptor would hold it on.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forked(self) -> None:
        """Without unlocking: it is still the parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class Ownership:
    """Takes the lease, renews it, and says when it is lost."""

    def __init__(self, store: Store, clock: Clock, settings: LifecycleSettings) -> None:
        self._store = store
        self._clock = clock
        self._ttl = settings.lease_ttl
        self._task: asyncio.Task[None] | None = None

    async def take(self, *, certain: bool) -> int:
        """Answers the epoch. `certain` is who holds the lock on the home: whoever has a lease there is gone."""
        # Two managers of one process are two owners.
        owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        return (await self._store.take_lease(owner, ttl=self._ttl, steal=certain)).epoch

    def keep(self, lost: Callable[[StaleWriterError], None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._renew(lost), name="ostler-lease")

    async def _renew(self, lost: Callable[[StaleWriterError], None]) -> None:
        while True:
            await self._clock.sleep(self._ttl.total_seconds() / 3)
            try:
                await self._store.renew_lease(ttl=self._ttl)
            except StaleWriterError as error:
                lost(error)
                return
            except StoreError:
                continue  # a busy or a full disk: nobody else can write there either

    async def release(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        # A lease that cannot be given back ends by itself.
        with contextlib.suppress(StoreError, StaleWriterError):
            await self._store.release_lease()
