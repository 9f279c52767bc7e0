"""The daemon is killed without a word while tasks are submitted, prepared, run, proven, accepted and retired.

Every round submits tasks, accepts and retires what it can, and kills the daemon at a random moment. In the end every
task that was acknowledged was done once and accepted once, and every byte that its agent wrote is there.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import daemon_fork
import pytest
from shell import until
from workdirs_ground import git, make_repository

from ostler.client.blocking import BlockingClient, DaemonError

AGENT = """---
lifecycle:
  driver:
    command:
      - sh
      - -ec
      - |
        for i in 1 2 3; do echo "$OSTLER_TASK line $i" >> "$OSTLER_TASK.txt"; sleep 0.03; done
---
"""
CHECK = 'test "$(wc -l < $OSTLER_TASK.txt)" -eq 3 && sleep 0.05'
#: The longest time between the first answer of a daemon and its end.
LONGEST_LIFE = 0.9
Task = dict[str, Any]


class Home:
    """A project with a repository, and its daemon, which comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.repository = make_repository(folder / "project")
        self.home = self.repository / ".ostler"
        (self.home / "agents").mkdir(parents=True, mode=0o700)
        (self.home / "agents" / "worker.md").write_text(AGENT)
        (self.repository / ".git" / "info" / "exclude").write_text(".ostler/\n")
        (folder / "user").mkdir()
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "user"), "LANG": "C.UTF-8"}
        self.client = BlockingClient(self.home)
        with (self.home / "daemon.log").open("ab") as log:
            self.fork = subprocess.Popen(
                [sys.executable, "-P", daemon_fork.__file__, str(self.home)],
                env=self.environment,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.pid = 0

    def start(self) -> None:
        assert self.fork.stdin is not None
        self.fork.stdin.write("start\n")
        self.fork.stdin.flush()
        self.pid = int(self._line())
        until(self._answers, "the daemon did not come up")

    def _line(self) -> str:
        assert self.fork.stdout is not None
        return self.fork.stdout.readline()

    def _answers(self) -> bool:
        assert Path(f"/proc/{self.pid}").exists(), (self.home / "daemon.log").read_text()[-3000:]
        with contextlib.suppress(DaemonError):
            return bool(self.client.call("status", within=5))
        return False

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        pid, self.pid = self.pid, 0
        os.kill(pid, number)
        assert self._line() == "ended\n"

    def close(self) -> None:
        """Agents end in order, whatever state the test left the daemon in."""
        if not self.pid:
            self.start()
        self.end(signal.SIGTERM)
        self.fork.communicate()

    def tasks(self) -> list[Task]:
        found: list[Task] = self.client.call("tasks", include_finished=True, limit=1000, within=30)
        return found


class Reviewer(threading.Thread):
    """Accepts what is completed and retires what is accepted, until the daemon is gone."""

    def __init__(self, home: Home, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._home, self._chance = home, chance
        self.refusals: list[str] = []

    def run(self) -> None:
        while True:
            try:
                for task in self._home.tasks():
                    self._look_at(task)
            except DaemonError as error:
                if error.code == "unreachable":
                    return
                self.refusals.append(f"{error.code}: {error}")
            time.sleep(0.05)

    def _look_at(self, task: Task) -> None:
        if task["state"] == "completed":
            self._home.client.call("accept", task=task["key"], paths=[], within=30)
        elif task["state"] == "accepted" and task["workdir"] is not None and self._chance.random() < 0.5:
            self._home.client.call("retire", task=task["key"], within=30)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.close()
    assert at_work_in(home.home) == []


def at_work_in(folder: Path) -> list[str]:
    """What still runs with this home among its words or in its environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [words for words in found if "pytest" not in words]


def kill_often(home: Home, rounds: int, seed: int) -> set[str]:
    """The names under which tasks were submitted; each is acknowledged in the end."""
    chance = random.Random(seed)
    names: set[str] = set()
    pending: list[str] = []
    for number in range(rounds):
        home.start()
        reviewer = Reviewer(home, random.Random(chance.random()))
        reviewer.start()
        pending += [f"round-{number}-{one}" for one in range(chance.randint(1, 2))]
        life = threading.Timer(chance.uniform(0.0, LONGEST_LIFE), home.end)
        life.start()
        names.update(pending)
        submit_all(home, pending)
        life.join()
        reviewer.join()
        assert not reviewer.refusals, (seed, number, reviewer.refusals)
    home.start()
    submit_all(home, pending)
    assert not pending
    return names


def submit_all(home: Home, pending: list[str]) -> None:
    """What was not acknowledged is submitted again, under the same name."""
    body = {"task": "Write three lines.", "agent": "worker", "near": str(home.repository), "checks": [CHECK]}
    with contextlib.suppress(DaemonError):
        while pending:
            home.client.call("add_task", key=pending[0], new_task=body, within=30)
            del pending[0]


def check_all(home: Home, names: set[str], seed: int) -> None:
    finish(home, lambda task: task["state"] == "accepted", seed)
    tasks, merged = home.tasks(), git(home.repository, "log", "--format=%B").split()
    assert git(home.repository, "status", "--porcelain") == "", "so the files are those of the branch"
    assert len(tasks) == len(names), "each was added once"
    for task in tasks:
        key = task["key"]
        assert (task["state"], task["failures"]) == ("accepted", 0), (seed, task)
        wrote = "".join(f"{key} line {number}\n" for number in (1, 2, 3))
        assert (home.repository / f"{key}.txt").read_text() == wrote, (seed, key, "done once, and all of it")
        assert merged.count(key) == 1, (seed, key, "accepted once")
        if task["workdir"] is None:
            home.client.call("unretire", task=key, within=30)
        assert (home.home / "tasks" / key / f"{key}.txt").read_text() == wrote, (seed, key)
    assert sorted(path.name for path in (home.home / "tasks").iterdir()) == sorted(task["key"] for task in tasks)
    assert list((home.home / "proof").iterdir()) == []
    done = subprocess.run(
        [sys.executable, "-m", "ostler", "audit", "verify"],
        env={**home.environment, "OSTLER_HOME": str(home.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("sound: "), done


def finish(home: Home, is_over: Callable[[Task], bool], seed: int) -> None:
    """Accept what is left; no task stays on the way."""

    def are_over() -> bool:
        for task in home.tasks():
            if task["state"] == "completed":
                home.client.call("accept", task=task["key"], paths=[], within=30)
        return all(map(is_over, home.tasks()))

    count, end = -1, 0.0
    while not are_over():
        left = [(task["key"], task["state"], task["error"]) for task in home.tasks() if not is_over(task)]
        assert all(state != "rejected" for _, state, _ in left), (seed, left)
        if len(left) != count:
            count, end = len(left), time.monotonic() + 30
        assert time.monotonic() < end, (seed, left)
        time.sleep(0.1)


@pytest.mark.timeout(180)
def test_no_task_is_lost_doubled_or_stuck_when_the_daemon_is_killed_again_and_again(home: Home) -> None:
    seed = random.randrange(2**32)
    check_all(home, kill_often(home, 25, seed), seed)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(4))
def test_so_it_is_after_hundreds_of_kills(home: Home, seed: int) -> None:
    check_all(home, kill_often(home, 150, seed), seed)
