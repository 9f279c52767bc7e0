"""From a request to a living unit: its box, its output, its process; or a sentence and nothing left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from ostler.keeper.asking import Asked, RefusedError, Reply
from ostler.keeper.children import Children, Ended
from ostler.keeper.emptying import Emptying, Place
from ostler.keeper.output import RATE, Log, Output
from ostler.keeper.protocol import MARK
from ostler.keeper.sharing import Sessions, nice_in
from ostler.keeper.spawning import CHANNEL_FD, CHANNEL_VARIABLE, Files, has_descriptors, open_terminal, spawn
from ostler.keeper.tag import tag_for
from ostler.keeper.template import Birth, Recipe
from ostler.keeper.templates import Templates
from ostler.keeper.tree import start_time, stat
from ostler.keeper.units import FAILED, LIVING, STARTING, House, Unit

_DEFAULT_LOG_BYTES = 5 * 1024 * 1024
_OOM_SCORE = 500
_HALT_SECONDS = 0.05


class _Start:
    """One start under way. `report` is the pipe of the child that is about to execute its program."""

    def __init__(self, unit: Unit, reply: Reply) -> None:
        self.unit = unit
        self.reply = reply
        self.report = -1


class Starter:
    """`started` is told of a unit that lives, `ended` of one whose main process has ended, `failed` of no unit."""

    def __init__(
        self,
        house: House,
        children: Children,
        emptying: Emptying,
        *,
        started: Callable[[Unit], None],
        ended: Callable[[Unit, Ended], None],
        failed: Callable[[Unit], None],
    ) -> None:
        self._loop = emptying.loop
        self._house = house
        self._children = children
        self._emptying = emptying
        self._started = started
        self._ended = ended
        self._failed = failed
        self.templates = Templates(house, children, emptying)
        self.sessions = Sessions(emptying.loop)
        self._births: dict[str, Birth] = {}
        #: Programs that are about to be executed.
        self._executing: set[_Start] = set()
        #: The bound of open descriptors that our children get: the one that we were given.
        self.nofile: Sequence[int] | None = None

    def start(self, asked: Asked, fds: list[int], reply: Reply) -> None:
        """Takes what it needs out of `fds`; the rest stays the caller's."""
        name, leaf, how = asked.name("unit"), asked.name_or_none("leaf"), asked.part("how")
        settle, limits = self._settle(asked, name), asked.limits("limits")
        wanted = 2 * asked.flag("channel") + asked.flag("stdin")
        if len(fds) != wanted:
            raise RefusedError("request", f"{wanted} descriptors were announced and {len(fds)} came")
        if how.has("template") and not asked.flag("channel"):
            raise RefusedError("request", "an agent from a template needs a channel")
        if not has_descriptors():
            raise RefusedError("start", "the keeper has too few descriptors left to take care of another agent")
        if self._house.is_taken(name):
            raise RefusedError("taken", f"there is a unit {name} already")
        room = self._house.open_room(asked.name("box"), limits)
        if room.closing or room.frozen:
            raise RefusedError("start", f"box {room.name} is {'being stopped' if room.closing else 'frozen'}")
        settle["nice"] = max(settle["nice"], nice_in(room))
        start = _Start(Unit(name, room, leaf), reply)
        self._house.add(start.unit)
        ours: list[int] = []
        try:
            settle["entrances"] = list(room.box.entrances(leaf))
            files = self._files(asked, fds, ours, start.unit)
            if how.has("template"):
                self._from_template(start, how, settle, files)
            else:
                self._execute(start, how, settle, files)
        except RefusedError as refused:
            kind, sentence = refused.kind, str(refused)
            self._undo(start.unit, lambda: reply.refuse(kind, sentence))
        except OSError as error:
            sentence = f"it could not be started: {error}"
            self._undo(start.unit, lambda: reply.refuse("start", sentence))
        finally:
            for one in ours:
                os.close(one)

    def _settle(self, asked: Asked, name: str) -> dict[str, Any]:
        return {
            "env": {**asked.environment("env"), MARK: f"{self._house.token}:{name}"},
            "cwd": asked.text_or_none("cwd"),
            "nice": asked.whole("nice", 0, -20, 19),
            "umask": asked.whole("umask", 0, 0, 0o777) if asked.has("umask") else None,
            "keeper": os.getpid(),
            "nofile": self.nofile,
            "tag": tag_for(self._house.token, name),
        }

    def _files(self, asked: Asked, fds: list[int], ours: list[int], unit: Unit) -> Files:
        """What the process is given; `ours` collects what we close once it has it."""
        channel = stdin = -1
        if asked.flag("channel"):
            channel = fds.pop(0)
            ours.append(channel)
            unit.channel = fds.pop(0)
        if asked.flag("stdin"):
            stdin = fds.pop(0)
            ours.append(stdin)
        path, terminal = asked.text_or_none("log"), asked.flag("pty")
        if path is None and not terminal:
            return Files(stdin=stdin, channel=channel)
        log = Log(path, asked.whole("log_bytes", _DEFAULT_LOG_BYTES, 0, 2**40))
        try:
            read, write = open_terminal() if terminal else os.pipe2(os.O_CLOEXEC)
        except OSError:
            log.close()
            raise
        ours.append(write)
        unit.output = Output(self._loop, read, log, asked.whole("log_rate", RATE, 1, 2**40))
        return Files(stdin=write if terminal and stdin < 0 else stdin, output=write, channel=channel, terminal=terminal)

    # --- a program ---------------------------------------------------------------------------------

    def _execute(self, start: _Start, how: Asked, settle: dict[str, Any], files: Files) -> None:
        if files.channel >= 0:
            settle["env"][CHANNEL_VARIABLE] = str(CHANNEL_FD)
        unit = start.unit
        unit.pid, start.report = spawn(how.texts("argv"), settle, files)
        unit.start_time = start_time(unit.pid)
        self._children.add(unit.pid, lambda ended: self._child_ended(start, ended), unit)
        unit.room.box.took_in(unit.pid, unit.leaf)
        self._executing.add(start)
        self._loop.watch(start.report, lambda: self._reported(start))

    def note_executed(self) -> None:
        """A program that has begun is a living unit, also where the loop has not come to hear of it.

        Those that have not begun are left stopped, so that none begins after the look.
        """
        for start in list(self._executing):
            _halt(start.unit.pid)
            look = select.poll()
            look.register(start.report, select.POLLIN)
            if look.poll(0):
                os.kill(start.unit.pid, signal.SIGCONT)
                self._reported(start)

    def _reported(self, start: _Start) -> None:
        """The pipe has ended: the program runs, or the process died on the way, which its end will tell."""
        if start.report < 0:
            return
        sentence = os.read(start.report, 4096)
        self._loop.unwatch(start.report)
        os.close(start.report)
        start.report = -1
        self._executing.discard(start)
        if sentence:
            self._fail(start, "start", sentence.decode(errors="replace"))
        else:
            self._lives(start)

    def _child_ended(self, start: _Start, ended: Ended) -> None:
        self._reported(start)
        if start.unit.state == LIVING:
            self._ended(start.unit, ended)

    def _lives(self, start: _Start) -> None:
        unit = start.unit
        unit.state = LIVING
        if unit.start_time is None:  # where /proc hides what hides itself: like us, until its own program runs
            unit.start_time = start_time(unit.pid)
        if os.geteuid():
            _expose_to_oom(unit.pid)
        self.sessions.weigh(unit)
        status = self._house.status(unit)
        start.reply.ok({key: status[key] for key in ("pid", "start_time", "boot_id", "enforcement")})
        self._started(unit)

    # --- a fork of a template ----------------------------------------------------------------------

    def _from_template(self, start: _Start, how: Asked, settle: dict[str, Any], files: Files) -> None:
        recipe = Recipe(
            argv=how.texts("argv"),
            settle={
                "env": how.environment("env"),
                "cwd": how.text_or_none("cwd"),
                "keeper": os.getpid(),
                "nofile": self.nofile,
                "umask": settle["umask"],
            },
            setup=how.anything("setup"),
        )
        birth = Birth(
            start.unit.name,
            settle,
            made=lambda pid: self._made(start, pid),
            failed=lambda kind, sentence: self._fail(start, kind, sentence),
        )
        self._births[start.unit.name] = birth
        try:
            birth.give(os.dup(files.channel))
            null = files.output < 0
            birth.give(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC) if null else os.dup(files.output))
            self.templates.bring_forth(how.text("template"), recipe, birth)
        except OSError:
            birth.close()
            raise

    def _made(self, start: _Start, pid: int) -> None:
        unit = start.unit
        birth = self._births.pop(unit.name, None)
        early = self._children.born(pid, lambda ended: self._ended(unit, ended), unit)
        unit.pid = pid
        unit.start_time = early.start_time if early is not None else start_time(pid)
        unit.room.box.took_in(pid, unit.leaf)
        if birth is not None and birth.template is not None and pid == birth.template.pid:
            unit.grown_from = birth.template.box.name
            birth.template.move_into(unit.room.box, unit.leaf)
        self._lives(start)
        if early is not None:
            self._ended(unit, early)

    # --- when it comes to nothing ------------------------------------------------------------------

    def cancel(self, unit: Unit) -> None:
        """For one that is starting: if no process was asked for yet, none will be."""
        birth = self._births.get(unit.name)
        if birth is not None and birth.template is not None:
            birth.template.take_back(birth)

    def abandon(self, unit: Unit) -> None:
        """Its template does not answer, so it goes, and the start fails with it."""
        birth = self._births.get(unit.name)
        if birth is not None and birth.template is not None:
            birth.template.kill()

    def _fail(self, start: _Start, kind: str, sentence: str) -> None:
        if start.unit.state == STARTING:
            self._undo(start.unit, lambda: start.reply.refuse(kind, sentence))

    def _undo(self, unit: Unit, then: Callable[[], None]) -> None:
        """A process that failed on its way may still be there for a moment; who tries again must not meet it."""
        unit.state = FAILED
        self._births.pop(unit.name, None)
        if unit.leaf is None and len(unit.room.units) > 1:
            self._leave(unit, then)
        else:
            self._emptying.begin(Place(unit.room.box, unit.leaf, [unit.name], lambda _: self._leave(unit, then)))

    def _leave(self, unit: Unit, then: Callable[[], None]) -> None:
        self._house.drop(unit)
        if unit.leaf is not None:
            unit.room.box.remove(unit.leaf)
        self._house.leave_room(unit.room)
        then()
        self._failed(unit)


def _halt(pid: int) -> None:
    """Stop a process that is about to execute its program, and wait until it stands still; one that hangs may go on."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + _HALT_SECONDS
    while (found := stat(pid)) is not None and found.state not in "TtZX" and time.monotonic() < end:
        time.sleep(0.0005)


def _expose_to_oom(pid: int) -> None:
    """An unprivileged child cannot say this of itself before its program runs; its parent can, once it does."""
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, str(_OOM_SCORE).encode())
        finally:
            os.close(descriptor)
