"""Starting a keeper, finding one, and making an old one run our code."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import annotated_types

import ostler
from ostler.errors import InvalidOperationError
from ostler.isolation import walls
from ostler.isolation.calls import wake
from ostler.isolation.process.interpreter import shared_options
from ostler.isolation.process.link import SHORT, KeeperError, Link
from ostler.keeper import protocol
from ostler.keeper.edition import edition
from ostler.keeper.hiding import HIDE
from ostler.keeper.records import Journal

_log = logging.getLogger("ostler.isolation")
#: Within a home.
KEEPER = walls.KEEPER
#: Where our own code is imported from; the keeper and its templates have no other way to it.
SOURCE = str(Path(ostler.__file__).resolve().parent.parent)
#: Hardly anything that is made while a program is loaded is garbage; both of them say when it is time to look for it.
_NO_GC = "import gc; gc.disable()"
_KEEPER = (
    f"{HIDE}; {_NO_GC}; import sys; sys.path.insert(0, sys.argv.pop(1)); from ostler.keeper.main import main; main()"
)
_SWEEP = "import sys; sys.path.insert(0, sys.argv[1]); from ostler.keeper.probing import sweep; sweep(sys.argv[2])"
_TEMPLATE = (
    f"{_NO_GC}; import sys; sys.path.insert(0, sys.argv.pop(1)); sys.path.append(sys.argv.pop(1)); "
    "from ostler.isolation.inside.template import main; main()"
)
#: And what it stands on, which may have been found by way of a variable that neither of them has.
_NEEDED = str(Path(annotated_types.__file__).resolve().parent.parent)
#: A keeper needs nothing of the manager's environment, and so can give nothing of it away.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_CHUNK = 64 * 1024
#: A keeper waits 15 s at most for its place, and ends for 5 s at most what was left there before it listens.
_START_SECONDS = 40.0
_SWEEP_SECONDS = 20.0


def _python(*options: str) -> list[str]:
    """Isolated, so no variable reaches it: that we write no bytecode must be told as an option."""
    return [sys.executable, "-I", *(["-B"] if sys.dont_write_bytecode else []), *options]


def keeper_argv(directory: Path) -> list[str]:
    return [*_python("-S"), "-c", _KEEPER, SOURCE, str(directory)]


def template_argv() -> list[str]:
    # With site, unlike the keeper: packages that were installed for editing are found only through it.
    return [*_python(*shared_options()), "-c", _TEMPLATE, SOURCE, _NEEDED]


def connect(directory: Path) -> socket.socket | None:
    """To the living keeper of a directory; None when there is none. Never waits."""
    try:
        return protocol.connect(str(directory), timeout=0.0)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return None
    except BlockingIOError as error:
        raise InvalidOperationError(
            f"the keeper of {directory} lets no more managers in, so it hangs; kill it, and open again"
        ) from error
    except OSError as error:
        raise InvalidOperationError(f"the keeper of {directory} cannot be reached: {error}") from error


async def start(directory: Path) -> bool:
    """Start one and wait until it listens. False when another holds the place; raises when it cannot live there."""
    _make(directory)
    try:
        code, said = await _run(keeper_argv(directory), _START_SECONDS)
    except OSError as error:
        raise InvalidOperationError(f"no keeper could be started in {directory}: {error}") from error
    if code == 0:
        return True
    if "another keeper" in said:
        return False
    raise InvalidOperationError(f"no keeper could be started in {directory}: {said or f'exit code {code}'}")


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidOperationError(f"no keeper can be started in {directory}: {error}") from error


def is_short(error: BaseException) -> bool:
    """Whether only this program's own lack of descriptors or memory stood in the way."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in SHORT


@contextlib.contextmanager
def vacant(directory: Path) -> Iterator[bool]:
    """Whether no keeper is there, not even one on its way out; and if so, none comes as long as this lasts."""
    try:
        lock = os.open(directory / protocol.LOCK, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    except OSError:
        yield False  # that cannot be told
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        if is_free:
            fcntl.flock(lock, fcntl.LOCK_UN)  # what was forked meanwhile has a copy, and would hold it on
        os.close(lock)


async def sweep(token: str) -> None:
    """End what a dead keeper left, proven to be its own. In a program of its own: it forks, and ours has threads."""
    if token:
        code, said = await _run([*_python("-S"), "-c", _SWEEP, SOURCE, token], _SWEEP_SECONDS)
        if code:
            _log.error("what the keeper left could not be swept: %s", said)


def token_of_dead(directory: Path) -> str:
    """By which what it left is known; empty when there was none, or it ended in order."""
    try:
        return (directory / protocol.TOKEN).read_text().strip() if (directory / protocol.SOCKET).exists() else ""
    except OSError:
        return ""


def exits_of_dead(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """What it wrote down of the ends of its units, by unit. Only while the place is vacant: it is tidied on the way."""
    if not (directory / protocol.EXITS).exists():
        return {}
    journal = Journal(str(directory / protocol.EXITS), _log.warning)
    journal.close()
    return journal.known


async def renew(link: Link, about: Mapping[str, Any], directory: Path) -> bool:
    """A keeper of another Ostler takes on our code, with all its agents. Whether it has; if not, it stays as it is."""
    if about.get("code") == edition():
        return False
    try:
        await link.request("upgrade", argv=keeper_argv(directory))
    except KeeperError as error:
        if error.kind == "lost" or about.get("version") != protocol.VERSION:
            raise InvalidOperationError(
                f"the keeper of this home runs other code than this program and cannot take on ours: {error}"
            ) from error
        _log.warning("the keeper of this home goes on with its older code: %s", error)
        return False
    return True


async def _run(argv: list[str], seconds: float) -> tuple[int, str]:
    """Run it to its end without holding up the loop; its exit code, and the end of what it said.

    What takes longer than `seconds` is killed.
    """
    process = _begun(argv)
    with contextlib.ExitStack() as held:
        assert process.stderr is not None  # noqa: S101 - it was asked for
        held.callback(process.stderr.close)
        held.callback(_put_down, process)
        os.set_blocking(process.stderr.fileno(), False)
        watched = os.pidfd_open(process.pid)
        held.callback(os.close, watched)
        try:
            async with asyncio.timeout(seconds):
                await _readable(watched)
        except TimeoutError:
            return -1, f"it took longer than {seconds:g} s"
        code = process.wait()
        with contextlib.suppress(BlockingIOError):
            return code, (os.read(process.stderr.fileno(), _CHUNK) or b"").decode("utf-8", "replace").strip()
        return code, ""


def _begun(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own program
        argv,
        env=_ENVIRONMENT,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        close_fds=True,
    )


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _put_down(process: subprocess.Popen[bytes]) -> None:
    """Only when it was not waited for to its end."""
    if process.poll() is None:
        process.kill()
        process.wait()
