"""A manager of a real keeper, as plain as can be: it asks, waits, and keeps the events that came in between."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ostler.keeper.hiding import HIDE

import ostler
from ostler.isolation.process.launch import keeper_argv as keeper_argv_of
from ostler.keeper.protocol import VERSION, Line, connect
from ostler.keeper.tree import marked

SOURCE = str(Path(ostler.__file__).resolve().parent.parent)
#: The same with another kind of boxes than the best that this machine has.
_FORCED = (
    f"{HIDE}; import sys; sys.path.insert(0, sys.argv.pop(1)); import ostler.keeper.main as program; "
    "from ostler.keeper.probing import open_boxes; "
    "program.open_boxes = lambda token: open_boxes(token, force={boxes!r}); program.main()"
)
PATIENCE = 60.0


def keeper_argv(directory: Path, boxes: str | None = None) -> list[str]:
    if boxes is None:
        return keeper_argv_of(directory)
    return [sys.executable, "-I", "-S", "-c", _FORCED.format(boxes=boxes), SOURCE, str(directory)]


def launch(directory: Path, boxes: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        keeper_argv(directory, boxes),
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
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
    """Connected, and by default believed."""

    def __init__(self, directory: Path, *, epoch: int = 1, lease: float = 30.0, hello: bool = True) -> None:
        self.line = Line(connect(str(directory)))
        self.events: list[dict[str, Any]] = []
        self.answers: dict[int, tuple[dict[str, Any], list[int]]] = {}
        self.is_open = True
        self._numbers = itertools.count(1)
        if hello:
            try:
                self.about = self.ask("hello", version=VERSION, epoch=epoch, lease_seconds=lease, pid=os.getpid())
            except Refused:
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
        self.line.close()
        for _, fds in self.answers.values():
            for one in fds:
                os.close(one)
        self.answers.clear()

    # --- speaking ----------------------------------------------------------------------------------

    def say(self, op: str, fds: Sequence[int] = (), **fields: Any) -> int:
        number = next(self._numbers)
        self.line.send({"id": number, "op": op, **fields}, fds)
        return number

    def listen(self, seconds: float) -> bool:
        """Takes one message; False when none came, or the keeper has left."""
        if (
            not self.is_open
            or not select.select([self.line], [self.line] if self.line.is_waiting else [], [], seconds)[0]
        ):
            self.line.flush()
            return False
        try:
            heard = self.line.receive()
        except BlockingIOError:
            return False
        if heard is None:
            self.is_open = False
            return False
        message, fds = heard
        if "event" in message:
            self.events.append(message)
        else:
            self.answers[message["id"]] = (message, fds)
        return True

    def hear(self, number: int) -> tuple[dict[str, Any], list[int]]:
        end = time.monotonic() + PATIENCE
        while number not in self.answers:
            assert self.is_open, "the keeper has left"
            assert time.monotonic() < end, "no answer came"
            self.listen(0.5)
        message, fds = self.answers.pop(number)
        if "error" in message:
            raise Refused(message["kind"], message["error"])
        return message["ok"], fds

    def ask(self, op: str, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        answer, got = self.hear(self.say(op, fds, **fields))
        for one in got:
            os.close(one)
        return answer

    # --- what tests ask for ------------------------------------------------------------------------

    def start(self, unit: str, argv: Sequence[str], fds: Sequence[int] = (), /, **more: Any) -> dict[str, Any]:
        return self.hear(self.say_start(unit, argv, fds, **more))[0]

    def say_start(self, unit: str, argv: Sequence[str], fds: Sequence[int] = (), /, **more: Any) -> int:
        fields = {
            "box": unit,
            "leaf": None,
            "limits": {},
            "how": {"argv": list(argv)},
            "env": {"PATH": os.environ["PATH"]},
        }
        return self.say("start", fds, **{"unit": unit, **fields, **more})

    def exit_of(self, unit: str, seconds: float = PATIENCE) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while True:
            for event in self.events:
                if event["event"] == "exit" and event["unit"] == unit:
                    found: dict[str, Any] = event["exit"]
                    return found
            assert self.is_open, "the keeper has left"
            assert time.monotonic() < end, f"{unit} did not end"
            self.listen(0.2)

    def stop(self, box: str, grace: float = 0.0, **more: Any) -> dict[str, Any]:
        return self.ask("stop", **{"box": box, "leaf": None, "unit": None, "grace_seconds": grace, **more})

    def statuses(self) -> dict[str, Mapping[str, Any]]:
        return {one["unit"]: one for one in self.ask("list")["units"]}


class Home:
    """A directory with a keeper in it, until the test is over."""

    def __init__(self, directory: Path, boxes: str | None = None) -> None:
        self.directory = directory
        self._boxes = boxes
        self._managers: list[Manager] = []
        self.launch()

    def launch(self) -> None:
        done = launch(self.directory, self._boxes)
        assert done.returncode == 0, done.stderr

    @property
    def log(self) -> str:
        return (self.directory / "keeper.log").read_text()

    @property
    def token(self) -> str:
        return (self.directory / "token").read_text()

    def manager(self, **more: Any) -> Manager:
        made = Manager(self.directory, **more)
        self._managers.append(made)
        return made

    def clear(self) -> None:
        """Nothing is left for the next test, and nothing was wrong in this one."""
        with Manager(self.directory) as last:
            for box in {status["box"] for status in last.statuses().values()}:
                last.stop(box)
                last.ask("forget", box=box)
            assert last.ask("list") == {"units": []}
        assert "Traceback" not in self.log, self.log

    def end(self) -> None:
        """Whatever is still there goes, and nothing may be left."""
        try:
            with (
                contextlib.suppress(ConnectionError, FileNotFoundError),
                Manager(self.directory, epoch=1 << 40) as last,
            ):
                for status in last.statuses().values():
                    if status["exit"] is None:
                        last.stop(status["box"])
                last.ask("bye", leave=False)
                while last.is_open:
                    last.listen(1.0)
        finally:
            for one in self._managers:
                one.close()
        wait_until(lambda: not marked(f"{self.token}:"))
        assert "Traceback" not in self.log, self.log


def pair() -> tuple[socket.socket, socket.socket]:
    """The manager's end and the agent's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
