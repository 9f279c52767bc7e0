"""The manager's side of a keeper: the `Holder` that starts it, speaks to it, and replaces it when it was killed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import itertools
import logging
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ostler.agent_process.framing import MAX_UNSENT
from ostler.errors import InvalidOperationError, StaleWriterError
from ostler.home import KEEPER
from ostler.isolation.base import Input, LastOutput, OtherVersionError, Screen, Site, Usage
from ostler.isolation.calls import wake
from ostler.isolation.hardening import harden, keep_from_children
from ostler.isolation.held.send_buffer import SendBuffer
from ostler.isolation.holder import (
    Command,
    Holder,
    HolderError,
    OnExit,
    PythonProgram,
    StartOrder,
    UnitExit,
    UnitStatus,
)
from ostler.isolation.process import launch
from ostler.isolation.process.templates import Templates
from ostler.keeper import protocol
from ostler.keeper.state import cell_of
from ostler.model.text import last_line

_log = logging.getLogger("ostler.isolation")
_CONNECT_SECONDS = 20.0
_REFUSED_SECONDS = 1.0
_REPLY_SECONDS = 30.0
#: A start may import a large module first.
_START_SECONDS = 150.0
_STOP_SECONDS = 15.0
_BYE_SECONDS = 5.0
#: While replies are awaited: after so many seconds of silence the keeper is asked whether it lives, after so many it is
#: taken to hang. One that hangs is given less time by the next requests. Counted in turns of a timer and not by a
#: clock, so that a pause of this program or of the whole machine counts as one.
_TURN_SECONDS = 1.0
_ASK_TURNS, _HANGS_TURNS, _STILL_HANGS_TURNS = 2, 5, 2
_DYING_LOOKS = 80
#: This program is short of something; keeper and agents are as well as ever.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_PAUSE = 0.02
_END_SECONDS = 20.0


def _lost() -> HolderError:
    return HolderError("lost", "the keeper of this home is gone")


class _Connection:
    """Requests and replies over one socket. A request that is not answered in time raises, and may still be done."""

    def __init__(
        self, sock: socket.socket, on_event: Callable[[Mapping[str, Any]], None], on_lost: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_event = on_event
        self._on_lost = on_lost
        self._reader = protocol.LineReader(1 << 26)
        self._buffer = SendBuffer(sock)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._turn: asyncio.TimerHandle | None = None
        self._silent_turns = 0
        self._hangs = False
        #: Done when the keeper says anything, or the connection is closed.
        self._word: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock.fileno(), self._readable)
        keep_from_children(self)

    @property
    def is_open(self) -> bool:
        return not self.closed.done()

    async def request(self, op: str, seconds: float = _REPLY_SECONDS, **fields: Any) -> dict[str, Any]:
        if not self.is_open:
            raise _lost()
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[number] = reply
        self._send({"id": number, "op": op, **fields})
        if self._turn is None:
            self._silent_turns = 0
            self._turn = self._loop.call_later(_TURN_SECONDS, self._check)
        try:
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError:
            raise HolderError("late", f"the keeper did not answer {op} within {seconds:g} s") from None
        finally:
            self._waiting.pop(number, None)

    async def word(self) -> None:
        """Return when the keeper says anything, or the connection is closed."""
        await asyncio.wait((self._word,))

    def _check(self) -> None:
        """Once in a turn while replies are awaited: does the keeper live?"""
        self._turn = None
        if not self._waiting or not self.is_open:
            return
        self._silent_turns += 1
        if self._silent_turns >= (_STILL_HANGS_TURNS if self._hangs else _HANGS_TURNS):
            self._hangs = True
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(HolderError("late", "the keeper of this home does not answer"))
                    reply.exception()  # the caller may have been cancelled
            return
        if self._silent_turns == _ASK_TURNS:
            self._send({"id": 0, "op": "renew"})
        self._turn = self._loop.call_later(_TURN_SECONDS, self._check)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._buffer.write(protocol.encode(message))

    def _readable(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._silent_turns, self._hangs = 0, False
        if not data:
            self._end()
            return
        try:
            for line in self._reader.feed(data):
                self._take(protocol.decode(line))
        except protocol.LineError:
            _log.exception("the keeper does not keep to its protocol")
            self._end()
            return
        word, self._word = self._word, self._loop.create_future()
        wake(word)

    def _end(self) -> None:
        self.close()
        self._on_lost()

    def forked(self) -> None:
        """In a forked child: without a word to the loop, which is that of the parent."""
        self._sock.close()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "event" in message:
            self._on_event(message)
            return
        number = message.get("id")
        waiting = [self._waiting.get(number)] if number is not None else list(self._waiting.values())
        for reply in waiting:
            if reply is None or reply.done():
                continue
            if "ok" in message:
                reply.set_result(message["ok"])
            else:
                reply.set_exception(HolderError(message.get("kind", "request"), str(message.get("error"))))

    def close(self) -> None:
        if self.is_open:
            self._loop.remove_reader(self._sock.fileno())
            self._buffer.close()
            self._sock.close()
            self.closed.set_result(None)
            if self._turn is not None:
                self._turn.cancel()
            wake(self._word)
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(_lost())
                    reply.exception()


class KeeperHolder(Holder):
    has_terminals = True

    def __init__(self, site: Site) -> None:
        self._site = site
        self.about: Mapping[str, Any] = {}
        self._private: Path | None = None
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        #: Both by cell and unit.
        self._listeners: dict[str, dict[str, OnExit]] = {}
        self._outputs: dict[str, dict[str, LastOutput]] = {}
        self._templates = Templates()
        self._renewing: asyncio.TimerHandle | None = None
        self._renewals: set[asyncio.Task[Any]] = set()

    @property
    def directory(self) -> Path:  # type: ignore[override]
        if self._site.directory is not None:
            return self._site.directory
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="ostler-home-"))
        return self._private

    @property
    def identity(self) -> str | None:
        return ":".join(str(self.about.get(name)) for name in ("boot_id", "pid", "start_time"))

    # --- connection ---

    async def open(self, *, start: bool = True) -> bool:
        await self._replaced()
        if self._connection is None:
            if self._opening is None:  # one attempt for all that wait
                self._opening = asyncio.get_running_loop().create_task(self._connect(start=start))
                self._opening.add_done_callback(self._opened)
            await asyncio.shield(self._opening)
            if start and self._connection is None:  # the attempt was one that starts no keeper
                return await self.open()
        return self._connection is not None

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()

    async def _connect(self, *, start: bool) -> None:
        directory, loop = self.directory / KEEPER, asyncio.get_running_loop()
        end = loop.time() + _CONNECT_SECONDS
        reason = "does not answer"
        if start or launch.left_something(directory):
            harden()  # before there is an agent that could read this program's memory
        while loop.time() < end:
            try:
                sock = await self._open_socket(directory)
            except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
                if not start and not launch.left_something(directory):
                    return
                if not await launch.start(directory):
                    await asyncio.sleep(_PAUSE)
                continue
            connection = _Connection(sock, self._event, self._lost)
            try:
                await self._hello(connection)
            except HolderError as error:
                connection.close()
                await self._require_leaving(error, directory)
                reason = str(error)
                if error.kind == "refused":  # perhaps for a moment only, in which a process above this one was ending
                    end = min(end, loop.time() + _REFUSED_SECONDS)
                await asyncio.sleep(_PAUSE)
            except BaseException:
                connection.close()
                raise
            else:
                self._connection = connection
                return
        raise InvalidOperationError(f"the keeper of {directory} cannot be used: {reason}")

    async def _open_socket(self, directory: Path) -> socket.socket:
        """Raises `FileNotFoundError` and the like where no keeper is; `InvalidOperationError` for one that hangs."""
        try:
            return protocol.connect(str(directory))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise
        except BlockingIOError as error:
            raise InvalidOperationError(
                f"the keeper of {directory} lets no more managers in, so it hangs; kill it, and open again"
            ) from error
        except OSError as error:
            await self._refuse_other_version(directory)
            raise InvalidOperationError(f"the keeper of {directory} cannot be reached: {error}") from error

    async def _require_leaving(self, error: HolderError, directory: Path) -> None:
        """Raises for a keeper that stays and does not take this manager; one that is ending is followed by another."""
        match error.kind:
            case "ending" | "lost" | "refused":
                return
            case "stale":
                raise StaleWriterError(f"a newer manager has the keeper of {directory}") from error
            case "late":
                raise InvalidOperationError(
                    f"the keeper of {directory} does not answer; if it stays so, kill it, and open again"
                ) from error
            case "version":
                await self._refuse_other_version(directory)
        raise InvalidOperationError(f"the keeper of {directory} refuses: {error}") from error

    @staticmethod
    async def _refuse_other_version(directory: Path) -> None:
        other = await asyncio.to_thread(launch.other_keeper, directory)
        if other is not None:
            raise OtherVersionError(other.sentence, f"wait for that, or end them now: kill {other.pid}")

    async def _hello(self, connection: _Connection) -> None:
        lease = self._site.outlive.total_seconds() if self._site.outlives else 0.0
        fields = {"version": protocol.VERSION, "epoch": self._site.epoch, "lease_seconds": lease}
        self.about = await connection.request("hello", **fields)
        self._outputs.clear()
        for status in self.about["units"]:
            self._note_output(str(status["unit"]), status.get("output"))
        self._renew(connection, lease)

    def _renew(self, connection: _Connection, lease: float) -> None:
        """The keeper ends everything when it has not heard a manager for the lease, connected or not."""
        if lease and connection.is_open:
            if connection is self._connection:
                task = asyncio.get_running_loop().create_task(_quietly(connection.request("renew")))
                self._renewals.add(task)
                task.add_done_callback(self._renewals.discard)
            self._renewing = asyncio.get_running_loop().call_later(lease / 3, self._renew, connection, lease)

    async def _request(self, op: str, seconds: float = _REPLY_SECONDS, **fields: Any) -> dict[str, Any]:
        try:
            if self._connection is None:
                raise _lost()
            return await self._connection.request(op, seconds, **fields)
        except HolderError as error:
            if error.kind == "lost":
                await self._replaced()  # so that the caller knows of its exit when it hears of the loss
            raise

    async def _replaced(self) -> None:
        if self._replacing is not None and self._replacing is not asyncio.current_task():
            await asyncio.wait((self._replacing,))

    def _event(self, message: Mapping[str, Any]) -> None:
        if message.get("event") == "output":
            for unit, fields in message["units"].items():
                self._note_output(unit, fields)
        elif message.get("event") == "exit":
            self._note_output(str(message.get("unit")), message.get("output"))
            on_exit = self._set_listener(str(message.get("unit")), None)
            if on_exit is not None:
                _tell(on_exit, _exit(message["exit"]))

    def _note_output(self, unit: str, fields: Mapping[str, Any] | None) -> None:
        if fields is not None:
            at = datetime.fromtimestamp(fields["at"], UTC)
            output = LastOutput(at=at, line=last_line(fields["tail"]), dropped=fields["dropped"])
            self._outputs.setdefault(cell_of(unit), {})[unit] = output

    # --- the keeper was killed ---

    def _lost(self) -> None:
        if self._connection is None:
            return  # it never became ours
        self._connection = None
        if self._renewing is not None:
            self._renewing.cancel()
        _log.error("the keeper of %s is gone; if it was killed, its agents die with it", self.directory)
        self._replacing = asyncio.get_running_loop().create_task(self._replace())

    async def _replace(self) -> None:
        """A new keeper sweeps before it listens, and knows the exits that the old one recorded."""
        listeners = {unit: on_exit for units in self._listeners.values() for unit, on_exit in units.items()}
        unknown = UnitExit(by="lost")
        exits: dict[str, UnitExit] = {}
        alive: set[str] = set()
        try:
            if listeners:
                await self._connect_patiently()
                statuses = await self.units()
                exits = {status.unit: status.exit for status in statuses if status.exit is not None}
                alive = {status.unit for status in statuses if status.exit is None}
                unknown = UnitExit(by="lost", left=tuple(self.about["survivors"]))  # one of them may be its own
        except StaleWriterError:
            unknown = UnitExit(by="taken")
        except Exception:  # noqa: BLE001 - logged; then it is swept without one
            _log.exception("no new keeper could be started for %s", self.directory)
            await _quietly(self._sweep_dead())
        finally:
            self._replacing = None
            for unit, on_exit in listeners.items():
                if unit in alive:
                    continue  # it is the same keeper, and only the connection was lost
                self._set_listener(unit, None)
                _tell(on_exit, exits.get(unit, unknown))

    async def _connect_patiently(self) -> None:
        """A program that has no descriptors left may have some again in a moment."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _CONNECT_SECONDS
        while True:
            try:
                return await self._connect(start=True)
            except InvalidOperationError as error:
                if not _is_short(error.__cause__) or loop.time() > end:
                    raise
            await asyncio.sleep(_PAUSE)

    async def _sweep_dead(self) -> None:
        """A keeper that was killed holds its lock until it is quite dead."""
        for _ in range(_DYING_LOOKS):
            if await launch.sweep_dead(self.directory / KEEPER):
                return
            await asyncio.sleep(_PAUSE)

    # --- the contract ---

    async def start(self, order: StartOrder, on_exit: OnExit) -> UnitStatus:
        before = self._set_listener(order.unit, on_exit)
        fields: dict[str, Any] = {
            "unit": order.unit,
            "limits": asdict(order.limits),
            "env": dict(order.env),
            "cwd": order.cwd,
            "log": str(order.log),
            "log_bytes": order.log_bytes,
            "log_rate": order.log_rate,
            "nice": order.nice,
            "umask": order.umask,
        }
        try:
            if isinstance(order.program, Command):
                fields["argv"] = list(order.program.argv)
                fields["stdin"] = order.program.stdin is not None
                fields["open_stdin"] = order.program.open_stdin
                fields["terminal"] = order.program.terminal
                if order.program.stdin is not None:
                    self._write_stdin(order.unit, order.program.stdin)
            else:
                fields["template"] = self._template(order.program)
            return _status(await self._request("start", _START_SECONDS, **fields))
        except BaseException:
            self._set_listener(order.unit, before)
            raise

    def _template(self, program: PythonProgram) -> dict[str, Any]:
        spec = self._templates.find(program.source, dict(program.env), program.cwd)
        return {
            "key": spec["template"],
            "fresh_argv": launch.fresh_argv(),
            **{name: spec[name] for name in ("argv", "env", "cwd", "setup")},
        }

    def _write_stdin(self, unit: str, text: bytes) -> None:
        directory = self._run_directory(unit)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / protocol.STDIN).write_bytes(text)

    def _run_directory(self, unit: str) -> Path:
        return self.directory / protocol.RUN / unit

    async def attach(self, unit: str, on_exit: OnExit) -> UnitStatus:
        before = self._set_listener(unit, on_exit)  # before the request: the exit may follow the reply at once
        try:
            status = _status(await self._request("status", unit=unit))
        except BaseException:
            self._set_listener(unit, before)
            raise
        if status.exit is not None:
            self._set_listener(unit, before)
        elif before is not None:
            before(UnitExit(by="taken"))
        return status

    def _set_listener(self, unit: str, on_exit: OnExit | None) -> OnExit | None:
        """None: no listener. Returns the one before."""
        cell = cell_of(unit)
        units = self._listeners.setdefault(cell, {})
        before = units.pop(unit, None)
        if on_exit is not None:
            units[unit] = on_exit
        elif not units:
            del self._listeners[cell]
        return before

    async def units(self, cell: str | None = None) -> list[UnitStatus]:
        return [_status(fields) for fields in (await self._request("list", cell=cell))["units"]]

    async def connect(self, status: UnitStatus) -> socket.socket:
        try:
            sock = protocol.connect(str(self._run_directory(status.unit)), protocol.AGENT_SOCKET)
        except BlockingIOError as error:  # too many connections wait; it lives, and does not take them
            raise HolderError("busy", f"the agent of unit {status.unit} takes no connection now") from error
        except OSError as error:
            if _is_short(error):  # it lives, and this program cannot reach it now
                raise HolderError("busy", f"the agent of unit {status.unit} cannot be reached now: {error}") from error
            raise HolderError("gone", f"the agent of unit {status.unit} cannot be reached: {error}") from error
        # The kernel shows who called listen(): the keeper, never an agent that put its own socket there.
        pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if pid != self.about.get("pid"):
            sock.close()
            raise HolderError("request", f"the socket of unit {status.unit} was not made by the keeper")
        return sock

    def last_output(self, unit: str) -> LastOutput | None:
        return self._outputs.get(cell_of(unit), {}).get(unit)

    def read_unsent(self, unit: str) -> bytes:
        """The agent could write there: no link, no FIFO, and not more than `MAX_UNSENT` of it."""
        path, flags = self._run_directory(unit) / protocol.UNSENT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with os.fdopen(os.open(path, flags | os.O_CLOEXEC), "rb") as file:
                return file.read(MAX_UNSENT) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
        except OSError:
            return b""

    async def read_terminal(self, name: str, after: Screen | None) -> Screen:
        place: dict[str, Any] = {} if after is None else {"unit": after.unit, "after": after.position}
        reply = await self._request("read_terminal", name=name, **place)
        data = base64.b64decode(reply["data"])
        return Screen(unit=reply["unit"], position=reply["at"], data=data, has_ended=reply["ended"])

    async def write_input(self, name: str, data: Input) -> tuple[int, bool]:
        fields: dict[str, Any] = {"data": base64.b64encode(data.data).decode(), "close": data.close, "size": data.size}
        reply = await self._request("write_input", name=name, writer=data.writer, at=data.at, **fields)
        return int(reply["taken"]), bool(reply["closed"])

    async def resize(self, name: str, size: tuple[int, int] | None, *, redraw: bool) -> None:
        await self._request("resize", name=name, size=size, redraw=redraw)

    async def freeze(self, cell: str) -> None:
        await self._request("freeze", cell=cell)

    async def thaw(self, cell: str) -> None:
        await self._request("thaw", cell=cell)

    async def usage(self, cell: str) -> Usage:
        used = await self._request("usage", cell=cell)
        return Usage(cpu_seconds=used["cpu_seconds"], memory_bytes=used["memory_bytes"], thread_count=used["threads"])

    async def stop(self, name: str, grace: float) -> list[str]:
        report = await self._request("stop", grace + _STOP_SECONDS, name=name, grace=grace)
        return [str(text) for text in report["left"]]

    async def forget(self, name: str) -> None:
        cell = cell_of(name)
        if name == cell:
            self._listeners.pop(cell, None)
            self._outputs.pop(cell, None)
        else:
            self._set_listener(name, None)
            self._outputs.get(cell, {}).pop(name, None)
        await self._request("forget", name=name)

    async def answers(self) -> None:
        if self._connection is not None:
            await self._connection.word()

    async def close(self, *, leave: bool) -> None:
        if self._replacing is not None:
            await asyncio.wait((self._replacing,), timeout=_END_SECONDS)
        if self._opening is not None:
            self._opening.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
        connection, self._connection = self._connection, None
        if connection is not None and connection.is_open:
            stays = leave
            with contextlib.suppress(HolderError):
                stays = bool((await connection.request("bye", _BYE_SECONDS, leave=leave)).get("stays"))
            if not stays and connection.is_open:
                await asyncio.wait((connection.closed,), timeout=_END_SECONDS)
            connection.close()
        for task in tuple(self._renewals):
            task.cancel()
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None


def _tell(on_exit: OnExit, how: UnitExit) -> None:
    """One listener that fails must not keep the others from their exits."""
    try:
        on_exit(how)
    except Exception:  # noqa: BLE001 - logged
        _log.exception("the exit of a unit could not be taken")


def _is_short(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in _SHORT


async def _quietly(work: Any) -> None:
    with contextlib.suppress(Exception):
        await work


def _exit(fields: Mapping[str, Any]) -> UnitExit:
    names = ("code", "signal", "oom", "by", "why", "ended", "lasted", "written", "dropped")
    cpu_seconds = float(fields.get("cpu_seconds") or 0.0)
    return UnitExit(**{name: fields[name] for name in names}, left=tuple(fields["left"]), cpu_seconds=cpu_seconds)


def _status(fields: Mapping[str, Any]) -> UnitStatus:
    record = fields.get("exit")
    return UnitStatus(
        unit=str(fields["unit"]),
        cell=str(fields["cell"]),
        identity={name: fields.get(name) for name in ("pid", "start_time", "boot_id")},
        enforcement=fields.get("enforcement") or {},
        key=str(fields.get("key") or ""),
        frozen=bool(fields.get("frozen")),
        terminal=None if fields.get("terminal") is None else tuple(fields["terminal"]),
        exit=None if record is None else _exit(record),
    )
