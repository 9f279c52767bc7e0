"""What stays on the screen and changes with the daemon: `ps -w`, `task list -w` and `top`."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from shell import Shell
from terminal import Terminal

FOREVER = ("--", "sh", "-c", "echo begun; exec sleep 600")


@pytest.fixture(scope="module")
def sh(open_shell: Shell) -> Shell:
    open_shell.ok("run", "-d", "--name", "first", *FOREVER)
    return open_shell


def run(sh: Shell, *words: str, columns: int = 100) -> Terminal:
    return Terminal([sh.program, *words], environment=sh.environment, folder=sh.project, columns=columns)


def test_ps_w_shows_agents_as_they_come_and_go(sh: Shell) -> None:
    with run(sh, "ps", "-w") as terminal:
        terminal.expect("first +command +.*processing")
        sh.ok("run", "-d", "--name", "second", *FOREVER)
        terminal.expect("second +command")
        sh.ok("pause", "second")
        terminal.expect("second +command +.*suspended")
        sh.ok("stop", "second")
        while "second" in terminal.expect(r"\x1b\[H[^\0]*?\x1b\[J")[0]:
            pass  # drawn before it had ended
        terminal.send("\x03")
        assert terminal.wait() == 130
        last = terminal.output.rpartition("\x1b[?1049l")[2]
    assert "first" in last, "the list stays when the screen is given back"
    assert "second" not in last


def test_task_list_w_prints_the_list_again_in_a_pipe(sh: Shell) -> None:
    sh.ok("task", "add", "Wait for it", "--hold", "--key", "held")
    with sh.start("task", "list", "-w", "-o", "jsonl") as listing:
        assert listing.stdout is not None
        assert json.loads(listing.stdout.readline())["is_held"]
        sh.ok("task", "requeue", "held")
        assert not json.loads(listing.stdout.readline())["is_held"]
        listing.send_signal(signal.SIGINT)
        assert listing.wait(60) == 130
    refused = sh.run("task", "list", "-w", "-o", "json")
    assert (refused.code, "use -o jsonl" in refused.err) == (2, True)


def test_top_in_a_terminal(sh: Shell) -> None:
    with run(sh, "top") as terminal:
        terminal.expect("first")
        terminal.send("w")
        terminal.expect("why first")
        terminal.send("\x1b")
        sh.ok("run", "-d", "--name", "third", *FOREVER)
        terminal.expect("third")
        sh.ok("stop", "third")
        terminal.send("q")
        assert terminal.wait() == 0
        assert terminal.output.rpartition("\x1b[?1049")[2].startswith("l"), "the screen is given back"
    refused = sh.run("top")
    assert (refused.code, "top needs a terminal" in refused.err) == (2, True)


def test_ps_w_says_that_no_daemon_answers_until_one_does(shell: Shell) -> None:
    shell.ok("run", "-d", "--name", "first", *FOREVER)
    with run(shell, "ps", "-w") as terminal:
        terminal.expect("first +command +.*processing")
        shell.kill_daemon()
        terminal.expect(r"no daemon answers since \d+ \w+; these are the last rows")
        terminal.expect("first +command")
        shell.ok("up", "-d")
        while "no daemon answers" in terminal.expect(r"\x1b\[H[^\0]*?\x1b\[J")[0]:
            pass  # drawn before it was back
        terminal.send("\x03")
        assert terminal.wait() == 130


#: The program, with less patience for a daemon that is gone.
HASTY = """\
import ostler.client.blocking as blocking
from ostler.cli import main
blocking.RECONNECT_SECONDS = 0.5
main()
"""


def test_run_says_that_its_command_goes_on_when_the_daemon_is_killed(shell: Shell) -> None:
    shell.ok("up", "-d")
    words = [str(shell.program.parent / "python"), "-c", HASTY, "run", "--name", "nightly", *FOREVER]
    with subprocess.Popen(
        words, env=shell.environment, cwd=shell.project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "begun\n"
        shell.kill_daemon()
        _, error = follower.communicate(timeout=60)
    assert follower.returncode == 6
    assert "nightly goes on without it: `ostler logs -f nightly` follows it" in error
    assert "nightly" in shell.ok("ps", "-q")
