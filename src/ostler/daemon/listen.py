"""The listeners of the daemon: the Unix socket of the home, and loopback TCP."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostler.api.gate import Gate
from ostler.api.speaker import AGENT, PERSON
from ostler.home import SOCKET_FILE
from ostler.isolation.process.speaker import is_agent
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.validation import fault

_log = logging.getLogger("ostler.daemon")
#: Open streams end with the daemon; they get this long.
STREAM_SECONDS = 2
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class _LocalProtocol(H11Protocol):
    """Only the user of the daemon, and root, may speak to its socket; whatever the rights of the file say."""

    home: Path

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        # At this moment, because the process may end before it is served, and another one get its number.
        self.client = (AGENT if is_agent(pid, self.home) else PERSON, pid)
        if uid not in {0, os.getuid()}:
            _log.warning("refused a connection of user %d", uid)
            transport.abort()


class Listener:
    """One socket, served by one server with its own gate."""

    def __init__(self, app: Any, sock: socket.socket, manager: AgentLifecycleManager) -> None:
        is_local = sock.family == socket.AF_UNIX
        local = type("LocalProtocol", (_LocalProtocol,), {"home": manager.require_home()})
        config = uvicorn.Config(
            Gate(app, manager, is_local_socket=is_local),
            http=local if is_local else H11Protocol,
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
