"""A preloaded parent: it imports the module of an agent once, and each agent is a fork of it.

It has one thread, no loop, and nothing open but its socket to the keeper; so that a child has all code in memory,
shared with its siblings, and nothing of anybody else's. A module that cannot be forked (it has started a thread, or
opened a connection) is not: the process that has loaded it becomes the one agent itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from ostler.isolation.inside import spare
from ostler.isolation.inside.filling import fill_holes
from ostler.isolation.inside.finding_source import Source, load, source_files
from ostler.isolation.inside.gathering import gather
from ostler.isolation.inside.host import Host, HostLoop
from ostler.isolation.inside.leaving import (
    files_being_written,
    flush,
    forget_what_was_registered,
    take_leave,
)
from ostler.isolation.inside.rehearsal import FirstSteps, rehearse
from ostler.isolation.inside.spare import await_order, fork_spare
from ostler.keeper import forking, protocol, settle
from ostler.keeper.forking import fork_for_keeper
from ostler.keeper.protocol import Line
from ostler.keeper.settle import caught_signals, settle_fork, settle_in

#: Where the keeper puts the socket over which it speaks to a template.
CONTROL = 3
#: The exit code of an agent that never came to life.
UNSETTLED = 71
_FAILED = 1
_STDIO = (0, 1, 2)
#: Quiet for so long, a template forks a spare.
_LULL_MS = 5


def main(control: int = CONTROL) -> NoReturn:
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _use_plain_output()
    scattered = gather(partial(rehearse, 1), forking, protocol, settle, spare)
    rehearse()
    # What is ours stays as it is from here on: to look through it again would take longer than to load a small module.
    gc.freeze()
    template = Template(Line(socket.socket(fileno=control)), scattered)
    code = template.serve()
    flush((sys.stdout, sys.stderr))
    # Without what the user's module wants done at the end of a program: its program ends elsewhere.
    os._exit(code)


class Template:
    def __init__(self, line: Line, kept: list[object]) -> None:
        self._first_steps = FirstSteps()
        self._kept = kept
        #: Opened by the module, and written to.
        self._files: list[Any] = []
        self._line = line
        self._module: ModuleType | None = None
        #: As it was before the module was loaded.
        self._environment = dict(os.environ)
        #: Open since before the module was loaded, and so none of its own.
        self._before = frozenset(_open_descriptors())
        #: Opened by the module, and harmless to share.
        self._shared: tuple[int, ...] = ()
        #: What the module does with signals is undone in each agent.
        self._caught: tuple[int, ...] = ()
        self._forks = False
        #: The keeper knows what to do with a spare, and has one of ours.
        self._gives_spares = self._has_spare = False

    def serve(self) -> int:
        """Until the keeper hangs up. The code with which to exit."""
        while True:
            heard = self._next()
            if heard is None:
                return 0
            message, fds = heard
            if "setup" in message:
                self._gives_spares = bool(message.get("spares"))
                if not self._set_up(message["setup"]):
                    return _FAILED
            elif "spent" in message:
                self._has_spare = False
            elif "fork" in message:
                self._fork(str(message["fork"]), message["settle"], fds)
            elif "become" in message:
                self._become(str(message["become"]), message["settle"], fds)
            _close(fds)

    def _next(self) -> tuple[dict[str, Any], list[int]] | None:
        poll = select.poll()
        while True:
            poll.register(self._line, select.POLLIN | (select.POLLOUT if self._line.is_waiting else 0))
            # Between two starts, never while one is waiting.
            lacks = self._forks and self._gives_spares and not self._has_spare
            if not poll.poll(_LULL_MS if lacks else None):
                self._keep_spare()
            try:
                self._line.flush()
                return self._line.receive()
            except BlockingIOError:
                continue
            except OSError:
                return None

    def _tell(self, message: Mapping[str, Any]) -> None:
        # A keeper that is gone is noticed by the next look at the socket.
        with contextlib.suppress(OSError):
            self._line.send(message)

    # --- once ----------------------------------------------------------------------------------------

    def _set_up(self, setup: Mapping[str, Any]) -> bool:
        began = time.time_ns()
        try:
            if setup.get("sys_path") is not None:
                sys.path[:] = setup["sys_path"]
            if setup.get("argv") is not None:  # a program may look at its words when it is loaded
                sys.argv[:] = setup["argv"]
            source = Source.read(setup["source"])
            self._module = load(source)
        except BaseException as error:  # noqa: BLE001 - importing runs foreign code; whatever it was is told
            self._tell({"failed": "".join(traceback.format_exception(error))})
            self._finish()
            return False
        own = [one for one in _open_descriptors() if one not in self._before]
        self._shared = tuple(one for one in own if _may_be_shared(one))
        why = _why_unforkable(set(own) - set(self._shared))
        # What lives now lives as long as the template: no collection in a child has to look at it, and so copy it.
        self._files = files_being_written()
        flush(self._files)
        if why is None:
            forget_what_was_registered()
            rehearse(2)  # once more: to load a module is to make Python forget some of what it had noted
        gc.collect()
        self._kept += fill_holes()
        gc.freeze()
        files = source_files(source, began, time.time_ns())
        self._caught, self._forks = caught_signals(), why is None
        self._tell({"ready": True, "files": files, "forks": why is None, "why": why})
        return True

    def _finish(self) -> None:
        """Before the end: all that was told goes out."""
        while self._line.is_waiting:
            select.select([], [self._line], [])
            try:
                self._line.flush()
            except OSError:
                return

    # --- for each agent ------------------------------------------------------------------------------

    def _fork(self, unit: str, settle: Mapping[str, Any], fds: list[int]) -> None:
        flush((sys.stdout, sys.stderr))
        self._has_spare = False  # or the keeper would have used it
        try:
            pid = fork_for_keeper()
        except OSError as error:
            self._tell({"failed": unit, "why": f"no process could be forked: {error.strerror or error}"})
            return
        if pid == 0:
            self._settle_fork(settle, fds)
        self._tell({"forked": unit, "pid": pid})

    def _keep_spare(self) -> None:
        flush((sys.stdout, sys.stderr))
        try:
            pid, line = fork_spare()
        except OSError:
            self._forks = False  # no process can be had now; each start asks for its own, and says so
            return
        if pid:
            self._has_spare = True
            with contextlib.suppress(OSError):  # then it ends with its line, and the next start forks
                self._line.send({"spare": pid}, (line.fileno(),))
            line.close()
            return
        self._line.sock.close()
        loop = HostLoop()
        self._first_steps.take(loop)
        settle, fds = await_order(line)
        self._settle_fork(settle, fds, loop)

    def _settle_fork(self, settle: Mapping[str, Any], fds: list[int], loop: HostLoop | None = None) -> NoReturn:
        def settled(channel: int, output: int) -> None:
            keep = (channel, *self._shared, *(loop.descriptors if loop else ()))
            settle_fork(settle, output=output, keep=keep, caught=self._caught, had=self._environment)

        self._live(fds, settled, loop)

    def _become(self, unit: str, settle: Mapping[str, Any], fds: list[int]) -> NoReturn:
        self._tell({"forked": unit, "pid": os.getpid()})
        self._finish()
        taken = {*self._before, *fds}
        own = [one for one in _open_descriptors() if one not in taken]

        def settled(channel: int, output: int) -> None:
            keep = (channel, *own)
            settle_in(settle, stdin=-1, stdout=output, stderr=output, keep=keep, had=self._environment)

        self._live(fds, settled)

    def _live(self, fds: list[int], settled: Callable[[int, int], None], loop: HostLoop | None = None) -> NoReturn:
        """In the agent's own process, which ends here."""
        try:
            channel, output = fds
            self._line.sock.detach()
            settled(channel, output)
        except BaseException:  # noqa: BLE001 - nothing lives here yet; the keeper sees the end
            traceback.print_exc()
            os._exit(UNSETTLED)
        code = UNSETTLED
        try:
            _reseed()
            gc.enable()
            assert self._module is not None, "the keeper set it up before"  # noqa: S101 - for the reader and mypy
            host = Host(socket.socket(fileno=channel), self._module, loop)
            host.part_children()
            code = host.run()
            host.hang_up()
            take_leave(self._files, code)
        except BaseException:  # noqa: BLE001 - into the agent's own log
            traceback.print_exc()
        finally:
            flush((sys.stdout, sys.stderr))
            os._exit(code)


# --- what makes a process fit to be forked -----------------------------------------------------------


def _why_unforkable(opened: set[int]) -> str | None:
    """A sentence, when a fork would take along what cannot be shared."""
    names = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
    if names:
        return f"its module starts a thread when it is imported: {', '.join(sorted(names))}"
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - loaded in every agent; light
        return "its module loads a library that starts threads of its own"
    if opened:
        what = ", ".join(sorted(_described(one) for one in opened))
        return f"its module leaves open what agents cannot share: {what}"
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123 - as above
            started = file.read().strip()
    except OSError:
        return None
    return "its module starts a program when it is imported" if started else None


def _open_descriptors() -> list[int]:
    found = [int(one) for one in os.listdir("/proc/self/fd")]  # noqa: PTH208 - as above
    return [one for one in found if one not in _STDIO and _is_open(one)]


def _is_open(descriptor: int) -> bool:
    """The one by which the list was read is in it, and closed by now."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _may_be_shared(descriptor: int) -> bool:
    """A log that is only ever added to, and devices without memory such as /dev/null and /dev/urandom."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND)
    return stat.S_ISCHR(mode) and not os.isatty(descriptor)


def _described(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as above
    except OSError:
        return f"descriptor {descriptor}"


def _use_plain_output() -> None:
    """Line by line onto whatever stands behind 1 and 2: in a child that is the agent's log, without a change here."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(  # noqa: SIM115 - lives as long as the program
            number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reseed() -> None:
    """Python's own numbers are drawn anew after every fork; those of numpy are not."""
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()


def _close(fds: Iterable[int]) -> None:
    for one in fds:
        with contextlib.suppress(OSError):
            os.close(one)
