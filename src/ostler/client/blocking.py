"""A blocking client on the standard library alone: what the command line uses."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ostler.client.calls import Prepared, StreamItem, StreamParser, prepare
from ostler.errors import UNREACHABLE
from ostler.home import SOCKET_FILE

#: How long a stream tries to find its daemon again.
RECONNECT_SECONDS = 60.0
#: A daemon that is silent for so long is asked for its health; where that is not answered either, it hangs.
SILENCE_SECONDS = 4.0
#: How often a silent daemon is looked at: one that a signal has stopped is not asked.
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
#: A connection that was idle for so long is not used again: the daemon closes it after a few seconds.
_IDLE_SECONDS = 2.0


class DaemonError(Exception):
    """The daemon refused, or could not be reached; `code` is that of its problem document."""

    def __init__(self, code: str, detail: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.code = code
        self.faults = faults


class UnreachableError(DaemonError):
    """No daemon listens there, or it went away."""

    def __init__(self, where: str, why: object) -> None:
        super().__init__(UNREACHABLE, f"no daemon answers at {where} ({why}); start it with `ostler up -d`")


class HangError(DaemonError):
    """A daemon listens there, and does not answer."""

    def __init__(self, where: str, pid: int | None) -> None:
        if pid is None:
            advice = f"wait, or look at the machine of {where}"
        elif _is_stopped(pid):
            advice = f"it was stopped by a signal: let it go on with `kill -CONT {pid}`"
        else:
            advice = f"wait, or end it with `kill -9 {pid}`: its agents go on, and the next command starts a new one"
        name = "the daemon" if pid is None else f"the daemon (pid {pid})"
        super().__init__(UNREACHABLE, f"{name} does not answer; {advice}")


def _is_stopped(pid: int) -> bool:
    return process_state(pid) in {"T", "t"}


def process_state(pid: int) -> str | None:
    """The letter of the kernel for it, such as Z for a process that has ended; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


class _WatchedSocket:
    """A socket whose reader calls `on_silence` with the seconds for which nothing has come."""

    def __init__(self, sock: socket.socket, on_silence: Callable[[float], None]) -> None:
        self._sock = sock
        self._on_silence = on_silence

    def makefile(self, mode: str, /) -> io.BufferedReader:
        del mode
        return io.BufferedReader(_WatchedReader(self._sock, self._on_silence))


class _WatchedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, on_silence: Callable[[float], None]) -> None:
        self._raw = sock.makefile("rb", buffering=0)
        self._on_silence = on_silence

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        since = time.monotonic()
        while not select.select([self._raw], [], [], _LOOK_SECONDS)[0]:
            silence = time.monotonic() - since
            self._on_silence(silence)
            if silence >= SILENCE_SECONDS:  # it was asked, and answered
                since = time.monotonic()
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self.timeout)
        try:
            connect_to(sock, self._path)
        except BaseException:
            sock.close()
            raise
        self.sock = sock


def connect_to(sock: socket.socket, path: Path) -> None:
    """Through a descriptor of its directory: the address of a socket holds no more than 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


class BlockingClient:
    """Talks to the daemon of a home, or to one at a loopback address with a token."""

    def __init__(
        self, home: Path, *, address: str | None = None, token: str | None = None, directory: str | None = None
    ) -> None:
        """`directory` is where the caller stands: its project's definitions and settings count."""
        self._home = home
        self._directory = directory
        self._address = None if address is None else address.removeprefix("http://").rstrip("/")
        self._token = token
        #: Connections that wait for the next request, each with the time since when; threads may take and leave them.
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []

    def close(self) -> None:
        """Its idle connections; the next call opens another."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[0].close()

    def __del__(self) -> None:
        self.close()

    @property
    def where(self) -> str:
        return self._address or str(self._home / SOCKET_FILE)

    @property
    def has_just_answered(self) -> bool:
        return any(time.monotonic() - since < _IDLE_SECONDS for _, since in self._idle)

    def call(self, verb: str, /, *, key: str | None = None, within: float | None = None, **parameters: Any) -> Any:
        """The JSON of the answer, within so many seconds. Raises `DaemonError`."""
        prepared = prepare(verb, parameters, key=key, token=self._token, directory=self._directory)
        connection, response = self._send(prepared, within=within)
        try:
            body = response.read()
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | http.client.HTTPException):
                raise UnreachableError(self.where, error) from error
            raise
        self._keep(connection, response)
        if response.status >= 400:
            raise _refusal(body, response.status)
        return json.loads(body) if body else None

    def stream(
        self,
        verb: str,
        /,
        *,
        after: str | None = None,
        on_hang: Callable[[str], None] | None = None,
        on_link: Callable[[bool], None] = lambda _: None,
        **parameters: Any,
    ) -> Iterator[StreamItem]:
        """Follow a stream. After a lost connection it goes on from its cursor, without a gap or a double.

        It ends when the daemon says so, and raises `UnreachableError` when no daemon is found for a minute. A daemon
        that hangs is waited for: `on_hang` is called with a sentence. Without it `HangError` is raised. `on_link` is
        called with True when a daemon answers, and with False when it is lost.
        """
        cursor, lost_at = after, 0.0
        while True:
            try:
                for item in self._stream_once(verb, cursor, parameters, on_hang, on_link):
                    lost_at = 0.0
                    if item.event in {"end", "bye"}:
                        if item.event == "end":
                            return
                        break
                    cursor = item.id or cursor
                    yield item
            except UnreachableError:
                on_link(False)
                if self._address is None and not self._home.is_dir():
                    sentence = f"the home {self._home} was removed or moved away; what ran in it has ended"
                    raise DaemonError(UNREACHABLE, sentence) from None
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > RECONNECT_SECONDS:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _stream_once(
        self,
        verb: str,
        cursor: str | None,
        parameters: Mapping[str, Any],
        on_hang: Callable[[str], None] | None,
        on_link: Callable[[bool], None],
    ) -> Iterator[StreamItem]:
        first = {} if cursor is None else {"after": cursor}
        prepared = prepare(verb, {**parameters, **first, "follow": True}, token=self._token, directory=self._directory)
        connection, response = self._send(prepared, on_hang=on_hang)
        try:
            if response.status >= 400:
                raise _refusal(response.read(), response.status)
            on_link(True)
            parser = StreamParser()
            while line := response.readline():
                item = parser.feed(line.decode().rstrip("\r\n"))
                if item is not None:
                    if item.event == "end":
                        response.read()  # nothing but the end of the answer
                        self._keep(connection, response)
                    yield item
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnreachableError(self.where, error) from error
        finally:
            if all(connection is not kept for kept, _ in self._idle):
                connection.close()
        raise UnreachableError(self.where, "it hung up")

    def _send(
        self, prepared: Prepared, *, within: float | None = None, on_hang: Callable[[str], None] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connection(2 * SILENCE_SECONDS if within is None else within)
        pid, has_told = None, False

        def on_silence(seconds: float) -> None:
            nonlocal has_told
            is_stopped = pid is not None and _is_stopped(pid)
            if has_told or not (is_stopped or (seconds >= SILENCE_SECONDS and not self._answers())):
                return
            error = HangError(self.where, pid)
            if on_hang is None:
                raise error
            on_hang(str(error))
            has_told = True

        def respond(sock: socket.socket, **options: Any) -> http.client.HTTPResponse:
            watched: Any = _WatchedSocket(sock, on_silence)
            return http.client.HTTPResponse(watched, **options)

        try:
            pid = _connect(connection)
            on_silence(0)  # what is sent to a stopped daemon would take effect when it goes on
            connection.request(prepared.method, prepared.path, body=prepared.body, headers=prepared.headers)
            if within is None:
                connection.sock.settimeout(None)
                connection.response_class = respond  # type: ignore[assignment]
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if within is not None and isinstance(error, TimeoutError):
                raise DaemonError("timeout", f"the daemon did not answer within {within:g} s") from error
            if isinstance(error, TimeoutError | BlockingIOError):  # the latter: too many wait for it to accept
                raise HangError(self.where, pid) from error
            raise UnreachableError(self.where, getattr(error, "strerror", None) or error) from error
        except BaseException:
            connection.close()
            raise

    def _keep(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        """For the next request, where the daemon keeps it open."""
        if response.will_close or connection.sock is None:
            connection.close()
        else:
            connection.response_class = http.client.HTTPResponse  # as of a new one
            self._idle.append((connection, time.monotonic()))

    def _answers(self) -> bool:
        """Whether the daemon answers another request; one that is gone closes the connection by itself."""
        try:
            self.call("health", within=SILENCE_SECONDS)
        except DaemonError as error:
            return error.code != "timeout" and not isinstance(error, HangError)
        return True

    def _connection(self, timeout: float | None) -> http.client.HTTPConnection:
        with contextlib.suppress(IndexError):
            connection, since = self._idle.pop()
            is_closed_there = bool(select.select([connection.sock], [], [], 0)[0])  # nothing is owed, so it is the end
            if time.monotonic() - since < _IDLE_SECONDS and not is_closed_there:
                connection.sock.settimeout(timeout)
                return connection
            connection.close()
        if self._address is None:
            return _SocketConnection(self._home / SOCKET_FILE, timeout)
        return http.client.HTTPConnection(self._address, timeout=timeout)


def _connect(connection: http.client.HTTPConnection) -> int | None:
    """Unless it is connected already; the process at the other end, where it is on this machine."""
    if connection.sock is None:
        connection.connect()
    sock = connection.sock
    if sock.family != socket.AF_UNIX:
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def _refusal(body: bytes, status: int) -> DaemonError:
    try:
        document = json.loads(body)
    except ValueError:
        document = {}
    detail = str(document.get("detail") or f"the daemon answered with HTTP {status}")
    return DaemonError(str(document.get("code", "failed")), detail, tuple(document.get("faults") or ()))
