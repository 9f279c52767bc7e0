"""The keeper: puts the parts together, answers requests, ends everything when its manager is gone for too long."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from ostler.keeper import tree
from ostler.keeper.directory import Directory
from ostler.keeper.exits import Children, ExitRecorder
from ostler.keeper.freeze import Freezer
from ostler.keeper.loop import Loop
from ostler.keeper.output import OutputReporter
from ostler.keeper.protocol import RUN, UNIT_NAME, VERSION
from ostler.keeper.remove import Remover
from ostler.keeper.server import Connection, Handler, Reply, Server
from ostler.keeper.start import Starter
from ostler.keeper.state import ENDED, RUNNING, STARTING, RequestError, State, Unit
from ostler.keeper.stop import Stopper
from ostler.keeper.templates import Templates

_POLL_SECONDS = 0.1
_TIDY_SECONDS = 2.0
#: After the last unit has ended without a manager; one that comes soon need not start another keeper.
_ALONE_SECONDS = 2.0
_END_GRACE = 5.0
#: How long a new keeper waits for its first manager, which may have died in between.
FIRST_HELLO_SECONDS = 60.0
_MAX_SECONDS = 1e9
#: How often a lease is looked at, at most.
_LOOK_SECONDS = 1.0
Refuse = Callable[[str, str], None]


class Keeper:
    def __init__(
        self, loop: Loop, listener: socket.socket, state: State, directory: Directory, warn: Callable[[str], None]
    ) -> None:
        self.loop = loop
        self.state = state
        self.directory = directory
        self.warn = warn
        self.ending = False
        self._is_stopping_all = False
        self._epoch = 0
        self._lease = Lease(loop, self)
        self.children = Children(loop)
        self.exits = ExitRecorder(loop, state, self.children, self._exited)
        self.templates = Templates(loop, state, self.children)
        self.remover = Remover(self.children, os.path.join(state.home, RUN), warn)
        self.starter = Starter(loop, state, self.children, self.exits, self.templates, self.remover)
        self.starter.on_failed(self._ended)
        self.freezer = Freezer(loop)
        self.starter.on_output(self._has_written)
        self._reporter = OutputReporter(loop, self._tell_output)
        self.stopper = Stopper(loop, state, self.starter.cancel)
        self.server = Server(loop, listener, self._handlers())
        self.server.hello = self._hello
        self.server.about = self._about
        self.server.heard = self._lease.renew
        self.server.manager_left = self._manager_left
        loop.after_turn = self.exits.after_turn
        loop.on_signal(signal.SIGTERM, lambda: self.end("stop"))
        loop.later(_TIDY_SECONDS, self._tidy)
        if state.groups.polls:
            loop.later(_POLL_SECONDS, self._poll_limits)
        self._lease.begin(FIRST_HELLO_SECONDS)

    def _handlers(self) -> dict[str, Handler]:
        return {
            "start": self._start,
            "status": lambda request, reply, _: reply(self.state.status(str(request["unit"]))),
            "list": lambda request, reply, _: reply({"units": self.state.statuses(request.get("cell"))}),
            "freeze": self._freeze,
            "thaw": self._thaw,
            "usage": self._usage,
            "stop": self._stop,
            "forget": self._forget,
            "renew": lambda _, reply, __: reply({}),
            "bye": self._bye,
            **self.starter.consoles.handlers(),
        }

    # --- the manager ---

    def _hello(self, connection: Connection, request: Mapping[str, Any], reply: Reply) -> None:
        if request.get("version") != VERSION:
            raise RequestError("version", f"this keeper speaks version {VERSION}, not {request.get('version')!r:.20}")
        epoch, lease = int(request["epoch"]), _seconds(request["lease_seconds"])
        if epoch < self._epoch:
            raise RequestError("stale", f"a manager of epoch {self._epoch} was here; {epoch} is older")
        if self.ending:
            raise RequestError("ending", "this keeper is ending")
        self._epoch = epoch
        if connection is not self.server.manager:
            self._undo_starts()
        self.server.promote(connection)
        self._lease.begin(lease)
        reply(
            {
                **_identity(),
                "token": self.state.token,
                "title": self.state.groups.title,
                "enforcement": dict(self.state.groups.enforcement()),
                "units": self.state.statuses(),
                "survivors": self.state.survivors,
            }
        )

    def _about(self) -> dict[str, Any]:
        """For a manager of another version, which leaves these units alone until they have ended."""
        living = sorted(unit.name for unit in self.state.units.values() if unit.state != ENDED)
        return {"version": VERSION, **_identity(), "living": len(living), "units": living}

    @property
    def is_needed(self) -> bool:
        """The next manager would miss it: it holds units, or exit records that a full disk does not take."""
        self.state.journal.flush()
        return bool(self.state.units) or self.state.journal.is_behind

    def _manager_left(self) -> None:
        if not self.ending:
            self._undo_starts()
            self._lease.manager_left()

    def _undo_starts(self) -> None:
        """The manager that asked for them never heard of them, and the next one does not expect them.

        But a command may have begun its work already: the next manager finds it, running or ended.
        """
        for unit in list(self.state.units.values()):
            if unit.state == STARTING and unit.is_command and unit.pid:
                unit.is_unanswered = True
            elif unit.state == STARTING:
                self.stopper.stop(unit.name, 0.0, "stop", lambda _: self._end_if_empty())

    def _bye(self, request: Mapping[str, Any], reply: Reply, _: Refuse) -> None:
        stays = bool(request.get("leave")) and self.is_needed
        reply({"stays": stays})
        if stays:
            if self.server.manager is not None:
                self.server.manager.close()
        else:
            self.end("stop")

    # --- requests ---

    def _start(self, request: Mapping[str, Any], reply: Reply, refuse: Refuse) -> None:
        if self.ending:
            raise RequestError("start", "this keeper is ending")
        self.starter.start(request, reply, refuse)

    def _freeze(self, request: Mapping[str, Any], reply: Reply, refuse: Refuse) -> None:
        cell = self.state.cell(str(request["cell"]))
        if any(unit.state == STARTING for unit in cell.units.values()):
            raise RequestError("busy", f"something is being started in cell {cell.name}")  # it would never answer
        if cell.stopping:
            raise RequestError("busy", f"cell {cell.name} is being stopped")

        def failed(sentence: str) -> None:
            is_gone = self.state.cells.get(cell.name) is not cell  # with its last unit
            refuse("unknown" if is_gone else "freeze", f"cell {cell.name}: {sentence}")

        self.freezer.freeze(cell, lambda: reply({}), failed)

    def _thaw(self, request: Mapping[str, Any], reply: Reply, _: Refuse) -> None:
        cell = self.state.cell(str(request["cell"]))
        try:
            self.freezer.thaw(cell)
        except OSError as error:
            raise RequestError("freeze", f"cell {cell.name}: {error}") from error
        reply({})

    def _usage(self, request: Mapping[str, Any], reply: Reply, _: Refuse) -> None:
        usage = self.state.cell(str(request["cell"])).group.usage()
        reply({"cpu_seconds": usage.cpu_seconds, "memory_bytes": usage.memory_bytes, "threads": usage.threads})

    def _stop(self, request: Mapping[str, Any], reply: Reply, _: Refuse) -> None:
        def stopped(report: dict[str, Any]) -> None:
            reply(report)
            self._end_if_empty()

        self.stopper.stop(str(request["name"]), _seconds(request["grace"]), "stop", stopped)

    def _forget(self, request: Mapping[str, Any], reply: Reply, _: Refuse) -> None:
        """A unit, or all units of a cell. Their run directories go too."""
        name = str(request["name"])
        if UNIT_NAME.fullmatch(name) is None:
            raise RequestError("request", f"{name!r:.80} is no name of a unit or a cell")
        units = {name, *(unit for unit in self._ended_units() if unit.startswith(f"{name}."))}
        for unit in units & self.state.units.keys():
            raise RequestError("busy", f"unit {unit} has not ended")
        for unit in units:
            self.state.journal.forget(unit)
            self.remover.remove(self.state.run_directory(unit))
        self.state.journal.flush()  # what the manager takes for forgotten stays so when this keeper is killed
        reply({})

    def _ended_units(self) -> set[str]:
        """With a record, or only a directory, which a keeper that was killed left. Without those that live."""
        try:
            directories = os.listdir(os.path.join(self.state.home, RUN))
        except OSError:
            directories = []
        return {*self.state.journal.records, *directories} - self.state.units.keys()

    # --- by itself ---

    def _has_written(self, unit: Unit) -> None:
        if unit.output is not None:
            self._reporter.add(unit.name, unit.output)

    def _tell_output(self, event: Mapping[str, Any]) -> bool:
        manager = self.server.manager
        if manager is None:
            return True  # the next one sees it in the statuses
        if not manager.has_unsent:
            manager.send(event)
            return True
        return False

    def _exited(self, unit: Unit) -> None:
        output = None if unit.output is None else unit.output.last()
        self.server.tell({"event": "exit", "unit": unit.name, "exit": unit.exit, "output": output})
        self._ended(unit)

    def _ended(self, unit: Unit) -> None:
        self._reporter.discard(unit.name)
        self.stopper.unit_ended(unit)
        self._end_if_empty()
        if self.server.manager is None:
            self.loop.later(_ALONE_SECONDS, self._end_if_alone)

    def _end_if_alone(self) -> None:
        """No manager is there and nothing lives. The exits are on the disk, where the next keeper finds them."""
        if self.server.manager is None and not self.state.units:
            self.end("stop")

    def _poll_limits(self) -> None:
        for cell in list(self.state.cells.values()):
            running = [unit for unit in cell.units.values() if unit.state == RUNNING]
            excess = cell.group.broken_limit() if running and not cell.frozen else None
            if excess is not None:
                for unit in running:
                    unit.by, unit.why = excess
                    unit.killed = True
                cell.group.kill()
        self.loop.later(_POLL_SECONDS, self._poll_limits)

    def _tidy(self) -> None:
        self.loop.later(_TIDY_SECONDS, self._tidy)
        if not self.ending and not self.directory.is_ours():
            self.warn("the home was removed")
            self.end("lease", "its home was removed")
        self.directory.trim_log()
        self.templates.retire_idle()
        self.exits.note_oom_kills()

    # --- the end ---

    def end(self, by: str, why: str = "") -> None:
        if self.ending:
            return
        self.ending = True
        self.server.stop_listening()
        for unit in self.state.units.values():
            if unit.state in {STARTING, RUNNING} and not unit.by:
                unit.why = why
        for cell in list(self.state.cells.values()):
            self.stopper.stop(cell.name, _END_GRACE, by, lambda _: self._end_if_empty())
        self._is_stopping_all = True
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        """A stop ends also when something cannot be killed: that does not keep the keeper."""
        if self._is_stopping_all and not len(self.stopper):
            self.loop.end()

    def close(self) -> None:
        self.templates.close()
        self.state.groups.sweep()
        self.children.reap()
        self.state.journal.close()
        if self.server.manager is not None:
            self.server.manager.flush_for(1.0)


class Lease:
    """Ends everything when no manager was heard for `seconds`, connected or not. 0: at once when it disconnects.

    Only time in which the keeper itself ran is counted: when the whole machine stood still, the manager could not renew
    either, and gets the rest of its lease for that.
    """

    def __init__(self, loop: Loop, keeper: Keeper) -> None:
        self._loop = loop
        self._keeper = keeper
        self._seconds = 0.0
        self._silent = 0.0
        self._looked = 0.0
        self._round = 0

    def begin(self, seconds: float) -> None:
        self._seconds = seconds
        self._round += 1
        self.renew()
        if seconds:
            self._look_later(self._round)

    def renew(self) -> None:
        self._silent = 0.0
        self._looked = time.monotonic()

    def _look_later(self, number: int) -> None:
        pause = min(_LOOK_SECONDS, self._seconds / 4)
        self._loop.later(pause, lambda: self._look(number, pause))

    def _look(self, number: int, pause: float) -> None:
        if number != self._round:
            return  # a later manager has its own lease
        now = time.monotonic()
        self._silent += min(now - self._looked, 2 * pause)
        self._looked = now
        if self._silent < self._seconds:
            self._look_later(number)
        else:
            sentence = f"no manager was heard for {self._seconds:g} s"
            self._keeper.warn(sentence)
            self._keeper.end("lease", sentence)

    def manager_left(self) -> None:
        if not self._seconds or not self._keeper.is_needed:
            self._keeper.end("lease")


def _identity() -> dict[str, Any]:
    return {"pid": os.getpid(), "start_time": tree.start_time(os.getpid()), "boot_id": tree.boot_id()}


def _seconds(value: Any) -> float:
    """Raises `ValueError` for what is no length of time."""
    seconds = float(value)
    if not math.isfinite(seconds) or not 0 <= seconds <= _MAX_SECONDS:
        raise ValueError(f"{value!r:.20} is no number of seconds")
    return seconds
