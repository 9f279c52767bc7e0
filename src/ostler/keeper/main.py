"""The program: `main()` with the directory of a keeper makes a daemon there, and returns when it listens.

The one who calls waits for nothing else: exit code 0 means that a keeper answers on the socket, 1 that none could be
started and why stands on standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ostler.keeper.boxes import Boxes
from ostler.keeper.hiding import hide
from ostler.keeper.keeping import Keeper
from ostler.keeper.logbook import Logbook
from ostler.keeper.loop import Loop
from ostler.keeper.probing import open_boxes
from ostler.keeper.protocol import EXITS, LOCK, LOG, SOCKET, TOKEN, connect
from ostler.keeper.records import Journal
from ostler.keeper.remains import records_of_swept
from ostler.keeper.takeover import StateError, keep_private, read_state, take_over
from ostler.keeper.upgrade import CHECK, PASSED, RESUME, Upgrade

READY = "--ready-fd"
_PR_SET_CHILD_SUBREAPER = 36
_OK = b"ok"
#: Two that nobody can change, and two that Python ignores for its own good.
_NOT_OURS = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ})
#: How long one may take to leave whose place another wants.
_LEAVING_SECONDS = 15.0
#: How often it is looked whether the home is still there.
_DELETED_SECONDS = 5.0


class StartError(Exception):
    """No keeper can be here; the sentence says why."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    hide()  # the program has begun with it; but who starts us in another way may not have
    words = list(sys.argv[1:] if argv is None else argv)
    options = {name: int(_option(words, name) or -1) for name in (CHECK, RESUME, READY)}
    if options[CHECK] >= 0:
        _check(options[CHECK])
    if options[RESUME] >= 0:
        _resume(options[RESUME])
    if len(words) != 1:
        _leave("usage: DIRECTORY [--ready-fd N]")
    _daemon(os.path.abspath(words[0]), options[READY])  # noqa: PTH100 - no pathlib here


def _option(words: list[str], name: str) -> str | None:
    if name not in words[:-1]:
        return None
    place = words.index(name)
    value = words[place + 1]
    del words[place : place + 2]
    return value


def _leave(sentence: str) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(1)


# --- becoming a daemon -----------------------------------------------------------------------------


def _daemon(directory: str, ready: int) -> NoReturn:
    _hear_again()
    read, write = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(write)
        said = b""
        while chunk := os.read(read, 4096):
            said += chunk
        if said != _OK:
            _leave(said.decode(errors="replace") or "the keeper died while it started")
        if ready >= 0:
            os.write(ready, _OK)
        os._exit(0)
    code = 1
    try:
        os.setsid()
        os.chdir("/")
        os.umask(0o077)
        _close_others(write)
        place = _take_place(directory)
    except (StartError, OSError) as error:
        os.write(write, str(error).encode(errors="replace"))
        os._exit(code)
    try:
        code = _keep(place, write)
    except BaseException as error:  # noqa: BLE001 - the log is the only one who can still be told
        place["log"].failed(error)
        with contextlib.suppress(OSError):
            os.write(write, f"the keeper failed while it started: {error!r}".encode(errors="replace"))
    finally:
        os._exit(code)


def _hear_again() -> None:
    """A program may block or ignore signals, and whatever it starts inherits that. Deaf, we would see no death."""
    for number in signal.valid_signals() - _NOT_OURS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _close_others(kept: int) -> None:
    """Whatever the starter had open is none of ours."""
    os.closerange(3, kept)
    os.closerange(kept + 1, 0x7FFFFFFF)


def _take_place(directory: str) -> dict[str, Any]:
    os.makedirs(directory, 0o700, exist_ok=True)  # noqa: PTH103 - no pathlib here
    if os.stat(directory).st_uid != os.geteuid():  # noqa: PTH116 - no pathlib here
        raise StartError(f"{directory} belongs to somebody else")
    os.chmod(directory, 0o700)  # noqa: PTH101 - no pathlib here
    lock = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # noqa: PTH118 - dito
    _wait_for(lock, directory)
    return {"directory": directory, "lock": lock, "log": _take_stdio(directory)}


def _wait_for(lock: int, directory: str) -> None:
    """One that listens keeps its place; one that no longer does is about to leave it."""
    until = time.monotonic() + _LEAVING_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _somebody_answers(directory) or time.monotonic() > until:
                raise StartError(f"another keeper holds {directory}") from None
            time.sleep(0.01)
        else:
            return


def _somebody_answers(directory: str) -> bool:
    try:
        connect(directory).close()
    except OSError:
        return False
    return True


def _take_stdio(directory: str) -> Logbook:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)
    return Logbook(os.path.join(directory, LOG))  # noqa: PTH118 - no pathlib here


# --- the keeper's own state ------------------------------------------------------------------------


def _keep(place: Mapping[str, Any], ready: int) -> int:
    directory: str = place["directory"]
    log: Logbook = place["log"]
    nofile = _privileges()
    token = _token(directory)
    boxes = open_boxes(token)
    killed = boxes.sweep()
    if killed:
        log.note(f"ended {len(killed)} processes that an earlier keeper left")
    keeper = _keeper(place, _listen(directory), boxes, token)
    for record in records_of_swept(killed, token):
        if record["unit"] not in keeper.house.journal.known:
            keeper.house.journal.add(record)
    keeper.house.journal.flush()
    keeper.starter.nofile = nofile
    os.write(ready, _OK)
    os.close(ready)
    return _run(keeper, directory)


def _keeper(place: Mapping[str, Any], listener: socket.socket, boxes: Boxes, token: str) -> Keeper:
    log: Logbook = place["log"]
    journal = Journal(os.path.join(place["directory"], EXITS), log.note)  # noqa: PTH118 - no pathlib here
    keeper = Keeper(Loop(log.failed), listener, boxes, journal, token=token, warn=log.note)
    lasting = {"directory": place["directory"], "lock": place["lock"]}
    keeper.upgrade = Upgrade(keeper, lasting).begin
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _end_when_deleted(keeper, place["lock"])
    return keeper


def _end_when_deleted(keeper: Keeper, lock: int) -> None:
    """No manager finds a keeper whose home was deleted. One that is connected ends the agents itself, in order."""
    if not os.fstat(lock).st_nlink and keeper.server.manager is None:
        keeper.end("stop")
    else:
        keeper.loop.later(_DELETED_SECONDS, lambda: _end_when_deleted(keeper, lock))


def _run(keeper: Keeper, directory: str) -> int:
    gc.freeze()
    gc.enable()
    keeper.loop.run()
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, SOCKET))  # noqa: PTH108, PTH118 - no pathlib here
    keeper.close()
    return 0


def _privileges() -> list[int]:
    """Room for many descriptors, and the last to be killed for memory; answers the bounds that our children get."""
    bounds = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (bounds[1], bounds[1]))
    with contextlib.suppress(OSError):
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"-500")
        finally:
            os.close(descriptor)
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise StartError("the kernel does not let the keeper inherit orphans")
    return list(bounds)


def _token(directory: str) -> str:
    """Made once for a home; by it its processes are known, whoever keeps them."""
    path = os.path.join(directory, TOKEN)  # noqa: PTH118 - no pathlib here
    with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:  # noqa: PTH123 - no pathlib here
        found = file.read().strip()
        if len(found) == 16 and set(found) <= set("0123456789abcdef"):
            return found
    made = os.urandom(8).hex()
    fresh = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(fresh, made.encode())
    os.fsync(fresh)
    os.close(fresh)
    os.rename(f"{path}.new", path)  # noqa: PTH104 - no pathlib here
    return made


def _listen(directory: str) -> socket.socket:
    """By a descriptor of the directory: its path may be longer than a socket's address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    home = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=home)
        listener.bind(f"/proc/self/fd/{home}/{SOCKET}")
        os.chmod(SOCKET, 0o600, dir_fd=home)
        listener.listen(64)
    finally:
        os.close(home)
    return listener


# --- taking over from older code -------------------------------------------------------------------


def _check(descriptor: int) -> NoReturn:
    try:
        read_state(descriptor)
    except StateError as error:
        _leave(str(error))
    os.write(1, f"{PASSED}\n".encode())
    os._exit(0)


def _resume(descriptor: int) -> NoReturn:
    """The same process went on with this code: its children, its lock and its manager are still there."""
    state = read_state(descriptor)
    os.close(descriptor)
    keep_private(state)
    place = {**state, "log": _take_stdio(state["directory"])}
    code = 1
    try:
        _privileges()
        listener = socket.socket(fileno=state["listener"])
        keeper = _keeper(place, listener, open_boxes(state["token"]), state["token"])
        take_over(keeper, state)
        keeper.loop.later(0, keeper.reap)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        code = _run(keeper, state["directory"])
    except BaseException as error:  # noqa: BLE001 - the log is the only one who can still be told
        place["log"].failed(error)
    finally:
        os._exit(code)
