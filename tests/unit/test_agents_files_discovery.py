from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ostler.agents.files import Discovery, discover
from ostler.agents.files import discovery as module
from ostler.model import IsolationLevel


def put(root: Path, **files: str) -> None:
    """Files by name, with __ for a slash: put(root, ostler__fixer="Fix.")."""
    for name, text in files.items():
        folder, _, stem = name.partition("__")
        path = root / f".{folder}" / "agents" / f"{stem}.{'toml' if folder == 'codex' else 'md'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(found: Discovery) -> list[str]:
    return [one.manifest.name for one in found.definitions]


def relative(found: Discovery, root: Path) -> list[str]:
    return [fault.message.replace(f"{root}/", "") for fault in found.faults]


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert discover(tmp_path) == Discovery()
    assert discover(tmp_path, user=tmp_path / "nor this") == Discovery()


def test_a_project_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    (fault,) = discover(tmp_path / "no" / "such").faults
    assert (Path(fault.path).name, fault.bound) == ("such", "is no directory; pass the one in which the project lies")
    (tmp_path / "file").touch()
    assert discover(tmp_path / "file").faults


def test_the_places_in_their_order_and_the_first_name_wins(tmp_path: Path) -> None:
    user = tmp_path / "home"
    user.mkdir()
    root = tmp_path / "root"
    put(root, ostler__a="from ostler", claude__a="from claude", claude__b="from claude", claude__c="c")
    put(root, codex__b='developer_instructions = "from codex"', codex__d='developer_instructions = "from codex"')
    (user / "d.md").write_text("from user")
    (user / "e.md").write_text("from user")
    (user / "f.toml").write_text('developer_instructions = "from user"')
    found = discover(root, user=user)
    assert {one.manifest.name: one.manifest.prompt for one in found.definitions} == {
        "a": "from ostler",
        "b": "from claude",
        "c": "c",
        "d": "from codex",
        "e": "from user",
        "f": "from user",
    }
    assert found.shadowed == (
        str(root / ".claude/agents/a.md"),
        str(root / ".codex/agents/b.toml"),
        str(user / "d.md"),
    )
    assert not found.faults


def test_the_agents_of_the_project_file_come_first_and_its_isolation_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "ostler.toml").write_text(
        '[project]\ndefault-isolation = "worktree"\n[agent.a]\ninstructions = "inline"\n'
    )
    put(tmp_path, ostler__a="file", ostler__b="b", ostler__c="---\nlifecycle: {isolation: none}\n---\n")
    found = discover(tmp_path)
    assert names(found) == ["a", "b", "c"]
    assert found.definitions[0].manifest.prompt == "inline"
    levels = [one.manifest.defaults.isolation_level for one in found.definitions if one.manifest.defaults]
    assert levels == [IsolationLevel.PROCESS, IsolationLevel.PROCESS, IsolationLevel.NONE]
    assert found.definitions[1].manifest.extra == {"lifecycle": {"isolation": "worktree"}}
    assert found.project is not None
    assert found.project.default_isolation == "worktree"


def test_a_broken_file_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "ostler.toml").write_text("[limits\n")
    put(tmp_path, ostler__a="---\nlifecycle: {restrat: 1}\n---\n", ostler__b="b", claude__c="---\n", claude__d="d")
    found = discover(tmp_path)
    assert names(found) == ["b", "d"]
    assert found.project is None
    assert relative(found, tmp_path) == [
        "ostler.toml:1: this is not TOML: Expected ']' at the end of a table declaration",
        ".ostler/agents/a.md:2: lifecycle.restrat is not known; did you mean restart?",
        ".claude/agents/c.md:1: the front matter begins here and never ends; close it with a line of ---",
    ]


def test_a_broken_file_holds_its_name(tmp_path: Path) -> None:
    put(tmp_path, ostler__a="---\nlifecycle: 3\n---\n", claude__a="another agent of that name")
    found = discover(tmp_path)
    assert not found.definitions
    assert len(found.faults) == 1
    assert found.shadowed == (str(tmp_path / ".claude/agents/a.md"),)


def test_what_is_no_definition_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path, ostler__a="a", ostler__README="read me")
    folder = tmp_path / ".ostler" / "agents"
    (folder / ".hidden.md").write_text("x")
    (folder / "notes.txt").write_text("x")
    assert names(discover(tmp_path)) == ["a"]


def test_links_that_leave_the_root_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(root, ostler__a="a")
    outside.mkdir()
    (outside / "secret.md").write_text("secret")
    (outside / "ostler.toml").write_text("")
    folder = root / ".ostler" / "agents"
    (folder / "alias.md").symlink_to(folder / "a.md")
    (folder / "gone.md").symlink_to(folder / "nothing.md")
    (folder / "leak.md").symlink_to(outside / "secret.md")
    (folder / "loop.md").symlink_to(folder / "loop.md")
    (root / ".claude").mkdir()
    (root / ".claude" / "agents").symlink_to(outside)
    (root / "ostler.toml").symlink_to(outside / "ostler.toml")
    found = discover(root)
    assert names(found) == ["a", "alias"]
    said = relative(found, root)
    assert said[0] == "ostler.toml: is a link that leads out of the project, and is not followed"
    assert said[1] == ".ostler/agents/gone.md: is a link that leads nowhere"
    assert said[2] == ".ostler/agents/leak.md: is a link that leads out of the project, and is not followed"
    assert said[3].startswith(".ostler/agents/loop.md: cannot be read: ")
    assert said[4] == ".claude/agents: is a link that leads out of the project, and is not followed"
    assert len(said) == 5


def test_a_pipe_does_not_hang_it_and_a_folder_is_no_definition(tmp_path: Path) -> None:
    put(tmp_path, ostler__b="b")
    folder = tmp_path / ".ostler" / "agents"
    os.mkfifo(folder / "a.md")
    (folder / "c.md").mkdir()
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude" / "agents").write_text("a file, not a folder")
    found = discover(tmp_path)
    assert names(found) == ["b"]
    assert relative(found, tmp_path)[0] == ".ostler/agents/a.md: is not a regular file"
    assert len(found.faults) == 3


def test_too_many_files_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 2)
    put(tmp_path, ostler__a="a", ostler__b="b", ostler__c="c")
    found = discover(tmp_path)
    assert names(found) == ["a", "b"]
    assert relative(found, tmp_path) == [".ostler/agents: holds 3 definitions; only the first 2 are read"]


def test_reading_imports_nothing_that_a_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trap_of_a_test.py").write_text("raise SystemExit('it was imported')")
    put(tmp_path, ostler__a="---\nlifecycle: {driver: 'python:trap_of_a_test:Agent'}\n---\n")
    assert names(discover(tmp_path)) == ["a"]
    assert "trap_of_a_test" not in sys.modules
