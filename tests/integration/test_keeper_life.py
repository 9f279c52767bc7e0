"""The life of a real keeper: who may speak to it, how long it waits, what survives its death."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import TREES, Home, Refused, is_alive, launch, marked, wait_until

from ostler.keeper.protocol import MAX_LINE, VERSION, connect

PYTHON = [sys.executable, "-I", "-S", "-c"]
_HELLO = {"id": 1, "op": "hello", "version": VERSION, "epoch": 1 << 40, "lease_seconds": 600}
#: A child connects and is dead and reaped when the keeper looks; its parent speaks.
_INTRUDER = f"""
import json, os, socket, sys
believed = 0
os.chdir(sys.argv[1])
for _ in range(300):
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(60)
    child = os.fork()
    if child == 0:
        line.connect("keeper.sock")
        os._exit(0)
    os.waitpid(child, 0)
    try:
        line.send(json.dumps({_HELLO}).encode() + b"\\n")
        believed += b'"ok"' in line.recv(65000)
    except OSError:
        pass
    line.close()
print("believed", believed, flush=True)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home" / "keeper")
    yield made
    made.end()


# --- who may speak ---


def test_it_is_private_and_alone(home: Home) -> None:
    about = home.manager().about
    assert home.directory.stat().st_mode & 0o777 == 0o700
    assert (home.directory / "keeper.sock").stat().st_mode & 0o777 == 0o600
    assert (home.directory / "token").stat().st_mode & 0o777 == 0o600
    assert about["token"] == home.token
    assert os.getsid(about["pid"]) == about["pid"]
    inside = Path(f"/proc/{about['pid']}/fd")
    log = home.directory / "keeper.log"
    assert [(inside / name).readlink() for name in "012"] == [Path(os.devnull), log, log]
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
    assert second.ask("renew") == {}
    with pytest.raises(Refused, match="say hello first"):
        home.manager(hello=False).ask("list")
    for lease in (-1, float("nan"), float("inf"), "long"):
        with pytest.raises(Refused, match="request"):
            home.manager(epoch=7, lease=lease)
    assert second.ask("renew") == {}


def test_a_manager_of_another_version_learns_what_lives_and_takes_nothing(home: Home) -> None:
    manager = home.manager()
    manager.start("a.1", ["sleep", "1000"])
    manager.start("done.1", ["true"])
    manager.exit_of("done.1")
    other = home.manager(hello=False)
    for hello in ({"version": VERSION + 1}, {"version": None, "epoch": "new"}, {}):
        with pytest.raises(Refused, match=f"this keeper speaks version {VERSION}") as refused:
            other.ask("hello", **hello)
        assert refused.value.kind == "version"
    assert other.ask("about") == {
        "version": VERSION,
        **{name: manager.about[name] for name in ("pid", "start_time", "boot_id")},
        "living": 1,
        "units": ["a.1"],
    }
    assert manager.ask("renew") == {}, "still the manager"


@pytest.mark.parametrize("garbage", [b"\x00\xff garbage\n", b"[1]\n", b"{\n", b"[" * 50_000 + b"\n"])
def test_a_peer_that_talks_nonsense_is_hung_up_on(home: Home, garbage: bytes) -> None:
    manager = home.manager()
    with connect(str(home.directory)) as peer:
        peer.settimeout(60)
        peer.sendall(garbage)
        assert peer.recv(10) == b""
    assert manager.ask("renew") == {}


def test_a_line_without_end_is_hung_up_on(home: Home) -> None:
    manager = home.manager()
    with connect(str(home.directory)) as peer:
        peer.settimeout(60)
        with pytest.raises(ConnectionError):
            peer.sendall(b"x" * (MAX_LINE + (1 << 24)))
    assert manager.ask("renew") == {}


def test_garbage_of_the_manager_itself_is_its_end_and_what_came_before_is_done(home: Home) -> None:
    manager = home.manager(lease=600)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    manager.sock.sendall(json.dumps({"id": 99, "op": "renew"}).encode() + b"\ngarbage\n")
    assert manager.hear(99) == {}
    wait_until(lambda: not manager.listen(0.01) and not manager.is_open)
    assert is_alive(pid)
    assert home.manager(epoch=2).about["units"][0]["unit"] == "a.1"


def test_a_request_that_fails_does_not_cost_the_next_in_the_same_chunk(home: Home) -> None:
    manager = home.manager()
    requests = [{"id": 1000 + n, "op": op} for n, op in enumerate(("start", "dance", "usage", "list"))]
    manager.sock.sendall(b"".join(json.dumps(request).encode() + b"\n" for request in requests))
    for number in (1000, 1001, 1002):
        with pytest.raises(Refused, match="request"):
            manager.hear(number)
    assert manager.hear(1003) == {"units": []}


def test_an_agent_may_not_speak_to_it(home: Home) -> None:
    manager = home.manager()
    code = (
        "import os, socket\n"
        "peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
        f"os.chdir({str(home.directory)!r})\n"
        "peer.connect('keeper.sock')\n"
        "print('heard', peer.recv(9999), peer.recv(9))\n"
    )
    manager.start("a.1", [*PYTHON, code])
    manager.exit_of("a.1")
    log = manager.log_of("a.1").read_text()
    assert "no agent may speak to its keeper" in log
    assert log.endswith("b''\n")
    manager.start("b.1", [*PYTHON, _INTRUDER, str(home.directory)])
    assert manager.exit_of("b.1")["code"] == 0
    assert manager.log_of("b.1").read_text() == "believed 0\n"
    assert manager.ask("renew") == {}


def test_peers_without_number_do_not_keep_the_manager_out(home: Home) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(20):
            held.enter_context(connect(str(home.directory)))
        assert home.manager().ask("renew") == {}


# --- how long it waits ---


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
    manager = home.manager(lease=600)
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


@pytest.mark.parametrize("groups", [None, TREES])
def test_a_manager_that_hangs_with_its_connection_open_loses_its_agents(tmp_path: Path, groups: str | None) -> None:
    """It says nothing; the connection stays. What renews the lease is any request."""
    home = Home(tmp_path / "home" / "keeper", groups)
    manager = home.manager(lease=2.0)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    end = time.monotonic() + 4
    while time.monotonic() < end:
        manager.ask("renew")
        time.sleep(0.1)
    assert is_alive(pid), "renewed for twice the lease"
    began = time.monotonic()
    record = manager.exit_of("a.1")
    assert (record["by"], record["signal"]) == ("lease", signal.SIGTERM)
    assert record["why"] == "no manager was heard for 2 s"
    assert time.monotonic() - began >= 1.0
    wait_until(lambda: not is_alive(manager.about["pid"]))
    assert manager.is_open or not is_alive(pid)
    home.launch()
    assert home.manager().about["units"][0]["exit"]["by"] == "lease"
    home.end()


def test_time_in_which_the_keeper_stood_still_is_not_counted(home: Home) -> None:
    """As when the whole machine stood still: the manager could not renew either."""
    manager = home.manager(lease=4.0)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    keeper = manager.about["pid"]
    os.kill(keeper, signal.SIGSTOP)
    time.sleep(6)  # longer than the lease; nothing happens meanwhile
    os.kill(keeper, signal.SIGCONT)
    assert manager.ask("renew") == {}
    assert is_alive(pid)


def test_one_to_which_no_manager_says_hello_goes(tmp_path: Path) -> None:
    directory = tmp_path / "home" / "keeper"
    change = "import ostler.keeper.keeper as k; k.FIRST_HELLO_SECONDS = 0.5"
    assert launch(directory, change=change).returncode == 0
    with connect(str(directory)) as peer:
        peer.settimeout(60)
        assert peer.recv(10) == b""
    wait_until(lambda: not (directory / "keeper.sock").exists())
    assert "no manager was heard" in (directory / "keeper.log").read_text()


def test_one_that_nobody_needs_goes(home: Home) -> None:
    manager = home.manager(lease=1000)
    keeper = manager.about["pid"]
    manager.close()
    wait_until(lambda: not is_alive(keeper))


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_a_keeper_whose_home_was_removed_ends_its_agents_and_itself(tmp_path: Path, again: bool) -> None:
    home = Home(tmp_path / "home" / "keeper")
    manager = home.manager(lease=600)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    keeper = manager.about["pid"]
    shutil.rmtree(tmp_path / "home")
    if again:
        home.launch()
    record = manager.exit_of("a.1")
    assert (record["by"], record["why"]) == ("lease", "its home was removed")
    wait_until(lambda: not is_alive(keeper))
    assert not is_alive(pid)
    manager.close()
    if again:
        assert home.manager().about["units"] == [], "the new one is not touched"
        home.end()


def test_bye_ends_everything_and_a_new_one_may_come_at_once(home: Home) -> None:
    manager = home.manager(lease=1000)
    pids = [manager.start(f"u{n}.1", ["sleep", "1000"])["pid"] for n in range(5)]
    manager.ask("bye", leave=False)
    home.launch()
    assert not any(is_alive(pid) for pid in pids)
    assert [status["exit"]["by"] for status in home.manager().about["units"]] == ["stop"] * 5


def test_terminating_it_is_an_orderly_end(home: Home) -> None:
    manager = home.manager(lease=1000)
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        os.kill(manager.about["pid"], ignored)
    assert manager.ask("renew") == {}
    os.kill(manager.about["pid"], signal.SIGTERM)
    assert manager.exit_of("a.1")["by"] == "stop"
    wait_until(lambda: not is_alive(manager.about["pid"]))
    assert not is_alive(pid)


# --- what survives, and what does not grow ---


def test_killing_it_kills_its_agents_and_its_journal_stays(home: Home) -> None:
    manager = home.manager(lease=1000)
    manager.start("done.1", ["/bin/sh", "-c", "exit 4"])
    record = manager.exit_of("done.1")
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    manager.start("daemon.1", ["/bin/sh", "-c", "setsid sh -c 'echo up; sleep 1000' & sleep 1000"])
    log = manager.log_of("daemon.1")
    wait_until(lambda: log.exists() and "up" in log.read_text())
    os.kill(manager.about["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
    with (home.directory / "exits.jsonl").open("a") as journal:
        journal.write('{"unit": "half.1", "bo')
    home.launch()
    assert not marked(f"{home.token}:")
    second = home.manager(epoch=2)
    assert second.statuses()["done.1"]["exit"] == record
    assert list(second.statuses()) == ["done.1"]
    second.ask("forget", name="done.1")
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


def test_its_log_is_bounded(home: Home) -> None:
    manager = home.manager()
    log = home.directory / "keeper.log"
    with log.open("ab") as file:
        file.write(b"x" * (9 << 20))
    wait_until(lambda: log.stat().st_size < 1 << 20)
    assert (home.directory / "keeper.log.1").stat().st_size == 1 << 20
    assert manager.ask("renew") == {}


def test_what_an_agent_filled_is_removed_and_nobody_waits_for_it(home: Home) -> None:
    manager = home.manager()
    run = home.directory.parent / "run"
    manager.start("a.1", ["true"])
    manager.exit_of("a.1")
    deep = run / "a.1" / "deep"
    deep.mkdir(parents=True)
    for number in range(5000):
        (deep / str(number)).touch()
    (run / "a.1.left").mkdir()
    (run / "a.10").mkdir()
    manager.ask("forget", name="a.1")
    assert not (run / "a.1").exists()
    wait_until(lambda: [path.name for path in run.iterdir()] == ["a.10"])


def test_a_socket_is_not_left_to_others(home: Home) -> None:
    manager = home.manager()
    manager.ask("bye", leave=False)
    wait_until(lambda: not is_alive(manager.about["pid"]))
    assert not (home.directory / "keeper.sock").exists()
    with pytest.raises(FileNotFoundError):
        connect(str(home.directory))


def test_a_manager_that_is_stopped_loses_its_agents(home: Home, tmp_path: Path) -> None:
    """A process with the connection open, under SIGSTOP."""
    source = Path(__file__).parent
    code = (
        f"import sys, time; sys.path[:0] = [{str(source)!r}]\n"
        "from pathlib import Path; from keeper_client import Manager\n"
        f"manager = Manager(Path({str(home.directory)!r}), lease=2.0)\n"
        "print(manager.start('a.1', ['sleep', '1000'])['pid'], flush=True)\n"
        "while True: manager.ask('renew'); time.sleep(0.2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not is_alive(pid))
        process.kill()
    wait_until(lambda: not (home.directory / "keeper.sock").exists())
    home.launch()
    assert home.manager().about["units"][0]["exit"]["by"] == "lease"


def test_a_command_whose_manager_left_during_its_start_is_found_by_the_next(home: Home, tmp_path: Path) -> None:
    """It may have done its work already, so it is neither undone nor done again."""
    units = [f"{number:032x}.1.{number:032x}" for number in range(20)]
    begun = tmp_path / "begun"
    begun.mkdir()
    with home.manager(epoch=1) as manager:
        for unit in units:
            manager.say_start(unit, ["/bin/sh", "-c", f"echo begun > {begun / unit}"])
    with home.manager(epoch=2) as manager:
        for unit in manager.statuses():
            assert manager.exit_of(unit)["code"] == 0
            assert (begun / unit).exists()
        assert {path.name for path in begun.iterdir()} <= set(manager.statuses())
