"""What the blocking client makes of a daemon that hangs or has ended."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_a_process_that_its_parent_has_not_reaped_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        zombie = int(parent.stdout.readline())
        assert wait_until_gone(zombie, 60)
        assert not wait_until_gone(parent.pid, 0)
        parent.kill()
