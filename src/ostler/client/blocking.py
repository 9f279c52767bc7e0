"""A blocking client on the standard library alone: what the command line uses."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ostler.client.calls import Prepared, StreamItem, StreamParser, prepare
from ostler.errors import UNREACHABLE
from ostler.home import SOCKET_FILE

#: How long a stream tries to find its daemon again.
RECONNECT_SECONDS = 60.0
_PAUSE_SECONDS = 0.1


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

    def __init__(self, home: Path, *, address: str | None = None, token: str | None = None) -> None:
        self._home = home
        self._address = None if address is None else address.removeprefix("http://").rstrip("/")
        self._token = token

    @property
    def where(self) -> str:
        return self._address or str(self._home / SOCKET_FILE)

    def call(self, verb: str, /, *, key: str | None = None, within: float | None = None, **parameters: Any) -> Any:
        """The JSON of the answer, within so many seconds. Raises `DaemonError`."""
        prepared = prepare(verb, parameters, key=key, token=self._token)
        connection, response = self._send(prepared, within)
        try:
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(self.where, error) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise _refusal(body, response.status)
        return json.loads(body) if body else None

    def stream(self, verb: str, /, *, after: str | None = None, **parameters: Any) -> Iterator[StreamItem]:
        """Follow a stream. After a lost connection it goes on from its cursor, without a gap or a double.

        It ends when the daemon says so, and raises `UnreachableError` when no daemon is found for a minute.
        """
        cursor, lost_at = after, 0.0
        while True:
            try:
                for item in self._stream_once(verb, cursor, parameters):
                    lost_at = 0.0
                    if item.event in {"end", "bye"}:
                        if item.event == "end":
                            return
                        break
                    cursor = item.id or cursor
                    yield item
            except UnreachableError:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > RECONNECT_SECONDS:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _stream_once(self, verb: str, cursor: str | None, parameters: Mapping[str, Any]) -> Iterator[StreamItem]:
        first = {} if cursor is None else {"after": cursor}
        prepared = prepare(verb, {**parameters, **first, "follow": True}, token=self._token)
        connection, response = self._send(prepared, None)
        try:
            if response.status >= 400:
                raise _refusal(response.read(), response.status)
            parser = StreamParser()
            while line := response.readline():
                item = parser.feed(line.decode().rstrip("\r\n"))
                if item is not None:
                    yield item
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnreachableError(self.where, error) from error
        finally:
            connection.close()
        raise UnreachableError(self.where, "it hung up")

    def _send(
        self, prepared: Prepared, timeout: float | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connection(timeout)
        try:
            connection.request(prepared.method, prepared.path, body=prepared.body, headers=prepared.headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise DaemonError("timeout", f"the daemon did not answer within {timeout:g} s") from error
            raise UnreachableError(self.where, getattr(error, "strerror", None) or error) from error

    def _connection(self, timeout: float | None) -> http.client.HTTPConnection:
        if self._address is None:
            return _SocketConnection(self._home / SOCKET_FILE, timeout)
        return http.client.HTTPConnection(self._address, timeout=timeout)


def _refusal(body: bytes, status: int) -> DaemonError:
    try:
        document = json.loads(body)
    except ValueError:
        document = {}
    detail = str(document.get("detail") or f"the daemon answered with HTTP {status}")
    return DaemonError(str(document.get("code", "failed")), detail, tuple(document.get("faults") or ()))
