"""A manager of a real keeper, as plain as can be: it asks, waits, and keeps the events that came in between."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ostler.isolation.process.launch import SOURCE, keeper_argv
from ostler.keeper.process_tree import marked
from ostler.keeper.protocol import STDIN, VERSION, LineReader, connect, decode, encode

__all__ = ["SOURCE", "Home", "Manager", "Refused", "is_alive", "keeper_argv", "launch", "marked", "wait_until"]
#: Seconds that a test waits for what must happen.
PATIENCE = 60.0
#: What makes a keeper use process trees although there are control groups.
TREES = "trees"


def launch(directory: Path, groups: str | None = None, change: str = "") -> subprocess.CompletedProcess[str]:
    """`groups`: other ones than the best that this machine has. `change`: code that runs before the keeper does."""
    argv = [word.replace("main()", f"{change}; main()") if change else word for word in keeper_argv(directory)]
    return subprocess.run(
        argv,
        env={"PATH": os.environ["PATH"], **({} if groups is None else {"OSTLER_KEEPER_GROUPS": groups})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def wait_until(is_so: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to be in time"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """A zombie is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Refused(Exception):  # noqa: N818 - the keeper's word for it
    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(f"{kind}: {sentence}")
        self.kind = kind
        self.sentence = sentence


class Manager:
    """Connected; with `hello` it is the manager of that keeper. It never renews its lease by itself."""

    def __init__(self, directory: Path, *, epoch: int = 1, lease: float = 600.0, hello: bool = True) -> None:
        self.directory = directory
        self.sock = connect(str(directory))
        self.sock.setblocking(True)
        self.events: list[dict[str, Any]] = []
        self.answers: dict[int, dict[str, Any]] = {}
        self.is_open = True
        self._reader = LineReader(1 << 26)
        self._numbers = itertools.count(1)
        if hello:
            try:
                self.about = self.ask("hello", version=VERSION, epoch=epoch, lease_seconds=lease)
            except (Refused, ConnectionError):
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.is_open = False
        self.sock.close()

    # --- requests and replies ---

    def say(self, op: str, **fields: Any) -> int:
        """Send a request; its number."""
        number = next(self._numbers)
        self.sock.sendall(encode({"id": number, "op": op, **fields}))
        return number

    def listen(self, seconds: float) -> bool:
        """Take what has come; False when nothing came, or the keeper has left."""
        if not self.is_open or not select.select([self.sock], [], [], seconds)[0]:
            return False
        try:
            data = self.sock.recv(1 << 18)
        except ConnectionError:
            data = b""
        if not data:
            self.is_open = False
            return False
        for message in map(decode, self._reader.feed(data)):
            if "event" in message:
                self.events.append(message)
            else:
                self.answers[message["id"]] = message
        return True

    def hear(self, number: int) -> dict[str, Any]:
        """The reply to the request of this number. Raises `Refused`."""
        end = time.monotonic() + PATIENCE
        while number not in self.answers:
            if not self.is_open:
                raise ConnectionResetError("the keeper has left")
            assert time.monotonic() < end, "no answer came"
            self.listen(0.5)
        message = self.answers.pop(number)
        if "error" in message:
            raise Refused(message["kind"], message["error"])
        reply: dict[str, Any] = message["ok"]
        return reply

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self.hear(self.say(op, **fields))

    # --- what tests ask for ---

    def start(self, unit: str, argv: Sequence[str], stdin: bytes | None = None, /, **more: Any) -> dict[str, Any]:
        return self.hear(self.say_start(unit, argv, stdin, **more))

    def say_start(self, unit: str, argv: Sequence[str], stdin: bytes | None = None, /, **more: Any) -> int:
        """A command in `argv`, or `template=...` among the others. The cell is the first two words of the unit."""
        home = self.directory.parent
        if stdin is not None:
            file = home / "run" / unit / STDIN
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stdin)
        fields: dict[str, Any] = {
            "unit": unit,
            "limits": {},
            "env": {"PATH": os.environ["PATH"]},
            "cwd": "/",
            "log": str(home / "logs" / f"{unit}.log"),
            "log_bytes": 1 << 20,
            "log_rate": 2 << 20,
            "stdin": stdin is not None,
            **({} if "template" in more else {"argv": list(argv)}),
        }
        return self.say("start", **{**fields, **more})

    def log_of(self, unit: str) -> Path:
        """Where `say_start` has its output put, if not said otherwise."""
        return self.directory.parent / "logs" / f"{unit}.log"

    def exit_of(self, unit: str, seconds: float = PATIENCE) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while True:
            for event in self.events:
                if event["event"] == "exit" and event["unit"] == unit:
                    record: dict[str, Any] = event["exit"]
                    return record
            assert self.is_open, "the keeper has left"
            assert time.monotonic() < end, f"{unit} did not end"
            self.listen(0.2)

    def stop(self, name: str, grace: float = 0.0) -> dict[str, Any]:
        """A cell or a unit."""
        return self.ask("stop", name=name, grace=grace)

    def statuses(self) -> dict[str, Mapping[str, Any]]:
        """By unit; `exit` is None for those that have not ended."""
        return {status["unit"]: {"exit": None, **status} for status in self.ask("list")["units"]}


class Home:
    """A directory with a keeper in it, until the test is over."""

    def __init__(self, directory: Path, groups: str | None = None) -> None:
        self.directory = directory
        self._groups = groups
        self._managers: list[Manager] = []
        self.launch()

    def launch(self, change: str = "") -> None:
        done = launch(self.directory, self._groups, change)
        assert done.returncode == 0, done.stderr

    @property
    def log(self) -> str:
        return (self.directory / "keeper.log").read_text()

    @property
    def token(self) -> str:
        return (self.directory / "token").read_text()

    def manager(self, **more: Any) -> Manager:
        manager = Manager(self.directory, **more)
        self._managers.append(manager)
        return manager

    def clear(self) -> None:
        """Nothing is left for the next test, and nothing was wrong in this one."""
        last = self.manager()  # stays: a keeper without units ends with its manager
        for cell in {status["cell"] for status in last.statuses().values()}:
            last.stop(cell)
            last.ask("forget", name=cell)
        assert last.ask("list") == {"units": []}
        shutil.rmtree(self.directory.parent / "logs", ignore_errors=True)
        assert "Traceback" not in self.log, self.log

    def end(self) -> None:
        """Whatever is still there goes, and nothing may be left."""
        try:
            with (
                contextlib.suppress(ConnectionError, FileNotFoundError),
                Manager(self.directory, epoch=1 << 40) as last,
            ):
                last.ask("bye", leave=False)
                while last.is_open:
                    last.listen(1.0)
        finally:
            for manager in self._managers:
                manager.close()
        wait_until(lambda: not marked(f"{self.token}:"))
        assert "Traceback" not in self.log, self.log
