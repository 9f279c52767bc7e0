"""The directory of a keeper: locked for its life, with its socket, its log, and the token of its home."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from ostler.keeper.protocol import LOCK, LOG, SOCKET, TOKEN, connect

_LOCK_SECONDS = 15.0
_MAX_LOG = 8 << 20
_KEPT_OF_LOG = 1 << 20


class StartError(Exception):
    """No keeper can run here; the text is a sentence."""


class Directory:
    """Taken by this process as long as it lives. Standard output and error are its log from now on."""

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(path, 0o700, exist_ok=True)
        if os.stat(path).st_uid != os.geteuid():
            raise StartError(f"{path} belongs to another user")
        os.chmod(path, 0o700)
        self._lock = _lock(path)
        self._take_output()

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _take_output(self) -> None:
        """The starter's pipes must not stay open."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        log = os.open(self.file(LOG), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for number, descriptor in enumerate((null, log, log)):
            os.dup2(descriptor, number)
        os.close(null)
        os.close(log)

    def is_ours(self) -> bool:
        """False when it was removed, also when another one stands there now."""
        try:
            there = os.stat(self.file(LOCK))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # it cannot be told now
        return os.path.samestat(there, os.fstat(self._lock))

    def trim_log(self) -> None:
        """Templates write there too, so it is cut in place; the end of what it was is kept beside it."""
        size = os.fstat(2).st_size
        if size > _MAX_LOG:
            with contextlib.suppress(OSError), open(f"{self.file(LOG)}.1", "wb") as file:
                file.write(os.pread(2, _KEPT_OF_LOG, size - _KEPT_OF_LOG))
            os.ftruncate(2, 0)

    def remove_socket(self) -> None:
        if self.is_ours():
            with contextlib.suppress(OSError):
                os.unlink(self.file(SOCKET))

    def token(self) -> str:
        """Made once per home: the name by which its processes are known to every keeper."""
        path = self.file(TOKEN)
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            token = file.read().strip()
            if len(token) == 16 and set(token) <= set("0123456789abcdef"):
                return token
        token = os.urandom(8).hex()
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, token.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(f"{path}.new", path)
        return token


def _lock(path: str) -> int:
    lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _answers(path) or time.monotonic() > end:
                raise StartError(f"another keeper holds {path}") from None
            time.sleep(0.01)
        else:
            return lock


def _answers(path: str) -> bool:
    try:
        connect(path).close()
    except OSError:
        return False
    return True
