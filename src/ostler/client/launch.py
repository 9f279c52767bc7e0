"""Starts the daemon of a home when it is needed; imports nothing heavy."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ostler.client.blocking import BlockingClient, HangError, UnreachableError, process_state
from ostler.home import DAEMON_LOG

START_SECONDS = 30.0
_PAUSE_SECONDS = 0.02


class DaemonStartError(Exception):
    """The daemon ended before it answered; its last lines say why."""


def start_daemon(home: Path, *, listen: str | None = None, strict: bool = False) -> Any:
    """Start it in the background and wait until it answers. Returns its status.

    With `strict` it does not start with faulty settings; else it tells of them in its status.

    Of several commands that start one at the same moment, one does, and the others wait for its daemon: a second one
    could be so late that it takes the home after an `ostler down`.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = [sys.executable, "-P", "-m", "ostler.daemon", "--home", str(home)]
    if listen is not None:
        words += ["--listen", listen]
    if strict:
        words.append("--strict")
    client = BlockingClient(home)
    until = time.monotonic() + START_SECONDS
    daemon: subprocess.Popen[bytes] | None = None
    begins = 0
    with _alone(home, until):
        while time.monotonic() < until:
            with contextlib.suppress(HangError):  # its socket is open before it has taken up its tasks
                try:
                    return client.call("status")
                except UnreachableError:
                    has_ended = daemon is not None and daemon.poll() is not None
                    if not _has_daemon(home):
                        if has_ended:
                            raise DaemonStartError(_last_lines(home, begins)) from None
                        if daemon is None:
                            daemon, begins = _spawn(home, words)
                    time.sleep(_PAUSE_SECONDS)
    raise DaemonStartError(f"it did not answer within {START_SECONDS:g} s; see {home / DAEMON_LOG}")


def _spawn(home: Path, words: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The daemon, and where its output begins in the log."""
    with (home / DAEMON_LOG).open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_SH)  # the daemon inherits it: see _has_daemon
        begins = log.tell()
        daemon = subprocess.Popen(  # noqa: S603 - our own program
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    return daemon, begins


@contextlib.contextmanager
def _alone(home: Path, until: float) -> Iterator[None]:
    """While no other command starts a daemon here; after that moment in any case."""
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def wait_while_starting(home: Path) -> None:
    """Wait for a daemon that lives and does not answer yet; the command that started it may be gone."""
    until = time.monotonic() + START_SECONDS
    while _has_daemon(home) and time.monotonic() < until:
        try:
            BlockingClient(home).call("status")
        except UnreachableError:
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _has_daemon(home: Path) -> bool:
    try:
        with (home / DAEMON_LOG).open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _last_lines(home: Path, begins: int) -> str:
    try:
        with (home / DAEMON_LOG).open("rb") as log:
            log.seek(begins)
            output = log.read()[-2000:].decode(errors="replace").strip()
    except OSError:
        output = ""
    return output.splitlines()[-1] if output else f"it ended at once; see {home / DAEMON_LOG}"


def wait_until_gone(pid: int, seconds: float) -> bool:
    """Whether the process has ended within that time. It has also where its parent has not reaped it."""
    until = time.monotonic() + seconds
    while process_state(pid) not in {None, "Z", "X"}:
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
