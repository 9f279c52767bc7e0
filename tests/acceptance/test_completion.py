"""Completion of the command line: in a real bash, and by the protocol that the scripts of zsh and fish speak."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell
from terminal import Terminal

NAME = "nightly-build"
HEAVY = "ostler.lifecycle", "ostler.store", "fastapi", "pydantic", "asyncio"


@pytest.fixture(scope="module")
def sh(open_shell: Shell) -> Shell:
    open_shell.environment["PATH"] = f"{open_shell.program.parent}:{open_shell.environment['PATH']}"
    (open_shell.home / "agents").mkdir()
    (open_shell.home / "agents" / "writer.md").write_text(
        "---\ndescription: Writes: much, and well\nlifecycle:\n  driver: {command: [sh, -c, 'exit 1']}\n---\n"
    )
    open_shell.ok("run", "-d", "--name", NAME, "--tag", "by-night", "--", "sleep", "600")
    open_shell.ok("run", "-d", "--name", "two words", "--", "sleep", "600")
    open_shell.ok("run", "--name", "ended-one", "--", "true")
    open_shell.ok("task", "add", "Write it: all of it", "--agent", "writer", "--hold", "--key", "NOVEL")
    return open_shell


@pytest.fixture(scope="module")
def bash(sh: Shell) -> Iterator[Terminal]:
    environment = sh.environment | {"PS1": "ready> ", "INPUTRC": "/dev/null", "HISTFILE": "/dev/null"}
    words = ["bash", "--norc", "--noprofile", "-i"]
    with Terminal(words, environment=environment, folder=sh.project, columns=200) as terminal:
        terminal.expect("ready> ")
        terminal.send('eval "$(ostler completion bash)"; echo "it is" loaded\r')
        terminal.expect("it is loaded")
        terminal.expect("ready> ")
        yield terminal


CASES = [
    ("ostler insp", "ect "),
    ("ostler logs nigh", f"{NAME[4:]} "),
    ("ostler inspect end", "ed-one "),
    ("ostler task cancel NO", "VEL "),
    ("ostler run wri", "ter "),
    ("ostler task add x --agent wri", "ter "),
    ("ostler ps --state susp", "ended "),
    ("ostler run --isolation pro", "cess "),
    ("ostler run --restart on-", "failure "),
    ("ostler run -- ./ever", "ything.sh "),
]


@pytest.mark.parametrize(("typed", "completed"), CASES)
def test_bash_completes_what_is_there(sh: Shell, bash: Terminal, typed: str, completed: str) -> None:
    (sh.project / "everything.sh").touch()
    bash.send(f"\x15{typed}\t")  # after what was typed before is gone
    bash.expect(f"{typed}{completed}")


def test_bash_lists_what_is_possible(bash: Terminal) -> None:
    bash.send("\x15ostler why \t\t")
    bash.expect("NOVEL +")
    bash.expect(f"{NAME}")


def complete(sh: Shell, shell: str, *words: str, **more: str) -> list[str]:
    """What is offered for the last word."""
    count = str(len(words)) if shell != "fish" else words[-1]
    line = " ".join(("ostler", *words))
    answer = sh.run(**{"COMP_WORDS": line, "COMP_CWORD": count, "_OSTLER_COMPLETE": f"{shell}_complete", **more})
    assert (answer.code, answer.err) == (0, "")
    return answer.out.split("\n")[:-1] if answer.out.strip() else []


def test_zsh_and_fish_get_values_with_what_they_are(sh: Shell) -> None:
    assert complete(sh, "zsh", "stop", "ni") == ["plain", NAME, "processing"]
    assert complete(sh, "zsh", "task", "show", "") == ["plain", "NOVEL", "queued: Write it: all of it"]
    assert complete(sh, "fish", "run", "wri") == ["plain,writer\tWrites: much, and well"]
    for shell in ("bash", "zsh", "fish"):
        assert "_OSTLER_COMPLETE" in sh.ok("completion", shell)


def test_only_what_a_command_can_be_used_on_is_offered(sh: Shell) -> None:
    assert complete(sh, "bash", "rm", "") == ["plain,ended-one"]
    assert complete(sh, "bash", "resume", "") == []
    assert complete(sh, "bash", "accept", "") == []
    assert complete(sh, "bash", "stop", NAME, "ni") == [], "it is named already"
    assert complete(sh, "bash", "ps", "--tag", "") == ["plain,by-night"]
    assert complete(sh, "bash", "answer", "") == []
    assert complete(sh, "bash", "token", "create", "x", "--role", "re") == ["plain,reviewer"]
    assert complete(sh, "bash", "loop", "PROM") == ["file,PROM"]


def test_a_name_that_is_no_single_word_is_offered_by_its_id(sh: Shell) -> None:
    offered = {line.removeprefix("plain,") for line in complete(sh, "bash", "stop", "")}
    (unnamed,) = offered - {NAME}
    assert sh.run("inspect", unnamed).json()["name"] == "two words"


def test_completion_starts_no_daemon_and_makes_no_home(sh: Shell, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert complete(sh, "bash", "--home", str(home), "logs", "") == []
    assert not home.exists()
    home.mkdir()
    assert complete(sh, "bash", "stop", "", OSTLER_HOME=str(home)) == []
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("words", ["", "logs ", "ps --state "])
def test_completion_imports_little(sh: Shell, words: str) -> None:
    """It is asked at every press of a key."""
    code = (
        "import sys\nfrom ostler.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    line = f"ostler {words}"
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split())), "_OSTLER_COMPLETE": "bash_complete"}
    program = [sys.executable, "-c", f"import sys; sys.argv = ['ostler']\n{code}"]
    done = subprocess.run(
        program, env=sh.environment | variables, cwd=sh.project, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"
