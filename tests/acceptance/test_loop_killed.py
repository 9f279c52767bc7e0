"""The daemon is killed ten times under a loop: no iteration twice, no wait lost, no old process beside a new one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from loop_shell import LoopShell, lives
from shell import Shell, until

from ostler.home import LOCK_FILE

#: A daemon is started eleven times, which takes a busy machine a while.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def loops(shell: Shell, tmp_path: Path) -> LoopShell:
    return LoopShell(shell, tmp_path)


def test_a_loop_goes_on_through_ten_kills_of_the_daemon(loops: LoopShell) -> None:
    kills = _drive(loops)
    assert kills == 10
    task, iterations = loops.task("T001"), loops.iterations("T001")
    assert (task["state"], task["waits"], task["attempt"]) == ("accepted", [], 5)
    assert [one["number"] for one in iterations] == [1, 2, 3, 4, 5]
    assert [one["ended_by"] for one in iterations] == ["exit", "breakpoint", "check", "breakpoint", "breakpoint"]
    assert (loops.starts("T001"), loops.nothing_lived_on("T001")) == (5, True)
    assert task["loop"]["retries"] == 2, "the exit and the failed check, and nothing else"
    assert "Which way?, ended: left" in iterations[2]["prompt"]
    assert {"made", "more"} <= set(loops.git("ls-tree", "--name-only", "main").split())
    events = map(json.loads, loops.shell.ok("events", "-n", "1000", "-o", "jsonl").splitlines())
    told = [(one["number"], one["ended_by"]) for one in events if one["event_type"] == "task_iteration"]
    assert told == [pair for one in iterations for pair in ((one["number"], None), (one["number"], one["ended_by"]))]


def _drive(loops: LoopShell) -> int:
    """Through exit, a question, a failed check, a review and a merge. How often the daemon was killed."""
    daemons = set[int]()

    def kill() -> None:
        """And the next command starts the daemon again."""
        pid = int((loops.shell.home / LOCK_FILE).read_text())
        os.kill(pid, signal.SIGKILL)
        daemons.add(pid)
        until(lambda: not lives(pid))
        loops.shell.ok("ps")

    def passed(name: str) -> None:
        loops.at(key, f"past-{name}").touch()

    def came_to(name: str) -> None:
        until(loops.at(key, f"at-{name}").exists, f"it did not come to {name}")

    check = f"touch {loops.stage}/checks; while [ ! -e {loops.stage}/checked ]; do sleep 0.02; done; test -f made"
    key = loops.begin(
        "gate exit",
        "gate block; ostler signal blocked --on 'human: Which way?'; gate never",
        "gate unmade; ostler signal complete -m 'made nothing'",
        "touch made; gate review; ostler signal pr -m 'Add made'; gate never",
        "touch more; gate comment; ostler signal pr -m 'Add more'",
        options=("--check", check),
    )
    came_to("exit")
    kill()  # 1: an agent works
    passed("exit")
    came_to("block")
    kill()  # 2: the next one works; the first ended without a signal
    passed("block")
    wait = loops.until_waits(key, "human")
    assert loops.nothing_lived_on(key), "it hung after its breakpoint, and was ended"
    kill()  # 3: it waits for a person
    assert loops.until_waits(key, "human") == wait
    loops.shell.ok("answer", key, "left")
    came_to("unmade")
    passed("unmade")
    until((loops.stage / "checks").exists)
    kill()  # 4: a check runs
    (loops.stage / "checked").touch()
    came_to("review")
    kill()  # 5: the agent that was told of the failed check works
    passed("review")
    kill()  # 6: it signals, or has signalled
    pull = loops.until_waits(key, "pull_request")
    kill()  # 7: it waits for its merge
    assert loops.until_waits(key, "pull_request") == pull
    loops.shell.ok("pr", "comment", "1", "-m", "Add more")
    kill()  # 8: a fresh agent is on its way
    came_to("comment")
    kill()  # 9: it works
    passed("comment")
    loops.until_waits(key, "pull_request")
    loops.shell.ok("pr", "merge", "1")
    kill()  # 10: all is over
    return len(daemons)
