"""The terminal and the open standard input of a command. The keeper holds both, so that they outlive the manager.

The keeper is the only reader of a terminal: what it reads goes into the log and into a bounded `Screen`. Viewers ask
for what came after a position and are answered when there is something, so a slow viewer holds up nothing: it asks
later, and where its position is not kept any more it gets the screen again. Input is taken as far as the program's own
buffer takes it, and the writer sends the rest again: nothing is stored here.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import struct
import termios
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ostler.keeper.loop import WRITE, Loop, Timer
from ostler.keeper.state import RequestError

#: Bytes of a screen that are kept; up to twice as many for a moment.
KEPT_BYTES = 64 << 10
#: Rows and columns that a program with a terminal sees unless its start names others.
DEFAULT_SIZE = (40, 120)
LARGEST_SIZE = 9999
#: A request that waits for output, or for room for input, is answered with nothing after so long.
_WAIT_SECONDS = 10.0
#: Consoles of ended units that are kept for viewers that are slower than the program.
_KEPT_ENDED = 16
_KEPT_WRITERS = 64
_REDRAW_SECONDS = 0.03
_CUT_WITHIN = 4096
_CLEAR = re.compile(rb"\x1bc|\x1b\[[23]J|\x1b\[(?:1;1)?H\x1b\[0?J")
_LONGEST_CLEAR = 12
_CUT = re.compile(rb"[\n\x1b]")
#: Private modes, the keypad, the keyboard protocol of kitty, and a full reset.
_MODE = re.compile(rb"\x1b(?:\[\?([0-9;]+)([hl])|([=>])|(\[[<=>][0-9;]*u)|(c))")
#: What a terminal answers to by typing: device attributes, positions, modes, colours, names.
_QUERY = re.compile(
    rb"\x1b\[[>=?]?[0-9;]*c|\x1b\[\??[0-9;]*n|\x1b\[\?u|\x1b\[>[0-9]*q|\x1b\[\??[0-9;]*\$p"
    rb"|\x1b\][0-9;]*;\?(?:\x07|\x1b\\)|\x1bP[+$]q[^\x1b]*\x1b\\"
)
#: Modes that are on in a terminal that nothing has changed: wrapping, a visible cursor.
_ON_BY_DEFAULT = frozenset({b"7", b"25"})
#: A soft reset: margins, attributes, character sets.
_SOFT_RESET, _CLEARED = b"\x1b[!p", b"\x1b[H\x1b[2J"
Reply = Callable[[dict[str, Any]], None]
Refuse = Callable[[str, str], None]


class Modes:
    """The modes of a terminal, by what was written to it. Not an emulator: it knows nothing of the text."""

    def __init__(self) -> None:
        self._by_number: dict[bytes, bytes] = {}
        self._keypad = self._keyboard = b""

    def feed(self, data: bytes) -> None:
        for match in _MODE.finditer(data):
            numbers, state, keypad, keyboard, reset = match.groups()
            if reset is not None:
                self.__init__()  # type: ignore[misc]  # as a new one
            elif keypad is not None:
                self._keypad = keypad
            elif keyboard is not None:
                self._keyboard = b"" if keyboard.startswith(b"[<") else keyboard
            else:
                self._by_number |= dict.fromkeys(numbers.split(b";"), state)

    def enter(self) -> bytes:
        """What brings another terminal into these modes."""
        modes = b"".join(b"\x1b[?%b%b" % mode for mode in self._by_number.items())
        return modes + b"".join(b"\x1b" + word for word in (self._keypad, self._keyboard) if word)

    def leave(self) -> bytes:
        """What brings a terminal in these modes back to its usual ones."""
        words = []
        for number, state in self._by_number.items():
            usual = b"h" if number in _ON_BY_DEFAULT else b"l"
            if state != usual:
                words.append(b"\x1b[?%b%b" % (number, usual))
        words += [b"\x1b[<u"] * bool(self._keyboard) + [b"\x1b>"] * (self._keypad == b"=")
        return b"".join(words)


class Screen:
    """The last bytes that a terminal got, since it was last cleared, with the modes that were set before them."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._start = self.end = 0  #: positions, counted from the first byte
        self._modes = Modes()
        self._answered = 0  #: up to here a viewer's terminal has seen the queries

    def feed(self, data: bytes) -> None:
        before = len(self._kept)
        self._kept += data
        self.end += len(data)
        clear = None
        for clear in _CLEAR.finditer(self._kept, max(0, before - _LONGEST_CLEAR + 1)):  # noqa: B007 - the last one
            pass
        if clear is not None and clear.start():
            self._forget(clear.start())
        if len(self._kept) > 2 * KEPT_BYTES:
            least = len(self._kept) - KEPT_BYTES
            border = _CUT.search(self._kept, least, least + _CUT_WITHIN)  # not in the midst of a sequence
            self._forget(least if border is None else border.start())

    def _forget(self, count: int) -> None:
        self._modes.feed(bytes(self._kept[:count]))
        del self._kept[:count]
        self._start += count

    def read(self, after: int | None) -> bytes:
        """What came after the position; the whole screen where that is not kept any more, or None."""
        start = self._start if after is None else after
        if not self._start <= start <= self.end:
            start = self._start
        fresh = max(start, min(self._answered, self.end))
        shown = bytes(self._kept[start - self._start : fresh - self._start])
        data = bytes(self._kept[fresh - self._start :])
        self._answered = self.end
        if start != after:
            data = _QUERY.sub(b"", shown) + data
            if start:  # something is missing before it
                data = _SOFT_RESET + self._modes.enter() + _CLEARED + data
            return data
        return shown + data


class Input:
    """Writes to the standard input of a program; owns `fd`, which is -1 when it is closed."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self.fd = fd
        self._loop = loop
        self._waiting: deque[_Write] = deque()
        #: By writer, how much was taken of what it sent: what it sends again after a lost answer is not taken twice.
        self._taken: dict[str, int] = {}
        os.set_blocking(fd, False)

    def write(self, request: Mapping[str, Any], reply: Reply) -> None:
        data, writer = base64.b64decode(str(request.get("data") or "")), str(request.get("writer") or "")
        seen = 0
        if writer:
            taken = self._taken.pop(writer, 0)
            self._taken[writer] = taken
            seen = taken - int(request["at"])
            if seen < 0:
                raise RequestError("request", f"bytes before {request['at']} of this writer are missing")
            if len(self._taken) > _KEPT_WRITERS:
                del self._taken[next(iter(self._taken))]
        self._try(_Write(data[seen:], min(seen, len(data)), writer, bool(request.get("close")), reply))

    def _try(self, write: _Write) -> None:
        count = 0
        try:
            if self.fd >= 0 and write.data:
                count = os.write(self.fd, write.data)
        except BlockingIOError:
            write.timer = self._loop.later(_WAIT_SECONDS, lambda: self._give_up(write))
            self._waiting.append(write)
            self._loop.watch(self.fd, self._writable, WRITE)
            return
        except OSError:  # the program has closed it, or has ended
            self.close()
        if write.writer:
            self._taken[write.writer] = self._taken.get(write.writer, 0) + count
        if write.closes and count == len(write.data):
            self.close()
        write.reply({"taken": write.seen + count, "closed": self.fd < 0})

    def _writable(self) -> None:
        self._loop.unwatch(self.fd)
        waiting, self._waiting = self._waiting, deque()
        for write in waiting:
            write.cancel()
            self._try(write)

    def _give_up(self, write: _Write) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(write)
            write.reply({"taken": write.seen, "closed": False})

    def close(self) -> None:
        if self.fd >= 0:
            self._loop.unwatch(self.fd)
            fd, self.fd = self.fd, -1
            os.close(fd)
            self._answer_waiting()

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for write in waiting:
            write.cancel()
            write.reply({"taken": write.seen, "closed": True})


class _Write:
    def __init__(self, data: bytes, seen: int, writer: str, closes: bool, reply: Reply) -> None:
        self.data = data
        self.seen = seen
        self.writer = writer
        self.closes = closes
        self.reply = reply
        self.timer: Timer | None = None

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Console:
    """What a person sees and types of one unit. `slave` stays open, so that a program that closes its terminal for a
    while can open it again.
    """

    def __init__(
        self, loop: Loop, unit: str, fd: int, stdin: int, slave: int = -1, size: tuple[int, int] | None = None
    ) -> None:
        self.unit = unit
        self.input = Input(loop, fd)
        #: What the program gets as its standard input; -1 when it has it.
        self.stdin = stdin
        self.screen = None if size is None else Screen()
        self.size = size
        self.ended = False
        self._loop = loop
        self._slave = slave
        self._held = b""  #: a carriage return whose line feed may follow
        self._readers: list[tuple[int | None, Reply, Timer]] = []

    def take(self, data: bytes) -> bytes:
        """Output of the terminal; returns what goes into the log, where lines end as the program ended them."""
        if self.screen is None:
            return data
        self.screen.feed(data)
        self._answer_readers()
        data = self._held + data
        self._held = data[-1:] if data.endswith(b"\r") else b""
        return (data[:-1] if self._held else data).replace(b"\r\n", b"\n")

    def read(self, after: int | None, reply: Reply) -> None:
        screen = self._require_screen()
        if self.ended or after is None or after != screen.end:
            self._answer(after, reply)
        else:
            timer = self._loop.later(_WAIT_SECONDS, self._answer_readers)
            self._readers.append((after, reply, timer))

    def _answer_readers(self) -> None:
        readers, self._readers = self._readers, []
        for after, reply, timer in readers:
            timer.cancel()
            self._answer(after, reply)

    def _answer(self, after: int | None, reply: Reply) -> None:
        screen = self._require_screen()
        data = base64.b64encode(screen.read(after)).decode()
        reply({"unit": self.unit, "at": screen.end, "data": data, "ended": self.ended})

    def _require_screen(self) -> Screen:
        if self.screen is None:
            raise RequestError("request", "it has no terminal")
        return self.screen

    def resize(self, size: tuple[int, int] | None, *, redraw: bool) -> None:
        """None: the size it has. `redraw`: also a program that sees the size it had draws its screen again."""
        self._require_screen()
        before = self.size
        if before is None:
            return
        if size is not None and size != before:
            self._set_size(size)
        elif redraw:
            other = (before[0] - 1 or 2, before[1])
            self._set_size(other)
            self._loop.later(_REDRAW_SECONDS, lambda: self._set_size(before) if self.size == other else None)

    def _set_size(self, size: tuple[int, int]) -> None:
        if self.input.fd < 0:
            return
        self.size = size
        set_size(self.input.fd, size)

    def status(self) -> dict[str, Any]:
        return {"terminal": self.size, "stdin": self.input.fd >= 0}

    def release_stdin(self) -> int:
        """The caller closes it."""
        stdin, self.stdin = self.stdin, -1
        return stdin

    def finish(self) -> None:
        """The unit has ended and its output was read. Harmless twice."""
        if not self.ended:
            self.ended = True
            self.input.close()
            for descriptor in (self.release_stdin(), self._slave):
                if descriptor >= 0:
                    os.close(descriptor)
            self._slave = -1
            self._answer_readers()


class Consoles:
    """By unit: of those that live, and of the last ones that ended."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._by_unit: dict[str, Console] = {}

    def open_terminal(self, unit: str, size: tuple[int, int]) -> tuple[Console, int, int]:
        """The console, the keeper's end of the terminal, and the program's."""
        ours, theirs = os.openpty()
        set_size(ours, size)
        return self._add(Console(self._loop, unit, _copy(ours), _copy(theirs), _copy(theirs), size)), ours, theirs

    def open_pipe(self, unit: str) -> Console:
        stdin, ours = os.pipe2(os.O_CLOEXEC)
        return self._add(Console(self._loop, unit, ours, stdin))

    def _add(self, console: Console) -> Console:
        self._by_unit.pop(console.unit, None)
        self._by_unit[console.unit] = console
        ended = [unit for unit, kept in self._by_unit.items() if kept.ended]
        for unit in ended[: max(0, len(ended) - _KEPT_ENDED)]:
            del self._by_unit[unit]
        return console

    def find(self, name: str) -> Console:
        """Of a unit, or the newest one below the name of a cell or an instance."""
        names = [unit for unit in self._by_unit if unit == name or unit.startswith(f"{name}.")]
        if not names:
            raise RequestError("unknown", f"the keeper has no terminal of {name}")
        return self._by_unit[names[-1]]

    def handlers(self) -> dict[str, Callable[[Mapping[str, Any], Reply, Refuse], None]]:
        return {
            "read_terminal": lambda request, reply, _: self._read(request, reply),
            "write_input": lambda request, reply, _: self._write(request, reply),
            "resize": lambda request, reply, _: self._resize(request, reply),
        }

    def _read(self, request: Mapping[str, Any], reply: Reply) -> None:
        """`after` counts in `unit`; of another unit, all of the newest is given."""
        console = self.find(str(request["name"]))
        after = request.get("after")
        console.read(int(after) if after is not None and request.get("unit") == console.unit else None, reply)

    def _write(self, request: Mapping[str, Any], reply: Reply) -> None:
        console = self.find(str(request["name"]))
        if request.get("close") and console.screen is not None:
            raise RequestError("request", "the input of a terminal is not closed; type ctrl-d")
        if request.get("size") is not None and console.screen is not None:
            console.resize(size_of(request["size"]), redraw=False)  # the one who types sees it in its own size
        console.input.write(request, reply)

    def _resize(self, request: Mapping[str, Any], reply: Reply) -> None:
        console = self.find(str(request["name"]))
        size = None if request.get("size") is None else size_of(request["size"])
        console.resize(size, redraw=bool(request.get("redraw")))
        reply({})


def size_of(value: Any) -> tuple[int, int]:
    rows, columns = value
    if not (type(rows) is int and type(columns) is int and 1 <= rows <= LARGEST_SIZE and 1 <= columns <= LARGEST_SIZE):
        raise RequestError(
            "request", f"a terminal has 1 to {LARGEST_SIZE:,} rows and columns, not {rows} and {columns}"
        )
    return rows, columns


def set_size(terminal: int, size: tuple[int, int]) -> None:
    """The kernel tells the program by SIGWINCH."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _copy(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
