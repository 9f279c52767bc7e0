"""One template: a parent that has imported an agent's module, and forks an agent from itself when it is told to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ostler.keeper.boxes import Box
from ostler.keeper.children import Children, Ended
from ostler.keeper.loop import READ, WRITE, Loop, Timer
from ostler.keeper.output import Tail
from ostler.keeper.protocol import Line, LostDescriptorsError, ProtocolError
from ostler.keeper.spare import Spare
from ostler.keeper.spawning import Files, spawn

IMPORT_SECONDS = 120.0
_END_SECONDS = 5.0
_MOVES = 10


class Birth:
    """One agent that a template shall bring forth. Its descriptors are closed when they are handed over."""

    def __init__(
        self,
        unit: str,
        settle: Mapping[str, Any],
        *,
        made: Callable[[int], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self.unit = unit
        self.settle = settle
        self.made = made
        self.failed = failed
        #: Where it waits or was asked for.
        self.template: Template | None = None
        self._fds: list[int] = []

    def give(self, fd: int) -> None:
        self._fds.append(fd)

    def take_fds(self) -> list[int]:
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        for one in self.take_fds():
            os.close(one)


class Recipe(NamedTuple):
    """How to start a template."""

    argv: Sequence[str]
    settle: Mapping[str, Any]
    setup: Any


class Template:
    """`ready` is called when it has imported; `gone` when nothing more can be had of it, and when it `is_over`."""

    def __init__(
        self,
        loop: Loop,
        children: Children,
        recipe: Recipe,
        box: Box,
        *,
        ready: Callable[[Template], None],
        gone: Callable[[Template], None],
    ) -> None:
        self.recipe = recipe
        #: For all that its module starts when it is imported. Whom it forks goes on into a box of its own.
        self.box = box
        self.is_ready = False
        #: It has ended, or has become an agent; what is left in its box is nobody's.
        self.is_over = False
        self.forks = True
        self.used = time.monotonic()
        self.waiting: list[Birth] = []
        self.told: dict[str, Birth] = {}
        self._loop = loop
        self._children = children
        self._ready = ready
        self._gone = gone
        self._files: dict[str, tuple[int, int]] = {}
        self._retiring = False
        self._last_call: Timer | None = None
        self._why: str | None = None
        self._line: Line | None = None
        self._spare: Spare | None = None
        self._spawn()
        self._patience = loop.later(IMPORT_SECONDS, self._too_slow)
        children.add(self.pid, self._ended, self)
        box.took_in(self.pid)
        loop.watch(self._exec, self._executed)
        try:
            self._say({"setup": recipe.setup, "spares": True})
        except (OSError, ProtocolError) as error:
            self._why = f"its template could not be told what to import: {error}"
            self.kill()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read = write = -1
        settle = {**self.recipe.settle, "entrances": list(self.box.entrances())}
        try:
            read, write = os.pipe2(os.O_CLOEXEC)
            files = Files(output=write, channel=theirs.fileno())
            self.pid, self._exec = spawn(self.recipe.argv, settle, files)
        except OSError:
            ours.close()
            if read >= 0:
                os.close(read)
            raise
        finally:
            theirs.close()
            if write >= 0:
                os.close(write)
        self._tail = Tail(self._loop, read)
        self._line = Line(ours)

    # --- what is asked of it -----------------------------------------------------------------------

    def is_stale(self) -> bool:
        """One of the files that it has loaded is not as it was."""
        for path, seen in self._files.items():
            try:
                now = os.stat(path)  # noqa: PTH116 - no pathlib here
            except OSError:
                return True
            if (now.st_mtime_ns, now.st_size) != seen:
                return True
        return False

    def is_dead(self) -> bool:
        """It may have ended in this very moment, and nobody was told yet."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def hold(self, birth: Birth) -> None:
        """Until it is ready."""
        birth.template = self
        self.waiting.append(birth)

    def take_back(self, birth: Birth) -> None:
        """If nothing was done for it yet, nothing will be."""
        if birth in self.waiting:
            self.waiting.remove(birth)
            birth.close()
            birth.failed("start", "it was stopped before it began")

    def bring_forth(self, birth: Birth) -> None:
        """Once it is ready. A spare takes it at once; else it forks."""
        birth.template = self
        self.used = time.monotonic()
        self._children.expect()
        fds = birth.take_fds()
        try:
            if not self._hand_to_spare(birth, fds):
                self._have_forked(birth, fds)
        finally:
            for one in fds:
                os.close(one)

    def _hand_to_spare(self, birth: Birth, fds: Sequence[int]) -> bool:
        spare, self._spare = self._spare, None
        if spare is None or not spare.hand_over(birth.settle, fds):
            return False
        birth.made(spare.pid)
        with contextlib.suppress(OSError, ProtocolError):  # then it does without a spare
            self._say({"spent": spare.pid})
        return True

    def _have_forked(self, birth: Birth, fds: Sequence[int]) -> None:
        self.told[birth.unit] = birth
        try:
            self._say({"fork" if self.forks else "become": birth.unit, "settle": birth.settle}, fds)
        except (OSError, ProtocolError) as error:
            del self.told[birth.unit]
            self._children.unborn()
            birth.failed("start", f"its template could not be told: {error}")

    def retire(self) -> None:
        """It ends once it has done what it was told."""
        self._retiring = True
        self._dismiss_spare()
        if not self.told and self._line is not None:
            self._hang_up()
            self._last_call = self._loop.later(_END_SECONDS, self.kill)

    def kill(self) -> None:
        """Harmless once it has ended, or has become an agent: then its number is another's."""
        self._dismiss_spare()
        self._children.kill(self.pid, signal.SIGKILL, self)

    def move_into(self, box: Box, leaf: str | None) -> None:
        """It has become an agent: what its module has started belongs to that one from now on."""
        for _ in range(_MOVES):  # one of them may fork meanwhile
            left = self.box.pids()
            if not left:
                break
            box.move_in(left, leaf)

    # --- what it says ------------------------------------------------------------------------------

    def _say(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """To one that is gone: nothing, its end is noticed. Raises `OSError` when only this could not be said."""
        if self._line is None:
            return
        try:
            self._line.send(message, fds)
        except ConnectionError as error:
            if error.errno is None:
                raise  # it lives, and does not read
        self._watch()

    def _watch(self) -> None:
        if self._line is not None:
            more = WRITE if self._line.is_waiting else 0
            self._loop.watch(self._line.fileno(), self._hear, READ | more)

    def _hear(self) -> None:
        try:
            while self._line is not None:
                self._line.flush()
                self._hear_one(self._line)
        except BlockingIOError:
            self._watch()
        except OSError:
            self._hang_up()
        except (ProtocolError, LookupError, TypeError, ValueError, AttributeError) as error:
            self._fail("template", f"its template said what is no message: {error}")
            self.kill()

    def _hear_one(self, line: Line) -> None:
        try:
            heard = line.receive()
        except LostDescriptorsError:
            return  # a spare that we cannot take; it ends with its line
        if heard is None:
            self._hang_up()
            return
        message, fds = heard
        try:
            self._take(message, fds)
        finally:
            for one in fds:
                os.close(one)

    def _take(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """What it needs of `fds` it takes out."""
        if "spare" in message:
            self._keep_spare(int(message["spare"]), fds)
        elif message.get("ready"):
            self._patience.cancel()
            self._files = {str(path): (int(seen[0]), int(seen[1])) for path, seen in message["files"].items()}
            self.forks = bool(message["forks"])
            self.is_ready = True
            self._ready(self)
        elif "forked" in message:
            if self.forks and not self._children.is_newborn(int(message["pid"])):
                raise ValueError(f"process {message['pid']} is not one that it has forked")
            birth = self.told.pop(str(message["forked"]))
            if self.forks:
                birth.made(int(message["pid"]))
            else:
                # From here on its end is the agent's; which process it is we know better than it.
                self._hang_up()
                self._tail.close()
                birth.made(self.pid)
                self.is_over = True
                self._gone(self)
        elif message.get("failed") in self.told:
            birth = self.told.pop(message["failed"])
            self._children.unborn()
            birth.failed("start", str(message.get("why")))
        else:
            self._fail("template", str(message["failed"]))
        if self._retiring:
            self.retire()

    def _keep_spare(self, pid: int, fds: list[int]) -> None:
        self._dismiss_spare()
        # It may have died since, and then its line, which is closed by whoever called this, is all there was of it.
        if self._children.is_unclaimed(pid) and not self._retiring:
            try:
                self._spare = Spare(self._children, pid, fds[0])
            except OSError as error:
                raise ValueError(f"its spare has no line: {error}") from error
            del fds[0]

    def _dismiss_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.dismiss()

    # --- its end -----------------------------------------------------------------------------------

    def _executed(self) -> None:
        sentence = os.read(self._exec, 4096)
        self._close_exec()
        if sentence:
            self._fail("template", sentence.decode(errors="replace"))

    def _close_exec(self) -> None:
        if self._exec >= 0:
            self._loop.unwatch(self._exec)
            os.close(self._exec)
            self._exec = -1

    def _too_slow(self) -> None:
        self._fail("template", f"its module was not imported within {IMPORT_SECONDS:.0f} seconds")
        self.kill()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._loop.unwatch(self._line.fileno())
            self._line.close()
            self._line = None

    def _ended(self, ended: Ended) -> None:
        """What it said before comes first: an agent that it became may be dead already, and told of."""
        if self._last_call is not None:
            self._last_call.cancel()
        if not self.forks:
            self._children.put_back(ended)
        if self._exec >= 0:
            self._executed()
        self._hear()
        self._hang_up()
        self.is_over = True
        how = f"by signal {ended.signal}" if ended.signal else f"with code {ended.code}"
        said = self._tail.text()
        self._tail.close()
        self._fail("template", self._why or f"its template ended {how}{': ' + said if said else ''}")

    def _fail(self, kind: str, sentence: str) -> None:
        """It brings forth nothing more."""
        self._patience.cancel()
        self._dismiss_spare()
        told, self.told = list(self.told.values()), {}
        waiting, self.waiting = self.waiting, []
        self._gone(self)
        for _ in told:
            self._children.unborn()
        for birth in (*told, *waiting):
            birth.close()
            birth.failed(kind, sentence)
