"""Every command of the installed program once, each exit code, and a wrong argument for each."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from shell import Shell, until

from ostler.client.blocking import BlockingClient

FOREVER = ("--", "sh", "-c", "echo begun; while true; do sleep 0.1; done")
#: A Python agent for `ask`, `waits` and `answer`, beside the project's definitions.
CLERK = """
from ostler import Agent


class Clerk(Agent):
    async def initialize(self, context):
        self.context = context

    async def process(self, request):
        match request:
            case {"prompt": text}:
                print("asked:", text, flush=True)
                return text
            case "permission":
                answer = await self.context.wait_for("human", reason="May I?")
                return answer.outcome
            case "trouble":
                raise ValueError("no good")
        return request
"""
CLERK_FILE = """---
description: Answers what it is asked
lifecycle:
  driver: python:clerk:Clerk
  isolation: process
---
Answer.
"""


@pytest.fixture(scope="module")
def sh(open_shell: Shell) -> Shell:
    (open_shell.project / "clerk.py").write_text(CLERK)
    folder = open_shell.home / "agents"
    folder.mkdir()
    (folder / "clerk.md").write_text(CLERK_FILE)
    return open_shell


def background(sh: Shell, name: str, *more: str) -> str:
    assert sh.ok("run", "-d", "--name", name, *more, *FOREVER) == f"{name}\n"
    return name


# --- run ---------------------------------------------------------------------------------------------


def test_run_shows_the_output_and_passes_the_exit_code_on(sh: Shell) -> None:
    said = sh.run("run", "--", "sh", "-c", "for i in 1 2 3; do echo step $i; done; echo oops >&2; exit 7")
    assert said.code == 7
    assert said.out == "step 1\nstep 2\nstep 3\n"
    assert said.err.endswith("oops\n")


def test_the_lines_of_each_stream_are_told_apart(sh: Shell) -> None:
    program = "printf 'no end'; sleep 0.3; echo oops >&2; sleep 0.3; echo; echo done"
    ran = sh.run("run", "--name", "two", "--", "sh", "-c", program)
    assert (ran.out, ran.err.splitlines()[-1]) == ("no end\ndone\n", "oops")
    assert sh.ok("logs", "-T", "--stderr", "two") == "oops\n"
    assert sh.ok("logs", "-T", "--stdout", "-n", "1", "two") == "done\n"
    lines = [json.loads(line) for line in sh.ok("logs", "-o", "jsonl", "two").splitlines()]
    streams = {line["text"]: line["stream"] for line in lines if line["text"]}
    assert streams == {"no end": "stdout", "oops": "stderr", "done": "stdout"}
    assert all(line["time"] for line in lines)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("run", "--", "true"), 0),
        (("run", "--", "sh", "-c", "kill -9 $$"), 137),
        (("run", "--timeout", "1s", "--", "sleep", "60"), 124),
        (("run", "--", "/no/such/program"), 127),
        (("run", "-d", "--restart", "on-failure:3", "--", "./missing"), 127),
        (("run", "--", "no-such-program"), 127),
        (("run", "--", "/etc/passwd"), 126),
        (("run", "--memory", "12M", "--", "true"), 2),
        (("run", "--restart", "sometimes", "--", "true"), 2),
        (("run", "--frob", "--", "true"), 2),
        (("run",), 2),
        (("run", "nobody", "hello"), 4),
    ],
)
def test_run_ends_with_the_documented_exit_codes(sh: Shell, words: tuple[str, ...], code: int) -> None:
    said = sh.run(*words)
    assert said.code == code, said
    assert code in {0, 137} or said.err


def test_run_follows_what_it_runs_over_restarts(sh: Shell) -> None:
    said = sh.run("run", "--restart", "on-failure:1", "--", "sh", "-c", "echo try; exit 4")
    assert (said.code, said.out) == (4, "try\ntry\n")


def test_run_without_the_dashes_says_how_a_program_is_run(sh: Shell) -> None:
    said = sh.run("run", "echo", "hello there")
    assert (said.code, said.out) == (4, "")
    assert "echo is a program; run it with: ostler run -- echo 'hello there'\n" in said.err
    assert "is a program" not in sh.run("run", "nobody", "hello").err


def test_run_removes_what_it_made_where_it_is_told_to(sh: Shell) -> None:
    sh.ok("run", "--rm", "--name", "gone", "--", "true")
    assert "gone" not in sh.ok("ps", "-a", "-q").split()


def test_run_passes_on_variables_and_stays_in_the_directory(sh: Shell) -> None:
    words = ("--", "sh", "-c", "echo $ONE $TWO; pwd")
    assert sh.ok("run", "-e", "ONE=1", "-e", "TWO", *words, TWO="2") == f"1 2\n{sh.project}\n"
    assert sh.run("run", "-e", "NOT_SET", *words).code == 2


def test_run_of_an_agent_by_name_gives_it_the_prompt(sh: Shell) -> None:
    assert sh.ok("run", "clerk", "hello", "there").splitlines()[0] == "asked: hello there"


def test_run_of_a_python_agent_prints_its_answer_last(sh: Shell) -> None:
    assert sh.ok("run", "clerk", "hello") == "asked: hello\nhello\n"


def test_run_leaves_the_limits_of_a_definition_as_they_are(sh: Shell) -> None:
    file = CLERK_FILE.replace("process\n", "process\n  limits: {time: 9min, tasks: 3}\n")
    (sh.home / "agents" / "limited.md").write_text(file)
    sh.ok("run", "-d", "--name", "limited", "--memory", "128M", "limited")
    limits = sh.run("inspect", "limited").json()["spawn_options"]["resource_limits"]
    assert (limits["execution_timeout"], limits["max_concurrent_tasks"], limits["max_memory_mb"]) == (540, 3, 128)
    sh.ok("kill", "limited")


def test_ctrl_c_stops_what_runs_in_the_foreground(sh: Shell) -> None:
    with sh.start("run", "--name", "foreground", *FOREVER) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    assert sh.run("wait", "foreground", "--timeout", "20s").code == 0


@pytest.mark.parametrize("command", ["stop", "kill"])
def test_run_of_what_somebody_else_stops_does_not_succeed(sh: Shell, command: str) -> None:
    with sh.start("run", "--name", f"ended-by-{command}", *FOREVER) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        sh.ok(command, f"ended-by-{command}")
        assert running.wait(60) == 143


def test_run_says_that_data_in_a_pipe_is_not_passed_on(sh: Shell) -> None:
    piped = sh.run("run", "--", "cat", stdin="lost")
    assert (piped.code, piped.out) == (0, "")
    assert "standard input is not passed on" in piped.err
    assert "standard input" not in sh.run("run", "--", "cat").err


def test_run_of_a_command_leaves_every_byte_as_it_is_in_a_pipe(sh: Shell) -> None:
    """Also what is no UTF-8, NUL, each end of a line, a line longer than a piece of the log, and no last newline."""
    written = b"a\r\nb\0c\r" + bytes(range(256)) * 3 + b"\xc3\xa9" * 40_000 + b"\n\n\xe2\x82"
    (sh.project / "written").write_bytes(written)
    command = [str(sh.program), "run", "--name", "exact", "--", "cat", "written"]
    done = subprocess.run(
        command, env=sh.environment, cwd=sh.project, stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    assert done.stdout == written
    lines = [json.loads(line)["text"] for line in sh.ok("logs", "exact", "-o", "jsonl").splitlines()]
    assert lines[0] == "a"
    assert lines[1].startswith("b\ufffdc\r")


def test_run_lets_only_colours_of_an_agent_reach_a_terminal(sh: Shell) -> None:
    """Clipboard, title and cursor never; through a pipe everything stays as it is."""
    text = "\x1b[31mred\x1b[0m \x1b]52;c;aGk=\x07 \x1b]0;title\x07 \x1b[2J\x1b[1;1Hx"
    words = ("run", "--", "printf", "%s\\n", text)
    assert sh.ok(*words) == f"{text}\n"
    main, terminal = pty.openpty()
    with os.fdopen(main, "rb", buffering=0) as screen, os.fdopen(terminal) as out:
        command = [str(sh.program), *words]
        subprocess.run(command, env=sh.environment, cwd=sh.project, stdout=out, stdin=subprocess.DEVNULL, check=True)
        shown = screen.read(4096).decode()
    assert shown.startswith("\x1b[31mred\x1b[0m ")
    assert "\\x1b]52;c;aGk=\\x07" in shown
    assert set(re.findall(r"\x1b[^m]*m?", shown)) <= {"\x1b[31m", "\x1b[0m"}


# --- looking -----------------------------------------------------------------------------------------


def test_lists_show_all_and_stop_takes_all_of_them(sh: Shell) -> None:
    sh.ok("status") if (sh.home / "daemon.sock").exists() else sh.ok("up", "-d")
    client = BlockingClient(sh.home)
    for number in range(105):
        options = {"name": f"many-{number}", "isolation_level": "none"}
        client.call("spawn", spawn={"definition": "clerk", "options": options})
        client.call("add_task", new_task={"task": "x", "agent": "clerk", "hold": True, "tags": ["many"]})
    names = sh.ok("ps", "-q", "--name", "many-*").split()
    assert len(names) == len(sh.ok("ps", "--name", "many-*").splitlines()) - 1 == 105
    assert len(sh.ok("task", "list", "--tag", "many", "-o", "name").split()) == 105
    few = sh.run("ps", "-n", "3", "-q", "--name", "many-*")
    assert (few.out.split(), "newest 3; without -n" in few.err) == (names[:3], True)
    few = sh.run("task", "list", "-n", "3")
    assert (len(few.out.splitlines()), "newest 3; without -n" in few.err) == (4, True)
    sh.ok("stop", *names)
    assert sh.ok("ps", "-q", "--name", "many-*") == ""


def test_ps_q_gives_words_that_name_exactly_one_agent(sh: Shell) -> None:
    sh.ok("up", "-d")  # the client starts none
    client = BlockingClient(sh.home)
    ids = set()
    for name in ("with a space", "twin", "twin"):
        options = {"name": name, "isolation_level": "none"}
        ids.add(client.call("spawn", spawn={"definition": "clerk", "options": options})["instance_id"])
    words = [word for word in sh.ok("ps", "-q").split() if word in ids]
    assert set(words) == ids
    sh.ok("stop", *words)


def test_what_waits_for_its_restart_is_listed_counted_and_can_be_stopped(sh: Shell) -> None:
    file = CLERK_FILE.replace("python:clerk:Clerk", "{command: [sh, -c, 'exit 3']}").replace(
        "isolation: process", "restart: {type: linear, initial-delay: 5min, max-delay: 5min, use-jitter: false}"
    )
    (sh.home / "agents" / "crashing.md").write_text(file)
    sh.ok("run", "-d", "--name", "crashing", "crashing", "go")
    until(lambda: "restarts soon" in sh.ok("ps", "--name", "crashing"))
    assert sh.ok("ps", "-q", "--name", "crashing") == "crashing\n"
    assert sh.run("run", "-d", "--name", "crashing", *FOREVER).code == 7
    sh.ok("restart", "crashing")
    until(lambda: re.search(r"^crashing .* failed .* s +1 ", sh.ok("ps", "--name", "crashing"), re.MULTILINE))
    sh.ok("stop", "crashing")
    assert "crashing" not in sh.ok("ps", "-q").split()


def test_times_on_the_screen_are_local_and_in_json_utc(sh: Shell) -> None:
    name = background(sh, "timed")
    here = sh.ok("why", name, TZ="Asia/Tokyo"), sh.ok("events", name, TZ="Asia/Tokyo")
    there = sh.ok("why", name, TZ="America/New_York"), sh.ok("events", name, TZ="America/New_York")
    for eastern, western in zip(here, there, strict=True):
        assert "+00:00" not in eastern
        hours = [re.search(r"\d{4}-\d\d-\d\d (\d\d):", text) for text in (eastern, western)]
        assert hours[0] is not None
        assert hours[1] is not None
        assert hours[0][1] != hours[1][1]
    assert sh.run("inspect", name, TZ="Asia/Tokyo").json()["created_at"].endswith(("Z", "+00:00"))
    sh.ok("kill", name)


def test_ps_shows_what_lives_and_with_a_what_has_ended(sh: Shell) -> None:
    background(sh, "lives")
    sh.run("run", "--name", "ended", "--", "sh", "-c", "exit 3")
    until(lambda: "begun" in sh.ok("ps"))  # what it wrote last is told twice a second
    lines = sh.ok("ps").splitlines()
    assert lines[0].split()[:4] == ["NAME", "AGENT", "STATE", "HEALTH"]
    row = next(line for line in lines if line.startswith("lives "))
    assert "processing" in row
    assert "command" in row
    assert "begun" in row
    assert not any(line.startswith("ended ") for line in lines)
    assert re.search(r"^ended .* failed .*\b3\b", sh.ok("ps", "-a"), re.MULTILINE)
    assert [one["name"] for one in sh.run("ps", "-o", "json", "--name", "lives").json()] == ["lives"]
    assert json.loads(sh.ok("ps", "-o", "jsonl", "--name", "lives"))["state"] == "processing"
    assert sh.ok("ps", "-q", "--name", "lives") == "lives\n"
    sh.ok("stop", "lives")


def test_to_ask_an_agent_that_is_busy_says_that_the_request_is_queued(sh: Shell) -> None:
    background(sh, "busy")
    until(lambda: sh.run("inspect", "busy").json()["metrics_now"])
    told = sh.run("ask", "-d", "busy", "hello")
    assert told.code == 0
    assert "busy is busy with its job: your request is queued behind it" in told.err
    sh.ok("kill", "busy")


def test_inspect_why_and_logs_take_a_name_or_a_part_of_an_id(sh: Shell) -> None:
    background(sh, "seen")
    until(lambda: "begun" in sh.ok("logs", "seen"))
    record = sh.run("inspect", "seen").json()
    assert record["state"] == "processing"
    assert record["attempts"][0]["number"] == 1
    short = record["instance_id"][-8:]
    assert sh.run("inspect", short).json()["name"] == "seen"
    assert "it works on 1 request" in sh.ok("why", "seen")
    assert sh.run("why", "-o", "json", "seen").json()["state"] == "processing"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  begun\n", sh.ok("logs", "seen"))
    assert sh.ok("logs", "-T", "-n", "1", "seen") == "begun\n"
    assert sh.ok("logs", "--since", "1h", "-T", "seen") == "begun\n"
    assert json.loads(sh.ok("logs", "-o", "jsonl", "seen"))["text"] == "begun"
    sh.ok("stop", "seen")


def test_control_characters_of_agents_are_escaped(sh: Shell) -> None:
    sh.run("run", "--name", "ugly", "--", "printf", "a\\033[2Jb\\n")
    assert "\x1b" not in sh.ok("logs", "ugly")
    assert "\\x1b[2J" in sh.ok("logs", "ugly")


def test_the_log_of_an_agent_that_wrote_nothing_says_so(sh: Shell) -> None:
    sh.ok("run", "--name", "silent", "--", "true")
    assert sh.run("logs", "silent")[1:] == ("", "ostler: silent has written nothing\n")
    assert sh.run("logs", "-n", "5", "silent")[1:] == ("", "")


def test_events_stats_audit_and_status(sh: Shell) -> None:
    sh.ok("run", "--name", "told", "--", "true")
    assert "spawned" in sh.ok("events", "told")
    numbers = [json.loads(line)["sequence"] for line in sh.ok("events", "told", "-o", "jsonl").splitlines()]
    assert numbers == sorted(numbers)
    first = json.loads(sh.ok("events", "--after", str(numbers[0]), "-n", "1", "-o", "jsonl"))
    assert first["sequence"] == numbers[0] + 1
    assert "state_changed" not in sh.ok("events", "told", "--type", "agent_spawned")
    assert "spawned" in sh.ok("events", "told", "--type", "agent_spawned", "-n", "1"), "newer ones of other types"
    assert [one["sequence"] for one in sh.run("events", "told", "-o", "json").json()] == numbers
    assert "spawned" in sh.ok("stats")
    assert sh.run("stats", "-o", "json").json()["total_spawned"] > 0
    assert "of agents, in sum" in sh.ok("report", "--since", "1h")
    assert sh.run("report", "-o", "json").json()["is_whole"]
    assert "spawn" in sh.ok("audit", "log")
    assert sh.ok("audit", "verify").startswith("sound: ")
    assert str(sh.home) in sh.ok("status")
    assert sh.run("status", "-o", "json").json()["home"] == str(sh.home)


# --- asking ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(sh: Shell) -> str:
    assert sh.ok("run", "-d", "--name", "asked", "clerk") == "asked\n"
    return "asked"


def test_ask_gives_the_answer(sh: Shell, asked: str) -> None:
    assert sh.ok("ask", asked, "hello") == "hello\n"
    assert json.loads(sh.ok("ask", asked, '{"a": [1]}')) == {"a": [1]}
    failed = sh.run("ask", asked, "trouble")
    assert failed.code == 1
    assert "ValueError: no good" in failed.err
    assert "Traceback" not in failed.err
    assert "Traceback" in sh.ok("logs", asked)


def test_waits_and_answer_let_a_waiting_agent_go_on(sh: Shell, asked: str) -> None:
    with sh.start("ask", asked, "permission") as asking:
        until(lambda: "May I?" in sh.ok("waits"))
        assert "ostler answer asked yes" in sh.ok("waits", asked)
        assert "waits for you: May I?" in sh.ok("ps", "--name", asked)
        assert sh.ok("answer", asked, "yes") == "asked goes on with 'yes'.\n"
        assert asking.communicate(timeout=60)[0] == "yes\n"
    assert sh.run("answer", asked, "yes").code == 4


def test_the_inbox_lists_what_needs_a_person_with_the_next_command(sh: Shell, asked: str) -> None:
    """In a list, counted by `status`, and by `ostler` alone on a terminal, which gives the help in a pipe."""
    with sh.start("ask", asked, "permission") as asking:
        until(lambda: "May I?" in sh.ok("inbox"))
        (row,) = [row for row in sh.run("inbox", "-o", "json").json() if row["key"] == asked]
        assert set(row) == {"kind", "key", "since", "sentence", "next"}
        assert (row["kind"], row["sentence"], row["next"]) == ("question", "asks: May I?", "ostler answer asked yes")
        assert asked in sh.ok("inbox", "-o", "name").splitlines()
        number = sh.run("status", "-o", "json").json()["inbox"]
        assert f"{number} thing{'s need' if number > 1 else ' needs'} you: ostler inbox" in sh.ok("status")
        assert "ostler answer asked yes" in on_terminal(sh)
        piped = sh.run()
        assert (piped.code, "Exit codes: 0 ok" in piped.out + piped.err) == (2, True)
        sh.ok(*row["next"].split()[1:])
        assert asking.communicate(timeout=60)[0] == "yes\n"
    assert asked not in sh.ok("inbox", "-o", "name").splitlines()
    sh.run("run", "--name", "seen", "--", "false")
    sh.ok("run", "-d", "--name", "unseen", "--", "false")
    sh.ok("wait", "unseen", "--for", "failed")
    names = sh.ok("inbox", "-o", "name").splitlines()
    assert ("unseen" in names, "seen" in names) == (True, False)
    sh.ok("rm", "unseen")
    assert "unseen" not in sh.ok("inbox", "-o", "name").splitlines()


def test_without_a_home_ostler_alone_shows_the_help(sh: Shell, tmp_path: Path) -> None:
    assert "Exit codes: 0 ok" in on_terminal(sh, "--home", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def on_terminal(sh: Shell, *words: str) -> str:
    """What the command shows on a terminal."""
    main, terminal = pty.openpty()
    with os.fdopen(main, "rb", buffering=0) as screen:
        with os.fdopen(terminal) as out:
            command = [str(sh.program), *words]
            shown = subprocess.Popen(
                command, env=sh.environment, cwd=sh.project, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        text = b""
        while True:
            try:
                part = screen.read(4096)
            except OSError:  # the other end is closed
                part = b""
            text += part
            if not part:
                break
    assert shown.wait(60) == 0, text
    return text.decode()


def test_a_request_with_an_id_is_answered_once(sh: Shell, asked: str) -> None:
    assert sh.ok("ask", asked, "-d", "--id", "r-1", "permission") == "r-1\n"
    until(lambda: "May I?" in sh.ok("waits", asked))
    assert sh.run("ask", asked, "--id", "r-1", "--timeout", "300ms", "permission").code == 124
    sh.ok("answer", asked, "no")
    assert sh.ok("ask", asked, "--id", "r-1", "permission") == "no\n"


# --- changing ----------------------------------------------------------------------------------------


def test_pause_freezes_a_command_and_resume_lets_it_go_on(sh: Shell) -> None:
    name = background(sh, "frozen")
    until(lambda: "processing" in sh.ok("ps", "--name", name))
    assert f"Go on with: ostler resume {name}" in sh.ok("pause", name)
    assert "frozen" in sh.ok("ps", "--name", name)
    assert sh.run("status", "-o", "json").json()["waits"] == 0  # a pause waits for no person
    assert sh.ok("resume", name) == f"{name} is processing.\n"
    assert sh.run("resume", name).code == 3
    sh.ok("kill", name)


@pytest.mark.parametrize(("depth", "told"), [("hold", "held"), ("park", "parked")])
def test_pause_holds_or_parks_an_agent_that_waits_to_be_asked(sh: Shell, asked: str, depth: str, told: str) -> None:
    sh.ok("pause", "--depth", depth, asked)
    assert told in sh.ok("ps", "--name", asked)
    assert sh.run("ask", asked, "hello").code == 3
    sh.ok("resume", asked)
    assert sh.ok("ask", asked, "hello") == "hello\n"


def test_output_that_was_dropped_is_told(sh: Shell) -> None:
    flooded = sh.run("run", "--name", "flood", "--", "head", "-c", "64M", "/dev/zero")
    assert flooded.code == 0
    assert re.search(r"ostler: \d+ M of its output were dropped", flooded.err)
    assert "were dropped" in sh.run("logs", "-n", "0", "flood").err
    assert json.loads(sh.ok("inspect", "flood"))["dropped_bytes"] > 0
    sh.ok("run", "--name", "calm", "--", "true")
    assert "dropped" not in sh.run("logs", "calm").err
    sh.ok("rm", "flood", "calm")


def test_restart_stop_kill_rm_prune_and_wait(sh: Shell) -> None:
    name = background(sh, "worked")
    assert "attempt 2" in sh.ok("restart", name)
    assert sh.run("wait", name, "--timeout", "200ms").code == 124
    assert sh.run("rm", name).code == 3
    assert "terminated" in sh.ok("stop", "-t", "2s", name)
    assert sh.ok("stop", name) == f"{name} had ended already.\n"
    assert sh.ok("wait", name) == "terminated\n"
    assert sh.run("wait", name, "--for", "ready").code == 1
    assert sh.ok("rm", name) == f"{name}\n"
    assert sh.run("inspect", name).code == 4
    assert "by force" in sh.ok("kill", background(sh, "killed"))
    assert "killed" in sh.run("prune", "-y").err
    assert "killed" not in sh.ok("ps", "-a")
    sh.ok("rm", "-f", background(sh, "forced"))


# --- setting up --------------------------------------------------------------------------------------


def test_init_writes_an_agent_that_runs(shell: Shell) -> None:
    assert "ostler run hello" in shell.ok("init")
    assert shell.ok("run", "hello", "world") == "hello, world\n"
    before = (shell.project / "ostler.toml").read_text()
    assert "nothing was changed" in shell.run("init").err
    assert (shell.project / "ostler.toml").read_text() == before
    assert "hello" in shell.ok("agents")
    assert shell.run("agents", "show", "hello").json()["name"] == "hello"
    assert "ok" in shell.ok("agents", "validate")


def test_the_workspace_is_shown_and_changed(sh: Shell) -> None:
    assert "enterprise" in sh.ok("workspace", "show")
    changed = sh.ok("workspace", "set", "--plan", "teams", "--tokens-per-minute", "5000", "--spawning", "off")
    assert "20 active agents" in changed
    refusal = sh.run("run", "--", "true")
    assert (refusal.code, "spawning is switched off" in refusal.err) == (5, True), refusal
    sh.ok("workspace", "set", "--plan", "enterprise", "--tokens-per-minute", "0", "--spawning", "on")
    found = sh.run("workspace", "show", "-o", "json").json()
    assert (found["tier"], found["disabled_features"], found["max_tokens_per_minute"]) == ("enterprise", [], 0)
    assert sh.run("workspace", "set").code == 2


def test_agents_validate_names_every_fault_with_its_line(shell: Shell) -> None:
    folder = shell.home / "agents"
    folder.mkdir()
    (folder / "fixer.md").write_text("---\nlifecycle:\n  restrat: no\n  limits: {memory: 12M}\n---\nFix it.\n")
    said = shell.run("agents", "validate")
    assert said.code == 1
    assert "2 faults" in said.out
    assert re.search(r"3: lifecycle\.restrat .*did you mean restart", said.out)
    ran = shell.run("run", "-d", "fixer", "mend it")
    assert ran.code == 2
    assert "fixer.md:3" in ran.err


def test_doctor_finds_out_by_doing(sh: Shell) -> None:
    said = sh.run("doctor")
    assert said.code == 0
    assert re.search(r"^ok +Python 3", said.out, re.MULTILINE)
    assert re.search(r"^(ok|warn) +limits: .*memory", said.out, re.MULTILINE)
    assert sh.run("doctor", "-o", "json").json()[0]["level"] == "ok"


def test_tokens_are_shown_once(sh: Shell) -> None:
    token = sh.ok("token", "create", "laptop", "--expires", "30d").strip()
    assert token.startswith("ostler_")
    assert token not in sh.ok("token", "list", "-o", "json")
    assert "laptop" in sh.ok("token", "list")
    assert sh.ok("token", "revoke", "laptop") == "laptop is revoked.\n"
    assert sh.run("token", "revoke", "laptop").code == 4
    acts = {one["action"]: one["actor"] for one in sh.run("audit", "log", "-o", "json").json()}
    assert (acts["token.add"], acts["token.revoke"]) == ("owner", "owner")


def test_completion_version_and_help(sh: Shell) -> None:
    assert "_OSTLER_COMPLETE" in sh.ok("completion", "bash")
    assert sh.ok("version").startswith("PART")
    assert sh.ok("--version").startswith("ostler ")
    assert "Exit codes: 0 ok" in sh.ok("--help")
    assert "logs" in sh.ok("logs", "-h")


# --- the daemon --------------------------------------------------------------------------------------


def test_up_down_keep_and_restart_daemon(shell: Shell) -> None:
    assert shell.run("status").code == 6
    assert shell.run("--no-start", "ps").code == 6
    assert "The daemon runs" in shell.ok("up", "-d")
    assert "runs already" in shell.run("up", "-d").err
    background(shell, "stays")
    pid = shell.daemon_pid()
    shell.ok("restart-daemon")
    assert shell.daemon_pid() != pid
    assert "stays" in shell.ok("ps")
    assert "its agents go on" in shell.ok("down", "--keep")
    said = shell.run("ps")
    assert "started it (found 1 agent alive)" in said.err
    assert "processing" in said.out
    assert re.search(r"^stays terminated gracefully in", shell.ok("down"), re.MULTILINE)
    assert shell.left_over() == []


def test_down_ends_agents_whose_daemon_was_killed(shell: Shell) -> None:
    background(shell, "orphan")
    shell.kill_daemon()
    assert "agents of it live" in shell.run("status").err
    assert re.search(r"^orphan terminated gracefully in", shell.ok("down"), re.MULTILINE)
    assert shell.left_over() == []
    assert "no daemon runs" in shell.run("down").err, "and there is nothing left to do"


def test_up_in_the_foreground_ends_its_agents_at_ctrl_c(shell: Shell) -> None:
    with shell.start("up") as daemon:
        until(lambda: shell.run("status").code == 0)
        background(shell, "child")
        daemon.send_signal(signal.SIGINT)
        _, told = daemon.communicate(timeout=60)
        assert daemon.returncode == 0
    assert "child terminated" in told


def test_a_listener_takes_a_token_and_no_other_address(shell: Shell) -> None:
    assert "loopback" in shell.run("up", "-d", "--listen", "0.0.0.0:7177").err
    shell.ok("up", "-d", "--listen", "127.0.0.1:0")
    address = shell.run("status", "-o", "json").json()["listens"][1].removeprefix("http://")
    token = shell.ok("token", "create", "phone").strip()
    elsewhere = {"OSTLER_ADDRESS": address, "OSTLER_HOME": "/nonexistent"}
    assert shell.run("ps", **elsewhere).code == 5
    assert shell.run("ps", OSTLER_TOKEN=token[::-1], **elsewhere).code == 5
    assert shell.run("ps", OSTLER_TOKEN=token, **elsewhere).code == 0
    assert shell.run("ps", OSTLER_TOKEN=token, **elsewhere | {"OSTLER_ADDRESS": f"http://{address}"}).code == 0
    viewer = shell.ok("token", "create", "watcher", "--role", "viewer").strip()
    assert shell.run("run", "--", "true", OSTLER_TOKEN=viewer, **elsewhere).code == 5


# --- mistakes ----------------------------------------------------------------------------------------

NEED_AN_AGENT = ["inspect", "logs", "why", "pause", "resume", "stop", "kill", "restart", "rm", "wait"]


@pytest.mark.parametrize("command", NEED_AN_AGENT)
def test_an_unknown_agent_is_exit_4_with_the_nearest_name(sh: Shell, command: str) -> None:
    if "nightly" not in sh.ok("ps", "-a", "-q").split():
        sh.run("run", "--name", "nightly", "--", "true")
    said = sh.run(command, "nightyl")
    assert said.code == 4
    assert "Did you mean nightly?" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ("ps", "--count"),
        ("inspect",),
        ("logs",),
        ("logs", "x", "--since", "tomorrow"),
        ("events", "--after", "x"),
        ("ask", "x"),
        ("answer",),
        ("why",),
        ("pause",),
        ("pause", "--depth", "deep", "x"),
        ("resume",),
        ("stop",),
        ("kill",),
        ("restart",),
        ("run", "-d", "-i", "--", "cat"),
        ("rm",),
        ("prune", "--what"),
        ("wait", "x", "--timeout", "soon"),
        ("wait", "x", "--for", "flying"),
        ("ps", "--state", "flying"),
        ("task", "list", "--state", "flying"),
        ("events", "--type", "flying"),
        ("stats", "-o", "yaml"),
        ("audit", "log", "-n", "0"),
        ("agents", "show"),
        ("init", "--force"),
        ("doctor", "--cure"),
        ("token", "create"),
        ("token", "create", "x", "--expires", "soon"),
        ("token", "create", "x", "--role", "king"),
        ("up", "--port", "1"),
        ("down", "now"),
        ("status", "-o", "table"),
        ("restart-daemon", "now"),
        ("completion", "tcsh"),
        ("version", "x"),
        ("waits", "-o", "name"),
        ("frobnicate",),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_exit_2_with_a_sentence(sh: Shell, words: tuple[str, ...]) -> None:
    said = sh.run(*words)
    assert said.code == 2, said
    assert said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "--cpus", "1000", "--", "true"), r"--cpus must be at most \d+, .*, was 1000"),
        (("run", "--memory", "12M", "--", "true"), "--memory must be 64M to 16T, was 12M"),
        (("run", "--memory", "900T", "--", "true"), "--memory must be 64M to 16T, was 900T"),
        (("run", "--memory", "12X", "--", "true"), "--memory must be a size such as 512M, was 12X"),
        (("run", "--restart", "on-failure:99", "--", "true"), "--restart .* must be 0 to 10, was 99"),
        (("run", "--tag", "a b", "--", "true"), "--tag must be .*, was 'a b'"),
        (("stop", "-t", "soon", "limited"), "--time must be a duration such as 30s, was 'soon'"),
        (("task", "add", "x", "--timeout", "soon"), "--timeout must be a duration .*, was 'soon'"),
        (("events", "--type", "flying"), "--type must be one of agent_spawned, .*, was 'flying'"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_refused_value_is_named_by_its_option_and_as_it_was_typed(
    sh: Shell, words: tuple[str, ...], told: str
) -> None:
    said = sh.run(*words)
    assert said.code == 2, said
    assert re.fullmatch(f"ostler: {told}", said.err.splitlines()[-1]), said.err


def test_broken_settings_stop_no_daemon_and_keep_no_command_from_working(shell: Shell) -> None:
    settings = shell.project / "ostler.toml"
    settings.write_text('[crew.coder]\nagent = "claude"\n')
    name = background(shell, "beside")
    pid = shell.daemon_pid()
    settings.write_text("[daemon]\nlisten = 7\n")
    refused = shell.run("restart-daemon")
    assert (refused.code, shell.daemon_pid()) == (2, pid)
    assert "ostler.toml:2: daemon.listen" in refused.err
    settings.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = shell.run("restart-daemon", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (refused.code, shell.daemon_pid()) == (2, pid)
    assert "choose another port" in refused.err
    settings.write_text('[crew.coder]\nagent = "claude"\n')
    shell.ok("restart-daemon")
    shell.kill_daemon()
    settings.write_text("[crew\n")
    looked = shell.run("ps", "-q")
    assert (looked.code, looked.out) == (0, f"{name}\n")
    assert "the last good ones are in force" in looked.err
    assert "coder" in shell.ok("crew", "ps")
    assert "ostler.toml:1" in shell.ok("status")
    shell.ok("stop", name)
    shell.ok("down")
    assert shell.run("up", "-d").code == 6, "told to start it, it says what is wrong"


def test_a_daemon_that_hangs_is_told_by_every_command_within_ten_seconds(sh: Shell) -> None:
    name = background(sh, "beyond")
    pid = sh.daemon_pid()
    following = sh.start("logs", "-f", "-T", name)
    assert following.stdout is not None
    assert following.stdout.readline() == "begun\n"
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        commands = [sh.start(*words) for words in (("ps",), ("stop", name), ("status",), ("down",), ("up", "-d"))]
        for command in commands:
            _, err = command.communicate(timeout=60)
            assert command.returncode == 6
            assert f"the daemon (pid {pid}) does not answer" in err
            assert f"kill -CONT {pid}" in err
        assert time.monotonic() - began < 10
        assert following.stderr is not None
        assert "does not answer" in following.stderr.readline()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert sh.ok("ps", "-q", "--name", name) == f"{name}\n", "nothing that was refused takes effect later"
    sh.ok("kill", name)
    following.communicate(timeout=60)
    assert following.returncode == 0, "it went on when the daemon did"


def test_a_mistyped_command_is_guessed(sh: Shell) -> None:
    assert "Did you mean logs?" in sh.run("lgos").err


def test_a_name_that_is_taken_is_a_conflict(sh: Shell) -> None:
    background(sh, "taken")
    said = sh.run("run", "-d", "--name", "taken", *FOREVER)
    assert said.code == 7
    assert "taken" in said.err
    sh.ok("kill", "taken")


def test_a_closed_pipe_is_no_traceback(sh: Shell) -> None:
    line = f"{sh.program} run -- sh -c 'seq 1 100000' | head -1"
    done = subprocess.run(
        ["bash", "-c", line], env=sh.environment, cwd=sh.project, capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n"
    assert "Traceback" not in done.stderr


def test_what_writes_into_a_closed_pipe_is_stopped(sh: Shell) -> None:
    line = f"{sh.program} run --name unread -- yes | head -1"
    done = subprocess.run(
        ["bash", "-c", line], env=sh.environment, cwd=sh.project, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("y\n", "")
    assert sh.run("inspect", "unread").json()["state"] == "terminated"


def test_colour_only_on_a_terminal_and_never_with_no_color(sh: Shell) -> None:
    assert "\x1b" not in sh.ok("ps", "-a")


def test_a_home_that_cannot_be_written_is_one_sentence(sh: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = sh.run("--home", str(tmp_path / "file" / "home"), "run", "--", "true")
    assert said.code in {1, 6}
    assert "Traceback" not in said.err


def test_ps_imports_nothing_heavy(sh: Shell) -> None:
    sh.ok("ps")
    code = (
        "import sys; sys.argv = ['ostler', 'ps']\n"
        "from ostler.cli.main import _run\n_run()\n"
        "heavy = {'asyncio', 'pydantic', 'fastapi', 'rich', 'textual'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)"
    )
    python = sh.program.parent / "python"
    done = subprocess.run(
        [python, "-c", code], env=sh.environment, cwd=sh.project, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "[]", done
    assert os.fspath(python)


def test_a_module_beside_the_home_is_found_also_where_the_project_is_the_users_own_directory(
    program: Path, tmp_path: Path
) -> None:
    sh = Shell(program, tmp_path)
    sh.environment["HOME"] = str(sh.project)
    (sh.project / "clerk.py").write_text(CLERK)
    (sh.home / "agents").mkdir()
    (sh.home / "agents" / "clerk.md").write_text(CLERK_FILE)
    try:
        assert "asked: how are you" in sh.ok("run", "clerk", "how are you")
    finally:
        sh.close()
