"""`ostler loop`, `signal`, `pr` and `waits --graph` with the installed program."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest
from loop_shell import LoopShell
from shell import Shell, until

from ostler.keeper.rlimit_tag import RLIMIT_LOCKS, tag_for


@pytest.fixture(scope="module")
def loops(open_shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> LoopShell:
    return LoopShell(open_shell, tmp_path_factory.mktemp("loops"))


def test_a_loop_in_the_foreground_tells_each_iteration_and_the_end(loops: LoopShell) -> None:
    loops.steps(
        "echo hm", "touch a b; ostler signal complete -m first", "touch c; ostler signal complete -m 'all pass'"
    )
    said = loops.shell.run("loop", "PROMPT.md", "--agent", "fixer", "--check", "test -f c", "--max-iterations", "9")
    assert said.code == 0, said
    first, second, third, last = said.out.splitlines()
    key = re.findall(r"ostler diff (T\d+)", last)[0]
    assert re.match(r"iteration 1 .* ended without a signal", first)
    assert re.match(r"iteration 2 .* check failed: .*2 files changed", second)
    assert re.match(r"iteration 3 .* all pass .*3 files changed", third)
    assert last.startswith("Complete after 3 iterations, ")
    assert f"{key} begins" in said.err
    shown = loops.shell.ok("loop", "show", key)
    assert [line.split()[0] for line in shown.splitlines()] == ["START", "1", "2", "3"]
    assert "the check `test -f c` failed" in loops.shell.ok("loop", "show", key, "--prompt", "3")
    assert loops.shell.run("loop", "follow", key).code == 0, "one that has ended is told at once"
    assert loops.nothing_lived_on(key)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("loop", "NONE.md", "--agent", "fixer"), 2, "NONE.md cannot be read"),
        (("loop", "PROMPT.md"), 2, "--agent"),
        (("loop", "PROMPT.md", "--agent", "nobody"), 2, "nobody"),
        (("loop", "PROMPT.md", "--agent", "fixer", "--max-iterations", "0"), 2, "max-iterations"),
        (("loop", "PROMPT.md", "--agent", "fixer", "--retry-interval", "soon"), 2, "--retry-interval"),
        (("loop", "show", "T999"), 4, "T999"),
        (("loop", "follow", "T999"), 4, "T999"),
        (("pr", "show", "99"), 4, "#99"),
        (("pr", "merge", "99"), 4, "#99"),
        (("pr", "comment", "99"), 2, "--message"),
        (("pr", "ci", "abc", "perhaps"), 2, "perhaps"),
        (("signal", "complete"), 3, "only a live agent of this home may signal"),
        (("signal", "finished"), 2, "finished"),
    ],
)
def test_mistakes_end_with_the_documented_exit_codes(
    loops: LoopShell, words: tuple[str, ...], code: int, told: str
) -> None:
    said = loops.shell.run(*words)
    assert (said.code, told in said.err) == (code, True), said


def test_until_needs_no_signal_and_a_cap_ends_the_command(loops: LoopShell) -> None:
    loops.steps("echo not yet", "echo ALL_TESTS_PASS")
    said = loops.shell.run("loop", "-", "--agent", "fixer", "--until", "ALL_TESTS_PASS", stdin="Mend it")
    assert said.code == 0, said
    assert "iteration 2" in said.out
    loops.steps("echo not yet", "echo not yet")
    said = loops.shell.run("loop", "PROMPT.md", "--agent", "fixer", "--until", "DONE", "--max-iterations", "2")
    assert said.code == 1, said
    assert "stopped after 2 iterations" in said.err
    assert "2 iterations. Answer to let it go on: ostler answer" in said.err
    key = re.findall(r"ostler answer (T\d+) yes", said.err)[0]
    assert loops.shell.run("loop", "follow", key).code == 1
    loops.steps("echo", "echo", "echo DONE")
    loops.shell.ok("answer", key, "yes")
    loops.until_state(key, "completed")


def begun(errors: IO[str]) -> str:
    """The key of the loop that has begun; whichever test comes first is also told that the daemon was started."""
    line = next(line for line in errors if " begins; " in line)
    return line.split()[1]


def test_ctrl_c_ends_the_agent_and_holds_the_task_back(loops: LoopShell) -> None:
    loops.steps("hang", "ostler signal complete")
    with loops.shell.start("loop", "PROMPT.md", "--agent", "fixer") as running:
        assert running.stderr is not None
        key = begun(running.stderr)
        until(loops.at(key, "hangs").exists)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        assert f"{key} is held back. Let it go on with: ostler task requeue {key}" in running.stderr.read()
    assert (loops.task(key)["is_held"], loops.nothing_lived_on(key)) == (True, True)
    assert [one["ended_by"] for one in loops.iterations(key)] == ["stopped"]
    loops.shell.ok("task", "requeue", key)
    assert loops.shell.run("loop", "follow", key).code == 0


def test_ctrl_c_between_two_starts_holds_the_task_back_too(loops: LoopShell) -> None:
    loops.steps("exit 1")
    with loops.shell.start("loop", "PROMPT.md", "--agent", "fixer", "--retry-interval", "1h") as running:
        assert running.stdout is not None
        assert "failed" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        assert running.stderr is not None
        key = begun(running.stderr)
    assert loops.task(key)["is_held"]
    loops.shell.ok("task", "cancel", key)


# --- who may signal ----------------------------------------------------------------------------------


def refusals(loops: LoopShell) -> list[str]:
    found = loops.json("audit", "log", "-n", "1000", "-o", "json")
    return [str(one["detail"]) for one in found if (one["action"], one["outcome"]) == ("task.signal", "denied")]


def environment_of(loops: LoopShell, key: str) -> dict[str, str]:
    """What Ostler told the agent, as the agent wrote it down."""
    lines = loops.at(key, "env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith("OSTLER_"))


def test_a_signal_from_outside_is_refused_and_audited(loops: LoopShell) -> None:
    before = len(refusals(loops))
    key = loops.begin("env > $stage/env; hang")
    until(loops.at(key, "hangs").exists)
    own = environment_of(loops, key)
    said = loops.shell.run("signal", "complete", "-m", "believe me", **own)
    assert (said.code, "no agent of this home" in said.err) == (3, True), said
    assert refusals(loops)[before:] == ["complete from a process that is no agent of this home"]
    assert loops.task(key)["state"] == "running", "what an environment says is not believed"
    loops.shell.ok("task", "cancel", key)


def test_a_signal_about_another_task_is_refused(loops: LoopShell) -> None:
    said = """printf '{"name": "complete", "payload": {"task_id": "T000"}}' > body; curl=$(command -v curl)
        [ -n "$curl" ] && curl -s --unix-socket $OSTLER_HOME/daemon.sock -d @body -H 'content-type: application/json' \
            http://localhost/v1/signals > $stage/said; ostler signal complete"""
    key = loops.begin(said)
    loops.until_state(key, "completed")
    if loops.at(key, "said").exists():
        assert f"must be {key}" in loops.at(key, "said").read_text()


def test_a_process_ends_with_its_attempt_so_that_it_cannot_speak_later(loops: LoopShell) -> None:
    late = "setsid sh -c 'while [ ! -e $0/go ]; do sleep 0.02; done; ostler signal complete > $0/late 2>&1' $stage"
    key = loops.begin(f"{late} & ostler signal blocked --on 'human: which?'; hang", "ostler signal complete")
    loops.until_waits(key, "human")
    assert loops.nothing_lived_on(key)
    loops.at(key, "go").touch()
    loops.shell.ok("answer", key, "this")
    loops.until_state(key, "completed")
    assert not loops.at(key, "late").exists()


def test_a_process_that_outlived_its_attempt_is_refused_and_audited(loops: LoopShell) -> None:
    """Should one ever live on, it is known by its tag, which it cannot exchange."""
    key = loops.begin("env > $stage/env; ostler signal complete")
    loops.until_state(key, "completed")
    own = environment_of(loops, key)
    token, _, unit = own["OSTLER_MARK"].partition(":")
    tag = tag_for(token, unit)
    if tag is None:
        pytest.skip("this machine uses the bound that carries the tag for something else")
    before = len(refusals(loops))
    done = subprocess.run(
        [loops.shell.program, "signal", "complete"],
        env=loops.shell.environment | own,
        cwd=loops.shell.project,
        preexec_fn=lambda: resource.setrlimit(RLIMIT_LOCKS, (tag, tag)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "an attempt that has ended" in done.stderr) == (3, True), done
    assert refusals(loops)[before:] == ["complete from an attempt that has ended"]


# --- waits and pull requests -------------------------------------------------------------------------


def test_waits_graph_shows_who_waits_for_whom_and_cycles(loops: LoopShell) -> None:
    first = loops.begin("ostler signal blocked --on human", "ostler signal complete")
    loops.until_waits(first, "human")
    second = loops.begin(f"ostler signal blocked --on {first.lower()}", "ostler signal complete")
    loops.until_waits(second, "dependency")
    assert f"{second} waits for {first}\n" in loops.shell.ok("waits", "--graph")
    loops.steps("", f"ostler signal blocked --on {second}", "ostler signal complete", key=first)
    loops.shell.ok("answer", first, "go on")
    parked = loops.until_waits(first, "human")
    assert "they wait for one another" in parked["reason"]
    found = loops.json("waits", "--graph", "-o", "json")
    assert found["waits"][second] == [first]
    loops.shell.ok("answer", first, "yes")
    loops.until_state(first, "completed")
    loops.shell.ok("accept", first)
    loops.until_state(second, "completed")


def test_a_pull_request_is_commented_on_refused_by_ci_approved_and_merged(loops: LoopShell) -> None:
    key = loops.begin(
        "touch one; ostler signal pr -m 'Add one'",
        "touch two; ostler signal pr -m 'Add one and two'",
        options=("--ci", "test -f one"),
    )
    loops.until_waits(key, "pull_request")
    (row,) = [line for line in loops.shell.ok("pr", "list").splitlines() if key in line]
    number = row.split()[0].removeprefix("#")
    assert row.split()[1:4] == [key, "open", "passed"]
    with loops.shell.start("loop", "follow", key) as following:
        loops.shell.ok("pr", "comment", number, "-m", "Add two as well")
        until(lambda: loops.at(key, "pids").read_text().count("\n") == 2)
        loops.until_waits(key, "pull_request")
        assert "> On pull request #" in loops.shell.ok("loop", "show", key, "--prompt", "2")
        assert "is approved" in loops.shell.ok("pr", "approve", number)
        assert f"{key} is accepted" in loops.shell.ok("pr", "merge", number)
        assert following.wait(60) == 0
        assert following.stdout is not None
        assert "Complete after 2 iterations" in following.stdout.read()
    assert {"one", "two"} <= set(loops.git("ls-tree", "--name-only", "main").split())
    assert loops.shell.run("pr", "merge", number).code == 3
    assert json.loads(loops.shell.ok("pr", "show", number))["state"] == "merged"
    assert key in loops.shell.ok("pr", "list", "-a")


def test_a_pull_request_that_is_closed_is_rejected(loops: LoopShell) -> None:
    key = loops.begin("ostler signal pr --url https://forge.example/7")
    loops.until_waits(key, "pull_request")
    number = next(one["number"] for one in loops.json("pr", "list", "-o", "json") if one["task_key"] == key)
    with loops.shell.start("loop", "follow", key) as following:
        assert "is closed" in loops.shell.ok("pr", "close", str(number), "-m", "too large")
        assert following.wait(60) == 1
    assert loops.task(key)["state"] == "rejected"
    assert loops.json("pr", "show", str(number))["url"] == "https://forge.example/7"


def test_ci_elsewhere_is_told_by_its_commit(loops: LoopShell) -> None:
    commit = loops.git("rev-parse", "HEAD").strip()
    assert loops.shell.ok("pr", "ci", commit, "passed") == f"{commit} passed.\n"


def test_an_agent_cannot_start_the_daemon_and_waits_for_it(loops: LoopShell) -> None:
    key = loops.begin("gate first; ostler signal complete -m 'after all' 2> $stage/said")
    until(loops.at(key, "at-first").exists)
    loops.shell.kill_daemon()
    loops.at(key, "past-first").touch()
    until(lambda: loops.at(key, "said").exists() and "waiting for it" in loops.at(key, "said").read_text())
    loops.shell.ok("ps")
    loops.until_state(key, "completed")
    assert loops.task(key)["summary"] == "after all"
    assert b"OSTLER_MARK=" not in Path(f"/proc/{loops.shell.daemon_pid()}/environ").read_bytes()


PYTHON_LOOP = """
import asyncio
import ostler
from ostler.loop import AgentLifecycleLoop

async def main():
    loop = AgentLifecycleLoop(repo_dir=".", max_retries=3)
    first = await loop.run_agent_loop("fixer", "Mend the parser", wait=False)
    print(first.result_type, first.iterations)
    async with ostler.Client() as client:
        (pull,) = [pull for pull in await client.pull_requests() if pull.task_key == first.task_id]
        await client.comment(pull.number, "Name it better.")
        second = await loop.run_agent_loop("fixer", first.task_id, wait=False)
        print(second.result_type, second.pr_url == pull.url, second.iterations)
        await client.report_ci(pull.commit, passed=True)
        print((await client.merge(pull.number)).state)
        print((await client.why_task(first.task_id)).verdict)
    third = await loop.run_agent_loop("fixer", first.task_id)
    print(third.result_type, third.summary)
    print((await loop.run_agent_loop("nobody", first.task_id)).result_type)

asyncio.run(main())
"""


def test_a_python_loop_is_driven_by_the_daemon_that_manages_the_home(loops: LoopShell) -> None:
    """It used to end with an error: the home is held by the daemon."""
    loops.steps("touch by-python; ostler signal pr -m 'please look'", "touch again; ostler signal pr -m 'renamed'")
    loops.shell.ok("ps")  # starts the daemon
    printed = loops.stage / "python.out"
    with printed.open("w") as out:
        program = subprocess.Popen(
            [loops.shell.program.parent / "python", "-u", "-c", PYTHON_LOOP],
            env=loops.shell.environment,
            cwd=loops.shell.project,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        program.wait(120)
    except subprocess.TimeoutExpired:
        program.kill()
        shown = loops.shell.ok("task", "show", "T001") + loops.shell.ok("why", "T001")
        log = (loops.shell.home / "daemon.log").read_text()[-3000:]
        pytest.fail(f"it printed {printed.read_text()!r}; the task: {shown}; the log: {log}")
    assert printed.read_text().splitlines() == [
        "pr_created 1",
        "pr_created True 2",
        "merged",
        "it is accepted",
        "task_complete renamed",
        "error",
    ]
