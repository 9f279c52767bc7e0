"""Tasks on the command line of the installed program: each command, its exit codes, and the ordinary way end to end."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from shell import Shell, until
from workdirs_ground import git, make_repository

import ostler

#: Runs the first paragraph of its prompt as a script; what it is told below that, it writes down.
AGENT = """---
description: Does what the task says
lifecycle:
  driver:
    command:
      - sh
      - -ec
      - |
        eval "$(sed '/^$/,$d' {prompt_file})"
        if grep -q '^>' {prompt_file}; then grep '^>' {prompt_file} > told.txt; fi
---
"""


@pytest.fixture(scope="module")
def sh(open_shell: Shell) -> Shell:
    project = open_shell.project
    git(project, "init", "--quiet", "--initial-branch=main")
    (project / ".gitignore").write_text(".ostler/\n")
    for name in ("a", "b", "c"):
        (project / f"{name}.txt").write_text(f"{name}1\n{name}2\n{name}3\n")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message=first")
    (open_shell.home / "agents").mkdir()
    (open_shell.home / "agents" / "worker.md").write_text(AGENT)
    return open_shell


def add(sh: Shell, script: str, *more: str) -> str:
    said = sh.ok("task", "add", script, "--agent", "worker", *more)
    return said.split()[0]


def shown(sh: Shell, key: str) -> dict[str, Any]:
    found: dict[str, Any] = sh.run("task", "show", key).json()
    return found


def reach(sh: Shell, key: str, state: str) -> dict[str, Any]:
    until(lambda: shown(sh, key)["state"] == state, f"{key} never was {state}")
    return shown(sh, key)


def done(sh: Shell, script: str, *more: str) -> str:
    key = add(sh, script, *more)
    reach(sh, key, "completed")
    return key


def test_the_ordinary_way(sh: Shell) -> None:
    """Add, look, read the diff, send back, look again, accept, undo, accept, retire, bring back."""
    said = sh.ok("task", "add", "echo said; sed -i s/a1/A1/ a.txt", "--agent", "worker", "--check", "grep -q A1 a.txt")
    found = re.fullmatch(r"(T\d+) queued for worker\.   Follow it: ostler logs -f \1\n", said)
    assert found, said
    key = found[1]
    reach(sh, key, "completed")
    row = next(line for line in sh.ok("task", "list").splitlines() if line.startswith(key))
    assert re.search(rf"completed +worker .*needs review: ostler diff {key}", row)
    looked = sh.run("diff", key)
    assert "-a1\n+A1\n" in looked.out
    assert "check: grep -q A1 a.txt  passed in" in looked.err
    assert "based on main at" in looked.err
    assert "said" in sh.ok("logs", key)
    told = sh.ok("task", "send-back", key, "-m", "Say it louder.")
    assert told == f"{key} goes back to the queue with your comment (attempt 2).\n"
    until(lambda: shown(sh, key)["attempt"] == 2 and shown(sh, key)["state"] == "completed")
    assert "+> Say it louder." in sh.ok("diff", key, "told.txt")
    assert "2 files changed" in sh.ok("diff", key, "--stat")
    assert re.match(rf"{key} accepted: merged into main as [0-9a-f]{{7}}\.", sh.ok("accept", key))
    assert (sh.project / "a.txt").read_text() == "A1\na2\na3\n"
    assert git(sh.project, "status", "--porcelain") == ""
    assert "is taken back" in sh.ok("undo", key)
    assert (sh.project / "a.txt").read_text() == "a1\na2\na3\n"
    part = sh.ok("accept", key, "./a.txt")
    assert re.match(rf"{key}: 1 of 2 files merged into main as .* ostler accept {key}\n", part), part
    assert not (sh.project / "told.txt").exists()
    assert re.match(rf"{key} accepted: merged into main", sh.ok("accept", key, "-m", "The rest of it"))
    assert git(sh.project, "log", "-1", "--format=%s").strip() == "The rest of it"
    place = Path(shown(sh, key)["workdir"]["path"])
    assert f"Bring it back: ostler unretire {key}" in sh.ok("retire", key)
    assert not place.exists()
    assert "is back" in sh.ok("unretire", key)
    assert (place / "told.txt").read_text() == "> Say it louder.\n"
    assert key not in sh.ok("task", "list", "--state", "completed")
    assert key in sh.ok("task", "list", "-a")


def test_a_failed_task_says_why_and_its_output_can_be_read(sh: Shell) -> None:
    key = add(sh, "echo tried; exit 3", "--backoff", "10m")
    until(lambda: shown(sh, key)["failures"] == 1)
    assert "tried" in sh.ok("logs", key), "its attempt has ended"
    told = sh.ok("why", key, TZ="Asia/Tokyo")
    assert told.startswith(f"{key}: ")
    assert "exit code 3" in told
    assert "+00:00" not in told
    row = next(line for line in sh.ok("task", "list").splitlines() if line.startswith(key))
    assert "failed" in row
    assert sh.run("why", "-o", "json", key).json()["state"] == "queued"
    sh.ok("task", "cancel", key)


def test_add_says_when_nothing_will_take_the_task_up(sh: Shell) -> None:
    said = sh.run("task", "add", "true")
    key = said.out.split()[0]
    assert "nothing takes it up" in said.err
    assert "no agent" in sh.ok("why", key)
    sh.ok("task", "cancel", key)


def test_add_takes_a_list_of_tasks_as_a_whole_or_says_what_is_wrong_on_which_line(sh: Shell) -> None:
    listed = "- task: first of the list\n  key: listed-1\n  hold: true\n- task: second\n  after: listed-1\n"
    wrong = sh.run("task", "add", "-f", "-", stdin=f"{listed}  agent: nobody\n")
    assert wrong.code == 2
    assert "standard input:6: agent must be one that can be spawned" in wrong.err
    assert "no task was added" in wrong.err
    (sh.project / "tasks.yaml").write_text(listed)
    assert sh.ok("task", "add", "-f", "tasks.yaml").startswith("listed-1  first of the list\n")
    assert sh.run("task", "add", "-f", "tasks.yaml").code == 2, "the key is taken"
    assert sh.run("task", "add", "-f", "tasks.yaml", "--agent", "worker").code == 2
    (sh.project / "tasks.yaml").unlink()


def test_add_takes_all_that_a_task_has(sh: Shell) -> None:
    first = done(sh, "true")
    words = ("--after", first, "--priority", "high", "--tag", "night", "--hold", "--timeout", "45m", "--key", "mine")
    said = sh.run("task", "add", "-", "--agent", "worker", *words, "--id", "once", stdin="true # from stdin\n")
    assert said.out.startswith("mine queued for worker. It is held back.")
    assert (
        sh.run("task", "add", "-", "--agent", "worker", *words, "--id", "once", stdin="true # from stdin\n").code == 0
    )
    task = shown(sh, "mine")
    assert (task["depends_on"], task["priority"], task["tags"], task["timeout"]) == ([first], "high", ["night"], 2700)
    assert "held; release it: ostler task requeue mine" in sh.ok("task", "list", "--tag", "night")
    sh.ok("task", "requeue", "mine")
    assert f"waits for {first}" in sh.ok("task", "list", "--text", "from stdin")
    sh.ok("accept", first)
    reach(sh, "mine", "completed")
    assert "it names no agent" in sh.ok("task", "add", "somebody should")


def test_a_task_is_cancelled_in_mid_work(sh: Shell) -> None:
    key = add(sh, "echo begun > begun; exec tail -f /dev/null")
    place = sh.home / "tasks" / key
    until((place / "begun").exists)
    said = sh.ok("task", "cancel", key, "-m", "no longer wanted")
    assert said == f"{key} is cancelled. Its workdir is kept: {place}\n"
    assert (shown(sh, key)["state"], shown(sh, key)["error"]) == ("rejected", "no longer wanted")
    assert not [line for line in sh.left_over() if "tail -f" in line]
    assert (place / "begun").exists()
    never_begun = sh.ok("task", "add", "x", "--hold").split()[0]
    assert sh.ok("task", "cancel", never_begun) == f"{never_begun} is cancelled.\n"


def test_the_log_of_a_task_whose_agent_was_removed_is_a_sentence(sh: Shell) -> None:
    key = done(sh, "echo said")
    sh.ok("rm", f"{key}-1")
    said = sh.run("logs", key)
    assert (said.code, said.out) == (4, "")
    assert said.err == f"ostler: the output of the agent that worked on {key} was removed with its record\n"


def test_a_task_is_requeued_and_rejected(sh: Shell) -> None:
    key = add(sh, "test -e begun || { touch begun; exec tail -f /dev/null; }")
    until((sh.home / "tasks" / key / "begun").exists)
    assert sh.ok("task", "requeue", key) == f"{key} is queued.\n"
    assert reach(sh, key, "completed")["attempt"] == 2
    assert f"{key} rejected." in sh.ok("reject", key, "-m", "not like this")
    assert shown(sh, key)["error"] == "not like this"


def test_a_conflict_is_told_with_its_paths_and_changes_nothing(sh: Shell) -> None:
    key = done(sh, "sed -i s/b1/B1/ b.txt")
    (sh.project / "b.txt").write_text("other\n")
    git(sh.project, "commit", "--quiet", "--all", "--message=theirs")
    tip = git(sh.project, "rev-parse", "HEAD")
    said = sh.run("accept", key)
    assert said.code == 7
    assert "conflicts in b.txt" in said.err
    assert f"ostler task send-back {key}" in said.err
    assert git(sh.project, "rev-parse", "HEAD") == tip
    assert "conflicts in b.txt" in sh.run("diff", key).err
    assert shown(sh, key)["state"] == "completed"
    sh.ok("task", "cancel", key)


async def accept_and_undo_by_the_client(sh: Shell, blocked: str, accepted: str) -> None:
    async with ostler.Client(sh.home) as client:
        with pytest.raises(ostler.CheckoutBlockedError) as raised:
            await client.accept(blocked)
        assert raised.value.paths == ("c.txt",)
        task, (undone,) = await client.take_back(accepted)
        assert (task.state, undone.followed) == ("completed", True)


def test_a_changed_file_of_the_user_is_named_and_the_others_are_accepted(sh: Shell) -> None:
    blocked, free, last = done(sh, "sed -i s/c1/C1/ c.txt"), done(sh, "echo 1 > one.txt"), done(sh, "echo 2 > two.txt")
    (sh.project / "c.txt").write_text("mine\n")
    tip = git(sh.project, "rev-parse", "HEAD")
    refusal = sh.run("accept", blocked)
    assert refusal.code == 7
    assert "c.txt cannot follow (changes of yours that are not committed)" in refusal.err
    assert "--branch-only" in refusal.err
    assert git(sh.project, "rev-parse", "HEAD") == tip
    both = sh.run("accept", blocked, free)
    assert (both.code, f"{blocked}: main is checked out" in both.err) == (7, True)
    assert f"{free} accepted" in both.out
    asyncio.run(accept_and_undo_by_the_client(sh, blocked, free))
    moved = sh.run("accept", blocked, "--branch-only")
    assert (moved.code, f"{blocked} accepted" in moved.out) == (0, True)
    assert "were left as they are, for c.txt cannot follow" in moved.err
    git(sh.project, "checkout", "--", "c.txt")
    (sh.project / "c.txt").write_text("mine again\n")
    assert "c.txt cannot follow" in sh.run("undo", blocked).err
    git(sh.project, "checkout", "--", "c.txt")
    everything = sh.ok("accept", "--all")
    assert {blocked, last} <= {line.split()[0] for line in everything.splitlines()}
    assert (sh.project / "c.txt").read_text() == "C1\nc2\nc3\n"
    assert "no task waits for its review" in sh.run("accept", "--all").err


def test_a_check_that_fails_sends_the_task_back_until_it_is_parked_with_its_reason_in_the_list(sh: Shell) -> None:
    words = ("--max-failures", "2", "--backoff", "100ms")
    key = add(sh, "touch made", "--check", "echo it is not good; exit 1", *words)
    until(lambda: [wait["kind"] for wait in shown(sh, key)["waits"]] == ["human"])
    task = shown(sh, key)
    assert (task["state"], task["attempt"]) == ("queued", 2)
    assert "it is not good" in task["error"]
    row = next(line for line in sh.ok("task", "list").splitlines() if line.startswith(key))
    reason = "failed 2 times, at last: the check `echo it is not good; exit 1` failed with exit code 1"
    assert row.endswith(f"go on: ostler task requeue {key}; {reason}")
    assert f"{key} changes nothing in these paths" in sh.run("diff", key, "b.txt").err
    assert sh.ok("task", "requeue", key) == f"{key} is queued.\n"
    until(lambda: shown(sh, key)["attempt"] == 4)
    sh.ok("reject", key, "-m", "no")
    assert "final; add it as a new task" in sh.run("task", "requeue", key).err
    assert "task.check" in sh.ok("audit", "log")
    assert sh.ok("audit", "verify").startswith("sound: ")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("task",), 2),
        (("task", "add"), 2),
        (("task", "add", ""), 2),
        (("task", "add", "x", "--agent", "nobody"), 2),
        (("task", "add", "x", "--after", "T999"), 2),
        (("task", "add", "x", "--priority", "urgent"), 2),
        (("task", "add", "x", "--timeout", "soon"), 2),
        (("task", "add", "x", "--key", "../up"), 2),
        (("task", "list", "--state", "lost"), 2),
        (("task", "list", "-n", "0"), 2),
        (("task", "show"), 2),
        (("task", "show", "T999"), 4),
        (("task", "cancel", "T999"), 4),
        (("task", "requeue", "T999"), 4),
        (("task", "send-back", "T999", "-m", "x"), 4),
        (("diff", "T999"), 4),
        (("accept", "T999"), 4),
        (("reject", "T999"), 2),
        (("reject", "T999", "-m", "x"), 4),
        (("undo", "T999"), 4),
        (("retire", "T999"), 4),
        (("unretire", "T999"), 4),
        (("accept", "../../etc"), 4),
    ],
)
def test_a_wrong_argument_is_refused_with_its_exit_code(sh: Shell, words: tuple[str, ...], code: int) -> None:
    said = sh.run(*words)
    assert said.code == code, said
    assert said.err or words == ("task",)
    assert "Traceback" not in said.err


def test_a_verb_that_does_not_fit_the_state_says_what_does(sh: Shell) -> None:
    held = add(sh, "true", "--hold")
    for words in (("accept", held), ("undo", held), ("task", "send-back", held, "-m", "x")):
        said = sh.run(*words)
        assert (said.code, f"{held} is queued" in said.err) == (3, True), said
    assert sh.run("diff", held).code == 4
    assert "has no workdir" in sh.run("retire", held).err
    key = done(sh, "true")
    said = sh.run("task", "requeue", key)
    assert (said.code, f"ostler task send-back {key}" in said.err) == (3, True)
    said = sh.run("task", "show", key.replace("T", "TT"))
    assert (said.code, "Did you mean T" in said.err) == (4, True)


def test_lists_are_read_by_programs(sh: Shell) -> None:
    key = add(sh, "true", "--tag", "listed", "--hold")
    assert [one["key"] for one in sh.run("task", "list", "--tag", "listed", "-o", "json").json()] == [key]
    assert json.loads(sh.ok("task", "list", "--tag", "listed", "-o", "jsonl"))["state"] == "queued"
    assert sh.run("status", "-o", "json").json()["tasks"]["by_state"]["queued"] >= 1


def test_doctor_names_workdirs_of_no_task(sh: Shell) -> None:
    sh.ok("up", "-d")
    (sh.home / "tasks").mkdir(exist_ok=True)
    (sh.home / "tasks" / "lost").mkdir()
    assert f"workdirs that belong to no task: {sh.home}/tasks/lost" in sh.run("doctor").out
    (sh.home / "tasks" / "lost").rmdir()


def test_a_daemon_that_is_stopped_queues_its_tasks_and_the_next_goes_on(shell: Shell) -> None:
    """`down` ends the agents in order: that spends nothing, and their files are there for the next attempt."""
    repository = make_repository(shell.project / "code")
    (shell.home / "agents").mkdir()
    (shell.home / "agents" / "worker.md").write_text(AGENT)
    changes = shell.project / "changes"
    hook = f"sh -c 'echo $OSTLER_TASK $OSTLER_STATE >> {changes}'"
    (shell.project / "ostler.toml").write_text(f'[tasks]\nat-once = 1\non-change = "{hook}"\n')
    shell.project = repository
    shell.environment["OSTLER_HOME"] = str(shell.home)
    key = add(shell, "if test -e begun; then echo went on; else touch begun; exec tail -f /dev/null; fi")
    until((shell.home / "tasks" / key / "begun").exists)
    shell.ok("down")
    assert not [line for line in shell.left_over() if "tail -f" in line]
    task = reach(shell, key, "completed")
    assert (task["attempt"], task["failures"], task["summary"]) == (2, 0, "went on")
    until(lambda: "completed" in changes.read_text())
    told = changes.read_text().splitlines()
    assert (told[:2], told[-1]) == ([f"{key} queued", f"{key} running"], f"{key} completed")


def test_a_project_that_is_moved_goes_on_where_it_is(shell: Shell) -> None:
    """Under a running daemon, with work that is finished and work that is not."""
    (shell.home / "agents").mkdir()
    (shell.home / "agents" / "worker.md").write_text(AGENT)
    git(shell.project, "init", "--quiet", "--initial-branch=main")
    (shell.project / ".gitignore").write_text(".ostler/\n")
    git(shell.project, "add", "--all")
    git(shell.project, "commit", "--quiet", "--message=first")
    finished = done(shell, "echo made > made.txt")
    running = add(shell, "if test -e begun; then echo went on; else touch begun; exec tail -f /dev/null; fi")
    until((shell.home / "tasks" / running / "begun").exists)
    pid, old = shell.daemon_pid(), shell.project
    shell.project = old.rename(old.with_name("project2"))
    shell.home = shell.project / ".ostler"
    until(lambda: not Path(f"/proc/{pid}").exists(), "the daemon of the old place goes on")
    accepted = shell.run("accept", finished)
    assert (accepted.code, f"{finished} accepted" in accepted.out) == (0, True), accepted
    assert f"the home was moved from {old}/.ostler to" in accepted.err
    assert (shell.project / "made.txt").read_text() == "made\n"
    task = reach(shell, running, "completed")
    assert (task["failures"], task["summary"]) == (0, "went on")
    assert "the home was moved from" in shell.ok("doctor")
    assert not old.exists(), sorted(old.rglob("*"))
