"""The daemon is killed without a word under everything that looks at it: nothing acknowledged is lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from shell import Shell, until

COUNTER = "i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo line $i; sleep 0.01; done"
SLOW = """
import asyncio
from ostler import Agent


class Slow(Agent):
    async def process(self, request):
        await asyncio.sleep(3)
        return request
"""


def test_streams_and_requests_go_on_when_the_daemon_is_killed(shell: Shell) -> None:
    (shell.project / "slow.py").write_text(SLOW)
    (shell.home / "agents").mkdir()
    (shell.home / "agents" / "slow.md").write_text(
        "---\nlifecycle:\n  driver: python:slow:Slow\n  isolation: process\n---\n"
    )
    shell.ok("run", "-d", "--name", "slow", "slow")
    shell.ok("run", "-d", "--name", "counter", "--", "sh", "-c", COUNTER)
    pids = {one["name"]: one["attempts"][0]["handle"] for one in map(_inspect(shell), ("slow", "counter"))}
    with (
        shell.start("events", "-f", "-o", "jsonl", "-n", "1000") as events,
        shell.start("logs", "-f", "-T", "counter") as logs,
        shell.start("ask", "slow", "hello") as asking,
    ):
        assert logs.stdout is not None
        assert logs.stdout.readline() == "line 1\n"
        for _ in range(3):
            shell.kill_daemon()
            shell.ok("ps")
        said, errors = asking.communicate(timeout=60)
        assert said == "hello\n", errors
        lines = ["line 1\n", *logs.stdout]
        assert lines == [f"line {number}\n" for number in range(1, 401)]
        assert logs.wait(60) == 0
        shell.ok("run", "--name", "last", "--", "true")
        time.sleep(1.0)
        events.terminate()
        told = events.communicate(timeout=60)[0].splitlines()
    numbers = [json.loads(line)["sequence"] for line in told]
    kept = [json.loads(line)["sequence"] for line in shell.ok("events", "-n", "1000", "-o", "jsonl").splitlines()]
    assert numbers == kept[: len(numbers)]
    assert len(numbers) > len(kept) - 3
    after = {one["name"]: one["attempts"][0]["handle"] for one in map(_inspect(shell), ("slow", "counter"))}
    assert after == pids


def _inspect(shell: Shell) -> Callable[[str], Any]:
    return lambda name: shell.run("inspect", name).json()


def test_a_command_in_the_foreground_outlives_the_daemon(shell: Shell) -> None:
    with shell.start("run", "--name", "fore", "--", "sh", "-c", f"{COUNTER}; exit 5") as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "line 1\n"
        shell.kill_daemon()
        shell.ok("ps")
        rest = running.stdout.read().splitlines()  # communicate() would not see what is in its buffer
        assert running.wait(60) == 5
    assert rest == [f"line {number}" for number in range(2, 401)]


def test_agents_keeper_and_daemon_end_when_their_home_is_deleted(shell: Shell) -> None:
    (shell.project / "slow.py").write_text(SLOW)
    (shell.home / "agents").mkdir()
    (shell.home / "agents" / "slow.md").write_text(
        "---\nlifecycle:\n  driver: python:slow:Slow\n  isolation: process\n---\n"
    )
    shell.ok("run", "-d", "--name", "command", "--", "sh", "-c", "echo up; sleep 1000")
    shell.ok("run", "-d", "--name", "slow", "slow")
    shell.ok("run", "-d", "--name", "frozen", "--", "sleep", "1000")
    shell.ok("pause", "--depth", "freeze", "frozen")
    with shell.start("logs", "-f", "command") as follower, shell.start("run", "--", "sleep", "1000") as runner:
        assert follower.stdout is not None
        assert follower.stdout.readline().endswith("up\n")
        until(lambda: len(shell.run("ps", "-q").out.split()) == 4)
        shutil.rmtree(shell.home)
        assert "was removed or moved away" in follower.communicate(timeout=55)[1], "and not after a minute of waiting"
        assert "was removed or moved away" in runner.communicate(timeout=55)[1]
        assert (follower.returncode, runner.returncode) == (6, 6)
    until(lambda: not shell.left_over(), "something lives on")
    assert not shell.home.exists(), "nothing was made anew"


def test_of_two_commands_that_start_the_daemon_at_once_both_succeed(shell: Shell) -> None:
    started = [shell.start("run", "--", "sh", "-c", f"echo {number}") for number in range(4)]
    outcomes = []
    for one in started:
        with one:
            outcomes.append((one.communicate(timeout=60), one.returncode))
    assert [code for _, code in outcomes] == [0, 0, 0, 0], outcomes
    assert sorted(out for (out, _), _ in outcomes) == ["0\n", "1\n", "2\n", "3\n"]


def test_down_ends_a_daemon_that_is_still_starting_and_whose_command_was_killed(shell: Shell) -> None:
    with shell.start("up", "-d") as starting:
        until(lambda: any("ostler.daemon" in line for line in shell.left_over()))
        starting.kill()
    said = shell.run("down")
    assert (said.code, said.out) == (0, "The daemon has ended.\n"), said
    assert not shell.left_over()


def test_the_library_is_refused_a_home_that_a_daemon_owns(shell: Shell) -> None:
    shell.ok("up", "-d")
    code = "import asyncio, ostler\nasync def main():\n  async with ostler.open(): pass\nasyncio.run(main())"
    done = subprocess.run(
        [shell.program.parent / "python", "-c", code],
        env=shell.environment,
        cwd=shell.project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"LeaseHeldError: a daemon \(process \d+\) manages the home .*ostler\.Client", done.stderr)


def test_a_program_talks_to_the_daemon_with_the_async_client(shell: Shell) -> None:
    code = """
import asyncio, ostler

async def main():
    async with ostler.Client() as client:
        made = await client.spawn(command=["sh", "-c", "echo hello"], job="")
        lines = [line.text async for line in client.logs(made.instance_id, follow=True)]
        found = await client.instance(made.instance_id)
        print(lines, found.state, (await client.statistics()).total_spawned)
        try:
            await client.instance("nobody")
        except ostler.NotFoundError as error:
            print(type(error).__name__)

asyncio.run(main())
"""
    shell.ok("up", "-d")
    done = subprocess.run(
        [shell.program.parent / "python", "-c", code],
        env=shell.environment,
        cwd=shell.project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "['hello'] terminated 1\nNotFoundError\n", done.stderr
    until(lambda: "terminated" in shell.ok("ps", "-a"))
