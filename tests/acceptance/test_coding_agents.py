"""Coding agents by name on the command line: what a person sees of them, and what is said of one that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from coding_ground import CACHE, require_program
from shell import Shell, until

from ostler.testing import ScriptedModel, run, say, usage_limit

FIXER = """---
description: Mends what is broken
model: tiny-model
lifecycle:
  driver: codex
  home: private
---
You mend things.
"""


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    done = say("I made it.\nAll is well.").using(input_tokens=15_000, output_tokens=500)
    with ScriptedModel([run("echo hi > made.txt"), done]) as model:
        yield model


@pytest.fixture
def sh(shell: Shell) -> Shell:
    """Its daemon finds the programs; its user is signed in nowhere."""
    shell.environment["PATH"] = f"{CACHE}:{shell.environment['PATH']}"
    return shell


def variables(model: ScriptedModel, driver: str) -> list[str]:
    return [word for name, value in model.environment(driver).items() for word in ("-e", f"{name}={value}")]


def test_a_coding_agent_works_where_it_is_called(sh: Shell, model: ScriptedModel) -> None:
    require_program("claude")
    said = sh.run("run", "--name", "one", *variables(model, "claude"), "--model", "opus", "claude", "make", "a", "file")
    assert said.code == 0, said
    assert said.out == "• Bash: echo hi > made.txt\nI made it.\nAll is well.\n"
    assert (sh.project / "made.txt").read_text() == "hi\n"
    assert model.requests[0].prompt.endswith("make a file")
    assert "opus" in model.requests[0].model
    assert [line.split("  ", 1)[1] for line in sh.ok("logs", "one").splitlines()] == said.out.splitlines()
    raw = sh.ok("logs", "--raw", "-T", "one").splitlines()
    assert json.loads(raw[-1])["type"] == "result"
    head, row = sh.ok("ps", "-a").splitlines()
    assert head.split()[-4:] == ["EXIT", "TOKENS", "COST", "DOING"]
    assert row.split()[-4:-1] == ["0", "16", "k"]
    assert row.split()[-1].startswith("$")


def test_a_definition_file_names_a_driver(sh: Shell, model: ScriptedModel) -> None:
    require_program("codex")
    folder = sh.home / "agents"
    folder.mkdir()
    (folder / "fixer.md").write_text(FIXER)
    assert "Mends what is broken" in sh.ok("agents")
    said = sh.run("run", "--name", "two", *variables(model, "codex"), "fixer", "the", "parser")
    assert said.code == 0, said
    assert said.out.endswith("• shell: echo hi > made.txt\nI made it.\nAll is well.\n")
    assert model.requests[0].prompt == "You mend things.\n\nthe parser"
    assert model.requests[0].model == "tiny-model"
    assert not Path(sh.environment["HOME"], ".codex").exists()
    homes = list((sh.home / "homes").iterdir())
    assert [(home / ".codex").is_dir() for home in homes] == [True]
    sh.ok("rm", "two")
    assert list((sh.home / "homes").iterdir()) == []
    assert "TOKENS" not in sh.ok("ps", "-a")


def test_a_limit_is_told(sh: Shell, model: ScriptedModel) -> None:
    require_program("codex")
    model.set_script([usage_limit()])
    said = sh.run("run", "--name", "three", *variables(model, "codex"), "codex", "go")
    assert said.code == 1
    assert "hit your usage limit" in said.out
    found = sh.run("inspect", "three").json()
    assert found["state"] == "failed"
    assert found["error_message"].startswith("codex was refused by its model: ")
    assert "; try again at 20" in found["error_message"]


def test_one_that_fails_with_exit_code_0_has_failed(sh: Shell, model: ScriptedModel) -> None:
    require_program("pi")
    model.set_script([usage_limit()])
    (sh.project / ".pi").mkdir()
    settings = {"retry": {"enabled": False, "provider": {"maxRetries": 0}}}
    (sh.project / ".pi" / "settings.json").write_text(json.dumps(settings))
    folder = sh.home / "agents"
    folder.mkdir()
    (folder / "mine.md").write_text("---\nlifecycle: {driver: pi, home: private}\n---\nBe brief.\n")
    said = sh.run("run", *variables(model, "pi"), "mine", "go")
    assert said.code == 1
    assert "pi was refused by its model: 429 You exceeded your current quota" in said.err


def test_what_is_not_there_is_told_with_what_to_do(sh: Shell) -> None:
    said = sh.run("run", "-e", "PATH=/nowhere", "claude", "go")
    assert said.code == 125
    assert "claude is not installed" in said.err
    assert said.err.rstrip().endswith("install it with: npm install -g @anthropic-ai/claude-code")
    said = sh.run("run", "cluade", "go")
    assert (said.code, "did you mean claude?" in said.err) == (4, True)
    assert sh.run("run", "--model", "x", "--", "true").code == 2
    listed = sh.ok("agents").splitlines()
    assert [line.split()[0] for line in listed[1:]] == ["claude", "codex", "pi"]


def test_ctrl_c_ends_it_and_all_that_it_started(sh: Shell, model: ScriptedModel) -> None:
    require_program("claude")
    model.set_script([run("setsid tail -f /dev/null & touch begun; tail -f /dev/null"), say("never")])
    running = sh.start("run", *variables(model, "claude"), "claude", "go")
    until((sh.project / "begun").exists)
    running.terminate()
    assert running.wait(60) == 130
    until(lambda: not [line for line in sh.left_over() if "tail -f" in line])
    running.communicate()
