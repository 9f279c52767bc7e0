"""Starts the daemon of a home when it is needed; imports nothing heavy."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import time
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

    Of several commands that start one at the same moment, one wins by the lock of the home; the others find it.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = [sys.executable, "-P", "-m", "ostler.daemon", "--home", str(home)]
    if listen is not None:
        words += ["--listen", listen]
    if strict:
        words.append("--strict")
    with (home / DAEMON_LOG).open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_SH)  # the daemon inherits it: see _has_daemon
        begins = log.tell()
        daemon = subprocess.Popen(  # noqa: S603 - our own program
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    client = BlockingClient(home)
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(HangError):  # its socket is open before it has taken up its tasks
            try:
                return client.call("status")
            except UnreachableError:
                # A daemon of another command may have been faster, and may not answer yet.
                if daemon.poll() not in {None, 0} and not _has_daemon(home):
                    try:
                        return client.call("status")
                    except UnreachableError:
                        raise DaemonStartError(_last_lines(home, begins)) from None
                time.sleep(_PAUSE_SECONDS)
    raise DaemonStartError(f"it did not answer within {START_SECONDS:g} s; see {home / DAEMON_LOG}")


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
