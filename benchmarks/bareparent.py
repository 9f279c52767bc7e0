"""The floor of a spawn: a preloaded parent that forks a child with a loop of its own, and nothing else.

It keeps no record, no limit, no exit code and no output. Run as a program it is that parent: for every byte on its
socket it forks; the child says ready with its pid on a socket of its own and echoes what it reads.
"""

from __future__ import annotations

import array
import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import ostler.agent_process.framing
import ostler.agents

LOADED = (ostler.agents, ostler.agent_process.framing)  # the same imports as a template of ours has


_REQUEST = b'{"name":"Ada"}'


class Bare:
    """One child of the parent."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self._line = line

    def call(self) -> None:
        self._line.send(_REQUEST)
        if self._line.recv(65536) != _REQUEST:
            raise SystemExit("the floor does not answer")

    async def ask(self) -> None:
        """The same from a loop, as whoever calls from asyncio must."""
        loop = asyncio.get_running_loop()
        self._line.setblocking(False)
        await loop.sock_sendall(self._line, _REQUEST)
        answer = await loop.sock_recv(self._line, 65536)
        self._line.setblocking(True)
        if answer != _REQUEST:
            raise SystemExit("the floor does not answer")

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._line.recv(1)
        self._line.close()


class BareParent:
    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        self._program = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        self._line.recv(1)

    def spawn(self) -> Bare:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rights = array.array("i", [theirs.fileno()])
        self._line.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        theirs.close()
        return Bare(int(ours.recv(20)), ours)

    def close(self) -> None:
        self._line.close()
        self._program.wait()


def serve(line: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are nobody's concern here
    gc.collect()
    gc.freeze()
    line.send(b"r")
    while True:
        _, fds, _, _ = socket.recv_fds(line, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            line.close()
            asyncio.run(echo(socket.socket(fileno=fds[0])))
            os._exit(0)
        os.close(fds[0])


async def echo(line: socket.socket) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def answer() -> None:
        data = line.recv(65536)
        line.send(data) if data else over.set()

    loop.add_reader(line, answer)
    line.send(str(os.getpid()).encode())
    await over.wait()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(socket.socket(fileno=int(sys.argv[1])))
