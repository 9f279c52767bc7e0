"""One run of one program: in a session of its own, watched by its pidfd, ended together with its group.

A process id may be given to somebody else as soon as its owner was reaped. So the end is first only looked at
(`WNOWAIT`); while the dead child still holds its id the rest of its group is killed; then it is reaped, and from
there on nothing is signalled any more. All of that happens in one callback of the loop, so nothing comes between.
A grandchild that left the group is out of reach here; the process level finds those.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import termios
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler.agents.output import KeptOutput
from ostler.seams import Clock

_CHUNK = 64 * 1024
#: More than a pipe can hold: enough for what a child wrote before it ended, and a bound on one that never stops.
_LAST_CHUNKS = 32
_LAST_MOMENT_S = 0.2
#: Lines and columns of the terminal.
_WINDOW = (40, 120)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What to start and where."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    #: What it reads; without it there is nothing to read.
    stdin: bytes | None = None
    pty: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How it ended: by a code, by a signal, or unknown because somebody else reaped it."""

    code: int | None = None
    signal_name: str | None = None


class Child:
    """Made on the loop that will watch it, and used only there."""

    __slots__ = ("_clock", "_ended", "_ending", "_loop", "_output", "_process", "_reading", "_silent", "_watched")

    def __init__(self, start: Start, output: KeptOutput, clock: Clock) -> None:
        """Starts it. Raises `OSError` when the program cannot be run; then nothing is left."""
        self._clock = clock
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._ending = Ending()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._silent: asyncio.Future[None] = self._loop.create_future()
        with ExitStack() as undo:
            with ExitStack() as given:
                self._reading, writing = _channel(pty=start.pty)
                undo.callback(os.close, self._reading)
                given.callback(os.close, writing)
                self._process = _spawn(start, writing, given)
                undo.callback(_put_down, self._process)
            self._watched = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self._loop.add_reader(self._reading, self._read)
        self._loop.add_reader(self._watched, self._see_end)

    async def wait(self) -> Ending:
        """Until it has ended and been reaped."""
        await asyncio.wait({self._ended})
        return self._ending

    async def drain(self, seconds: float) -> None:
        """Take in the rest of the output, for at most so long: somebody who left the group may keep it open."""
        await self._within(self._silent, seconds)

    async def stop(self, grace: float) -> None:
        """Ask the group to end, then force it. Being cancelled meanwhile only means to force it at once."""
        self._signal_group(signal.SIGTERM)
        # One that is stopped would hear the request only when somebody lets it go on.
        self._signal_group(signal.SIGCONT)
        with suppress(asyncio.CancelledError):
            await self._within(self._ended, grace)
        self._signal_group(signal.SIGKILL)
        # Waits on even when cancelled, because the dead must be reaped; bounded, because one may hang in the kernel.
        until = self._clock.mono() + grace
        while not self._ended.done() and (left := until - self._clock.mono()) > 0:
            with suppress(asyncio.CancelledError):
                await self._within(self._ended, left)

    def close(self) -> None:
        """Let go of the output. What has not ended is killed, and the loop reaps it as soon as it is dead."""
        self._signal_group(signal.SIGKILL)
        for _ in range(_LAST_CHUNKS):
            if self._silent.done() or not self._read():
                break
        self._hang_up()
        if not self._ended.done() and self._loop.is_closed():
            # Nobody watches any more. The dead are quick, so this is a moment; one that hangs is left to subprocess.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_MOMENT_S)
            os.close(self._watched)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._ended.done():
            return
        try:
            # Fails when somebody else has reaped it: then its id may be a stranger's by now.
            os.waitid(os.P_PIDFD, self._watched, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.killpg(self._process.pid, number)
        except (ChildProcessError, ProcessLookupError, PermissionError):
            return

    def _see_end(self) -> None:
        try:
            status = os.waitid(os.P_PIDFD, self._watched, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            status = None
        else:
            if status is None:
                return
            self._signal_group(signal.SIGKILL)
            self._ending = _ending(status)
        self._ended.set_result(None)
        _forget(self._loop, self._watched)
        self._process.wait()

    def _read(self) -> bool:
        """One piece, so that a chatty program does not keep the loop to itself. False when there is none now."""
        try:
            chunk = os.read(self._reading, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            # A terminal ends with an error, where a pipe ends with nothing.
            chunk = b""
        if chunk:
            self._output.feed(chunk)
        else:
            self._hang_up()
        return True

    def _hang_up(self) -> None:
        if not self._silent.done():
            self._silent.set_result(None)
            _forget(self._loop, self._reading)

    async def _within(self, event: asyncio.Future[None], seconds: float) -> None:
        """Wait for it, but not for longer than that, by the clock that was passed in."""
        if event.done():
            return
        woken: asyncio.Future[None] = self._loop.create_future()

        def wake(_why: object = None) -> None:
            if not woken.done():
                woken.set_result(None)

        event.add_done_callback(wake)
        timer = self._clock.call_later(seconds, wake)
        try:
            await woken
        finally:
            timer.cancel()
            event.remove_done_callback(wake)


def _channel(*, pty: bool) -> tuple[int, int]:
    """Where we read its output, and where it writes it. Python makes both ends close-on-exec."""
    if not pty:
        reading, writing = os.pipe()
    else:
        reading, writing = os.openpty()
        termios.tcsetwinsize(writing, _WINDOW)
        settings = termios.tcgetattr(writing)
        # The output is kept as text, so a line should end as it does elsewhere.
        settings[1] &= ~termios.ONLCR
        termios.tcsetattr(writing, termios.TCSANOW, settings)
    os.set_blocking(reading, False)
    return reading, writing


def _spawn(start: Start, writing: int, given: ExitStack) -> subprocess.Popen[bytes]:
    """`given` holds what only the child needs, and closes it here once the child has its own."""
    reads = writing if start.pty else subprocess.DEVNULL
    if start.stdin is not None:
        # A file in memory has room for all of it and ends by itself; a pipe would have to be fed.
        reads = os.memfd_create("ostler-prompt", os.MFD_CLOEXEC)
        given.callback(os.close, reads)
        with os.fdopen(reads, "wb", closefd=False) as file:
            file.write(start.stdin)
        os.lseek(reads, 0, os.SEEK_SET)
    return subprocess.Popen(  # noqa: S603 - no shell, and the words come from the user's own definition
        list(start.argv),
        env=dict(start.env),
        cwd=start.cwd,
        stdin=reads,
        stdout=writing,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _put_down(process: subprocess.Popen[bytes]) -> None:
    # Not one that somebody else has reaped: its id may be a stranger's by now.
    with suppress(ChildProcessError, ProcessLookupError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _forget(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    # A loop that is closed does not watch it any more.
    with suppress(RuntimeError):
        loop.remove_reader(descriptor)
    os.close(descriptor)


def _ending(status: Any) -> Ending:
    if status.si_code == os.CLD_EXITED:
        return Ending(code=status.si_status)
    try:
        return Ending(signal_name=signal.Signals(status.si_status).name)
    except ValueError:
        return Ending(signal_name=f"signal {status.si_status}")
