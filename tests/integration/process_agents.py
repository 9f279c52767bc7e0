"""Agents for the tests of level process. Imported in processes of their own, so it imports little."""

# ruff: noqa: ASYNC220, ASYNC230, PTH115, PTH123, PTH208, T201 - they do what agents do, in processes of their own

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from ostler.agents import Agent, AgentContext


class Handy(Agent):
    """Does what the request names."""

    def initialize(self, context: AgentContext) -> None:
        self.context = context

    async def process(self, request: Any) -> Any:
        return await getattr(self, request["do"])(request)

    async def echo(self, request: Any) -> Any:
        return request.get("value")

    async def hang(self, _: Any) -> None:
        self.context.signal("began")
        await asyncio.Event().wait()

    async def look(self, _: Any) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "environ": dict(os.environ),
            "cwd": str(Path.cwd()),
            "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
            "nice": os.nice(0),
        }

    async def peek(self, request: Any) -> list[str]:
        """Which of these of another process it can read."""
        seen = []
        for name in ("environ", "mem", "fd/0"):
            try:
                with open(f"/proc/{request['pid']}/{name}", "rb") as file:
                    file.read(1)
                seen.append(name)
            except OSError:
                continue
        return seen

    async def shout(self, request: Any) -> None:
        print(request["text"])
        sys.stderr.write(f"{request['text']}\n")

    async def die(self, request: Any) -> None:
        os.kill(os.getpid(), request["signal"])
        await asyncio.Event().wait()

    async def leave(self, request: Any) -> None:
        os._exit(request["code"])

    async def eat(self, request: Any) -> int:
        held = bytearray(request["mb"] << 20)
        for place in range(0, len(held), 4096):
            held[place] = 1
        return len(held)

    async def raise_child(self, _: Any) -> int:
        """A grandchild that leaves the session and ignores TERM."""
        code = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        return subprocess.Popen([sys.executable, "-c", code]).pid

    async def babble(self, request: Any) -> None:
        """A line that is no message, on the channel itself."""
        self._channel().send(bytes.fromhex(request["hex"]) + b"\n")
        await asyncio.Event().wait()

    async def hang_up(self, _: Any) -> None:
        self._channel().shutdown(socket.SHUT_RDWR)
        signal.pause()

    async def secret(self, _: Any) -> Any:
        return {1, 2, 3}

    @staticmethod
    def _channel() -> socket.socket:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(name)))
                peer = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                if peer not in {0, os.getpid(), os.getppid()}:  # nobody, its own loop, the keeper that listened for it
                    return sock
                sock.close()
        raise LookupError("no channel")


def make_handy() -> Agent:
    return Handy()


def fails() -> Agent:
    raise ImportError("not today")
