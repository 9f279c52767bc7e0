"""The manager's end of the conversation with its keeper: questions, answers, and what the keeper says unasked."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

from ostler.isolation.forks import keep_from_children
from ostler.keeper.protocol import REFUSED, Line, ProtocolError

_log = logging.getLogger("ostler.isolation")
#: So many messages are read in one turn of the loop; the rest has to wait for the others.
_PER_TURN = 64
_GONE = "the keeper of this home is gone"
#: How long an answer may take, besides the grace that a question gives: by real time, for a keeper that hangs does not
#: look at our clock. A start may import a large module first, and an upgrade waits until all is quiet.
_SECONDS = 30.0
_SECONDS_OF: Mapping[str, float] = MappingProxyType(
    {"hello": 5.0, "bye": 5.0, "ping": 2.0, "start": 150.0, "upgrade": 45.0}
)
#: Of a keeper that has just left a question unanswered, and said nothing since.
_SILENT_SECONDS = 2.0
#: This program is short of something; the keeper is as well as ever.
SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})

Answer = tuple[dict[str, Any], list[int]]


class KeeperError(Exception):
    """The keeper refused; `kind` is its word for why.

    Ours are "lost" when it is gone, "late" when it does not answer, and "short" when this program has no room to ask.
    """

    def __init__(self, sentence: str, kind: str = "") -> None:
        self.kind = kind
        super().__init__(sentence)


class Link:
    """One connection. It never comes back by itself: a keeper that is gone has taken its agents along."""

    def __init__(
        self, sock: socket.socket, told: Callable[[Mapping[str, Any]], None], lost: Callable[[], None]
    ) -> None:
        self._line = Line(sock)
        self._told = told
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._is_silent = False
        #: Done when the keeper says something, or has left.
        self._word: asyncio.Future[None] = self._loop.create_future()
        #: Done when the keeper has left.
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._line, self._read)
        keep_from_children(self)

    @property
    def is_open(self) -> bool:
        return not self.over.done()

    async def next_word(self) -> None:
        """Until the keeper says anything, or has left."""
        await asyncio.wait((self._word,))

    async def request(self, op: str, /, **fields: Any) -> dict[str, Any]:
        """Ask and wait. Raises `KeeperError`."""
        answer, fds = await self.ask(op, **fields)
        _close_all(fds)
        return answer

    def ask(self, op: str, /, fds: Sequence[int] = (), **fields: Any) -> asyncio.Future[Answer]:
        """Ask at once; the descriptors are copied. The answer may bring some, which are then the caller's."""
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if not self.is_open:
            answer.set_exception(KeeperError(_GONE, "lost"))
            return answer
        number = next(self._numbers)
        self._asked[number] = answer
        try:
            self._line.send({"id": number, "op": op, **fields}, fds)
        except (TypeError, ValueError, ProtocolError) as error:
            del self._asked[number]
            answer.set_exception(KeeperError(str(error), "request"))
            return answer
        except OSError as error:
            if error.errno in SHORT:
                del self._asked[number]
                answer.set_exception(KeeperError(f"this program has no room to ask for it: {error}", "short"))
                return answer
            # The reader sees the end too, but this caller should not have to wait for that.
            self._loop.call_soon(self._hear_out)
            return answer
        if self._line.is_waiting:
            self._loop.add_writer(self._line, self._write)
        self._set_deadline(number, answer, op, fields)
        return answer

    def _set_deadline(self, number: int, answer: asyncio.Future[Answer], op: str, fields: Mapping[str, Any]) -> None:
        seconds = _SILENT_SECONDS if self._is_silent else _SECONDS_OF.get(op, _SECONDS)
        seconds += float(fields.get("grace_seconds") or 0.0)
        timer = self._loop.call_later(seconds, self._overdue, number, op, seconds)
        answer.add_done_callback(lambda _: timer.cancel())

    def _overdue(self, number: int, op: str, seconds: float) -> None:
        """An answer that comes later is dropped."""
        answer = self._asked.pop(number, None)
        if answer is not None and not answer.done():
            self._is_silent = True
            answer.set_exception(KeeperError(f"the keeper of this home left {op} unanswered for {seconds:g} s", "late"))
            answer.exception()  # the caller may have been cancelled

    def depart(self) -> None:
        """From now on its end is expected."""
        self._lost = _nothing

    def close(self) -> None:
        """Hang up. It is not lost, so its loss is not told."""
        self.depart()
        self._end()

    def forked(self) -> None:
        """Without a word to the loop, which watches for the parent."""
        self._line.close()

    def _write(self) -> None:
        try:
            self._line.flush()
        except OSError as error:
            if error.errno not in SHORT:  # else one message was dropped, and its caller hears in time
                self._end()
            return
        if not self._line.is_waiting:
            self._loop.remove_writer(self._line)

    def _read(self) -> None:
        for _ in range(_PER_TURN):
            if not self.is_open:
                return
            try:
                came = self._line.receive()
            except BlockingIOError:
                return
            except ProtocolError:
                came = None
            if came is None:
                self._end()
                return
            self._is_silent = False
            word, self._word = self._word, self._loop.create_future()
            word.set_result(None)
            try:
                self._take(*came)
            except Exception:  # noqa: BLE001 - logged; the next message is for another caller
                _log.exception("the manager failed to take note of what its keeper said")

    def _hear_out(self) -> None:
        """It does not listen any more; its last words may say why."""
        self._read()
        self._end()

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        if "event" in message:
            _close_all(fds)
            if message["event"] == REFUSED:
                self._refuse(KeeperError(str(message.get("error")), REFUSED))
            else:
                self._told(message)
            return
        answer = self._asked.pop(message.get("id", 0), None)
        if answer is None or answer.done():  # the caller was cancelled
            _close_all(fds)
        elif "error" in message:
            _close_all(fds)
            answer.set_exception(KeeperError(str(message["error"]), str(message.get("kind", ""))))
        else:
            answer.set_result((message.get("ok") or {}, fds))

    def _end(self) -> None:
        if not self.is_open:
            return
        self.over.set_result(None)
        self._word.set_result(None)
        self._loop.remove_reader(self._line)
        self._loop.remove_writer(self._line)
        self._line.close()
        self._refuse(KeeperError(_GONE, "lost"))
        self._lost()

    def _refuse(self, error: KeeperError) -> None:
        """All that was asked."""
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # the caller may have been cancelled


def _close_all(fds: Sequence[int]) -> None:
    for one in fds:
        with contextlib.suppress(OSError):
            os.close(one)


def _nothing() -> None:
    pass
