"""One user, one home, two repositories: each command uses what the repository has in which it is typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Said, Shell, until
from workdirs_ground import git

#: It works until the file `go` is there, and says from which project its definition came.
_AGENT = """---
description: greets
lifecycle:
  driver: {command: [sh, -c, 'while [ ! -e %(go)s ]; do sleep 0.05; done; echo hello from %(name)s | tee made.txt']}
---
"""


class Desk(Shell):
    """A user without a home in any project: `~/.ostler` serves them all."""

    def __init__(self, program: Path, folder: Path) -> None:
        super().__init__(program, folder)
        self.home.rmdir()
        self.home = Path(self.environment["HOME"]) / ".ostler"
        self.folder = folder

    def repository(self, name: str) -> Path:
        folder = self.folder / name
        (folder / ".claude" / "agents").mkdir(parents=True)
        text = _AGENT % {"go": self.folder / "go", "name": name}
        (folder / ".claude" / "agents" / "greeter.md").write_text(text)
        git(folder, "init", "-q", "-b", "main")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "begin")
        return folder

    def within(self, folder: Path, *words: str) -> Said:
        self.project = folder
        return self.run(*words)


@pytest.fixture
def desk(program: Path, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(program, tmp_path)
    yield desk
    desk.close()


def test_two_repositories_share_one_daemon_and_keep_their_names(desk: Desk) -> None:
    first, second = desk.repository("first"), desk.repository("second")
    (desk.folder / "go").touch()
    assert desk.within(first, "run", "greeter", "please").out == "hello from first\n"
    assert "PROJECT" not in desk.ok("ps", "-a")
    assert desk.within(second, "run", "greeter", "please").out == "hello from second\n"
    lines = desk.ok("ps", "-a").splitlines()
    assert "PROJECT" in lines[0]
    assert [("first" in line, "second" in line) for line in lines[1:]] == [(False, True), (True, False)]


def test_a_task_goes_on_in_its_project_after_its_daemon_was_killed(desk: Desk) -> None:
    first, second = desk.repository("first"), desk.repository("second")
    for folder in (first, second):
        assert desk.within(folder, "task", "add", "greet", "--agent", "greeter").code == 0

    def states() -> list[str]:
        return [task["state"] for task in json.loads(desk.ok("task", "list", "-o", "json"))]

    until(lambda: states() == ["running", "running"])
    desk.kill_daemon()
    (desk.folder / "go").touch()
    until(lambda: states() == ["completed", "completed"])
    lines = desk.ok("task", "list").splitlines()
    assert "PROJECT" in lines[0]
    for key, name in (("T001", "first"), ("T002", "second")):
        assert f"hello from {name}" in desk.ok("diff", key)
        assert any(line.startswith(key) and f" {name} " in line for line in lines)
