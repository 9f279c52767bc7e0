"""The command line in a real terminal: tables as wide as it is."""

from __future__ import annotations

import re

import pytest
from shell import Shell
from terminal import Terminal

LONG = "a-name-that-goes-on-and-on-" * 4
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def sh(open_shell: Shell) -> Shell:
    open_shell.ok("run", "-d", "--name", LONG, "--", "sh", "-c", "echo begun; exec sleep 600")
    return open_shell


def run(sh: Shell, *words: str, columns: int = 80) -> Terminal:
    return Terminal([sh.program, *words], environment=sh.environment, folder=sh.project, columns=columns)


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
