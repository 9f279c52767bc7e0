"""A real keeper holds real terminals: their screens, their input, their sizes, and what outlives a manager."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from keeper_client import PATIENCE, Home, Manager, Refused, wait_until

PYTHON = [sys.executable, "-I", "-S", "-c"]
SIZE = [24, 80]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("home") / "keeper")
    yield made
    made.end()


@pytest.fixture
def manager(home: Home) -> Iterator[Manager]:
    yield home.manager()
    home.clear()


class Viewer:
    """Someone who reads along from the first byte on."""

    def __init__(self, manager: Manager, name: str) -> None:
        self.manager = manager
        self.name = name
        self.shown = b""
        self.place: dict[str, Any] = {}
        self.has_ended = False

    def read(self) -> None:
        reply = self.manager.ask("read_terminal", name=self.name, **self.place)
        self.place = {"unit": reply["unit"], "after": reply["at"]}
        self.shown += base64.b64decode(reply["data"])
        self.has_ended = reply["ended"]

    def until(self, text: bytes) -> bytes:
        end = time.monotonic() + PATIENCE
        while text not in self.shown:
            assert time.monotonic() < end, self.shown[-500:]
            assert not self.has_ended, self.shown[-500:]
            self.read()
        before, _, self.shown = self.shown.partition(text)
        return before


def write(manager: Manager, name: str, data: bytes, **more: Any) -> dict[str, Any]:
    return manager.ask("write_input", name=name, data=base64.b64encode(data).decode(), **more)


def run(manager: Manager, unit: str, *words: str, **more: Any) -> Viewer:
    manager.start(unit, words, terminal=SIZE, **more)
    return Viewer(manager, unit)


# --- output ------------------------------------------------------------------------------------------


def test_a_program_has_a_controlling_terminal_of_its_size(manager: Manager) -> None:
    viewer = run(manager, "a.1", "sh", "-c", "tty; stty size; echo over > /dev/tty")
    viewer.until(b"/dev/pts/")
    viewer.until(b"24 80\r\n")
    viewer.until(b"over\r\n")
    assert manager.exit_of("a.1")["code"] == 0
    assert manager.log_of("a.1").read_bytes().endswith(b"\n24 80\nover\n")


def test_a_viewer_that_comes_after_the_end_sees_the_last_screen(manager: Manager) -> None:
    manager.start("b.1", ["echo", "quick"], terminal=SIZE)
    manager.exit_of("b.1")
    manager.ask("forget", name="b.1")
    viewer = Viewer(manager, "b")
    viewer.until(b"quick\r\n")
    viewer.read()
    assert viewer.has_ended


def test_a_flood_is_held_up_by_no_viewer_and_a_slow_one_sees_the_end(manager: Manager) -> None:
    viewer = run(manager, "c.1", "sh", "-c", "seq 300000; echo done")
    viewer.read()
    assert manager.exit_of("c.1")["code"] == 0  # nobody has read meanwhile
    viewer.until(b"done\r\n")
    assert len(viewer.shown) < 1000


def test_a_program_that_leaves_its_terminal_for_a_while_finds_it_again(manager: Manager) -> None:
    script = "exec </dev/null >/dev/null 2>&1; sleep 0.3; echo back > /dev/tty; echo more > /dev/tty"
    viewer = run(manager, "d.1", "sh", "-c", script)
    viewer.until(b"back\r\n")
    viewer.until(b"more\r\n")
    assert manager.exit_of("d.1")["code"] == 0


def test_children_that_hold_the_terminal_do_not_keep_the_end(manager: Manager) -> None:
    viewer = run(manager, "e.1", "sh", "-c", "(trap '' HUP; sleep 1000) & echo begun; exit 3")
    viewer.until(b"begun")
    assert manager.exit_of("e.1")["code"] == 3
    while not viewer.has_ended:
        viewer.read()


def test_a_terminal_with_a_file_to_read(manager: Manager) -> None:
    manager.start("f.1", ["sh", "-c", "cat; test -t 1 && echo ' to a terminal'"], b"read", terminal=SIZE)
    manager.exit_of("f.1")
    assert manager.log_of("f.1").read_text() == "read to a terminal\n"


# --- input -------------------------------------------------------------------------------------------


def test_what_is_typed_reaches_the_program_and_ctrl_c_is_a_signal(manager: Manager) -> None:
    viewer = run(manager, "g.1", "sh", "-c", "trap 'echo caught; exit 5' INT; echo ready; while read x; do :; done")
    viewer.until(b"ready")
    write(manager, "g.1", b"word\r")
    viewer.until(b"word\r\n")
    write(manager, "g.1", b"\x03")
    viewer.until(b"caught")
    assert manager.exit_of("g.1")["code"] == 5
    assert write(manager, "g.1", b"late") == {"taken": 0, "closed": True}


def test_what_is_sent_again_after_a_lost_answer_is_taken_once(manager: Manager) -> None:
    manager.start("h.1", ["cat"], open_stdin=True)
    assert write(manager, "h.1", b"abc", writer="w", at=0)["taken"] == 3
    assert write(manager, "h.1", b"abcdef", writer="w", at=0)["taken"] == 6
    assert write(manager, "h.1", b"def", writer="w", at=3)["taken"] == 3
    with pytest.raises(Refused, match="are missing"):
        write(manager, "h.1", b"x", writer="w", at=9)
    assert write(manager, "h.1", b"", writer="w", at=6, close=True)["closed"]
    assert manager.exit_of("h.1")["code"] == 0
    assert manager.log_of("h.1").read_bytes() == b"abcdef"


def test_a_program_that_does_not_read_takes_no_more_than_its_pipe_holds(manager: Manager) -> None:
    manager.start("i.1", ["sleep", "1000"], open_stdin=True)
    taken = 0
    while (count := write(manager, "i.1", bytes(40_000))["taken"]) and taken < 10 << 20:
        taken += count
    assert 0 < taken <= 1 << 20  # then one waited in vain for room
    write_later = manager.say("write_input", name="i.1", data=base64.b64encode(b"tail").decode())
    manager.stop("i.1")
    assert manager.hear(write_later) == {"taken": 0, "closed": True}


def test_a_program_that_closes_its_input_says_so(manager: Manager) -> None:
    manager.start("j.1", ["sh", "-c", "exec 0</dev/null; echo closed; sleep 1000"], open_stdin=True)
    wait_until(lambda: manager.log_of("j.1").exists() and manager.log_of("j.1").read_bytes())
    assert write(manager, "j.1", b"word") == {"taken": 0, "closed": True}


# --- size --------------------------------------------------------------------------------------------

WATCH = "import os,signal;f=lambda *_:os.write(1,b'%d %d.'%os.get_terminal_size(1));signal.signal(28,f);f()\n"
WATCH += "while 1: signal.pause()"


def test_a_new_size_reaches_the_program_and_who_types_brings_its_own(manager: Manager) -> None:
    viewer = run(manager, "k.1", *PYTHON, WATCH)
    viewer.until(b"80 24")
    manager.ask("resize", name="k.1", size=[30, 100])
    viewer.until(b"100 30")
    write(manager, "k.1", b"x", size=[20, 70])
    viewer.until(b"70 20")
    assert manager.statuses()["k.1"]["terminal"] == [20, 70]


def test_the_same_size_makes_a_program_draw_again_if_asked(manager: Manager) -> None:
    viewer = run(manager, "l.1", *PYTHON, WATCH)
    viewer.until(b"80 24")
    manager.ask("resize", name="l.1", size=SIZE, redraw=True)
    viewer.until(b"80 24")


@pytest.mark.parametrize("size", [[0, 80], [24, 0], [24, 100_000], [-1, 80], [24.5, 80], ["24", 80], [True, 80]])
def test_a_size_that_no_window_has_is_refused(manager: Manager, size: list[Any]) -> None:
    with pytest.raises(Refused, match="a terminal has 1 to 9,999 rows and columns"):
        manager.start("m.1", ["true"], terminal=size)
    manager.start("n.1", ["sleep", "1000"], terminal=SIZE)
    with pytest.raises(Refused, match="a terminal has 1 to 9,999 rows and columns"):
        manager.ask("resize", name="n.1", size=size)
    assert "m.1" not in manager.statuses()


# --- managers come and go ----------------------------------------------------------------------------


def test_the_next_manager_has_the_terminal_and_a_viewer_goes_on_without_a_gap(home: Home, manager: Manager) -> None:
    viewer = run(manager, "o.1", "sh", "-c", "echo one; read x; echo two; read x; echo three")
    viewer.until(b"one\r\n")
    manager.say("read_terminal", name="o.1", **viewer.place)  # waits when the manager is killed
    manager.close()
    following = home.manager()
    assert following.statuses()["o.1"]["terminal"] == SIZE
    write(following, "o.1", b"\r")
    viewer.manager = following
    assert viewer.until(b"two\r\n") == b"\r\n"
    write(following, "o.1", b"\r")
    viewer.until(b"three\r\n")


def test_a_frozen_program_draws_nothing_and_goes_on_with_what_was_typed(manager: Manager) -> None:
    viewer = run(manager, "p.1", "sh", "-c", "stty -echo; echo ready; read x; echo got $x")
    viewer.until(b"ready\r\n")
    manager.ask("freeze", cell="p.1")
    assert write(manager, "p.1", b"word\r")["taken"] == 5
    assert manager.statuses()["p.1"]["frozen"]
    manager.ask("thaw", cell="p.1")
    viewer.until(b"got word\r\n")


def test_no_descriptor_is_left_of_terminals_that_ended(manager: Manager) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{manager.about['pid']}/fd").iterdir()))

    manager.start("q.0", ["true"], terminal=SIZE)
    manager.exit_of("q.0")
    before = descriptors()
    for number in range(1, 30):
        manager.start(f"q.{number}", ["true"], terminal=SIZE)
        manager.start(f"r.{number}", ["true"], open_stdin=True)
        with pytest.raises(Refused):
            manager.start(f"s.{number}", ["/nothing"], terminal=SIZE)
        manager.exit_of(f"q.{number}")
        manager.exit_of(f"r.{number}")
    wait_until(lambda: descriptors() <= before)
    with pytest.raises(Refused, match=r"no terminal of q\.0"):  # only the last ones are kept
        manager.ask("read_terminal", name="q.0")
