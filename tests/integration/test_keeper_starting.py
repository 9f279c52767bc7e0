"""A real keeper starts real programs: what they get, what they do not get, and what is told of their end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import Home, Manager, Refused, is_alive, wait_until

from ostler.keeper.protocol import MARK

PYTHON = [sys.executable, "-I", "-S", "-c"]
#: What a process sees of itself, as JSON on standard output. The descriptor by which it looks is closed by then.
LOOK = """
import json, os, sys
fds = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "fds": fds, "env": dict(os.environ), "cwd": os.getcwd(), "sid": os.getsid(0), "pid": os.getpid(),
    "ppid": os.getppid(), "cap": int(status["CapBnd"], 16), "eff": int(status["CapEff"], 16),
    "nnp": status["NoNewPrivs"].strip(), "blocked": int(status["SigBlk"], 16), "ignored": int(status["SigIgn"], 16),
    "nice": os.nice(0), "oom": open("/proc/self/oom_score_adj").read().strip(),
}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("home") / "keeper")
    yield made
    made.end()


@pytest.fixture
def manager(home: Home) -> Iterator[Manager]:
    yield home.manager()
    home.clear()


def test_an_exit_code_and_a_signal_are_told_as_they_were(manager: Manager) -> None:
    begun = manager.start("a.1", ["/bin/sh", "-c", "exit 3"])
    manager.start("b.1", ["/bin/sh", "-c", "kill -SEGV $$"])
    manager.start("c.1", ["true"])
    first, second, third = (manager.exit_of(unit) for unit in ("a.1", "b.1", "c.1"))
    assert (first["code"], first["signal"], first["by"], first["oom"], first["left"]) == (3, None, "", False, [])
    assert (second["code"], second["signal"]) == (None, signal.SIGSEGV)
    assert (third["code"], third["signal"]) == (0, None)
    assert (first["pid"], first["start_time"]) == (begun["pid"], begun["start_time"])
    assert begun["start_time"] > 0
    assert begun["boot_id"] == manager.about["boot_id"]
    assert set(begun["enforcement"]) == {"memory", "cpu", "pids"}
    assert manager.statuses()["a.1"]["exit"] == first


def test_a_program_that_is_not_there_is_named(manager: Manager, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for argv, words in (
        (["/no/such/program"], "the program '/no/such/program' was not found"),
        (["no-such-word"], "the program 'no-such-word' was not found"),
        ([str(plain)], "may not be executed: Permission denied"),
    ):
        with pytest.raises(Refused, match="start") as refused:
            manager.start("a.1", argv)
        assert words in refused.value.sentence
    with pytest.raises(Refused, match="could not go to its directory /no/such: No such file") as refused:
        manager.start("a.1", ["true"], cwd="/no/such")
    assert refused.value.kind == "start"
    assert manager.statuses() == {}
    manager.start("a.1", ["true"])
    assert manager.exit_of("a.1")["code"] == 0


def test_a_unit_is_started_once(manager: Manager) -> None:
    manager.start("a.1", ["true"])
    manager.exit_of("a.1")
    with pytest.raises(Refused, match="taken"):
        manager.start("a.1", ["true"])
    manager.ask("forget", name="a.1")
    assert manager.statuses() == {}
    manager.start("a.1", ["true"])


def test_a_process_gets_what_was_given_and_nothing_else(manager: Manager, home: Home, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "deep" / "a.log"
    here = tmp_path / "here"
    here.mkdir()
    manager.start("a.1", [*PYTHON, LOOK], log=str(log), cwd=str(here), nice=5, umask=0o077, env={"ONLY": "this"})
    assert manager.exit_of("a.1")["code"] == 0
    seen = json.loads(log.read_text())
    seen["env"].pop("LC_CTYPE", None)  # Python's own, when no language is set
    assert seen["env"] == {"ONLY": "this", MARK: f"{home.token}:a.1"}
    assert seen["fds"] == [0, 1, 2]
    assert seen["cwd"] == str(here)
    assert seen["sid"] == seen["pid"]
    assert seen["ppid"] == manager.about["pid"]
    assert seen["nnp"] == "1"
    assert seen["nice"] == os.getpriority(os.PRIO_PROCESS, 0) + 5  # these tests may run under `nice`
    assert seen["oom"] == "500"
    for capability in (16, 17, 19, 21, 22, 24, 38, 39, 40):
        assert not (seen["cap"] | seen["eff"]) >> capability & 1
    assert seen["blocked"] == 0
    # Python itself ignores the first two when it starts; the others are the C library's own, which nobody can set.
    expected = (signal.SIGPIPE, signal.SIGXFSZ, 32, 33)
    assert seen["ignored"] & ~sum(1 << (number - 1) for number in expected) == 0


def test_standard_input_is_what_was_given(manager: Manager) -> None:
    manager.start("a.1", ["cat"], b"word\n")
    manager.start("b.1", ["cat"])
    assert manager.exit_of("a.1")["written"] == 5
    assert manager.exit_of("b.1")["written"] == 0
    assert manager.log_of("a.1").read_text() == "word\n"


def test_an_environment_may_be_large(manager: Manager) -> None:
    env = {f"V{number}": "x" * 100_000 for number in range(12)}
    manager.start("a.1", [*PYTHON, "import os; print(sum(map(len, os.environ.values())))"], env=env)
    assert manager.exit_of("a.1")["code"] == 0
    assert int(manager.log_of("a.1").read_text()) > 1_200_000


def test_three_hundred_at_once(manager: Manager) -> None:
    numbers = [manager.say_start(f"u{number}.1", ["sleep", "1000"]) for number in range(300)]
    pids = {manager.hear(number)["pid"] for number in numbers}
    assert len(pids) == 300
    assert all(is_alive(pid) for pid in pids)
    stops = [manager.say("stop", name=f"u{number}.1", grace=0) for number in range(300)]
    assert all(manager.hear(number)["left"] == [] for number in stops)
    assert not any(is_alive(pid) for pid in pids)
    assert all(status["exit"]["by"] == "stop" for status in manager.statuses().values())


def test_a_short_command_is_not_taken_for_one_that_cannot_be_run(manager: Manager) -> None:
    for turn in range(6):
        units = [f"t{turn}n{number}.1" for number in range(40)]
        numbers = [manager.say_start(unit, ["/bin/true"]) for unit in units]
        for number in numbers:
            manager.hear(number)
        assert {manager.exit_of(unit)["code"] for unit in units} == {0}


def test_runs_share_a_cell_and_end_each_by_itself(manager: Manager) -> None:
    first = manager.start("a.1.1", ["sleep", "1000"])
    manager.start("a.1.2", ["/bin/sh", "-c", "sleep 1000 & exit 5"])
    assert manager.exit_of("a.1.2")["code"] == 5
    assert is_alive(first["pid"])
    assert manager.ask("usage", cell="a.1")["threads"] == 1
    with pytest.raises(Refused, match="busy"):
        manager.ask("forget", name="a.1.1")
    assert manager.stop("a.1.1") == {"graceful": False, "left": []}
    manager.start("a.1.3", ["true"])
    assert manager.exit_of("a.1.3")["code"] == 0
    manager.ask("forget", name="a.1")
    assert manager.statuses() == {}
    with pytest.raises(Refused, match="unknown"):
        manager.ask("usage", cell="a.1")


def test_freezing_stands_still_and_thawing_goes_on(manager: Manager) -> None:
    log = manager.log_of("a.1")
    manager.start("a.1", ["/bin/sh", "-c", "while :; do echo x; done"])
    wait_until(lambda: log.exists() and log.stat().st_size > 1000)
    manager.ask("freeze", cell="a.1")
    assert manager.statuses()["a.1"]["frozen"] is True
    with pytest.raises(Refused, match="frozen"):
        manager.start("a.1.2", ["true"])
    manager.ask("thaw", cell="a.1")
    used = manager.ask("usage", cell="a.1")["cpu_seconds"]
    wait_until(lambda: manager.ask("usage", cell="a.1")["cpu_seconds"] > used)
    manager.ask("freeze", cell="a.1")
    assert manager.stop("a.1")["left"] == []
    assert manager.exit_of("a.1")["signal"] == signal.SIGKILL


def test_nonsense_is_refused_by_name(manager: Manager) -> None:
    for fields, words in (
        ({"unit": "../../a"}, "unit"),
        ({"unit": "a"}, "unit"),
        ({"argv": []}, "argv"),
        ({"argv": None}, "argv"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"env": {"A": 1}}, "env"),
        ({"limits": {"pids": -1}}, "pids"),
        ({"limits": {"dance": 1}}, "dance"),
        ({"nice": "very"}, "very"),
        ({"log_rate": None}, "log_rate"),
        ({"log_bytes": "many"}, "many"),
        ({"cwd": 7}, "cwd"),
    ):
        with pytest.raises(Refused, match="request") as refused:
            manager.start("a.1", ["true"], **fields)
        assert words in refused.value.sentence
    for op in ("dance", "", None, 7):
        with pytest.raises(Refused, match="there is no request"):
            manager.ask(op)  # type: ignore[arg-type]  # nonsense on purpose
    for grace in (float("nan"), -1, "long"):
        with pytest.raises(Refused, match="request"):
            manager.stop("a.1", grace)  # type: ignore[arg-type]  # nonsense on purpose
    with pytest.raises(Refused, match="request"):
        manager.ask("forget", name="../run")
    assert manager.ask("renew") == {}
    assert manager.ask("list") == {"units": []}


def test_failed_starts_cost_the_keeper_no_descriptor(manager: Manager) -> None:
    descriptors = Path(f"/proc/{manager.about['pid']}/fd")
    before = len(list(descriptors.iterdir()))
    for number in range(20):
        for fields in ({"cwd": "/no/such"}, {"argv": ["/no/such"]}, {"limits": {"pids": -1}}, {"stdin": True}):
            with pytest.raises(Refused):
                manager.start(f"u{number}.1", ["true"], **fields)
    wait_until(lambda: len(list(descriptors.iterdir())) <= before)
    assert manager.statuses() == {}


def test_the_keeper_cannot_be_looked_into_by_its_children(manager: Manager) -> None:
    pid = manager.about["pid"]
    code = f"open('/proc/{pid}/environ').read()"
    manager.start("a.1", [*PYTHON, f"import os; os.path.exists('/proc/{pid}/stat') or os._exit(9); {code}"])
    # Its own capabilities are gone and the keeper is not dumpable: even for root this is refused.
    assert manager.exit_of("a.1")["code"] == 1
    manager.start("b.1", [*PYTHON, f"import os; print(os.readlink('/proc/{pid}/fd/2'))"])
    assert manager.exit_of("b.1")["code"] == 1
    assert os.path.exists(f"/proc/{pid}")  # noqa: PTH110 - a word for it
