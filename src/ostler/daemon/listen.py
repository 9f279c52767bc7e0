"""The listeners of the daemon: the Unix socket of the home, and loopback TCP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostler.api.gate import Gate
from ostler.api.speaker import AGENT, PERSON
from ostler.home import SOCKET_FILE
from ostler.isolation.process.speaker import is_agent
from ostler.keeper import tree
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.validation import fault

_log = logging.getLogger("ostler.daemon")
#: Open streams end with the daemon; they get this long.
STREAM_SECONDS = 2
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


#: Of one listener, so that TCP never takes the places of the Unix socket.
MAX_CONNECTIONS = 200
#: Of all processes of agents together, so that people find a place on the Unix socket.
MAX_AGENT_CONNECTIONS = 100
#: How long a request may take to arrive.
REQUEST_SECONDS = 20.0


class _Protocol(H11Protocol):
    """HTTP with an end to patience: for connections beyond the limit, and for requests that do not arrive."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self._admits(transport):
            transport.abort()
        elif self._are_too_many():
            self._refuse("503 Service Unavailable")
        else:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._refuse, "408 Request Timeout")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        is_arriving = self.conn.their_state in {h11.IDLE, h11.SEND_BODY}
        if self._deadline is not None and not is_arriving:
            self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None and is_arriving:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._refuse, "408 Request Timeout")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _admits(self, transport: Any) -> bool:
        """Whether the peer may speak here at all."""
        del transport
        return True

    def _are_too_many(self) -> bool:
        return len(self.connections) > MAX_CONNECTIONS

    def _refuse(self, status: str) -> None:
        if self.conn.our_state is h11.IDLE:  # no answer has begun
            self.transport.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
        self.transport.close()


class _LocalProtocol(_Protocol):
    """Only the user of the daemon, and root, may speak to its socket; whatever the rights of the file say."""

    home: Path
    #: Processes of the user's hooks, which the daemon runs on behalf of a person.
    hooks: AbstractSet[int]
    is_agent: bool = False

    def _admits(self, transport: Any) -> bool:
        sock = transport.get_extra_info("socket")
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        # At this moment, because the process may end before it is served, and another one get its number.
        self.is_agent = is_agent(pid, self.home) or self._is_started_here(pid)
        self.client = (AGENT if self.is_agent else PERSON, pid)
        if uid not in {0, os.getuid()}:
            _log.warning("refused a connection of user %d", uid)
            return False
        return True

    def _is_started_here(self, pid: int) -> bool:
        """Whether an agent inside this program (levels none and thread) has started the process, and no hook."""
        ancestors = tree.ancestors(pid)
        return os.getpid() in ancestors and not self.hooks & {pid, *ancestors}

    def _are_too_many(self) -> bool:
        agents = [peer for peer in self.connections if isinstance(peer, _LocalProtocol) and peer.is_agent]
        return super()._are_too_many() or (self.is_agent and len(agents) > MAX_AGENT_CONNECTIONS)


class Listener:
    """One socket, served by one server with its own gate."""

    def __init__(self, app: Any, sock: socket.socket, manager: AgentLifecycleManager, hooks: AbstractSet[int]) -> None:
        is_local = sock.family == socket.AF_UNIX
        local = type("LocalProtocol", (_LocalProtocol,), {"home": manager.require_home(), "hooks": hooks})
        config = uvicorn.Config(
            Gate(app, manager, is_local_socket=is_local),
            http=local if is_local else _Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STREAM_SECONDS,
        )
        self._server = _Server(config)
        self._sock = sock

    async def run(self) -> None:
        await self._server.serve(sockets=[self._sock])

    def stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves the signals to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def unix_socket(home: Path) -> socket.socket:
    path = home / SOCKET_FILE
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # the lock of the home is held, so no daemon listens there
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(f"/proc/self/fd/{folder}/{SOCKET_FILE}")  # an address holds no more than 107 bytes
    finally:
        os.umask(before)
        os.close(folder)
    sock.listen(128)
    return sock


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def tcp_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    name = host.strip("[]") or "127.0.0.1"
    if name not in _LOOPBACK or not port.isdecimal():
        raise fault("listen", "must be a loopback address such as 127.0.0.1:7177; other addresses are refused", address)
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1" if name == "localhost" else name, int(port)))
    except OSError as error:
        sock.close()
        raise fault("listen", f"cannot be used ({error.strerror}); choose another port", address) from error
    return sock
