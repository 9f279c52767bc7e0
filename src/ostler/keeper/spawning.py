"""A program as a child of the keeper: fork, settle in, execute. What fails on the way comes back as a sentence."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import struct
import termios
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ostler.keeper.settle import SettleError, settle_in

#: The descriptor under which a program finds its channel, and the variable that says so.
CHANNEL_FD = 3
CHANNEL_VARIABLE = "OSTLER_CHANNEL_FD"
#: Above what a program is given; descriptors wait here for their turn.
_ASIDE = 10
_ROWS, _COLUMNS = 40, 120
#: So many descriptors the keeper keeps for itself: to answer, to look at processes, to end them.
_RESERVE = 64


class Files(NamedTuple):
    """The descriptors of the child; -1 is /dev/null, and for the channel none."""

    stdin: int = -1
    output: int = -1
    channel: int = -1
    #: `output` is a terminal, to be its controlling one.
    terminal: bool = False


def has_descriptors() -> bool:
    """Whether more are free than the keeper must keep. The kernel gives out the lowest first, so one number tells."""
    bound = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if bound == resource.RLIM_INFINITY:
        return True
    try:
        lowest = os.dup(0)
    except OSError:
        return False
    os.close(lowest)
    return lowest + _RESERVE < bound


def spawn(argv: Sequence[str], settle: Mapping[str, Any], files: Files) -> tuple[int, int]:
    """The pid, and a pipe: it ends when the program runs, or first says why it does not. Raises `OSError`."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        # Held back until the child has its own ways to take a signal: none may reach it in the keeper's clothes.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _become(argv, settle, files, write)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except OSError:
        os.close(read)
        raise
    finally:
        os.close(write)
    return pid, read


def _become(argv: Sequence[str], settle: Mapping[str, Any], files: Files, report: int) -> NoReturn:
    """In the child; never returns."""
    sentence = "the new process failed"
    try:
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, _ASIDE)
        keep = [report]
        channel = files.channel
        if channel >= 0:
            channel = fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, _ASIDE)
            keep.append(channel)
        settle_in({**settle, "execs": True}, stdin=files.stdin, stdout=files.output, stderr=files.output, keep=keep)
        if channel >= 0:
            os.dup2(channel, CHANNEL_FD)
            os.close(channel)
        if files.terminal:
            fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        os.execvpe(argv[0], list(argv), dict(settle.get("env") or {}))  # noqa: S606 - a program without a shell
    except SettleError as error:
        sentence = str(error)
    except OSError as error:
        sentence = _why_not(argv[0], error)
    except BaseException as error:  # noqa: BLE001 - nothing of the keeper may run on in here
        sentence = f"the new process failed: {error!r}"
    with contextlib.suppress(OSError):
        os.write(report, sentence.encode(errors="replace")[:4000])
    os._exit(127)


def _why_not(program: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"the program {program!r} was not found"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"the program {program!r} may not be executed: {error.strerror}"
    return f"the program {program!r} cannot be executed: {error.strerror}"


def open_terminal() -> tuple[int, int]:
    """The keeper's side and the agent's, of a usual size; lines end as the agent ends them."""
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.ONLCR
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    return ours, theirs
