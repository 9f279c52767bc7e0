"""`run -it` and `attach` in a real terminal, which tmux provides: what a person sees in one window or in two."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell, until

#: Draws its size and what was typed over the whole screen; q ends it with exit code 7.
DRAWS = """
import curses, sys
def main(screen):
    typed = ""
    while True:
        rows, columns = screen.getmaxyx()
        screen.erase()
        screen.addstr(0, 0, f"TOP {rows}x{columns} typed:{typed}:")
        screen.addstr(rows - 1, 0, "BOTTOM")
        screen.refresh()
        key = screen.getch()
        if key == ord("q"):
            sys.exit(7)
        if 32 < key < 127:
            typed += chr(key)
curses.wrapper(main)
"""


class Windows:
    """A tmux server with windows in which a shell runs."""

    def __init__(self, shell: Shell, folder: Path) -> None:
        self.shell = shell
        self._socket = folder / "tmux.sock"

    def tmux(self, *words: str) -> str:
        argv = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *words]
        environment = self.shell.environment | {"PS1": "$ "}
        return subprocess.run(
            argv, env=environment, cwd=self.shell.project, capture_output=True, text=True, check=True
        ).stdout

    def open(self, name: str, columns: int = 80, rows: int = 24) -> None:
        self.tmux("new-session", "-d", "-x", str(columns), "-y", str(rows), "-s", name, "env PS1='$ ' sh")
        self.sees(name, "$")

    def enter(self, name: str, *words: str | Path) -> None:
        self.keys(name, shlex.join(map(str, words)), "Enter")

    def keys(self, name: str, *keys: str) -> None:
        self.tmux("send-keys", "-t", name, *keys)

    def screen(self, name: str) -> str:
        return self.tmux("capture-pane", "-p", "-t", name)

    def sees(self, name: str, *texts: str) -> str:
        screen = ""

        def has_all() -> bool:
            nonlocal screen
            screen = self.screen(name)
            return all(text in screen for text in texts)

        try:
            until(has_all)
        except AssertionError:
            raise AssertionError(f"no {texts} in:\n{screen}") from None
        return screen

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], capture_output=True, check=False, timeout=60)


@pytest.fixture
def windows(shell: Shell, tmp_path: Path) -> Iterator[Windows]:
    missing = "" if shutil.which("tmux") else "tmux is not installed (apt-get install tmux)"
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    made = Windows(shell, tmp_path)
    yield made
    made.close()


def draw(windows: Windows, *options: str) -> list[str | Path]:
    (windows.shell.project / "draws.py").write_text(DRAWS)
    return [windows.shell.program, "run", "-it", "--name", "draws", *options, "--", sys.executable, "draws.py"]


def test_a_full_screen_program_in_two_windows_outlives_its_daemon(windows: Windows) -> None:
    windows.open("one")
    windows.enter("one", *draw(windows))
    windows.sees("one", "TOP 24x80", "BOTTOM")
    windows.keys("one", "a")
    windows.sees("one", "typed:a:")

    windows.open("two", columns=100, rows=30)
    windows.enter("two", windows.shell.program, "attach", "draws")
    assert windows.sees("two", "TOP 30x100 typed:a:", "BOTTOM").rstrip().endswith("BOTTOM")
    windows.keys("one", "b")  # who types has the size of its window
    windows.sees("one", "TOP 24x80 typed:ab:")
    windows.sees("two", "TOP 24x80 typed:ab:")

    windows.shell.kill_daemon()
    windows.keys("one", "c")  # waits for the next daemon, which the windows start
    windows.sees("two", "typed:abc:")
    windows.keys("two", "d")
    windows.sees("one", "typed:abcd:")
    windows.sees("two", "TOP 30x100 typed:abcd:")

    windows.keys("two", "e", "C-q")  # what was typed before is not lost
    windows.sees("two", "detached; draws goes on. Attach again with: ostler attach draws")
    windows.enter("two", windows.shell.program, "attach", "draws")
    windows.sees("two", "typed:abcde:")
    windows.keys("two", "q")
    windows.sees("two", "draws has ended")
    windows.sees("one", "$")
    windows.keys("one", "echo code $?", "Enter")
    windows.sees("one", "code 7")


def test_the_program_follows_the_size_of_the_window(windows: Windows) -> None:
    windows.open("one")
    windows.enter("one", *draw(windows))
    windows.sees("one", "TOP 24x80")
    windows.tmux("resize-window", "-t", "one", "-x", "60", "-y", "20")
    windows.sees("one", "TOP 20x60", "BOTTOM")


def test_the_window_is_left_as_it_was_by_the_end_by_detaching_and_by_a_signal(windows: Windows) -> None:
    windows.open("one")

    numbers = itertools.count()

    def stty() -> str:
        number = next(numbers)
        windows.keys("one", f"clear; stty -a | md5sum; echo 'do''ne {number}'", "Enter")
        return windows.sees("one", f"done {number}").partition("done")[0].split()[-2]

    before = stty()
    program = windows.shell.program
    windows.enter("one", program, "run", "-it", "--name", "a", "--", "sh", "-c", "echo beg''un; exit 3")
    windows.sees("one", "begun\n$")
    assert stty() == before
    windows.enter("one", *draw(windows))
    windows.sees("one", "TOP 24x80")
    windows.keys("one", "C-q")
    windows.sees("one", "detached")
    assert "BOTTOM" not in windows.screen("one")  # back from the alternate screen
    assert stty() == before
    windows.enter("one", program, "attach", "draws")
    windows.sees("one", "TOP 24x80")
    client = [line.split() for line in windows.shell.left_over() if "attach draws" in line]
    os.kill(int(client[0][0]), signal.SIGTERM)
    windows.sees("one", "Terminated")
    assert stty() == before


def test_keys_that_detach_are_chosen_and_ctrl_c_is_the_programs(windows: Windows) -> None:
    windows.open("one")
    script = "trap 'echo cau''ght' INT; echo beg''un; while :; do read x && echo got:$x; done"
    words: list[str | Path] = [windows.shell.program, "run", "-it", "--detach-keys", "ctrl-p,ctrl-q", "--name", "b"]
    windows.enter("one", *words, "--", "bash", "-c", script)
    windows.sees("one", "begun")
    windows.keys("one", "C-c")
    windows.sees("one", "caught")
    windows.keys("one", "word", "Enter")
    windows.sees("one", "got:word")
    windows.keys("one", "C-p", "C-q")
    windows.sees("one", "detached; b goes on")


def test_what_is_pasted_is_whole_also_where_the_program_is_slow(windows: Windows, tmp_path: Path) -> None:
    text = "".join(f"line {number} {'x' * 50}\n" for number in range(3000))
    (tmp_path / "text").write_text(f"cat > pasted <<X\n{text}X\n")
    windows.open("one")
    windows.enter("one", windows.shell.program, "run", "-it", "--", "bash", "--norc")
    windows.sees("one", "bash-")
    windows.tmux("load-buffer", str(tmp_path / "text"))
    windows.tmux("paste-buffer", "-t", "one")
    pasted = windows.shell.project / "pasted"
    until(lambda: pasted.exists() and pasted.read_text() == text, seconds=60)


def test_a_window_that_is_stopped_holds_up_neither_the_program_nor_another_window(windows: Windows) -> None:
    windows.open("one")
    script = "read go; seq 400000; echo al''l; touch written; read stop"
    words: list[str | Path] = [windows.shell.program, "run", "-it", "--name", "flood", "--", "bash", "-c", script]
    windows.enter("one", *words)
    until(lambda: "flood" in windows.shell.ok("ps", "-q"))
    windows.open("two")
    windows.enter("two", windows.shell.program, "attach", "flood")
    until(lambda: any("attach flood" in line for line in windows.shell.left_over()))
    client = int(next(line for line in windows.shell.left_over() if "attach flood" in line).split()[0])
    os.kill(client, signal.SIGSTOP)
    try:
        windows.keys("one", "go", "Enter")
        until((windows.shell.project / "written").exists)
        windows.sees("one", "400000\nall")
    finally:
        os.kill(client, signal.SIGCONT)
    windows.keys("two", "fg", "Enter")  # its shell took it for stopped by the person
    windows.sees("two", "400000\nall")


def test_an_end_of_everything_ends_the_attached_window(windows: Windows) -> None:
    windows.open("one")
    windows.enter("one", *draw(windows))
    windows.sees("one", "TOP 24x80")
    windows.shell.ok("down")
    windows.sees("one", "$ ")
    assert "BOTTOM" not in windows.screen("one")
    assert windows.shell.run("status").code == 6  # the window has started no other daemon


# --- without a terminal ------------------------------------------------------------------------------


def test_attach_says_what_to_do_where_it_cannot(shell: Shell) -> None:
    shell.ok("run", "-d", "--name", "plain", "--", "sleep", "1000")
    shell.ok("run", "-dt", "--name", "screen", "--", "sleep", "1000")
    refused = shell.run("attach", "plain")
    assert (refused.code, "`ostler logs -f plain` follows what it writes" in refused.err) == (3, True)
    refused = shell.run("attach", "screen")
    assert (refused.code, "must be a terminal" in refused.err) == (2, True)
    refused = shell.run("run", "-it", "--", "true")
    assert (refused.code, "must be a terminal" in refused.err) == (2, True)
    refused = shell.run("run", "-it", "claude")
    assert (refused.code, "ostler run -it -- CMD" in refused.err) == (2, True)
    shell.ok("stop", "screen")
    refused = shell.run("attach", "screen")
    assert (refused.code, "`ostler logs screen` shows what it wrote" in refused.err) == (3, True)
    refused = shell.run("attach", "scren")
    assert (refused.code, "Did you mean screen?" in refused.err) == (4, True)


def test_standard_input_is_passed_on_as_fast_as_it_is_read_and_closed(shell: Shell) -> None:
    text = "".join(f"line {number}\n" for number in range(200_000))
    done = shell.run("run", "-i", "--", "sh", "-c", "sleep 1; cksum", stdin=text)
    direct = subprocess.run(["cksum"], input=text, capture_output=True, text=True, check=True)
    assert (done.code, done.out) == (0, direct.stdout)
    assert shell.run("run", "-i", "--", "head", "-n", "1", stdin=text).out == "line 0\n"
    assert shell.run("run", "-i", "--", "sh", "-c", "cat; exit 4", stdin="end").code == 4


def test_standard_input_goes_on_over_a_killed_daemon_with_nothing_lost_or_doubled(shell: Shell) -> None:
    shell.ok("up", "-d")
    script = "read first; echo $first; cksum"
    feeder = subprocess.Popen(
        [shell.program, "run", "-i", "--name", "sum", "--", "sh", "-c", script],
        env=shell.environment, cwd=shell.project,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert feeder.stdin is not None
    assert feeder.stdout is not None
    feeder.stdin.write(b"go\n")
    feeder.stdin.flush()
    assert feeder.stdout.readline() == b"go\n"
    shell.kill_daemon()
    feeder.stdin.write(bytes(30_000))
    feeder.stdin.flush()  # taken from the pipe and held until there is a daemon
    shell.ok("ps")  # starts the next daemon
    out, _ = feeder.communicate(bytes(3_970_000), timeout=60)
    direct = subprocess.run(["cksum"], input=bytes(4_000_000), capture_output=True, check=True)
    assert out == direct.stdout
