"""Asking an agent from outside whether it is well: over HTTP, by a connection, by a command.

The answer distinguishes what says something about the agent (it passed, it failed) from what says something about
the asking (unable). A heartbeat and the agent's own health check go through its cell and are not asked here.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType

from ostler.clock import Clock, Deadline
from ostler.durations import duration_text
from ostler.model.spawn import HealthCheckConfig, command_target, http_target, tcp_target
from ostler.model.states import ProbeType
from ostler.model.text import clipped
from ostler.policy.health import ProbeOutcome, ProbeResult
from ostler.version import __version__

#: Of the head of an HTTP answer; the body is not read.
MAX_HEAD = 16 * 1024
#: A command may write so much; one that writes more is ended.
MAX_OUTPUT = 1024 * 1024
#: How much of what a command wrote stands in the result.
MAX_DETAILS = 500
MAX_KEPT = 4 * MAX_DETAILS
#: What a command gets of the manager's environment. Keys and tokens are not among it.
ENVIRONMENT = frozenset({"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"})

#: The machine of the manager has run out of something, or forbids it, or has no way there.
_OUR_FAULT = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EACCES, errno.EPERM}
    | {errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.ENETDOWN, errno.EAFNOSUPPORT}
)
_INTERIM_ANSWERS = 5
_KILL_SECONDS = 5.0
_CHUNK = 64 * 1024


async def probe(config: HealthCheckConfig, clock: Clock) -> ProbeResult:
    """Look once, for at most `config.timeout`. Raises nothing but a cancellation."""
    ask = _PROBES.get(config.probe)
    if ask is None:
        return _unable(f"a {config.probe} check is answered by the agent's place, not from outside")
    try:
        return await ask(config, clock)
    except TimeoutError:
        return _failed(f"no answer within {duration_text(config.timeout)}")
    except ssl.SSLError as error:
        # Before ValueError, which a certificate that does not verify is as well.
        return _failed(f"no TLS connection: {error.reason or error}")
    except ValueError as error:
        return _unable(f"target {error}")
    except socket.gaierror as error:
        return _unable(f"the name of the host does not resolve: {error.strerror}")
    except OSError as error:
        return (_unable if error.errno in _OUR_FAULT else _failed)(f"no connection: {error.strerror or error}")


def _passed(details: str | None = None) -> ProbeResult:
    return ProbeResult(outcome=ProbeOutcome.PASSED, details=details)


def _failed(details: str) -> ProbeResult:
    return ProbeResult(outcome=ProbeOutcome.FAILED, details=clipped(details, 2 * MAX_DETAILS))


def _unable(details: str) -> ProbeResult:
    return ProbeResult(outcome=ProbeOutcome.UNABLE, details=clipped(details, 2 * MAX_DETAILS))


# --- over the network --------------------------------------------------------------------------------


async def _tcp(config: HealthCheckConfig, clock: Clock) -> ProbeResult:
    host, port = tcp_target(config.target or "")
    async with Deadline(clock, config.timeout):
        _, writer = await asyncio.open_connection(host, port)
    writer.transport.abort()
    return _passed()


async def _http(config: HealthCheckConfig, clock: Clock) -> ProbeResult:
    target = http_target(config.target or "")
    request = (
        f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nUser-Agent: ostler/{__version__}\r\n"
        "Accept: */*\r\nConnection: close\r\n\r\n"
    )
    tls = _tls() if target.tls else None
    async with Deadline(clock, config.timeout):
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls, limit=MAX_HEAD)
        try:
            writer.write(request.encode("ascii"))
            status = await _status(reader)
        finally:
            # Not closed politely: a peer that does not read must not keep us, and the rest of the answer is unread.
            writer.transport.abort()
    if status is None:
        return _failed("the answer is not HTTP")
    said = f"HTTP status {status}"
    return _passed(said) if 200 <= status < 400 else _failed(said)


async def _status(reader: asyncio.StreamReader) -> int | None:
    """The status of the final answer; None where what came is no HTTP."""
    for _ in range(_INTERIM_ANSWERS):
        words = (await _head(reader)).split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not (words[1].isdigit() and len(words[1]) == 3):
            return None
        status = int(words[1])
        if status >= 200:
            return status
    return None


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The first line of a head that came to its end; nothing where it broke off or does not end."""
    first, size = b"", 0
    with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        while size <= MAX_HEAD:
            line = await reader.readuntil(b"\n")
            if not line.strip():
                return first
            first = first or line
            size += len(line)
    return b""


@cache
def _tls() -> ssl.SSLContext:
    # Reading all certificates of the machine takes tens of milliseconds, so it is done once.
    return ssl.create_default_context()


# --- by a command ------------------------------------------------------------------------------------


async def _command(config: HealthCheckConfig, clock: Clock) -> ProbeResult:
    words = command_target(config.target or "")
    try:
        run = _Run(words)
    except OSError as error:
        return _unable(f"cannot run {words[0]}: {error.strerror or error}")
    try:
        async with Deadline(clock, config.timeout):
            await run.over()
    finally:
        await run.end(clock)
    if run.flooded:
        return _failed(f"the command wrote more than {MAX_OUTPUT} bytes and was ended")
    return _ended(run.status, run.written)


def _ended(status: int | None, written: bytes) -> ProbeResult:
    if status is None:
        return _unable("how the command ended is not known: somebody else has collected it")
    said = clipped(written.decode("utf-8", "replace").strip(), MAX_DETAILS)
    if status == 0:
        return _passed(said or None)
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return _failed(f"the command ended with {how}" + (f": {said}" if said else ""))


class _Run:
    """One command in a session of its own, watched by its pidfd.

    It is collected only after its group has been killed: until then its number, and with it that of the group,
    cannot be given to anybody else.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._enough = asyncio.Event()
        self._size = 0
        self._kept = bytearray()
        self.status: int | None = None
        self._process = subprocess.Popen(  # noqa: S603 - the operator's command, and no shell
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name in ENVIRONMENT},
            start_new_session=True,
            bufsize=0,
        )
        self._output = self._process.stdout.fileno() if self._process.stdout else -1
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.communicate()
            raise
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._pidfd, self._exited)
        self._loop.add_reader(self._output, self._drain)

    @property
    def written(self) -> bytes:
        return bytes(self._kept)

    @property
    def flooded(self) -> bool:
        return self._size > MAX_OUTPUT

    async def over(self) -> None:
        """Returns when it has ended, or written too much. What it left in the background is not waited for."""
        await self._enough.wait()

    async def end(self, clock: Clock) -> None:
        """Nothing of its group lives after this; one that not even a kill ends is left to the next start."""
        try:
            self._kill()
            with suppress(TimeoutError):
                async with Deadline(clock, _KILL_SECONDS):
                    await self._gone.wait()
            while self._drain():
                pass
            if self._gone.is_set():
                self._collect()
        finally:
            self._loop.remove_reader(self._pidfd)
            self._loop.remove_reader(self._output)
            os.close(self._pidfd)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._gone.set()
        self._enough.set()

    def _kill(self) -> None:
        # Refused where the command has taken another user's rights: that one we cannot end.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _collect(self) -> None:
        # Popen takes a child that somebody else has collected for a success, so we look ourselves first.
        with suppress(ChildProcessError):
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if info is not None:
                self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self._process.wait()

    def _drain(self) -> bool:
        """Take what it has written, and say whether there may be more."""
        try:
            piece = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return False
        self._size += len(piece)
        self._kept += piece[: max(MAX_KEPT - len(self._kept), 0)]
        if not piece or self.flooded:
            self._loop.remove_reader(self._output)
            if self.flooded:
                self._enough.set()
            return False
        return True


_PROBES: Mapping[ProbeType, Callable[[HealthCheckConfig, Clock], Awaitable[ProbeResult]]] = MappingProxyType(
    {ProbeType.HTTP: _http, ProbeType.TCP: _tcp, ProbeType.COMMAND: _command}
)
