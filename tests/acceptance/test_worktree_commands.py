"""Commands in the worktree of a task: `shell`, `edit`, and `resume-session`, by which a person takes it over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shell import Shell, until
from workdirs_ground import git

#: Claude Code as an agent, and in a terminal: there it does what the file `by-hand` says.
_CLAUDE = """#!/bin/sh
case "$*" in *--output-format*)
  cat > /dev/null
  echo '{{"type":"system","subtype":"init","session_id":"s1"}}'
  echo by the agent > made.txt
  echo '{{"type":"result","subtype":"success","is_error":false,"result":"ok","session_id":"s1","num_turns":1}}' ;;
*) echo "$*" > {stage}/words; . {stage}/by-hand ;;
esac
"""


@pytest.fixture
def desk(shell: Shell, tmp_path: Path) -> Shell:
    """A repository with one task that waits for its review."""
    stage = tmp_path / "stage"
    stage.mkdir()
    (stage / "claude").write_text(_CLAUDE.format(stage=stage))
    (stage / "claude").chmod(0o755)
    shell.environment["PATH"] = f"{stage}:{shell.program.parent}:{shell.environment['PATH']}"
    git(shell.project, "init", "-q", "-b", "main")
    (shell.project / "README").write_text("begin\n")
    (shell.project / ".gitignore").write_text(".ostler\n")
    git(shell.project, "add", "-A")
    git(shell.project, "commit", "-q", "-m", "begin")
    shell.ok("task", "add", "make it", "--agent", "claude", "--check", "test -e made.txt")
    until(lambda: task_of(shell)["state"] == "completed", seconds=60)
    return shell


def task_of(shell: Shell) -> dict[str, object]:
    task: dict[str, object] = json.loads(shell.ok("task", "show", "T001"))
    return task


def test_a_person_works_in_the_worktree_of_a_task(desk: Shell, tmp_path: Path) -> None:
    task = task_of(desk)
    place, stage = str(task["workdir"]["path"]), tmp_path / "stage"  # type: ignore[index]
    said = desk.run("shell", "T001", stdin="pwd; echo $OSTLER_PORT $OSTLER_SLUG\n", SHELL="/bin/sh")
    assert said.out.splitlines() == [place, f"{task['port']} {task['slug']}"]
    editor = stage / "editor"
    editor.write_text('#!/bin/sh\necho "$@" in "$(pwd)"\n')
    editor.chmod(0o755)
    assert desk.ok("edit", "T001", EDITOR=f"{editor} --wait").strip() == f"--wait {place} in {place}"
    _by_hand(stage, "echo by hand > made.txt; ostler accept T001; ostler task show T001")
    said = desk.run("resume-session", "T001")
    assert said.code == 0, said
    assert (stage / "words").read_text().strip() == "--resume s1"
    assert "waits for your review" in said.out
    assert said.err.count("is an agent and may not call") == 2, "what runs in the session is not the person"
    assert task_of(desk)["state"] == "completed"
    assert "by hand" in desk.ok("diff", "T001")
    desk.ok("reject", "T001", "-m", "enough")
    desk.ok("retire", "T001")
    said = desk.run("shell", "T001")
    assert said.code == 3
    assert "in the vault; bring it back with: ostler unretire T001" in said.err


def test_an_agent_cannot_take_a_task_over(desk: Shell, tmp_path: Path) -> None:
    told = tmp_path / "told"
    done = desk.run("run", "--", "sh", "-c", f"ostler resume-session T001 > {told} 2>&1; ostler task requeue T001")
    assert done.code != 0
    assert "is an agent and may not call take_over" in told.read_text()
    assert task_of(desk)["state"] == "completed"


def test_what_is_changed_in_the_shell_is_reviewed_and_merged(desk: Shell, tmp_path: Path) -> None:
    said = desk.run("shell", "T001", stdin="echo mine > by-hand.txt; exit 5\n", SHELL="/bin/sh")
    assert said.code == 5, "that of the shell"
    assert "T001: your changes are checked and wait for your review with the rest: ostler diff T001" in said.err
    assert "+mine" in desk.ok("diff", "T001")
    editor = tmp_path / "stage" / "editor"
    editor.write_text("#!/bin/sh\n")
    editor.chmod(0o755)
    said = desk.run("edit", "T001", EDITOR=str(editor))
    assert "what you change later is taken in by: ostler task hand-in T001" in said.err
    place = Path(str(task_of(desk)["workdir"]["path"]))  # type: ignore[index]
    (place / "by-hand.txt").write_text("later\n")
    assert "wait for your review" in desk.ok("task", "hand-in", "T001")
    assert "nothing has changed" in desk.ok("task", "hand-in", "T001")
    desk.ok("accept", "T001")
    assert (desk.project / "by-hand.txt").read_text() == "later\n"


def test_a_check_that_refuses_what_was_changed_in_the_shell_is_named(desk: Shell) -> None:
    said = desk.run("shell", "T001", stdin="rm made.txt\n", SHELL="/bin/sh")
    assert said.code == 0, said
    assert "T001: the check `test -e made.txt` failed with exit code 1" in said.err


def _by_hand(stage: Path, script: str) -> None:
    (stage / "by-hand").write_text(f"{script}\n")
