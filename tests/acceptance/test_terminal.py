"""The command line in a real terminal: tables as wide as it is, the pager, and what works now."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from shell import Shell, until
from terminal import Terminal
from workdirs_ground import git

LONG = "a-name-that-goes-on-and-on-" * 4
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def sh(open_shell: Shell) -> Shell:
    open_shell.ok("run", "-d", "--name", LONG, "--", "sh", "-c", "echo begun; exec sleep 600")
    return open_shell


def run(sh: Shell, *words: str, columns: int = 80, variables: Mapping[str, str] = MappingProxyType({})) -> Terminal:
    environment = {**sh.environment, **variables}
    return Terminal([sh.program, *words], environment=environment, folder=sh.project, columns=columns)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_table_is_as_wide_as_the_terminal_at_most(sh: Shell, columns: int) -> None:
    with run(sh, "ps", columns=columns) as terminal:
        assert terminal.wait() == 0
        head, row = (_STYLE.sub("", line) for line in terminal.lines())
    assert len(head) <= columns
    assert len(row) <= columns
    assert row[head.index("STATE") :].startswith("processing")
    assert (LONG in row) == (columns == 200)


def test_wide_shows_everything_and_a_pipe_is_not_cut(sh: Shell) -> None:
    with run(sh, "ps", "-o", "wide") as terminal:
        assert terminal.wait() == 0
        assert LONG in terminal.output
        assert "LEVEL" in terminal.output
    assert LONG in sh.ok("ps", COLUMNS="80")


# --- the pager ---------------------------------------------------------------------------------------

AGENT = """---
lifecycle:
  driver: {command: [sh, -ec, 'echo short > short.txt; seq 1000 > long.txt']}
---
"""


@pytest.fixture(scope="module")
def key(sh: Shell) -> str:
    """A task that wrote a long file and a short one."""
    git(sh.project, "init", "--quiet", "--initial-branch=main")
    (sh.project / ".gitignore").write_text(".ostler/\n")
    git(sh.project, "add", "--all")
    git(sh.project, "commit", "--quiet", "--message=first")
    (sh.home / "agents").mkdir()
    (sh.home / "agents" / "writer.md").write_text(AGENT)
    key = sh.ok("task", "add", "write them", "--agent", "writer").split()[0]
    until(lambda: sh.run("task", "show", key).json()["state"] == "completed")
    return key


@pytest.fixture
def less() -> None:
    missing = "" if shutil.which("less") else "less is not installed (apt-get install less)"
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


@pytest.mark.usefixtures("less")
def test_a_long_diff_is_shown_in_colour_by_less(sh: Shell, key: str) -> None:
    with run(sh, "diff", key) as terminal:
        terminal.expect(r"\x1b\[32m\+11\x1b\[")
        assert "+100" not in terminal.output, "the first screen only"
        terminal.send("G")
        terminal.expect(r"\+1000")
        terminal.send("q")
        assert terminal.wait() == 0
        assert "based on main" in terminal.output.split("+1000")[1], "what is said of it comes after it"


def test_a_short_diff_needs_no_key(sh: Shell, key: str) -> None:
    with run(sh, "diff", key, "short.txt") as terminal:
        assert terminal.wait() == 0
        assert "\x1b[32m+short" in terminal.output


def test_ctrl_c_is_for_the_pager(sh: Shell, key: str) -> None:
    pager = "cat > /dev/null; trap 'echo caught; exit' INT; echo paging; while :; do sleep 0.05; done"
    with run(sh, "diff", key, variables={"OSTLER_PAGER": pager}) as terminal:
        terminal.expect("paging")
        terminal.send("\x03")
        terminal.expect("caught")
        assert terminal.wait() == 0
        assert "based on main" in terminal.output


@pytest.mark.parametrize(
    ("variables", "begins"),
    [
        ({"OSTLER_PAGER": "sed s/^/ours:/", "PAGER": "sed s/^/all:/", "NO_COLOR": "1"}, "ours:diff "),
        ({"PAGER": "sed s/^/all:/", "NO_COLOR": "1"}, "all:diff "),
        ({"OSTLER_PAGER": "", "PAGER": "sed s/^/all:/", "NO_COLOR": "1"}, "diff "),
        ({"PAGER": "cat", "NO_COLOR": "1"}, "diff "),
        ({"TERM": "dumb", "PAGER": "sed s/^/all:/"}, "diff "),
    ],
)
def test_the_pager_is_chosen_as_git_does_it(sh: Shell, key: str, variables: dict[str, str], begins: str) -> None:
    with run(sh, "diff", key, "short.txt", variables=variables) as terminal:
        assert terminal.wait() == 0
        assert terminal.output.startswith(begins)
        assert "\x1b[" not in terminal.output


def test_a_pager_that_is_missing_keeps_nothing_back(sh: Shell, key: str) -> None:
    with run(sh, "diff", key, "short.txt", variables={"PAGER": "no-such-pager"}) as terminal:
        assert terminal.wait() == 0
        assert "+short" in terminal.output


def test_in_a_pipe_there_is_neither_colour_nor_pager(sh: Shell, key: str) -> None:
    text = sh.ok("diff", key, PAGER="sed s/^/all:/")
    assert text.startswith("diff ")
    assert "\x1b[" not in text
    assert "+1000\n" in text


# --- what works now ----------------------------------------------------------------------------------

GATED = """---
lifecycle:
  driver: {command: [sh, -ec, 'echo far from done; while [ ! -e "$GATE" ]; do sleep 0.05; done; $LAST']}
---
"""


def test_a_loop_shows_who_works_and_then_how_it_ended(sh: Shell, key: str, tmp_path: Path) -> None:
    del key  # the repository is there
    gate = tmp_path / "gate"
    (sh.home / "agents" / "gated.md").write_text(
        GATED.replace("$GATE", str(gate)).replace("$LAST", "ostler signal complete")
    )
    (sh.project / "PROMPT.md").write_text("Wait")
    with run(sh, "loop", "PROMPT.md", "--agent", "gated") as terminal:
        begun = terminal.expect(r"ostler: (T\d+) begins")[1]
        terminal.expect(rf"{begun}-1 .* far from done")
        gate.touch()
        terminal.expect(r"iteration 1 ")
        terminal.expect("Complete after 1 iteration")
        assert terminal.wait() == 0


def test_a_crew_shows_who_works_and_then_how_it_ended(sh: Shell, key: str, tmp_path: Path) -> None:
    del key
    gate = tmp_path / "gate"
    (sh.home / "agents" / "gated.md").write_text(GATED.replace("$GATE", str(gate)).replace("$LAST", "true"))
    (sh.project / "ostler.toml").write_text('[crew.coder]\nagent = "gated"\n')
    added = sh.ok("task", "add", "wait", "--agent", "gated").split()[0]
    with run(sh, "crew", "up") as terminal:
        terminal.expect(rf"coder-1 .*{added} .* far from done")
        gate.touch()
        terminal.expect(rf"coder-1 +{added} +completed")
        terminal.send("\x03")
        assert terminal.wait() == 130
