"""Agents that do what no agent should, each in a process of its own. It is imported there, so it imports little."""

# ruff: noqa: PTH115, PTH123, PTH208 - they do what agents do, in processes of their own

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from ostler.agents import Agent, AgentContext

#: Whatever a test forgets ends by itself after so many seconds.
LAST_RESORT = 60
_CHUNK = b"0123456789abcdef" * 4095 + b"fifteen letters\n"

_BEGIN = f"import os, signal, sys, time; end = time.monotonic() + {LAST_RESORT}\n"
_REST = "while time.monotonic() < end: time.sleep(1)\n"
_SAY = "sys.stdout.write('up\\n'); sys.stdout.flush()\n"
#: Programs that an agent starts, each of them hard to end.
PROGRAMS = {
    "busy": f"{_BEGIN}{_SAY}\nwhile time.monotonic() < end: pass\n",
    "daemon": f"{_BEGIN}\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n{_SAY}{_REST}",
    "deaf": f"{_BEGIN}signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{_SAY}{_REST}",
    "tidy": (
        f"{_BEGIN}def tidy(*_):\n    open(sys.argv[1], 'w').write('TERM')\n    os._exit(0)\n"
        f"signal.signal(signal.SIGTERM, tidy)\n{_SAY}{_REST}"
    ),
    "stopped": f"{_BEGIN}{_SAY}os.kill(os.getpid(), signal.SIGSTOP)\n{_REST}",
    "restless": f"{_BEGIN}{_SAY}\nwhile time.monotonic() < end:\n    if os.fork(): os._exit(0)\n",
    "bomb": (
        f"{_BEGIN}signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.setsid()\n{_SAY}"
        "while time.monotonic() < end:\n    try: os.fork()\n    except OSError: time.sleep(0.01)\n"
    ),
}


class Doer(Agent):
    """Does what the request names."""

    def initialize(self, context: AgentContext) -> None:
        self.context = context
        self.held: list[bytearray] = []

    async def process(self, request: Any) -> Any:
        return await getattr(self, request["do"])(request)

    async def echo(self, request: Any) -> Any:
        return request.get("value")

    async def know(self, _: Any) -> dict[str, int]:
        return {"pid": os.getpid(), "attempt": self.context.attempt, "parent": os.getppid()}

    # --- too much of it -----------------------------------------------------------------------------

    async def eat(self, request: Any) -> None:
        """Little by little, so that nothing but its box can stop it."""
        for _ in range(request["mb"]):
            self.held.append(bytearray(os.urandom(1)) * (1 << 20))

    async def spin(self, request: Any) -> None:
        end = time.monotonic() + request["seconds"]
        while time.monotonic() < end:
            pass

    async def flood(self, request: Any) -> int:
        """As fast as it is taken; how much that was."""
        written, end = 0, time.monotonic() + request["seconds"]
        while written < request["most"] and time.monotonic() < end:
            written += os.write(1, _CHUNK)
        return written

    async def speak(self, request: Any) -> None:
        for number in range(request["count"]):
            self.context.signal("n", {"n": number})
            if number % 100 == 0:
                await asyncio.sleep(0)

    async def speak_alone(self, request: Any) -> None:
        """As soon as there is a file, which goes when all is said; and then perhaps ends."""

        def speak() -> None:
            while not os.access(request["when"], os.F_OK):
                time.sleep(0.01)
            for number in range(request["count"]):
                self.context.signal("n", {"n": number})
            os.unlink(request["when"])  # noqa: PTH108 - it does what agents do
            if request["ends"]:
                os._exit(3)

        threading.Thread(target=speak, daemon=True).start()

    async def raise_one(self, request: Any) -> None:
        """Start one of `PROGRAMS` and answer when it is up."""
        command = [sys.executable, "-I", "-S", "-c", PROGRAMS[request["program"]], request.get("argument", "")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220 - a short wait hurts nobody
        assert child.stdout is not None
        self.held.append(bytearray(child.stdout.readline()))

    # --- ends ---------------------------------------------------------------------------------------

    async def leave(self, request: Any) -> None:
        os._exit(request["code"])

    async def leave_on_term(self, request: Any) -> None:
        def leave(*_: object) -> None:
            if "note" in request:
                os.close(os.open(request["note"], os.O_CREAT))
            os._exit(7)

        signal.signal(signal.SIGTERM, leave)

    async def die(self, request: Any) -> None:
        os.kill(os.getpid(), request["signal"])
        await asyncio.Event().wait()

    async def ignore(self, _: Any) -> None:
        """Neither its time-out nor a signal gets through to it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end = time.monotonic() + LAST_RESORT
        while time.monotonic() < end:
            time.sleep(0.05)  # noqa: ASYNC251 - that it blocks is the point

    # --- walls --------------------------------------------------------------------------------------

    async def pry(self, request: Any) -> dict[str, str]:
        """What comes of every way into another process."""
        place = f"/proc/{request['pid']}"
        return {
            "environ": _tried(lambda: _read(f"{place}/environ")),
            "mem": _tried(lambda: _read(f"{place}/mem")),
            "maps": _tried(lambda: _read(f"{place}/maps")),
            "fd": _tried(lambda: os.readlink(f"{place}/fd/1")),
            "fd/1": _tried(lambda: os.close(os.open(f"{place}/fd/1", os.O_RDONLY | os.O_NONBLOCK))),
            "cwd": _tried(lambda: os.readlink(f"{place}/cwd")),
            "pidfd_getfd": _tried(lambda: _steal(request["pid"])),
        }

    async def surroundings(self, _: Any) -> dict[str, Any]:
        return {"environ": dict(os.environ), "files": _open_files(), "child": _files_of_a_child()}


class Plodder(Agent):
    """Its plain method blocks, and tells how many of it ran at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._most = 0

    def process(self, request: Any) -> int:
        with self._lock:
            self._now += 1
            self._most = max(self._most, self._now)
        time.sleep(request["seconds"])
        with self._lock:
            self._now -= 1
        return self._most


def _tried(way: Any) -> str:
    try:
        way()
    except OSError as error:
        return type(error).__name__
    return "open"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1)


def _steal(pid: int) -> None:
    """Descriptor 0 of another process, by the system call for it."""
    import ctypes  # noqa: PLC0415 - only the one that steals needs it

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.pidfd_open(pid)
    try:
        if libc.syscall(438, descriptor, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(descriptor)


def _open_files() -> list[str]:
    """By kind: a socket by its type, anything else by what the kernel calls it."""
    found = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    target = one.type.name
            found.append(f"{name} {target}")
    return found


def _files_of_a_child() -> list[str]:
    """What a program sees that an agent starts without a thought for descriptors."""
    code = "import os; [print(n, os.readlink(f'/proc/self/fd/{n}')) for n in os.listdir('/proc/self/fd')[:-1]]"
    done = subprocess.run([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, close_fds=False, check=True)
    return done.stdout.decode().splitlines()
