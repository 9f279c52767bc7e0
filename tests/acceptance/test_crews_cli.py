"""Crews from the shell: a night at work, Ctrl+C, policies, a killed daemon, settings that change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from shell import Shell, until

SETTINGS = '[crew.coder]\nagent = "fixer"\ncount = 2\nbackoff = "0s"\n'
#: Does what its task says first.
SCRIPT = """
read -r what
case $what in
  fail-once*) mkdir "$OSTLER_TASK.failed" 2>/dev/null && exit 3 ;;
  fail*) exit 3 ;;
  hang*) touch "$1/$OSTLER_TASK.begun"; exec tail -f /dev/null ;;
  deaf*) trap '' TERM INT; touch "$1/$OSTLER_TASK.begun"; while :; do sleep 0.1; done ;;
  gate*) touch "$1/$OSTLER_TASK.begun"; while [ ! -e "$1/$OSTLER_TASK.go" ]; do sleep 0.05; done ;;
esac
echo "$OSTLER_TASK by $OSTLER_MEMBER" > made.txt
"""


def agent_file(sh: Shell, name: str = "fixer") -> None:
    script = sh.project / "agent.sh"
    script.write_text(SCRIPT.replace('mkdir "$OSTLER', 'mkdir "$1/$OSTLER'))
    folder = sh.home / "agents"
    folder.mkdir(exist_ok=True)
    driver = f"{{command: [sh, {script}, {sh.project}], prompt: stdin}}"
    (folder / f"{name}.md").write_text(f"---\ndescription: Mends\nlifecycle:\n  driver: {driver}\n---\n")


@pytest.fixture
def sh(shell: Shell) -> Shell:
    (shell.project / "ostler.toml").write_text(SETTINGS)
    agent_file(shell)
    return shell


def add(sh: Shell, text: str, *more: str, agent: str = "fixer") -> str:
    return sh.ok("task", "add", text, "--agent", agent, "--backoff", "100ms", *more).split()[0]


def task(sh: Shell, key: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(sh.ok("task", "show", key))
    return found


def crews(sh: Shell) -> dict[str, dict[str, object]]:
    return {one["name"]: one for one in json.loads(sh.ok("crew", "ps", "-o", "json"))}


def lines_until(running: subprocess.Popen[str], *wanted: str) -> list[str]:
    assert running.stdout is not None
    seen: list[str] = []
    while not all(any(word in line for line in seen) for word in wanted):
        line = running.stdout.readline()
        assert line, seen
        seen.append(line.rstrip("\n"))
    return seen


def test_a_night(sh: Shell) -> None:
    good, bad = add(sh, "write"), add(sh, "fail-once")
    with sh.start("crew", "up") as running:
        seen = lines_until(running, f"{good}  completed", f"{bad}  failed", f"{bad}  completed")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        assert running.stderr is not None
        assert "stopping in order" in running.stderr.read()
    assert seen[0] == "crew coder (fixer × 2, on-error requeue)"  # noqa: RUF001 - times
    assert seen[1] == "2 tasks queued.   Ctrl+C stops in order."
    failed = next(line for line in seen if f"{bad}  failed" in line)
    assert "exit code 3" in failed
    assert "requeued (1 of 3)" in failed
    assert task(sh, bad)["attempt"] == 2
    assert str(task(sh, bad)["member"]) in {"coder-1", "coder-2"}
    ps = sh.ok("crew", "ps")
    assert "crew coder (fixer × 2, on-error requeue) is not up   Bring it up: ostler crew up coder" in ps  # noqa: RUF001


def test_ctrl_c_drains_and_a_second_one_forces(sh: Shell) -> None:
    key = add(sh, "deaf")
    with sh.start("crew", "up") as running:
        until((sh.project / f"{key}.begun").exists)
        running.send_signal(signal.SIGINT)
        assert running.stderr is not None
        assert "stopping in order" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        assert "at once" in running.stderr.readline()
        assert running.wait(9) == 130, "asked once it gets 10 s"
        assert running.stdout is not None
        assert f"{key}  queued     its crew is stopping" in running.stdout.read()
    assert [task(sh, key)[name] for name in ("state", "failures", "is_held")] == ["queued", 0, False]
    assert not [line for line in sh.left_over() if "agent.sh" in line]


def test_an_architect_that_errs_ends_it_with_exit_code_1(sh: Shell) -> None:
    agent_file(sh, "thinker")
    (sh.project / "ostler.toml").write_text(SETTINGS + '[crew.architect]\nagent = "thinker"\non-error = "shutdown"\n')
    hung, bad = add(sh, "hang"), add(sh, "fail", agent="thinker")
    said = sh.run("crew", "up")
    assert said.code == 1
    reason = f"manual intervention required: architect-1 erred on {bad}: sh failed with exit code 3 and said nothing"
    assert said.err.strip().splitlines()[-1] == f"ostler: {reason}"
    assert reason in sh.ok("crew", "ps")
    assert task(sh, hung)["state"] == "queued"


def test_a_killed_daemon_costs_nothing(sh: Shell) -> None:
    key = add(sh, "gate")
    assert "Stop them: ostler crew stop" in sh.ok("crew", "up", "-d")
    until((sh.project / f"{key}.begun").exists)
    before = task(sh, key)
    sh.kill_daemon()
    (sh.project / f"{key}.go").touch()
    until(lambda: task(sh, key)["state"] == "completed")
    after = task(sh, key)
    assert [after[name] for name in ("instance_id", "attempt", "member")] == [
        before[name] for name in ("instance_id", "attempt", "member")
    ]
    assert crews(sh)["coder"]["is_up"]
    second = add(sh, "write")
    until(lambda: task(sh, second)["state"] == "completed")


def test_stop_scale_and_reload(sh: Shell) -> None:
    sh.ok("crew", "up", "-d", "coder")
    assert sh.ok("crew", "scale", "coder", "3") == "crew coder has 3 members.\n"
    assert len(crews(sh)["coder"]["members"]) == 3  # type: ignore[arg-type]
    (sh.project / "ostler.toml").write_text(SETTINGS + 'on-eror = "stop"\n')
    broken = sh.run("crew", "reload")
    assert broken.code == 2
    assert f"{sh.project}/ostler.toml:5: crew.coder.on-eror is not known; did you mean on-error?" in broken.err
    assert "ostler.toml:5" in sh.run("crew", "ps").err
    (sh.project / "ostler.toml").write_text(SETTINGS + 'on-error = "stop"\n')
    os.kill(sh.daemon_pid(), signal.SIGHUP)
    until(lambda: crews(sh)["coder"]["on_error"] == "stop")
    assert "the last good settings stay in force" in Path(sh.home, "daemon.log").read_text()
    assert sh.ok("crew", "stop").startswith("crew coder is stopped.")


def test_a_daemon_that_is_stopped_gives_the_tasks_back(sh: Shell) -> None:
    key = add(sh, "hang")
    sh.ok("crew", "up", "-d")
    until((sh.project / f"{key}.begun").exists)
    os.kill(sh.daemon_pid(), signal.SIGTERM)
    until(lambda: not [line for line in sh.left_over() if "ostler.daemon" in line])
    assert not [line for line in sh.left_over() if "agent.sh" in line or "tail" in line]
    (sh.project / f"{key}.begun").unlink()
    assert crews(sh)["coder"]["is_up"], "it comes up again with the daemon"
    until((sh.project / f"{key}.begun").exists)
    assert [task(sh, key)[name] for name in ("failures", "attempt")] == [0, 2]
    why = sh.ok("why", f"{key}-2")
    assert "of crew coder, generation" in why


MISTAKES = [
    (("crew", "up", "codr"), 4, "did you mean coder?"),
    (("crew", "stop", "codr"), 4, "did you mean coder?"),
    (("crew", "scale", "coder", "2"), 3, "bring it up with `ostler crew up coder`"),
    (("crew", "scale", "coder", "-1"), 2, ""),
    (("crew", "frob"), 2, ""),
]


def test_mistakes_name_the_next_step(sh: Shell) -> None:
    for words, code, hint in MISTAKES:
        said = sh.run(*words)
        assert (said.code, hint in said.err) == (code, True), said


def test_without_a_crew_it_is_said_how_to_declare_one(shell: Shell) -> None:
    assert "[crew.coder]" in shell.run("crew", "ps").err
    said = shell.run("crew", "up")
    assert said.code == 4
    assert "[crew.coder]" in said.err
