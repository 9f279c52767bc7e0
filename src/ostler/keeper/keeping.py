"""The keeper itself: what its manager can ask of it, and how it ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping

from ostler.keeper.asking import Asked, RefusedError, Reply
from ostler.keeper.boxes import Boxes
from ostler.keeper.burying import Undertaker
from ostler.keeper.children import Children
from ostler.keeper.edition import edition
from ostler.keeper.emptying import Emptying
from ostler.keeper.lease import Lease
from ostler.keeper.loop import Loop
from ostler.keeper.protocol import VERSION
from ostler.keeper.records import Journal
from ostler.keeper.serving import Connection, Server
from ostler.keeper.starting import Starter
from ostler.keeper.stopping import Stops
from ostler.keeper.tree import boot_id, start_time
from ostler.keeper.units import LIVING, STARTING, House, Unit

_GRACE_SECONDS = 5.0
_POLICE_SECONDS = 0.1
_TIDY_SECONDS = 30.0
_WEEK = 7 * 86400.0
#: How long the last words may take to be read.
_FAREWELL_SECONDS = 2.0


class Keeper:
    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        boxes: Boxes,
        journal: Journal,
        *,
        token: str,
        warn: Callable[[str], None],
    ) -> None:
        self.loop = loop
        self.warn = warn
        self.epoch = 0
        self.ending = False
        self.edition = edition()
        self.house = House(boxes, journal, token=token, boot_id=boot_id())
        self.children = Children()
        emptying = Emptying(loop, boxes, self.children, token)
        self.undertaker = Undertaker(loop, self.house, emptying, self._buried)
        self.starter = Starter(
            self.house,
            self.children,
            emptying,
            started=self._started,
            ended=self.undertaker.bury,
            failed=self._failed,
        )
        self.stops = Stops(loop, self.house, self.children, cancel=self.starter.cancel, abandon=self.starter.abandon)
        self.server = Server(loop, listener, warn)
        self.server.handlers = self._handlers()
        self.server.hello = self._hello
        self.server.gone = self._manager_left
        self.lease = Lease(loop, lambda: not self.house.units, lambda: self.end("lease"))
        #: Set by who can exchange the code of a running keeper.
        self.upgrade: Callable[[list[str], Reply], None] | None = None
        loop.turn_end = self.undertaker.turn_end
        loop.on_signal(signal.SIGCHLD, self.reap)
        loop.on_signal(signal.SIGTERM, lambda: self.end("stop"))
        loop.later(_TIDY_SECONDS, self._tidy)
        if boxes.polices:
            loop.later(_POLICE_SECONDS, self._police)

    def _handlers(self) -> Mapping[str, Callable[[Asked, list[int], Reply], None]]:
        return {
            "start": self._start,
            "attach": self._attach,
            "list": lambda _, __, reply: reply.ok({"units": list(self.house.statuses())}),
            "freeze": lambda asked, _, reply: self._still(asked, reply, frozen=True),
            "thaw": lambda asked, _, reply: self._still(asked, reply, frozen=False),
            "stop": self._stop,
            "usage": self._usage,
            "forget": self._forget,
            "upgrade": self._upgrade,
            "bye": self._bye,
            "ping": lambda _, __, reply: reply.ok(),
        }

    # --- the manager -------------------------------------------------------------------------------

    def _hello(self, peer: Connection, asked: Asked, reply: Reply) -> None:
        epoch = asked.whole("epoch", 0, 0, 2**63)
        seconds = asked.number("lease_seconds", 0.0, _WEEK)
        if asked.anything("version") != VERSION:
            raise RefusedError(
                "version", f"this keeper speaks version {VERSION}, not {asked.anything('version')!r:.20}"
            )
        if epoch < self.epoch:
            raise RefusedError("stale", f"a manager of epoch {self.epoch} was here; {epoch} is older")
        if self.ending:
            raise RefusedError("ending", "this keeper is ending")
        self.epoch = epoch
        if peer is not self.server.manager:
            self._undo_starts()
        self.server.promote(peer)
        self.lease.manager_came(seconds)
        reply.ok(
            {
                "version": VERSION,
                "code": self.edition,
                "pid": os.getpid(),
                "start_time": start_time(os.getpid()),
                "boot_id": self.house.boot_id,
                "token": self.house.token,
                "boxes": self.house.boxes.title,
                "enforcement": dict(self.house.boxes.enforcement()),
                "units": list(self.house.statuses()),
            }
        )

    def _manager_left(self) -> None:
        if not self.ending:
            self._undo_starts()
            self.lease.manager_left()

    def _undo_starts(self) -> None:
        """The manager that asked for them is gone, and the next one neither knows nor wants what is half started."""
        self.starter.note_executed()
        for unit in list(self.house.units.values()):
            if unit.state == STARTING:
                self.stops.stop(unit.room, unit.leaf, 0.0, "stop", lambda _: self._perhaps_over())

    def _bye(self, asked: Asked, _: list[int], reply: Reply) -> None:
        leave = asked.flag("leave")
        reply.ok()
        if leave and self.house.units:
            if self.server.manager is not None:
                self.server.manager.close()
        else:
            self.end("stop")

    # --- units -------------------------------------------------------------------------------------

    def _start(self, asked: Asked, fds: list[int], reply: Reply) -> None:
        if self.ending:
            raise RefusedError("start", "this keeper is ending")
        self.starter.start(asked, fds, reply)

    def _attach(self, asked: Asked, _: list[int], reply: Reply) -> None:
        name = asked.name("unit")
        status = self.house.status_of(name)
        unit = self.house.units.get(name)
        reply.ok(status, [unit.channel] if unit is not None and unit.channel >= 0 else [])

    def _still(self, asked: Asked, reply: Reply, *, frozen: bool) -> None:
        room = self.house.room(asked.name("box"))
        if room.closing:
            raise RefusedError("busy", f"box {room.name} is being stopped")
        if frozen and room.has_starting:
            # Frozen before its program begins, it would never say that it has started.
            raise RefusedError("busy", f"something is being started in box {room.name}")
        try:
            (room.box.freeze if frozen else room.box.thaw)()
        except OSError as error:
            raise RefusedError("freeze", f"box {room.name}: {error}") from error
        room.frozen = frozen
        reply.ok()

    def _stop(self, asked: Asked, _: list[int], reply: Reply) -> None:
        box, leaf = asked.name_or_none("box"), asked.name_or_none("leaf")
        unit = self.house.units.get(asked.name("unit")) if asked.has("unit") else None
        if unit is not None:
            box, leaf = unit.room.name, unit.leaf
        room = self.house.rooms.get(box) if box is not None else None
        if room is None or (asked.has("unit") and unit is None):
            if box is None:
                reply.ok({"graceful": True, "left": []})
            else:
                self.stops.strike_remains(box, reply.ok)
            return

        def stopped(report: Mapping[str, object]) -> None:
            reply.ok(report)
            self._perhaps_over()  # an end that was asked for meanwhile has waited for this

        self.stops.stop(room, leaf, asked.number("grace_seconds", 0.0, _WEEK), "stop", stopped)

    def _usage(self, asked: Asked, _: list[int], reply: Reply) -> None:
        usage = self.house.room(asked.name("box")).box.usage()
        reply.ok({"cpu_seconds": usage.cpu_seconds, "memory_bytes": usage.memory_bytes, "threads": usage.threads})

    def _forget(self, asked: Asked, _: list[int], reply: Reply) -> None:
        if asked.has("unit"):
            self.house.forget_unit(asked.name("unit"))
        else:
            self.house.forget(asked.name("box"))
        self.house.journal.flush()
        reply.ok()

    def _upgrade(self, asked: Asked, _: list[int], reply: Reply) -> None:
        if self.upgrade is None or self.ending:
            raise RefusedError("upgrade", "this keeper is ending")
        self.upgrade(asked.texts("argv"), reply)

    # --- what happens by itself --------------------------------------------------------------------

    def reap(self) -> None:
        if self.children.reap():
            self.loop.later(0, self.reap)

    def _started(self, unit: Unit) -> None:
        self.stops.started(unit)

    def _buried(self, unit: Unit) -> None:
        self.server.tell({"event": "exit", "unit": unit.name, "exit": unit.exit})
        self.stops.ended(unit)
        self._perhaps_over()

    def _failed(self, unit: Unit) -> None:
        self.stops.ended(unit)
        self._perhaps_over()

    def _police(self) -> None:
        for room in self.house.rooms.values():
            living = [unit for unit in room.units.values() if unit.state == LIVING]
            if not living or room.frozen:
                continue
            why = room.box.police()
            if why is not None:
                for unit in living:
                    unit.blame("memory" if "memory" in why else "pids", why)
                room.box.kill()
        self.loop.later(_POLICE_SECONDS, self._police)

    def _tidy(self) -> None:
        self.starter.templates.retire_idle()
        self.loop.later(_TIDY_SECONDS, self._tidy)

    # --- its end -----------------------------------------------------------------------------------

    def end(self, by: str) -> None:
        """Stop everything in order; the loop ends when all is proven gone. Nobody new is let in."""
        if self.ending:
            return
        self.ending = True
        self.server.stop_listening()
        for room in list(self.house.rooms.values()):
            self.stops.stop(room, None, _GRACE_SECONDS, by, lambda _: self._perhaps_over())
        self._perhaps_over()

    def _perhaps_over(self) -> None:
        """One that still lives after its stop cannot die; the end does not wait for that."""
        if self.ending and not len(self.stops) and all(unit.state == LIVING for unit in self.house.unended()):
            self.loop.end()

    def close(self) -> None:
        """After the loop: what was imported, what was kept, and whoever carries our mark."""
        self.starter.templates.close()
        for room in list(self.house.rooms.values()):
            for unit in list(room.units.values()):
                self.house.drop(unit)
            room.box.remove()
        killed = self.house.boxes.sweep()
        if killed:
            self.warn(f"ended {len(killed)} processes that were left")
        self.children.reap()
        self.house.journal.close()
        self._farewell()

    def _farewell(self) -> None:
        manager, until = self.server.manager, time.monotonic() + _FAREWELL_SECONDS
        while manager is not None and manager.is_open and manager.is_waiting and time.monotonic() < until:
            select.select([], [manager], [], 0.1)
            manager.flush()
        if manager is not None:
            manager.close()
