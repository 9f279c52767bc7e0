"""`ostler attach` and `ostler run -it`: the terminal of an agent in the terminal of a person."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import select
import signal
import termios
import threading
import time
import tty
from collections import deque
from typing import Any

import click

from ostler.cli import completers
from ostler.cli.common import ENDED, Daemon, fail, on_agent
from ostler.cli.output import note, plain
from ostler.client.blocking import DaemonError, UnreachableError
from ostler.errors import ExitCode
from ostler.keeper.terminal import Modes

DETACH_KEYS = "ctrl-q"
#: Bytes that were typed or pasted and are not sent yet; what is typed beyond is lost, with a bell.
_MAX_TYPED = 8 << 20
#: Bytes in one request.
_CHUNK = 32 << 10
#: A daemon that is gone for so long is started again: until then `restart-daemon` may do it.
_START_AFTER_SECONDS = 2.0
_PAUSE_SECONDS = 0.1
#: What was typed before the person detached is sent for at most so long.
_LAST_KEYS_SECONDS = 2.0
_BELL = b"\a"


class DetachKeys:
    """Finds the keys that detach among what is typed. Between two keys of a sequence the first is held back."""

    def __init__(self, text: str) -> None:
        self._keys = [_key(word) for word in text.split(",")]
        self._matched = 0
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What is to be sent, and whether the person detaches."""
        sent = b""
        while data:
            match = self._keys[self._matched].match(data) if self._matched else self._keys[0].search(data)
            if match is None:
                sent, self._held, self._matched = sent + self._held, b"", 0
                if self._keys[0].search(data) is None:
                    return sent + data, False
                continue
            sent += data[: match.start()]
            self._held += match[0]
            data = data[match.end() :]
            self._matched += 1
            if self._matched == len(self._keys):
                return sent, True
        return sent, False


def _key(word: str) -> re.Pattern[bytes]:
    """A character, or ctrl- and a letter; also as terminals with a newer keyboard protocol send it."""
    name = word.strip().lower()
    if len(name) == 1 and name.isascii() and name.isprintable():
        return re.compile(re.escape(name.encode()))
    letter = name.removeprefix("ctrl-")
    if letter == name or len(letter) != 1 or not "@" <= letter.upper() <= "_":
        raise click.UsageError(f"--detach-keys must be keys such as ctrl-q or ctrl-p,ctrl-q, was {word}")
    code = ord(letter)
    plain_code = re.escape(bytes([ord(letter.upper()) - 64]))
    return re.compile(rb"%b|\x1b\[%d;5u|\x1b\[27;5;%d~" % (plain_code, code, code))


class InputPump:
    """Sends what is typed or piped, in a thread: in order, each byte once, also over a daemon that is killed."""

    def __init__(self, daemon: Daemon, instance_id: str) -> None:
        self._client = daemon.raw()
        self._instance_id = instance_id
        self._writer = os.urandom(8).hex()
        self._at = 0
        self.size: tuple[int, int] | None = None

    def send(self, data: bytes, *, close: bool = False) -> bool:
        """Waits until the program has taken it; False when it reads no more."""
        while data or close:
            chunk = data[:_CHUNK]
            size = None if self.size is None else {"rows": self.size[0], "columns": self.size[1]}
            try:
                reply = self._client.call(
                    "write_input",
                    instance=self._instance_id,
                    data=base64.b64encode(chunk).decode(),
                    writer=self._writer,
                    at=self._at,
                    close=close and len(chunk) == len(data),
                    size=size,
                )
            except UnreachableError:
                time.sleep(_PAUSE_SECONDS)  # what follows the output finds the next daemon, or gives up
                continue
            self._at += reply["taken"]
            data = data[reply["taken"] :]
            if reply["closed"]:
                return not data
        return True


def pump_standard_input(daemon: Daemon, instance_id: str) -> None:
    """In a thread of its own, from a pipe or a file to its end."""

    def pump() -> None:
        sender = InputPump(daemon, instance_id)
        with contextlib.suppress(DaemonError, OSError):  # it has ended; what follows the output says how
            while chunk := os.read(0, _CHUNK):
                if not sender.send(chunk):
                    return
            sender.send(b"", close=True)

    threading.Thread(target=pump, daemon=True).start()


class _SignalledError(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


class Attachment:
    """One person at the terminal of one agent, from `run` until the agent ends or the person detaches."""

    def __init__(self, daemon: Daemon, instance: dict[str, Any], keys: str, *, types: bool = True) -> None:
        self._daemon = daemon
        self._name = plain(str(instance["name"]))
        self._instance_id = str(instance["instance_id"])
        self._keys = DetachKeys(keys)
        self._types = types
        self._modes = Modes()
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._typed: deque[bytes] = deque()
        self._has_typed = threading.Event()
        self._is_sending = False
        self._failed: BaseException | None = None
        self._is_over = False
        self._lost_at = 0.0

    def run(self, *, redraw: bool) -> bool:
        """Whether the agent has ended; False: the person has detached. The terminal is left as it was."""
        before = termios.tcgetattr(0)
        handlers = {number: signal.signal(number, _raise) for number in (signal.SIGTERM, signal.SIGHUP)}
        handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: self._poke(b"w"))
        try:
            tty.setraw(0, termios.TCSANOW)
            self._resize(_size(), redraw=redraw)
            threading.Thread(target=self._show, daemon=True).start()
            threading.Thread(target=self._send, daemon=True).start()
            has_detached = self._serve()
        except _SignalledError as error:
            self._leave(before)
            signal.signal(error.number, signal.SIG_DFL)
            os.kill(os.getpid(), error.number)
            raise
        finally:
            self._leave(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._failed is not None:
            raise self._failed
        return not has_detached

    def _leave(self, before: list[Any]) -> None:
        """Twice is harmless. Output that comes later is not shown."""
        self._is_over = True
        modes, self._modes = self._modes, Modes()
        words = modes.leave()
        with contextlib.suppress(OSError):
            _write(b"\x1b[0m" + words if words else b"")
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)

    # --- keys and the window, in the main thread ---

    def _serve(self) -> bool:
        """Whether the person has detached."""
        watched = [self._wake[0], 0]
        while True:
            ready = select.select(watched, [], [])[0]
            if self._wake[0] in ready:
                words = os.read(self._wake[0], 4096)
                if b"e" in words:
                    return False
                if b"w" in words:
                    self._resize(_size(), redraw=False)
                if b"r" in words:
                    self._resize(None, redraw=True)
            if 0 in ready:
                data = os.read(0, _CHUNK)
                if not data:  # the terminal is gone
                    return True
                keys, detaches = self._keys.feed(data)
                self._type(keys)
                if detaches:
                    self._finish_typing()
                    return True

    def _finish_typing(self) -> None:
        until = time.monotonic() + _LAST_KEYS_SECONDS
        while (self._typed or self._is_sending) and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS / 10)

    def _type(self, keys: bytes) -> None:
        if not keys or not self._types:
            return
        if sum(map(len, self._typed)) + len(keys) > _MAX_TYPED:
            _write(_BELL)
            return
        self._typed.append(keys)
        self._has_typed.set()

    def _poke(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake[1], word)

    def _resize(self, size: tuple[int, int] | None, *, redraw: bool) -> None:
        rows, columns = size or (None, None)
        with contextlib.suppress(DaemonError):  # it has ended, or the next daemon is told
            self._daemon.raw().call(
                "resize", instance=self._instance_id, within=5.0, rows=rows, columns=columns, redraw=redraw
            )

    # --- threads ---

    def _send(self) -> None:
        sender = InputPump(self._daemon, self._instance_id)
        with contextlib.suppress(DaemonError):  # it has ended; what follows the output says how
            while self._has_typed.wait() and not self._is_over:
                self._has_typed.clear()
                sender.size = _size()
                while self._typed:
                    self._is_sending = True
                    sender.send(self._typed.popleft())
                    self._is_sending = False

    def _show(self) -> None:
        try:
            stream = self._daemon.raw().stream(
                "terminal", instance=self._instance_id, on_hang=self._say, on_link=self._linked
            )
            for item in stream:
                data = base64.b64decode(item.data["data"])
                if self._is_over:
                    return
                self._modes.feed(data)
                _write(data)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._failed = error
        self._poke(b"e")

    def _linked(self, is_linked: bool) -> None:
        if is_linked:
            if self._lost_at:
                self._say("the daemon is back")
                self._poke(b"r")
            self._lost_at = 0.0
            return
        if not self._lost_at:
            self._lost_at = time.monotonic()
            self._say(f"the daemon is gone; {self._name} goes on, waiting for the next daemon")
        elif time.monotonic() - self._lost_at > _START_AFTER_SECONDS:
            self._daemon.start_again()

    def _say(self, sentence: str) -> None:
        _write(f"\r\nostler: {plain(sentence)}\r\n".encode(errors="backslashreplace"))


def _raise(number: int, _frame: Any) -> None:
    raise _SignalledError(number)


def _size() -> tuple[int, int]:
    try:
        size = os.get_terminal_size(0)
    except OSError:
        return 24, 80
    return max(size.lines, 1), max(size.columns, 1)


def window() -> dict[str, int]:
    rows, columns = _size()
    return {"rows": rows, "columns": columns}


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:  # another program left the terminal so
            select.select([], [1], [])


def require_terminal() -> None:
    """Of the person."""
    if not (os.isatty(0) and os.isatty(1)):
        raise click.UsageError(
            "standard input and output must be a terminal; use -i for a pipe, `ostler logs -f` to look"
        )


def tell_detached(name: str) -> None:
    shown = plain(name)
    note(f"detached; {shown} goes on. Attach again with: ostler attach {shown}")


@click.command()
@click.argument("agent", shell_complete=completers.agents(ended=False))
@click.option("--detach-keys", "keys", default=DETACH_KEYS, show_default=True, help="Keys that detach: ctrl-p,ctrl-q.")
def attach(agent: str, keys: str) -> None:
    """See and type into the terminal of an agent that was started with `ostler run -t`.

    Several people may be attached; the terminal has the size of the window that was changed or typed into last. Ctrl-q
    detaches, and the agent goes on. It also goes on when the daemon is killed: attach waits for the next daemon.
    """
    daemon = Daemon()
    DetachKeys(keys)  # a mistake in it is told first
    instance = on_agent(daemon, "instance", agent)
    name = plain(str(instance["name"]))
    if instance["state"] in ENDED:
        raise fail(f"{name} is {instance['state']}; `ostler logs {name}` shows what it wrote", ExitCode.WRONG_STATE)
    try:
        daemon.call("resize", instance=instance["instance_id"])  # refused where it has no terminal
    except DaemonError as error:
        if error.code != "forbidden":  # who may only read may look
            raise
    require_terminal()
    if instance["state"] == "suspended":
        note(f"{name} is suspended and draws nothing; let it go on with: ostler resume {name}")
    if Attachment(daemon, instance, keys).run(redraw=True):
        note(f"{name} has ended; `ostler inspect {name}` shows how")
    else:
        tell_detached(name)
