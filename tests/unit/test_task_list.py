"""A list of tasks in YAML: what is read of it, and where each mistake stands."""

from __future__ import annotations

import json

import pytest

from ostler.definitions.task_list import TaskList
from ostler.errors import DefinitionError


def faults(text: str) -> list[str]:
    with pytest.raises(DefinitionError) as caught:
        TaskList("tasks.yaml", text)
    return [fault.message for fault in caught.value.faults]


def test_an_item_is_the_text_of_a_task_or_has_the_keys_of_the_options() -> None:
    text = """\
# what is to be done tonight
- Mend the parser
- task: |
    Document it
    and its options
  key: docs
  agent: claude
  checks: [ruff check ., "pytest -q"]
  after: parser
  timeout: 45m
  max-failures: 5
  hold: true
"""
    first, second = TaskList("tasks.yaml", text).entries
    assert first == {"task": "Mend the parser", "priority": "normal"}
    assert second["task"].startswith("Document it\n")
    assert second["checks"] == ["ruff check .", "pytest -q"]
    assert second["depends_on"] == ["parser"]
    assert (second["max_failures"], second["hold"]) == (5, True)


@pytest.mark.parametrize(
    "text",
    ["- one\n- two\n", "---\n- one\n- two\n", "tasks:\n  - one\n  - two\n", json.dumps(["one", "two"])],
    ids=["list", "document", "below a key", "JSON"],
)
def test_the_list_may_be_written_in_several_ways(text: str) -> None:
    assert [entry["task"] for entry in TaskList("tasks.yaml", text).entries] == ["one", "two"]


def test_every_mistake_is_told_with_its_line() -> None:
    text = "- task: one\n  agnet: claude\n- agent: claude\n- task: three\n  timeout: soon\n"
    told = faults(text)
    assert [message.split(":")[1] for message in told] == ["2", "3", "5"]
    assert told[0] == "tasks.yaml:2: agnet is not known; did you mean agent?"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "no list of tasks"),
        ("just words\n", 1, "no list of tasks"),
        ("- task: one\n   agent: x\n", 2, "not YAML"),
        ("- one\n- *two\n", 2, "not YAML"),
        ("- one\n- [two]\n", 2, ""),
    ],
)
def test_what_is_no_list_of_tasks_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    assert any(message.startswith(f"tasks.yaml:{line}: ") and words in message for message in faults(text))


def test_a_fault_that_the_daemon_finds_is_told_with_its_line() -> None:
    tasks = TaskList("tasks.yaml", "- one\n- task: two\n  agent: nobody\n  after: [T9]\n")
    assert tasks.place("tasks.1.agent must be known") == "tasks.yaml:3: agent must be known"
    assert tasks.place("tasks.1.depends_on must be keys").startswith("tasks.yaml:4: after must be keys")
    assert tasks.place("tasks.0.key cannot be used") == "tasks.yaml:1: key cannot be used"
    assert tasks.place("something else") == "something else"
