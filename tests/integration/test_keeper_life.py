"""The life of a real keeper: who may speak to it, how long it waits, what survives its death or its exchange."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import SOURCE, Home, Refused, is_alive, keeper_argv, launch, pair, wait_until
from ostler.keeper.edition import edition

from ostler.keeper.protocol import connect
from ostler.keeper.tree import marked

PYTHON = [sys.executable, "-I", "-S", "-c"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "keeper")
    yield made
    made.end()


# --- who may speak -----------------------------------------------------------------------------------


def test_it_is_private_and_alone(home: Home) -> None:
    about = home.manager().about
    assert home.directory.stat().st_mode & 0o777 == 0o700
    assert (home.directory / "keeper.sock").stat().st_mode & 0o777 == 0o600
    assert (home.directory / "token").stat().st_mode & 0o777 == 0o600
    assert about["code"] == edition()
    assert about["token"] == home.token
    assert os.getsid(about["pid"]) == about["pid"]
    inside = Path(f"/proc/{about['pid']}/fd")
    assert [(inside / one).readlink() for one in "012"] == [
        Path(os.devnull),
        Path(os.devnull),
        home.directory / "keeper.log",
    ]
    second = launch(home.directory)
    assert second.returncode == 1
    assert "another keeper" in second.stderr


def test_a_path_may_be_long(tmp_path: Path) -> None:
    home = Home(tmp_path / ("long" * 30) / "keeper")
    assert home.manager().about["units"] == []
    home.end()


def test_a_later_manager_takes_over_and_an_older_is_refused(home: Home) -> None:
    first = home.manager(epoch=5)
    pid = first.start("a.1", ["sleep", "1000"])["pid"]
    second = home.manager(epoch=6)
    wait_until(lambda: not first.listen(0.01) and not first.is_open)
    assert second.about["units"][0]["pid"] == pid
    with pytest.raises(Refused, match="stale"):
        home.manager(epoch=5)
    assert second.ask("ping") == {}
    with pytest.raises(Refused, match="say hello first"):
        home.manager(hello=False).ask("list")
    with pytest.raises(Refused, match="version"):
        home.manager(hello=False).ask("hello", version=99, epoch=9, lease_seconds=0, pid=1)


@pytest.mark.parametrize("garbage", [b"\x00\xff garbage", b"[1]", b"{", b"[" * 50_000, b"\x00large"])
def test_a_peer_that_talks_nonsense_is_hung_up_on(home: Home, garbage: bytes) -> None:
    manager = home.manager()
    with connect(str(home.directory)) as peer:
        peer.settimeout(60)
        peer.send(garbage)
        assert peer.recv(10) == b""
    assert manager.ask("ping") == {}


def test_garbage_of_the_manager_itself_is_its_end(home: Home) -> None:
    manager = home.manager(lease=30)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    manager.line.sock.send(b"garbage")
    wait_until(lambda: not manager.listen(0.01) and not manager.is_open)
    assert is_alive(pid)
    assert home.manager(epoch=2).about["units"][0]["unit"] == "a.1"


def test_an_agent_may_not_speak_to_it(home: Home, tmp_path: Path) -> None:
    manager = home.manager()
    log = tmp_path / "log"
    code = (
        "import os, socket\n"
        "peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"os.chdir({str(home.directory)!r})\n"
        "peer.connect('keeper.sock')\n"
        "print('heard', peer.recv(9999), peer.recv(9))\n"
    )
    manager.start("a.1", [*PYTHON, code], log=str(log))
    manager.exit_of("a.1")
    assert "no agent may speak to its keeper" in log.read_text()
    assert log.read_text().endswith("b''\n")
    assert manager.ask("ping") == {}


def test_peers_without_number_do_not_keep_the_manager_out(home: Home) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(20):
            held.enter_context(connect(str(home.directory)))
        assert home.manager().ask("ping") == {}


# --- how long it waits -------------------------------------------------------------------------------


def test_without_a_lease_all_ends_with_the_manager(home: Home) -> None:
    manager = home.manager(lease=0)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    keeper = manager.about["pid"]
    manager.close()
    wait_until(lambda: not is_alive(keeper))
    assert not is_alive(pid)
    home.launch()
    record = home.manager().about["units"][0]["exit"]
    assert (record["unit"], record["by"], record["signal"]) == ("a.1", "lease", signal.SIGTERM)


def test_within_the_lease_they_go_on_and_after_it_they_end(home: Home) -> None:
    manager = home.manager(lease=30)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    keeper = manager.about["pid"]
    manager.close()
    began = time.monotonic()
    again = home.manager(epoch=2, lease=1.0)
    assert is_alive(pid)
    again.ask("bye", leave=True)
    wait_until(lambda: not is_alive(keeper))
    assert time.monotonic() - began >= 1.0
    assert not is_alive(pid)


def test_one_that_nobody_needs_goes(home: Home) -> None:
    manager = home.manager(lease=1000)
    keeper = manager.about["pid"]
    manager.close()
    wait_until(lambda: not is_alive(keeper))


def test_bye_ends_everything_and_a_new_one_may_come_at_once(home: Home) -> None:
    manager = home.manager(lease=1000)
    pids = [manager.start(f"u{n}.1", ["sleep", "1000"])["pid"] for n in range(5)]
    manager.ask("bye", leave=False)
    home.launch()
    assert not any(is_alive(pid) for pid in pids)
    assert [one["exit"]["by"] for one in home.manager().about["units"]] == ["stop"] * 5


def test_terminating_it_is_an_orderly_end(home: Home) -> None:
    manager = home.manager(lease=1000)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        os.kill(manager.about["pid"], ignored)
    assert manager.ask("ping") == {}
    os.kill(manager.about["pid"], signal.SIGTERM)
    assert manager.exit_of("a.1")["by"] == "stop"
    wait_until(lambda: not is_alive(manager.about["pid"]))
    assert not is_alive(pid)


# --- what survives -----------------------------------------------------------------------------------


def test_killing_it_kills_its_agents_and_its_journal_stays(home: Home, tmp_path: Path) -> None:
    manager = home.manager(lease=1000)
    manager.start("done.1", ["/bin/sh", "-c", "exit 4"])
    done = manager.exit_of("done.1")
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    log = tmp_path / "daemon"
    manager.start("daemon.1", ["/bin/sh", "-c", "setsid sh -c 'echo up; sleep 1000' & sleep 1000"], log=str(log))
    wait_until(lambda: log.exists() and "up" in log.read_text())
    os.kill(manager.about["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
    with (home.directory / "exits.jsonl").open("a") as journal:
        journal.write('{"unit": "half.1", "bo')
    home.launch()
    assert not marked(f"{home.token}:")
    second = home.manager(epoch=2)
    assert second.statuses()["done.1"]["exit"] == done
    assert list(second.statuses()) == ["done.1"]
    second.ask("forget", box="done.1")
    os.kill(second.about["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(second.about["pid"]))
    home.launch()
    assert home.manager(epoch=3).about["units"] == []


def test_many_ends_are_written_before_they_are_told(home: Home) -> None:
    manager = home.manager()
    for number in [manager.say_start(f"u{n}.1", ["sleep", "1000"]) for n in range(50)]:
        manager.hear(number)
    for status in manager.statuses().values():
        os.kill(int(status["pid"]), signal.SIGKILL)
    seen: set[str] = set()
    while len(seen) < 50:
        manager.listen(1.0)
        journal = (home.directory / "exits.jsonl").read_text()
        for event in manager.events:
            assert f'"unit":"{event["unit"]}"' in journal
            seen.add(event["unit"])
        manager.events.clear()


# --- its exchange ------------------------------------------------------------------------------------


def newer(tmp_path: Path, change: str = "") -> list[str]:
    """The command of a keeper whose sources differ from ours."""
    source = tmp_path / "newer"
    shutil.copytree(Path(SOURCE) / "ostler" / "keeper", source / "ostler" / "keeper")
    for name in ("__init__.py", "lazy_imports.py", "version.py"):
        shutil.copy(Path(SOURCE) / "ostler" / name, source / "ostler" / name)
    with (source / "ostler" / "keeper" / "takeover.py").open("a") as file:
        file.write(f"# newer\n{change}\n")
    return [str(source) if one == SOURCE else one for one in keeper_argv(tmp_path / "keeper")]


def test_new_code_takes_over_everything(home: Home, tmp_path: Path) -> None:
    manager = home.manager()
    ours, theirs = pair()
    echo = "import os, socket; c = socket.socket(fileno=3)\nwhile p := c.recv(99): print(p, flush=True); c.send(p)\n"
    log = tmp_path / "a.log"
    begun = manager.start(
        "a.1", [*PYTHON, echo], [theirs.fileno(), ours.fileno()], channel=True, log=str(log), limits={"pids": 50}
    )
    manager.start("done.1", ["/bin/sh", "-c", "exit 4"])
    done = manager.exit_of("done.1")
    manager.start("cold.1", ["sleep", "1000"])
    manager.ask("freeze", box="cold.1")
    theirs.close()
    ours.settimeout(60)
    before = manager.about
    assert manager.ask("upgrade", argv=newer(tmp_path)) == {}
    after = manager.ask("hello", version=1, epoch=1, lease_seconds=30, pid=os.getpid())
    assert (after["pid"], after["start_time"]) == (before["pid"], before["start_time"])
    assert after["code"] != before["code"]
    with ours:
        ours.send(b"still")
        assert ours.recv(99) == b"still"
        wait_until(lambda: "still" in log.read_text())
    statuses = manager.statuses()
    assert statuses["a.1"]["pid"] == begun["pid"]
    assert statuses["done.1"]["exit"] == done
    assert statuses["cold.1"]["frozen"] is True
    assert manager.hear(manager.say("attach", unit="a.1"))[1] != []
    manager.start("new.1", ["/bin/sh", "-c", "exit 5"])
    assert manager.exit_of("new.1")["code"] == 5
    assert manager.stop("cold.1")["left"] == []
    os.kill(begun["pid"], signal.SIGSEGV)
    assert manager.exit_of("a.1")["signal"] == signal.SIGSEGV
    with pytest.raises(Refused, match="stale"):
        home.manager(epoch=0)
    assert launch(home.directory).returncode == 1


def test_code_that_cannot_take_over_says_why(home: Home, tmp_path: Path) -> None:
    manager = home.manager()
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    for argv, words in (
        (newer(tmp_path, "OLDEST_STATE = STATE_VERSION = 99"), "its state is of version 2, this code reads 99"),
        (["/no/such/python"], "'/no/such/python' was not found"),
        ([*PYTHON, "raise SystemExit('it is broken')"], "(code 1): it is broken"),
        (["true"], "it said nothing"),
    ):
        with pytest.raises(Refused) as refused:
            manager.ask("upgrade", argv=argv)
        assert (refused.value.kind, words in refused.value.sentence) == ("upgrade", True), refused.value
    assert manager.ask("list")["units"][0]["pid"] == pid
    assert is_alive(pid)


def test_an_end_during_the_exchange_is_not_lost(home: Home, tmp_path: Path) -> None:
    manager = home.manager()
    argv = newer(tmp_path)
    for number in [manager.say_start(f"u{n}.1", ["sleep", "1000"]) for n in range(20)]:
        manager.hear(number)
    pids = [int(one["pid"]) for one in manager.statuses().values()]
    upgrade = manager.say("upgrade", argv=argv)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        manager.listen(0.01)
    manager.hear(upgrade)
    for number in range(20):
        assert manager.exit_of(f"u{number}.1")["signal"] == signal.SIGKILL


def test_a_socket_is_not_left_to_others(home: Home) -> None:
    manager = home.manager()
    manager.ask("bye", leave=False)
    wait_until(lambda: not is_alive(manager.about["pid"]))
    assert not (home.directory / "keeper.sock").exists()
    with pytest.raises(FileNotFoundError):
        connect(str(home.directory))
