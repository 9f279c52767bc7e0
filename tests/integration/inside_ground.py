"""A keeper and a manager for tests: just enough of both to start an agent from a template and to talk to it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ostler.isolation import wire
from ostler.keeper.protocol import Line

_PATIENCE_SECONDS = 20.0
_PROGRAM = "import sys; from ostler.isolation.inside.template import main; main(int(sys.argv[1]))"
INSTANCE = "01890000-0000-7000-8000-00000000a9e7"
ATTEMPT = 3
EPOCH = 7
#: What template and agents have in common.
ENVIRONMENT = {"COLOUR": "red"}


class Template:
    """One template process. Its agents are our children too: they are born as its siblings."""

    def __init__(
        self, directory: Path, module: str, *, main: bool = False, package: str | None = None, spares: bool = True
    ) -> None:
        self.path = directory / f"{module}.py"
        self._log = directory / f"{self.path.stem}.log"
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        self.line = Line(ours)
        self._spare: tuple[int, Line] | None = None
        source = {"module": "__main__" if main else module, "path": str(self.path), "main": main, "package": package}
        setup = {"setup": {"sys_path": [str(directory), *sys.path], "source": source}}
        self.line.send(setup | {"spares": True} if spares else setup)
        self.answer = self.hear()
        self.agents: list[Started] = []

    def hear(self) -> dict[str, Any]:
        while "spare" in (message := self._next()):
            pass
        return message

    def await_spare(self) -> int:
        """Until the next agent need not wait for a fork. Its pid."""
        while self._spare is None:
            self._next()
        return self._spare[0]

    def _next(self) -> dict[str, Any]:
        _wait_for(self.line.sock)
        heard = self.line.receive()
        assert heard is not None, f"the template is gone: {self._log.read_text()}"
        message, fds = heard
        if "spare" in message:
            self._dismiss_spare()
            self._spare = message["spare"], Line(socket.socket(fileno=fds[0]))
        return message

    def _dismiss_spare(self) -> None:
        if self._spare is not None:
            self._spare[1].close()

    def start(self, qualname: str, *, begins: bool = True, word: str = "fork", **plan: Any) -> Started:
        ours, its = wire.channel()
        read, write = os.pipe()
        settle: dict[str, Any] = {
            "entrances": [],
            "env": {**ENVIRONMENT, "MARK": "of the agent"},
            "cwd": None,
            "nice": 0,
            "keeper": os.getpid(),
        }
        pid = self._begun({word: "a.1", "settle": settle}, [its.fileno(), write])
        its.close()
        os.close(write)
        agent = Started(pid, ours, read)
        self.agents.append(agent)
        if begins:
            agent.begin(qualname, **plan)
            assert agent.hear("made") == {"t": "made"}
        return agent

    def _begun(self, order: Mapping[str, Any], fds: list[int]) -> int:
        """By the spare, if there is one; as the keeper does it."""
        spare, self._spare = self._spare, None
        if spare is not None:
            pid, line = spare
            line.send({"settle": order["settle"]}, fds)
            line.close()
            self.line.send({"spent": pid})
            return pid
        self.line.send(order, fds)
        answer = self.hear()
        assert answer.get("forked") == "a.1", answer
        return int(answer["pid"])

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self._dismiss_spare()
        self.line.close()
        self.process.wait(_PATIENCE_SECONDS)

    def log(self) -> str:
        return self._log.read_text()


class Started:
    """The manager's side of one agent process."""

    def __init__(self, pid: int, sock: socket.socket, output: int) -> None:
        self.pid = pid
        self.sock = sock
        self.epoch = EPOCH
        self.code: int | None = None
        self._output = output
        self._joiner = wire.Joiner()
        self._calls = 0

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

    def tell(self, message: Mapping[str, Any], *, attempt: int = ATTEMPT) -> None:
        for packet in wire.packets(wire.encode(message), attempt, self.epoch):
            self.sock.send(packet)

    def next(self) -> dict[str, Any]:
        while True:
            _wait_for(self.sock)
            packet = wire.receive(self.sock)
            if packet is None:
                raise EOFError(self.pid)
            read = wire.read(packet)
            assert read.attempt == ATTEMPT
            if read.epoch < self.epoch:
                continue
            message = self._joiner.take(read)
            if message is not None:
                return message

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
        self.tell({"t": "acks", "ack": [number]})
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
        self.sock.close()
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
