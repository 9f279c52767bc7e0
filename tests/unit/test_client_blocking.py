"""The blocking client: its connections, and what it makes of a daemon that hangs or has ended."""

from __future__ import annotations

import contextlib
import http.server
import select
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler.client import blocking
from ostler.client.blocking import BlockingClient, HangError
from ostler.client.launch import wait_until_gone
from ostler.home import SOCKET_FILE

#: Prints the pid of a child that has ended, and does not reap it.
_PARENT = "import os, time; pid = os.fork() or os._exit(0); print(pid, flush=True); time.sleep(600)"


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingClient]:
    """The client of a daemon that listens and answers nothing."""
    monkeypatch.setattr(blocking, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(blocking, "_LOOK_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / SOCKET_FILE))
        sock.listen(128)
        yield BlockingClient(tmp_path)


def test_a_daemon_that_answers_nothing_is_an_error_that_says_what_to_do(silent: BlockingClient) -> None:
    with pytest.raises(HangError, match=r"the daemon \(pid \d+\) does not answer; .*kill -9"):
        silent.call("instances")


def test_a_stream_tells_of_a_daemon_that_hangs_and_waits_for_it(silent: BlockingClient) -> None:
    class HeardError(Exception):
        pass

    def on_hang(told: str) -> None:
        assert "does not answer" in told
        raise HeardError

    with pytest.raises(HeardError):
        next(silent.stream("events", on_hang=on_hang))


class AnsweringDaemon(socketserver.UnixStreamServer):
    """Answers every request with the number of its connection; a stream has one event, the last."""

    def __init__(self, home: Path, *, closes: bool) -> None:
        super().__init__(str(home / SOCKET_FILE), _Answers)
        self.closes = closes
        self.connections = 0

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)


class _Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: AnsweringDaemon

    def do_GET(self) -> None:
        is_stream = "follow" in self.path
        body = b"event: end\ndata: {}\n\n" if is_stream else str(self.server.connections).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.server.closes

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def answering(home: Path, *, closes: bool) -> Iterator[BlockingClient]:
    with AnsweringDaemon(home, closes=closes) as daemon:
        serving = threading.Thread(target=daemon.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        client = BlockingClient(home)
        yield client
        client.close()
        daemon.shutdown()
        serving.join()


def test_calls_and_a_stream_that_has_ended_share_one_connection(tmp_path: Path) -> None:
    with answering(tmp_path, closes=False) as client:
        assert client.call("health") == 1
        assert list(client.stream("logs", instance="ada")) == []
        assert client.call("health") == 1


def test_a_connection_that_the_daemon_has_closed_is_not_used_again(tmp_path: Path) -> None:
    with answering(tmp_path, closes=True) as client:
        assert client.call("health") == 1
        ((connection, _),) = client._idle  # noqa: SLF001 - when it is closed is seen nowhere else
        assert select.select([connection.sock], [], [], 60)[0]
        assert client.call("health") == 2


def test_a_connection_that_was_idle_for_long_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "_IDLE_SECONDS", 0.0)
    with AnsweringDaemon(tmp_path, closes=False) as daemon:  # serves one connection after the other

        def serve() -> None:
            for _ in range(2):
                daemon.handle_request()

        serving = threading.Thread(target=serve)
        serving.start()
        client = BlockingClient(tmp_path)
        assert [client.call("health") for _ in range(2)] == [1, 2]
        client.close()
        serving.join()


def test_a_process_that_its_parent_has_not_reaped_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        zombie = int(parent.stdout.readline())
        assert wait_until_gone(zombie, 60)
        assert not wait_until_gone(parent.pid, 0)
        parent.kill()
