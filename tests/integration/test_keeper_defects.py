"""What a reviewer found: each of these went wrong once, with a real keeper and real processes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import SOURCE, Home, Manager, Refused, is_alive, keeper_argv, wait_until
from test_keeper_templates import Agent

from ostler.keeper import cgroupfs
from ostler.keeper.protocol import VERSION
from ostler.keeper.tree import cpu_seconds

PYTHON = [sys.executable, "-I", "-S", "-c"]
KINDS = [None, "signals"]
_HELLO = {"id": 1, "op": "hello", "version": VERSION, "epoch": 1 << 40, "lease_seconds": 600, "pid": 1}
#: A child connects and is dead and reaped when the keeper looks; its parent speaks.
_INTRUDER = f"""
import json, os, socket, sys
believed = 0
for _ in range(300):
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(60)
    child = os.fork()
    if child == 0:
        line.connect(sys.argv[1])
        os._exit(0)
    os.waitpid(child, 0)
    try:
        line.send(json.dumps({_HELLO}).encode())
        believed += b'"ok"' in line.recv(65000)
    except OSError:
        pass
    line.close()
print("believed", believed, flush=True)
"""
#: A child that, being root, leaves every group of its box.
_ESCAPE = f"""
import os, sys, time
sys.path.insert(0, {SOURCE!r})
from ostler.keeper import cgroupfs
if os.fork() == 0:
    os.setsid()
    own = cgroupfs.own_groups(cgroupfs.read("/proc/self/mountinfo"), cgroupfs.read("/proc/self/cgroup"))
    for path in own.values():
        if "/ostler-" in path:
            cgroupfs.write(path.split("/ostler-")[0] + "/cgroup.procs", "0")
    os.environ.clear()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    os.execv("/bin/sleep", ["sleep", "1000"])
time.sleep(1000)
"""


@pytest.fixture(params=KINDS, ids=["best", "signals"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "keeper", request.param)
    yield made
    made.end()


@pytest.fixture
def manager(home: Home) -> Manager:
    return home.manager()


best_boxes = pytest.mark.parametrize("home", [None], indirect=True, ids=["best"])
plain_boxes = pytest.mark.parametrize("home", ["signals"], indirect=True, ids=["signals"])


def number_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().strip().isdigit())
    return int(path.read_text())


# --- who may speak -----------------------------------------------------------------------------------


@best_boxes
def test_no_agent_becomes_the_manager_by_a_child_that_is_gone(home: Home, manager: Manager, tmp_path: Path) -> None:
    log = tmp_path / "log"
    manager.start("a.1", [*PYTHON, _INTRUDER, str(home.directory / "keeper.sock")], log=str(log))
    assert manager.exit_of("a.1", 60)["code"] == 0
    assert log.read_text() == "believed 0\n"
    assert manager.ask("ping") == {}


@best_boxes
def test_a_connection_whose_maker_has_ended_is_closed(home: Home) -> None:
    """Also when it was no agent, and was let in: whoever speaks now is another."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with line:
        line.settimeout(60)
        code = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).connect(sys.argv[2])"
        argv = [*PYTHON, code, str(line.fileno()), str(home.directory / "keeper.sock")]
        subprocess.run(argv, pass_fds=[line.fileno()], check=True)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.send(json.dumps(_HELLO).encode())
            assert b'"ok"' not in line.recv(1000)


# --- descriptors -------------------------------------------------------------------------------------


@best_boxes
def test_a_keeper_short_of_descriptors_refuses_and_keeps_its_manager(manager: Manager, tmp_path: Path) -> None:
    keeper = manager.about["pid"]
    resource.prlimit(keeper, resource.RLIMIT_NOFILE, (110, resource.prlimit(keeper, resource.RLIMIT_NOFILE)[1]))
    started = 0
    refused: Refused | None = None
    while refused is None:
        with Agent(manager, f"u{started}.1", log=str(tmp_path / str(started))) as agent:
            try:
                agent.started()
            except Refused as error:
                refused = error
            else:
                started += 1
    assert (refused.kind, "too few descriptors" in refused.sentence) == ("start", True)
    assert 5 < started < 25
    status, fds = manager.hear(manager.say("attach", unit="u0.1"))
    for one in fds:
        os.close(one)
    assert (status["exit"], len(fds)) == (None, 1)
    assert manager.stop("u0.1")["left"] == []
    manager.ask("forget", box="u0.1")
    with Agent(manager, "again.1") as agent:
        agent.started()


# --- what a template's module starts -----------------------------------------------------------------


@pytest.mark.parametrize("boxes", KINDS, ids=["best", "signals"])
def test_what_a_module_started_ends_with_the_agent_that_the_template_became(tmp_path: Path, boxes: str | None) -> None:
    home = Home(tmp_path / "keeper", boxes)
    try:
        manager = home.manager()
        with Agent(manager, "a.1", {"helper": str(tmp_path / "helper"), "threads": True}) as agent:
            agent.started()
            helper = number_in(tmp_path / "helper")
            assert manager.ask("usage", box="a.1")["threads"] >= 2
            assert manager.stop("a.1")["left"] == []
            assert not is_alive(helper)
    finally:
        home.end()


def test_what_a_module_started_ends_with_its_template_and_the_agents_live_on(manager: Manager, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("one")
    setup = {"helper": str(tmp_path / "helper"), "files": [str(source)]}
    with Agent(manager, "a.1", setup) as first:
        pid = first.started()["pid"]
        helper = number_in(tmp_path / "helper")
        daemon = int(first.says("daemon")[0])
        assert is_alive(helper)
        source.write_text("another")
        with Agent(manager, "b.1", {**setup, "helper": None}) as second:
            second.started()
            wait_until(lambda: not is_alive(helper))
            assert first.says("word")[0] == str(pid)
            assert is_alive(daemon)


def test_what_a_module_started_does_not_outlive_an_exchange_of_the_keeper(
    home: Home, manager: Manager, tmp_path: Path
) -> None:
    with Agent(manager, "a.1", {"helper": str(tmp_path / "helper")}) as agent:
        pid = agent.started()["pid"]
        helper = number_in(tmp_path / "helper")
        boxes = "signals" if manager.about["boxes"] == "signals" else None
        manager.ask("upgrade", argv=keeper_argv(home.directory, boxes)[:-1])
        wait_until(lambda: not is_alive(helper))
        assert agent.says("word")[0] == str(pid)


# --- nobody gets away --------------------------------------------------------------------------------


def test_the_daemon_of_a_forked_agent_goes_and_its_neighbours_stays(manager: Manager) -> None:
    with Agent(manager, "a.1") as first, Agent(manager, "b.1") as second:
        first.started()
        second.started()
        mine, neighbours = int(first.says("daemon")[0]), int(second.says("daemon")[0])
        assert manager.stop("a.1", 0.2)["left"] == []
        assert not is_alive(mine)
        assert is_alive(neighbours)
        second.channel.send(b"exit 3")
        assert manager.exit_of("b.1")["left"] == []
        assert not is_alive(neighbours)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave its groups")
@pytest.mark.parametrize("grace", [0.0, 1.0])
def test_one_that_has_left_its_groups_is_found(manager: Manager, tmp_path: Path, grace: float) -> None:
    log = tmp_path / "log"
    manager.start("a.1", [*PYTHON, _ESCAPE], log=str(log))
    manager.start("b.1", ["sleep", "1000"])
    escaped = number_in(log)
    assert manager.stop("a.1", grace)["left"] == []
    assert not is_alive(escaped)
    assert manager.statuses()["b.1"]["exit"] is None


# --- causes ------------------------------------------------------------------------------------------


@best_boxes
def test_a_kill_after_a_childs_memory_kill_is_not_the_agents_memory(manager: Manager, tmp_path: Path) -> None:
    log = tmp_path / "log"
    greedy = f"{sys.executable} -I -S -c 'x = bytearray(300 << 20)'; echo lives on; exec sleep 1000"
    limits = {"memory_bytes": 64 << 20}
    pid = manager.start("a.1", ["/bin/sh", "-c", greedy], log=str(log), limits=limits)["pid"]
    wait_until(lambda: "lives on" in log.read_text())
    time.sleep(1.5)  # whoever lives on for a second was not the one; nothing can be seen of that from outside
    os.kill(pid, signal.SIGKILL)
    record = manager.exit_of("a.1")
    assert (record["signal"], record["oom"], record["by"]) == (signal.SIGKILL, False, None)
    own = [sys.executable, "-I", "-S", "-c", "x = bytearray(300 << 20)"]
    manager.start("b.1", own, limits=limits)
    assert manager.exit_of("b.1")["oom"] is True


# --- many, and one that cannot die -------------------------------------------------------------------


@plain_boxes
def test_many_deaths_share_one_look(manager: Manager) -> None:
    numbers = [manager.say_start(f"u{number}.1", ["sleep", "1000"]) for number in range(120)]
    pids = [manager.hear(number)[0]["pid"] for number in numbers]
    keeper = manager.about["pid"]
    used = cpu_seconds(keeper)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for number in range(120):
        assert manager.exit_of(f"u{number}.1")["left"] == []
    assert cpu_seconds(keeper) - used < 3


def _freezer() -> Path | None:
    own = cgroupfs.own_groups(cgroupfs.read("/proc/self/mountinfo"), cgroupfs.read("/proc/self/cgroup"))
    return Path(own["freezer"]) if "freezer" in own and os.geteuid() == 0 else None


@pytest.mark.skipif(_freezer() is None, reason="only a foreign freezer makes a process that no kill can end")
@best_boxes
def test_one_that_cannot_die_does_not_keep_the_keeper(home: Home, manager: Manager) -> None:
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    keeper = manager.about["pid"]
    root = _freezer()
    assert root is not None
    ice = root / f"ice-{home.token}"
    ice.mkdir()
    try:
        (ice / "cgroup.procs").write_text(str(pid))
        (ice / "freezer.state").write_text("FROZEN")
        wait_until(lambda: (ice / "freezer.state").read_text() == "FROZEN\n")
        stop = manager.say("stop", box="a.1", grace_seconds=0)
        manager.say("bye", leave=False)
        report, _ = manager.hear(stop)
        assert [one.split(" (")[0] for one in report["left"]] == [f"process {pid}"]
        wait_until(lambda: not is_alive(keeper))
    finally:
        (ice / "freezer.state").write_text("THAWED")
        wait_until(lambda: not is_alive(pid))
        ice.rmdir()
    home.launch()
