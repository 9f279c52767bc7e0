"""Which files are found, in which order, and how they come into a registry."""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ostler.agents import Agent, AgentRegistry
from ostler.agents.base import PythonMaker
from ostler.definitions import Discovery, discover, register_file, register_files, validate_files
from ostler.errors import AgentInitializationError, InvalidOperationError

MODULE = "ostler.definitions.discover"


def put(root: Path, **files: str) -> None:
    """Files by folder and name: put(root, ostler__fixer="Fix.")."""
    for name, text in files.items():
        folder, _, stem = name.partition("__")
        path = root / f".{folder}" / "agents" / f"{stem}.{'toml' if folder == 'codex' else 'md'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def command(program: str) -> str:
    return f"---\nlifecycle: {{driver: {{command: [{program}]}}}}\n---\n"


def prompts(found: Discovery) -> dict[str, str | None]:
    return {one.manifest.name: one.manifest.prompt for one in found.definitions}


def relative(found: Discovery, root: Path) -> list[str]:
    return [fault.message.replace(f"{root}/", "") for fault in found.faults]


# --- finding -----------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert discover(tmp_path) == Discovery()
    assert discover(tmp_path, user=tmp_path / "nor this") == Discovery()


def test_a_project_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("no/such", "file"):
        (fault,) = discover(tmp_path / name).faults
        assert fault.message == f"{tmp_path / name}: is no directory; name that of the project"


def test_the_places_in_their_order_and_the_first_name_wins(tmp_path: Path) -> None:
    user, above = tmp_path / "home", tmp_path / "above"
    root = above / "root"
    put(root, ostler__a="from ostler", claude__a="from claude", claude__b="from claude", claude__c="c")
    put(root, codex__b='developer_instructions = "from codex"', codex__d='developer_instructions = "from codex"')
    put(above, ostler__d="from above", ostler__e="from above", codex__f='developer_instructions = "from above"')
    put(user, claude__f="from user", claude__g="from user")
    found = discover(root, user=user)
    assert prompts(found) == {
        "a": "from ostler",
        "b": "from claude",
        "c": "c",
        "d": "from codex",
        "e": "from above",
        "f": "from above",
        "g": "from user",
    }
    assert not found.faults


def test_a_user_above_the_project_is_read_once(tmp_path: Path) -> None:
    put(tmp_path, ostler__a="a")
    (tmp_path / "root").mkdir()
    assert [path for path, _ in discover(tmp_path / "root", user=tmp_path).files] == [tmp_path / ".ostler/agents/a.md"]


def test_the_agents_of_the_project_file_come_first(tmp_path: Path) -> None:
    (tmp_path / "ostler.toml").write_text('[agent.a]\ninstructions = "inline"\n')
    put(tmp_path, ostler__a="file", ostler__b="b")
    assert prompts(discover(tmp_path)) == {"a": "inline", "b": "b"}


def test_a_broken_file_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "ostler.toml").write_text("[daemon\n")
    put(tmp_path, ostler__a="---\nlifecycle: {restrat: 1}\n---\n", ostler__b="b", claude__c="---\n", claude__d="d")
    found = discover(tmp_path)
    assert prompts(found) == {"b": "b", "d": "d"}
    assert relative(found, tmp_path) == [
        "ostler.toml:1: this is not TOML: Expected ']' at the end of a table declaration",
        ".ostler/agents/a.md:2: lifecycle.restrat is not known; did you mean restart?",
        ".claude/agents/c.md:1: the front matter begins here and never ends; close it with a line of ---",
    ]


def test_a_broken_file_holds_its_name(tmp_path: Path) -> None:
    put(tmp_path, ostler__a="---\nlifecycle: 3\n---\n", claude__a="another agent of that name")
    found = discover(tmp_path)
    assert not found.definitions
    assert found.broken == {"a": found.faults}
    assert len(found.faults) == 1
    put(tmp_path, ostler__a="good", claude__a="---\nlifecycle: 3\n---\n")
    found = discover(tmp_path)
    assert (prompts(found), found.broken, len(found.faults)) == ({"a": "good"}, {}, 1)


def test_every_file_is_validated_with_its_faults(tmp_path: Path) -> None:
    (tmp_path / "ostler.toml").write_text("")
    put(
        tmp_path,
        ostler__a="---\nlifecycle:\n  restrat: 1\n  limits: {memory: 12M}\n---\n",
        claude__a="a",
        claude__b="b",
    )
    found = {str(path.relative_to(tmp_path)): faults for path, faults in validate_files(tmp_path)}
    assert [(fault.line, fault.sentence) for fault in found.pop(".ostler/agents/a.md")] == [
        (3, "lifecycle.restrat is not known; did you mean restart?"),
        (4, "lifecycle.limits.memory must be at least 64M, was 12M"),
    ]
    assert found == {"ostler.toml": (), ".claude/agents/a.md": (), ".claude/agents/b.md": ()}


def test_what_is_no_definition_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path, ostler__a="a", ostler__README="read me")
    folder = tmp_path / ".ostler" / "agents"
    (folder / ".hidden.md").write_text("x")
    (folder / "notes.txt").write_text("x")
    assert list(prompts(discover(tmp_path))) == ["a"]


def test_links_that_leave_the_project_are_not_followed(tmp_path: Path) -> None:
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
    assert list(prompts(found)) == ["a", "alias"]
    said = relative(found, root)
    assert said[0] == "ostler.toml: is a link that leads out of the project, and is not read"
    assert said[1] == ".ostler/agents/gone.md: cannot be read: No such file or directory"
    assert said[2] == ".ostler/agents/leak.md: is a link that leads out of the project, and is not read"
    assert said[3].startswith(".ostler/agents/loop.md: cannot be read: ")
    assert said[4] == ".claude/agents: is a link that leads out of the project, and is not read"
    assert len(said) == 5
    assert set(found.broken) == {"gone", "leak", "loop"}


def test_what_another_user_puts_above_the_project_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    put(root, ostler__a="a")
    put(tmp_path, claude__b="b")
    (tmp_path / "ostler.toml").write_text('[agent.c]\ninstructions = "c"\n')
    assert list(prompts(discover(root))) == ["c", "a", "b"]
    for path in (tmp_path / ".claude/agents", tmp_path / "ostler.toml", root / ".ostler/agents"):
        try:
            os.chown(path, 12345, -1)
        except PermissionError:
            pytest.skip("only root can give files away")
    found = discover(root)
    assert list(prompts(found)) == ["a"]
    assert relative(found, tmp_path) == [
        "ostler.toml: belongs to another user, and is not read",
        ".claude/agents: belongs to another user, and is not read",
    ]


def test_a_pipe_does_not_hang_it_and_a_folder_is_no_definition(tmp_path: Path) -> None:
    put(tmp_path, ostler__b="b")
    folder = tmp_path / ".ostler" / "agents"
    os.mkfifo(folder / "a.md")
    (folder / "c.md").mkdir()
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude" / "agents").write_text("a file, not a folder")
    found = discover(tmp_path)
    assert list(prompts(found)) == ["b"]
    assert relative(found, tmp_path)[0] == ".ostler/agents/a.md: is not a regular file"
    assert len(found.faults) == 3


def test_too_many_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[MODULE], "MAX_FILES", 2)
    put(tmp_path, ostler__a="a", ostler__b="b", ostler__c="c")
    found = discover(tmp_path)
    assert list(prompts(found)) == ["a", "b"]
    assert relative(found, tmp_path) == [".ostler/agents: holds 3 definitions; only the first 2 are read"]


def test_reading_imports_nothing_that_a_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trap_of_a_test.py").write_text("raise SystemExit('it was imported')")
    put(tmp_path, ostler__a="---\nlifecycle: {driver: 'python:trap_of_a_test:Agent'}\n---\n")
    assert list(prompts(discover(tmp_path))) == ["a"]
    assert "trap_of_a_test" not in sys.modules


# --- registering -------------------------------------------------------------------------------------


def programs(registry: AgentRegistry) -> dict[str, tuple[str, ...]]:
    return {one.name: one.command.argv for one in registry.list() if one.command is not None}


def test_every_definition_is_registered_with_its_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_by_a_test.py").write_text("from ostler import Agent\n\n\nclass Fixer(Agent):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    put(tmp_path, ostler__a="---\nlifecycle: {driver: 'python:made_by_a_test:Fixer'}\n---\n", ostler__b=command("cat"))
    put(tmp_path, claude__c="c")
    registry = AgentRegistry()
    found = register_files(registry, tmp_path)
    assert [one.name for one in registry.list()] == ["a", "b", "c"]
    assert not found.faults
    assert "made_by_a_test" not in sys.modules
    makers = [registry.maker(one.id) for one in registry.list()]
    assert type(makers[0]()).__qualname__ == "Fixer"
    with pytest.raises(InvalidOperationError, match="the command cat runs only at isolation level process"):
        makers[1]()
    assert pickle.loads(pickle.dumps(makers)) == makers  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_module_of_a_test:Fixer", "cannot be imported (ModuleNotFoundError: No module named"),
        ("odd_of_a_test:Missing", "cannot be imported (AttributeError:"),
        ("broken_of_a_test:Fixer", "cannot be imported (SystemExit: no)"),
        ("odd_of_a_test:Stranger", "odd_of_a_test:Stranger is neither a subclass of ostler.Agent nor a function"),
    ],
)
def test_a_class_that_cannot_be_had_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, sentence: str
) -> None:
    (tmp_path / "odd_of_a_test.py").write_text("class Stranger:\n    pass\n")
    (tmp_path / "broken_of_a_test.py").write_text("raise SystemExit('no')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AgentInitializationError) as caught:
        PythonMaker(target)()
    assert sentence in str(caught.value)


def test_only_what_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, ostler__a=command("one"), ostler__b=command("two"), ostler__c="---\nlifecycle: 3\n---\n")
    (tmp_path / "ostler.toml").write_text('[agent.d]\ndriver = "command: three"\n')
    for path in (tmp_path / "ostler.toml", *(tmp_path / ".ostler/agents").iterdir()):
        os.utime(path, (1, 1))
    monkeypatch.setattr(time, "time_ns", lambda: 2**62)  # long after
    registry, added = AgentRegistry(), []
    registry.on_change(lambda manifest: added.append(manifest.name))
    first = register_files(registry, tmp_path)
    assert added == ["d", "a", "b"]
    assert register_files(registry, tmp_path) == first
    assert added == ["d", "a", "b"]
    put(tmp_path, ostler__a=command("four"))
    assert register_files(registry, tmp_path).faults == first.faults
    assert added == ["d", "a", "b", "a"]
    assert programs(registry) == {"a": ("four",), "b": ("two",), "d": ("three",)}


def test_two_changes_in_one_tick_of_the_clock_are_both_seen(tmp_path: Path) -> None:
    registry = AgentRegistry()
    path = tmp_path / ".ostler/agents/a.md"
    for program in ("one", "two", "six"):
        put(tmp_path, ostler__a=command(program))
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        register_files(registry, tmp_path)
        assert programs(registry) == {"a": (program,)}


def test_a_file_that_breaks_leaves_its_last_good_definition(tmp_path: Path) -> None:
    registry = AgentRegistry()
    put(tmp_path, ostler__a=command("one"))
    register_files(registry, tmp_path)
    put(tmp_path, ostler__a="---\nlifecycle: 3\n---\n")
    assert len(register_files(registry, tmp_path).faults) == 1
    assert programs(registry) == {"a": ("one",)}


class Mine(Agent):
    def process(self, request: Any) -> Any:
        return request


def test_a_name_that_code_has_taken_stays_with_the_code_unless_it_is_replaced(tmp_path: Path) -> None:
    registry = AgentRegistry()
    registry.register(Mine, name="a")
    put(tmp_path, ostler__a=command("one"), ostler__b=command("two"))
    found = register_files(registry, tmp_path)
    assert [one.manifest.name for one in found.definitions] == ["b"]
    assert found.faults[0].message.startswith(f"{tmp_path}/.ostler/agents/a.md: the agent name a is taken by ")
    assert programs(registry) == {"b": ("two",)}
    assert not register_files(registry, tmp_path, replace=True).faults
    assert programs(registry) == {"a": ("one",), "b": ("two",)}


def test_one_file_takes_the_place_of_what_has_its_name(tmp_path: Path) -> None:
    registry = AgentRegistry()
    registry.register(Mine, name="a")
    put(tmp_path, ostler__a=command("one"))
    manifest = register_file(registry, tmp_path / ".ostler/agents/a.md")
    assert registry.find("a") == manifest
    assert programs(registry) == {"a": ("one",)}
