"""A keeper and a manager for tests: just enough of both to start an agent from a template and to talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ostler.agent_process.framing import LineReader, encode
from ostler.keeper.protocol import AGENT_SOCKET, AHEAD, NOW, connect, listen

_PATIENCE_SECONDS = 60.0
_PROGRAM = """
import os, sys
given = int(sys.argv.pop(1))
if given != 3:
    os.dup2(given, 3)
    os.close(given)
from ostler.agent_process.template import main
main()
"""
INSTANCE = "01890000-0000-7000-8000-00000000a9e7"
ATTEMPT = 3
EPOCH = 7
KEY = "a key"
#: What template and agents have in common.
ENVIRONMENT = {"COLOUR": "red"}


class Template:
    """One template process. Its agents are our children too: they are born as its siblings."""

    def __init__(self, directory: Path, module: str, *, main: bool = False, package: str | None = None) -> None:
        self.path = directory / f"{module}.py"
        self._log = directory / f"{self.path.stem}.log"
        self.sock, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
            )
        its.close()
        self._spares: deque[tuple[int, socket.socket]] = deque()
        source = {"module": "__main__" if main else module, "path": str(self.path), "main": main, "package": package}
        self.send({"setup": {"sys_path": [str(directory), *sys.path], "source": source}})
        self.answer = self.hear()[0]
        self.agents: list[Started] = []

    def send(self, message: Mapping[str, Any]) -> None:
        self.sock.send(json.dumps(message).encode())

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        _wait_for(self.sock)
        packet, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 2, socket.MSG_CMSG_CLOEXEC)
        assert packet, f"the template is gone: {self._log.read_text()}"
        return json.loads(packet), fds

    def fork(self, when: str) -> tuple[int, socket.socket]:
        """A child that waits for its order."""
        self.send({"fork": when})
        answer, fds = self.hear()
        return int(answer["forked"]), socket.socket(fileno=fds[0])

    def fork_spare(self) -> int:
        self._spares.append(self.fork(AHEAD))
        return self._spares[-1][0]

    def start(self, qualname: str, *, begins: bool = True, **plan: Any) -> Started:
        run = tempfile.TemporaryDirectory(prefix="ostler-run-")
        settings = {"env": {**ENVIRONMENT, "MARK": "of the agent"}, "keeper": os.getpid()}
        read, write = os.pipe()
        listener = listen(run.name, AGENT_SOCKET, 8)
        pid, sock = self._spares.popleft() if self._spares else self.fork(NOW)
        with sock, listener:
            order = json.dumps({"plan": settings, "key": KEY, "run": run.name}).encode()
            socket.send_fds(sock, [order], [listener.fileno(), write, write])
        os.close(write)
        agent = Started(pid, run, read)
        self.agents.append(agent)
        if begins:
            agent.begin(qualname, **plan)
            assert agent.hear("made") == {"t": "made"}
        return agent

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        while self._spares:
            self._spares.popleft()[1].close()
        self.sock.close()
        self.process.wait(_PATIENCE_SECONDS)

    def log(self) -> str:
        return self._log.read_text()


class Started:
    """The manager's side of one agent process."""

    def __init__(self, pid: int, run: tempfile.TemporaryDirectory[str], output: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._run = run
        self._output = output
        self._calls = 0
        self.welcome: dict[str, Any] = {}
        self._sockets: list[socket.socket] = []
        self.sock = self.connect(EPOCH)

    @property
    def unsent(self) -> Path:
        return Path(self._run.name, "unsent.jsonl")

    def connect(self, epoch: int, key: str = KEY) -> socket.socket:
        """As a new manager; it is known by its epoch."""
        self.sock = connect(self._run.name, AGENT_SOCKET)
        self._sockets.append(self.sock)
        self._reader = LineReader()
        self._messages: deque[dict[str, Any]] = deque()
        self.tell({"t": "hello", "key": key, "epoch": epoch})
        return self.sock

    def begin(self, qualname: str, **plan: Any) -> None:
        given = {
            "instance_id": INSTANCE,
            "attempt": ATTEMPT,
            "name": "somebody",
            "definition_id": INSTANCE,
            "context": {"Colour": "red"},
            "limits": {"max_worker_threads": 2, "execution_timeout": "PT1M30S"},
            "workdir": None,
            "source": {"qualname": qualname},
        }
        self.tell({"t": "begin", "plan": given | plan})

    def tell(self, message: Mapping[str, Any]) -> None:
        self.sock.setblocking(True)
        self.sock.sendall(encode(message))

    def next(self) -> dict[str, Any]:
        while not self._messages:
            _wait_for(self.sock)
            data = self.sock.recv(1 << 18)
            if not data:
                raise EOFError(self.pid)
            for message in self._reader.feed(data):
                if message["t"] == "welcome":
                    self.welcome = message
                self._messages.append(message)
        message = self._messages.popleft()
        return self.next() if message["t"] == "welcome" else message

    def hear(self, kind: str) -> dict[str, Any]:
        """The next of that kind; what comes before it is passed over."""
        while (message := self.next())["t"] != kind:
            pass
        return message

    def call(self, payload: Any = None, verb: str = "process") -> int:
        self._calls += 1
        self.tell({"t": "call", "id": self._calls, "verb": verb, "payload": payload})
        return self._calls

    def ask(self, payload: Any = None, verb: str = "process") -> dict[str, Any]:
        number = self.call(payload, verb)
        answer = self.hear("answer")
        assert answer["id"] == number
        self.tell({"t": "ack", "ack": [number]})
        return answer

    def wait(self) -> int:
        """The exit code; minus the signal, if it was one."""
        if self.code is None:
            end = time.monotonic() + _PATIENCE_SECONDS
            while True:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    break
                assert time.monotonic() < end, "it does not end"
                time.sleep(0.002)
            self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def output(self) -> str:
        """All that it printed, once it has ended."""
        self.wait()
        pieces = []
        while piece := os.read(self._output, 65536):
            pieces.append(piece)
        return b"".join(pieces).decode()

    def close(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
        for sock in self._sockets:
            sock.close()
        self._run.cleanup()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def _wait_for(sock: socket.socket) -> None:
    ready, _, _ = select.select([sock], [], [], _PATIENCE_SECONDS)
    assert ready, "nothing was heard"


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)
