"""Commands as agents: real programs that misbehave in the ways programs do."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ostler.agents import (
    AgentContext,
    AgentRunner,
    CommandAgent,
    CommandSpec,
    ExitMeaning,
    Message,
    PromptBy,
    WaitAnswer,
    WaitAsked,
)
from ostler.errors import AgentExecutionError
from ostler.model import ContextData, ResourceLimits
from ostler.seams import Clock, SystemClock
from ostler.testing import ManualClock

pytestmark = pytest.mark.anyio

PYTHON = sys.executable
ID = UUID("01234567-89ab-7def-8123-456789abcdef")


class Deaf:
    def say(self, message: Message) -> None: ...

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        return WaitAnswer(outcome=wait.kind)


def context(workspace: Path | None, clock: Clock | None = None, **data: Any) -> AgentContext:
    return AgentContext(
        instance_id=ID, attempt=4, definition_id=UUID(int=2), name="fixer", data=ContextData(data),
        limits=ResourceLimits(), clock=clock or SystemClock(), voice=Deaf(), directory=workspace,
    )  # fmt: skip


Make = Callable[..., Awaitable[AgentRunner]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
def make(place: Path) -> Make:
    """A runner of a command, ready to process."""

    async def made(*argv: str, clock: Clock | None = None, data: dict[str, Any] | None = None, **fields: Any) -> Any:
        spec = CommandSpec(argv=argv, **fields)
        runner = AgentRunner(lambda: CommandAgent(spec), context(place, clock, **(data or {})))
        await runner.run("initialize")
        return runner

    return made


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No child, no zombie, no open file."""
    gc.collect()
    files_before, children_before = open_files(), children()
    yield
    gc.collect()
    assert open_files() <= files_before
    assert children() <= children_before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[str]:
    """The dead ones that nobody has reaped are among them."""
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


async def until(done: Callable[[], bool], seconds: float = 20) -> None:
    """Look again and again; what is waited for happens in another process."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Dead and waiting for its parent is dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def is_gone(pid: int) -> bool:
    """Dead, and reaped."""
    return not Path(f"/proc/{pid}").exists()


def files(place: Path) -> list[str]:
    return [file.name for file in place.iterdir()]


def mode(place: Path) -> int:
    return stat.S_IMODE(place.stat().st_mode)


def numbers(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()] if file.exists() else []


# --- the prompt and the place ------------------------------------------------------------------------


async def test_the_prompt_comes_in_a_file_of_its_own(make: Make, place: Path) -> None:
    code = (
        "import os,sys; f=sys.argv[1]; told=os.environ['OSTLER_PROMPT_FILE'];"
        "print(open(f).read(), oct(os.stat(f).st_mode), told==f, os.getcwd())"
    )
    it = await make(PYTHON, "-c", code, "{prompt_file}")
    result = await it.run("process", "Fix the tést.\n")
    assert result["output"] == f"Fix the tést.\n 0o100600 True {place}\n"
    assert (result["exit_code"], result["meaning"], result["dropped_bytes"]) == (0, "done", 0)
    assert result["duration_seconds"] > 0
    assert files(place) == [], "the prompt does not stay"
    assert mode(place) == 0o700


async def test_the_prompt_comes_on_standard_input(make: Make) -> None:
    it = await make("cat", prompt_by=PromptBy.STDIN)
    prompt = "x" * 3_000_000
    result = await it.run("process", {"prompt": prompt})
    assert len(result["output"]) < 1_100_000
    assert result["dropped_bytes"] == 3_000_000 - 1024 * 1024
    assert (await it.run("process", ""))["output"] == ""


async def test_the_prompt_comes_as_an_argument(make: Make) -> None:
    it = await make("printf", "%s|", "a {prompt} b", "{{}}", prompt_by=PromptBy.ARGUMENT)
    assert (await it.run("process", "$(id) `id` ; {name}"))["output"] == "a $(id) `id` ; {name} b|{}|"
    it = await make("printf", "%s|", prompt_by=PromptBy.ARGUMENT)
    assert (await it.run("process", "-n"))["output"] == "-n|"
    with pytest.raises(AgentExecutionError, match="argument must be shorter than 128 KiB; pass a long prompt by file"):
        await it.run("process", "x" * 200_000)


async def test_without_a_prompt_by_stdin_there_is_nothing_to_read(make: Make) -> None:
    it = await make("cat")
    assert (await it.run("process", "hello"))["output"] == ""


async def test_placeholders_say_who_and_where(make: Make, place: Path) -> None:
    it = await make(
        "printf", "%s ", "{instance_id}", "{attempt}", "{name}", "{workspace}", "{context.depth}", data={"Depth": 3}
    )
    assert (await it.run("process", "x"))["output"] == f"{ID} 4 fixer {place} 3 "


async def test_without_a_workspace_it_runs_in_a_place_that_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = CommandSpec(argv=("sh", "-c", "pwd; touch left; cat {prompt_file}"))
    it = AgentRunner(lambda: CommandAgent(spec, instructions="Be brief."), context(None))
    await it.run("initialize")
    output = (await it.run("process", "Hello."))["output"]
    assert output.startswith(f"{tmp_path}/ostler-")
    assert output.endswith("\nBe brief.\n\nHello.")
    assert files(tmp_path) == []
    assert (await it.run("process", None))["output"].endswith("\nBe brief.")


async def test_it_may_run_elsewhere(make: Make, tmp_path: Path) -> None:
    it = await make("pwd", cwd=str(tmp_path))
    assert (await it.run("process", "x"))["output"] == f"{tmp_path}\n"
    it = await make("pwd", cwd="/no/such/place")
    with pytest.raises(AgentExecutionError, match="pwd cannot run in /no/such/place: No such file"):
        await it.run("process", "x")


@pytest.mark.parametrize("request_", [None, 3, {}, {"prompt": 3}, ["x"], "a\0b"])
async def test_a_request_without_a_prompt_is_refused(make: Make, request_: Any) -> None:
    it = await make("true")
    with pytest.raises(AgentExecutionError, match=r"ValidationError: (request must be a text|prompt must not)"):
        await it.run("process", request_)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("no-such-program-here",), r"argv.0 must be a program on the agent's PATH \(/usr/local/bin:/usr/bin:/bin\)"),
        (("/etc/passwd",), "argv.0 must be a program"),
        (("echo", "{context.repo}"), "{context.repo} is used by the command"),
        (("echo", "{nothing}"), "argv.1 must use only"),
    ],
)
async def test_what_can_never_run_fails_at_the_start(make: Make, argv: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(AgentExecutionError, match=complaint):
        await make(*argv)


async def test_a_program_that_is_none_is_told(make: Make, place: Path) -> None:
    it = await make("./here", "x")
    with pytest.raises(AgentExecutionError, match=r"^\./here cannot be run: No such file or directory$"):
        await it.run("process", "x")
    (place / "here").write_text("not a program")
    with pytest.raises(AgentExecutionError, match="cannot be run: Permission denied"):
        await it.run("process", "x")
    (place / "here").chmod(0o700)
    with pytest.raises(AgentExecutionError, match="cannot be run: Exec format error"):
        await it.run("process", "x")


# --- the walls ---------------------------------------------------------------------------------------


async def test_it_sees_only_the_variables_it_was_given(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("API_KEY", "k-1")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("LD_PRELOAD_LIKE", "x")
    it = await make("env", env=("API_KEY", "NOT_SET"), set_env={"MODE": "fast"}, prompt_by=PromptBy.STDIN)
    seen = dict(line.split("=", 1) for line in (await it.run("process", "x"))["output"].splitlines())
    assert seen == {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/home/somebody",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "API_KEY": "k-1",
        "MODE": "fast",
        "OSTLER_INSTANCE_ID": str(ID),
        "OSTLER_ATTEMPT": "4",
    }


async def test_it_inherits_no_open_file_and_a_group_of_its_own(make: Make, tmp_path: Path) -> None:
    code = (
        "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], os.getpgrp()==os.getsid(0)==os.getpid())"
    )
    it = await make(PYTHON, "-c", code)
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert (await it.run("process", "x"))["output"] == "[0, 1, 2] True\n"


# --- how it ends -------------------------------------------------------------------------------------


async def test_exit_codes_mean_what_the_spec_says(make: Make) -> None:
    codes = {"3": ExitMeaning.RETRY, "4": ExitMeaning.BLOCKED, "5": ExitMeaning.DONE}
    it = await make("sh", "-c", "exit {prompt}", exit_codes=codes, prompt_by=PromptBy.ARGUMENT)
    for code, meaning in ((0, "done"), (3, "retry"), (4, "blocked"), (5, "done")):
        result = await it.run("process", str(code))
        assert (result["exit_code"], result["meaning"]) == (code, meaning)


async def test_a_failure_shows_its_code_and_its_last_lines(make: Make) -> None:
    it = await make("sh", "-c", "for i in $(seq 100); do echo line $i; done; echo broken >&2; exit 7")
    with pytest.raises(AgentExecutionError) as caught:
        await it.run("process", "x")
    lines = str(caught.value).splitlines()
    assert lines[0] == "sh failed with exit code 7; its last lines:"
    assert lines[1:] == [*(f"line {number}" for number in range(82, 101)), "broken"]
    it = await make("false")
    with pytest.raises(AgentExecutionError, match=r"^false failed with exit code 1 and said nothing$"):
        await it.run("process", "x")


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (40, "signal 40")])
async def test_a_signal_is_named(make: Make, number: int, name: str) -> None:
    it = await make(PYTHON, "-c", f"import os; print('last', flush=True); os.kill(os.getpid(), {number})")
    with pytest.raises(AgentExecutionError, match=f"was killed by {name}; its last lines:\nlast$"):
        await it.run("process", "x")


async def test_an_exit_code_that_somebody_else_took_is_not_a_success(make: Make) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        it = await make("true")
        with pytest.raises(AgentExecutionError, match="somebody else took its exit code"):
            await it.run("process", "x")
    finally:
        signal.signal(signal.SIGCHLD, before)


async def test_a_child_that_outlives_the_program_is_ended(make: Make, place: Path) -> None:
    it = await make("sh", "-c", "trap '' TERM HUP; sleep 1000 & echo $! > child; echo started")
    result = await it.run("process", "x")
    assert result["output"] == "started\n"
    [child] = numbers(place / "child")
    await until(lambda: not is_alive(child))


async def test_one_that_left_the_group_does_not_keep_the_answer(make: Make, place: Path) -> None:
    it = await make(
        "sh", "-c", "setsid sh -c 'echo $$ > child; exec sleep 1000' & while ! [ -s child ]; do :; done; echo started"
    )
    began = time.monotonic()
    try:
        assert (await it.run("process", "x"))["output"] == "started\n"
        assert time.monotonic() - began < 10, "it holds the output open, and is not waited for"
    finally:
        for child in numbers(place / "child"):
            os.kill(child, signal.SIGKILL)


# --- much output -------------------------------------------------------------------------------------


async def test_fifty_megabytes_of_output_do_not_grow_memory(make: Make) -> None:
    it = await make(
        "sh", "-c", "echo first; head -c 52428800 /dev/zero | tr '\\0' x; echo; echo last", max_output_bytes=65536
    )
    await it.run("process", "warm up")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await it.run("process", "x")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert result["output"].startswith("first\nxxx")
    assert result["output"].endswith("xxx\nlast\n")
    assert result["dropped_bytes"] == 52428800 + 12 - 65536
    assert f"… ({result['dropped_bytes']} bytes left out) …" in result["output"]
    assert grown < 4096, f"{grown} KiB"


# --- cancelling --------------------------------------------------------------------------------------

TALKS = "import os,signal,time; {}; open('up','w').write(str(os.getpid())); time.sleep(1000)"


@pytest.fixture
def cancelled(place: Path) -> Callable[[AgentRunner], Awaitable[int]]:
    """Runs until the program is up, cancels, and gives its pid, which must be gone by then."""

    async def run(it: AgentRunner) -> int:
        task = asyncio.create_task(it.run("process", "x"))
        await until(lambda: bool(numbers(place / "up")))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        [pid] = numbers(place / "up")
        assert is_gone(pid), "it is gone, and reaped"
        return pid

    return run


async def test_a_cancelled_program_is_asked_first(make: Make, place: Path, cancelled: Any) -> None:
    code = TALKS.format("signal.signal(15, lambda *_: (open('asked','w').close(), os._exit(0)))")
    # The clock stands still: nothing here may need the force that comes after its time.
    await cancelled(await make(PYTHON, "-c", code, clock=ManualClock()))
    assert sorted(files(place)) == ["asked", "up"], "and the prompt does not stay"


async def test_one_that_never_stops_talking_can_be_stopped(make: Make, cancelled: Any) -> None:
    await cancelled(await make("sh", "-c", "echo $$ > up; exec yes"))


async def test_one_that_does_not_listen_is_forced_when_its_time_is_over(make: Make, place: Path) -> None:
    clock = ManualClock()
    it = await make(PYTHON, "-c", TALKS.format("signal.signal(15, signal.SIG_IGN)"), clock=clock)
    task = asyncio.create_task(it.run("process", "x"))
    await until(lambda: bool(numbers(place / "up")))
    [pid] = numbers(place / "up")
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    clock.advance(1.9)
    for _ in range(20):
        await asyncio.sleep(0)
    assert is_alive(pid), "it still has a moment"
    assert not task.done()
    clock.advance(0.2)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_gone(pid)


async def test_cancelling_again_forces_it_at_once(make: Make, place: Path) -> None:
    it = await make(PYTHON, "-c", TALKS.format("signal.signal(15, signal.SIG_IGN)"), clock=ManualClock())
    task = asyncio.create_task(it.run("process", "x"))
    await until(lambda: bool(numbers(place / "up")))
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    [pid] = numbers(place / "up")
    assert is_gone(pid)


async def test_one_that_is_stopped_hears_the_request(make: Make, place: Path) -> None:
    it = await make(PYTHON, "-c", TALKS.format("0"), clock=ManualClock())
    task = asyncio.create_task(it.run("process", "x"))
    await until(lambda: bool(numbers(place / "up")))
    [pid] = numbers(place / "up")
    os.kill(pid, signal.SIGSTOP)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_gone(pid)


async def test_a_child_that_ignores_the_request_goes_with_the_program(make: Make, place: Path, cancelled: Any) -> None:
    script = "(trap '' TERM; echo $$ > none; sh -c 'echo $$ > child; exec sleep 1000') & echo $$ > up; wait"
    await cancelled(await make("sh", "-c", script, clock=ManualClock()))
    await until(lambda: all(not is_alive(child) for child in numbers(place / "child")))


async def test_shutting_down_leaves_nothing_running(make: Make, place: Path) -> None:
    it = await make(PYTHON, "-c", TALKS.format("0"))
    task = asyncio.create_task(it.run("process", "x"))
    await until(lambda: bool(numbers(place / "up")))
    await it.run("shutdown")
    with pytest.raises(AgentExecutionError, match="was killed by SIGTERM"):
        await task


async def test_a_coroutine_that_is_dropped_takes_its_program_with_it(make: Make, place: Path) -> None:
    it = await make(PYTHON, "-c", TALKS.format("0"))
    work = it.run("process", "x")
    waiting = work.send(None)
    await until(lambda: bool(numbers(place / "up")))
    [pid] = numbers(place / "up")
    del waiting
    work.close()
    await until(lambda: is_gone(pid))


def test_a_loop_that_is_closed_leaves_no_program_behind(place: Path) -> None:
    loop = asyncio.new_event_loop()
    it = AgentRunner(lambda: CommandAgent(CommandSpec(argv=(PYTHON, "-c", TALKS.format("0")))), context(place))

    async def begin() -> Any:
        await it.run("initialize")
        work = it.run("process", "x")
        work.send(None)
        await until(lambda: bool(numbers(place / "up")))
        return work

    work = loop.run_until_complete(begin())
    loop.close()
    work.close()
    [pid] = numbers(place / "up")
    assert is_gone(pid)


async def test_requests_run_beside_one_another(make: Make) -> None:
    wait_for_both = "touch {prompt}; while ! [ -e a ] || ! [ -e b ]; do sleep 0.01; done; echo {prompt}"
    it = await make("sh", "-c", wait_for_both, prompt_by=PromptBy.ARGUMENT)
    results = await asyncio.gather(it.run("process", "a"), it.run("process", "b"))
    assert [result["output"] for result in results] == ["a\n", "b\n"]


# --- the terminal ------------------------------------------------------------------------------------


async def test_with_a_pty_it_sees_a_terminal(make: Make) -> None:
    code = "import os; print(*(os.isatty(n) for n in (0,1,2)), *os.get_terminal_size(), os.environ['TERM']); print('ä')"
    it = await make(PYTHON, "-c", code, pty=True)
    assert (await it.run("process", "x"))["output"] == "True True True 120 40 xterm-256color\nä\n"
    it = await make(PYTHON, "-c", code.replace("*os.get_terminal_size(), ", ""))
    assert (await it.run("process", "x"))["output"] == "False False False dumb\nä\n"


async def test_a_prompt_on_standard_input_goes_with_a_terminal(make: Make) -> None:
    code = "import os,sys; print(len(sys.stdin.read()), os.isatty(1))"
    it = await make(PYTHON, "-c", code, pty=True, prompt_by=PromptBy.STDIN)
    assert (await it.run("process", "x" * 100_000))["output"] == "100000 True\n"


async def test_much_output_through_a_terminal_arrives_whole(make: Make) -> None:
    it = await make("seq", "100000", pty=True)
    result = await it.run("process", "x")
    assert result["output"] == "".join(f"{number}\n" for number in range(1, 100_001))


async def test_a_terminal_that_a_stranger_keeps_open_is_let_go(make: Make, place: Path) -> None:
    it = await make(
        "sh",
        "-c",
        "setsid sh -c 'echo $$ > child; exec sleep 1000' & while ! [ -s child ]; do :; done; echo started",
        pty=True,
    )
    try:
        assert (await it.run("process", "x"))["output"] == "started\n"
    finally:
        for child in numbers(place / "child"):
            os.kill(child, signal.SIGKILL)


# --- elsewhere than in the main thread ---------------------------------------------------------------


def test_it_runs_on_a_loop_in_any_thread(place: Path) -> None:
    async def live() -> None:
        it = AgentRunner(lambda: CommandAgent(CommandSpec(argv=("echo", "hi"))), context(place))
        await it.run("initialize")
        seen.append((await it.run("process", "x"))["output"])

    seen: list[str] = []
    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    thread.join(30)
    assert seen == ["hi\n"]
