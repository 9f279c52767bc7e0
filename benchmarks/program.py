"""A daemon of its own on a new home, and a floor program, each behind a Unix socket, for the tables of the HTTP API."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ostler.client.blocking import BlockingClient
from ostler.client.launch import start_daemon, wait_until_gone
from ostler.home import SOCKET_FILE

_START_SECONDS = 60.0


class Connection(http.client.HTTPConnection):
    """One connection to a Unix socket, kept open over requests."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))

    def get(self, path: str) -> bytes:
        self.request("GET", path)
        response = self.getresponse()
        body = response.read()
        if response.status != http.HTTPStatus.OK:
            raise SystemExit(f"GET {path} gave {response.status}: {body[:300]!r}")
        return body

    def milliseconds(self, path: str) -> float:
        began = time.perf_counter()
        self.get(path)
        return (time.perf_counter() - began) * 1000


class Daemon:
    def __init__(self, home: Path, status: dict[str, Any]) -> None:
        self.home = home
        self.pid = int(status["pid"])
        self.client = BlockingClient(home)

    def connection(self) -> Connection:
        return Connection(self.home / SOCKET_FILE)


@contextlib.contextmanager
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as served:
        yield served


@contextlib.contextmanager
def serving(home: Path) -> Iterator[Daemon]:
    started = Daemon(home, start_daemon(home))
    try:
        yield started
    finally:
        started.client.call("stop_daemon")
        wait_until_gone(started.pid, _START_SECONDS)


@contextlib.contextmanager
def floor(*words: str) -> Iterator[Connection]:
    """The floor program `bareapi.py`, with what it is to serve."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "floor.sock"
        script = str(Path(__file__).with_name("bareapi.py"))
        with subprocess.Popen([sys.executable, script, str(path), *words], stdin=subprocess.PIPE) as program:
            try:
                wait_for_answer(path, "/healthz")
                yield Connection(path)
            finally:
                program.terminate()


def wait_for_answer(path: Path, url: str) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), contextlib.closing(Connection(path)) as connection:
            connection.get(url)
            return
        time.sleep(0.002)
    raise SystemExit(f"nothing answers at {path}")
