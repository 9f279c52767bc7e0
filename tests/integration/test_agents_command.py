"""Commands as agents: real programs at level process that misbehave in the ways programs do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_ground import PYTHON, Begin, begin, isolation, listener, lives, names_in, place, plan_for, site
from isolation.ground import until

from ostler.agents import PromptBy
from ostler.errors import AgentExecutionError
from ostler.isolation import Cell, Verb

__all__ = ["begin", "isolation", "listener", "place", "site"]

pytestmark = pytest.mark.anyio

Make = Callable[..., Awaitable[Cell]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make(begin: Begin, place: Path) -> Make:
    async def made(*argv: str, data: dict[str, Any] | None = None, **fields: Any) -> Cell:
        return await begin(replace(plan_for(place, *argv, **fields), context=data or {}))

    return made


async def run(cell: Cell, request: Any = "x") -> Any:
    return await cell.call(Verb.PROCESS, request)


def numbers(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()] if file.exists() else []


# --- the prompt and the place ------------------------------------------------------------------------


async def test_the_prompt_comes_in_a_file_of_its_own(make: Make, place: Path) -> None:
    code = (
        "import os,sys; f=sys.argv[1]; told=os.environ['OSTLER_PROMPT_FILE'];"
        "print(open(f).read(), oct(os.stat(f).st_mode), told==f, os.getcwd())"
    )
    result = await run(await make(PYTHON, "-c", code, "{prompt_file}"), "Fix the tést.\n")
    assert result["output"] == f"Fix the tést.\n 0o100600 True {place}\n"
    assert (result["exit_code"], result["meaning"], result["dropped_bytes"]) == (0, "done", 0)
    assert result["duration_seconds"] > 0
    assert names_in(place) == [], "the prompt does not stay"


async def test_the_prompt_comes_on_standard_input(make: Make) -> None:
    cell = await make("cat", prompt_by=PromptBy.STDIN)
    result = await run(cell, {"prompt": "x" * 3_000_000})
    assert len(result["output"]) < 1_100_000
    assert result["dropped_bytes"] == 3_000_000 - 1024 * 1024
    assert (await run(cell, ""))["output"] == ""


async def test_the_prompt_comes_as_an_argument(make: Make) -> None:
    cell = await make("printf", "%s|", "a {prompt} b", "{{}}", prompt_by=PromptBy.ARGUMENT)
    assert (await run(cell, "$(id) `id` ; {name}"))["output"] == "a $(id) `id` ; {name} b|{}|"
    with pytest.raises(AgentExecutionError, match="argument must be shorter than 128 KiB; pass a long prompt by file"):
        await run(cell, "x" * 200_000)


async def test_without_a_prompt_by_stdin_there_is_nothing_to_read(make: Make) -> None:
    assert (await run(await make("cat"), "hello"))["output"] == ""


async def test_placeholders_and_variables_say_who_and_where(make: Make, place: Path) -> None:
    words = ("{attempt}", "{name}", "{workdir}", "{context.depth}")
    cell = await make("printf", "%s ", *words, data={"Depth": 3})
    assert (await run(cell))["output"] == f"1 tool {place} 3 "
    cell = await make("sh", "-c", "echo $OSTLER_INSTANCE $OSTLER_ATTEMPT $OSTLER_WORKDIR $OSTLER_MAX_WORKER_THREADS")
    assert (await run(cell))["output"].split()[1:] == ["1", str(place), "4"]


async def test_the_spawn_gives_it_a_directory_and_variables(begin: Begin, tmp_path: Path) -> None:
    given = tmp_path / "given"
    plan = plan_for(given, "sh", "-c", "pwd; echo $COLOUR $MODE", env=("HOME",), set_env={"MODE": "fast"})
    plan = replace(plan, owns_workdir=False, env={"COLOUR": "red", "MODE": "slow"})
    with pytest.raises(AgentExecutionError, match="is not a directory; make it first"):
        await begin(plan)
    assert not given.exists()
    given.mkdir()
    cell = await begin(plan)
    assert (await run(cell))["output"] == f"{given}\nred slow\n"
    given.rmdir()
    with pytest.raises(AgentExecutionError, match="is not a directory; make it first"):
        await run(cell)
    await cell.destroy()
    assert not given.exists()


async def test_it_may_run_elsewhere(make: Make, tmp_path: Path) -> None:
    assert (await run(await make("pwd", cwd=str(tmp_path))))["output"] == f"{tmp_path}\n"
    cell = await make("pwd", cwd="/no/such/place")
    with pytest.raises(AgentExecutionError, match="could not go to its directory /no/such/place: No such file"):
        await run(cell)


async def test_a_program_that_is_none_is_told(make: Make, place: Path) -> None:
    cell = await make("./here", "x")
    with pytest.raises(AgentExecutionError, match=r"^\./here cannot be run: the program './here' was not found$"):
        await run(cell)
    (place / "here").write_text("not a program")
    with pytest.raises(AgentExecutionError, match=r"cannot be run: .*Permission denied"):
        await run(cell)
    (place / "here").chmod(0o700)
    with pytest.raises(AgentExecutionError, match=r"cannot be run: .*Exec format error"):
        await run(cell)
    assert names_in(place) == ["here"]


async def test_it_inherits_no_open_file_and_a_group_of_its_own(make: Make, tmp_path: Path) -> None:
    code = (
        "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], os.getpgrp()==os.getsid(0)==os.getpid())"
    )
    cell = await make(PYTHON, "-c", code)
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert (await run(cell))["output"] == "[0, 1, 2] True\n"


# --- how it ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (40, "signal 40")])
async def test_a_signal_is_named(make: Make, number: int, name: str) -> None:
    cell = await make(PYTHON, "-c", f"import os; print('last', flush=True); os.kill(os.getpid(), {number})")
    with pytest.raises(AgentExecutionError, match=f"was killed by {name}; its last lines:\nlast$") as caught:
        await run(cell)
    assert caught.value.signal == name


@pytest.mark.parametrize("pty", [False, True])
async def test_what_outlives_the_program_is_ended_and_does_not_keep_the_answer(
    make: Make, place: Path, pty: bool
) -> None:
    script = "trap '' TERM HUP; setsid sh -c 'echo $$ > child; exec sleep 1000' & while ! [ -s child ]; do :; done"
    since = time.monotonic()
    assert (await run(await make("sh", "-c", f"{script}; echo started", pty=pty)))["output"] == "started\n"
    assert time.monotonic() - since < 60
    assert not any(lives(child) for child in numbers(place / "child"))


async def test_requests_run_beside_one_another(make: Make) -> None:
    wait_for_both = "touch {prompt}; while ! [ -e a ] || ! [ -e b ]; do sleep 0.01; done; echo {prompt}"
    cell = await make("sh", "-c", wait_for_both, prompt_by=PromptBy.ARGUMENT)
    results = await asyncio.gather(run(cell, "a"), run(cell, "b"))
    assert [result["output"] for result in results] == ["a\n", "b\n"]


# --- cancelling --------------------------------------------------------------------------------------

TALKS = "import os,signal,time; {}; open('up','w').write(str(os.getpid())); time.sleep(1000)"


async def cancelled(cell: Cell, place: Path, stand_still: bool = False) -> float:
    """Runs until the program is up, and cancels; how long that took. It must be gone by then."""
    task = asyncio.ensure_future(run(cell))
    await until(lambda: bool(numbers(place / "up")))
    [pid] = numbers(place / "up")
    if stand_still:
        os.kill(pid, signal.SIGSTOP)
    since = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not lives(pid)
    return time.monotonic() - since


async def test_a_cancelled_program_is_asked_first(make: Make, place: Path) -> None:
    code = TALKS.format("signal.signal(15, lambda *_: (open('asked','w').close(), os._exit(0)))")
    assert await cancelled(await make(PYTHON, "-c", code), place) < 1.5
    assert names_in(place) == ["asked", "up"], "and the prompt does not stay"


async def test_one_that_never_stops_talking_can_be_stopped(make: Make, place: Path) -> None:
    await cancelled(await make("sh", "-c", "echo $$ > up; exec yes"), place)


async def test_one_that_does_not_listen_is_forced_when_its_time_is_over(make: Make, place: Path) -> None:
    cell = await make(PYTHON, "-c", TALKS.format("signal.signal(15, signal.SIG_IGN)"))
    assert 1.9 < await cancelled(cell, place) < 6


async def test_one_that_is_stopped_hears_the_request(make: Make, place: Path) -> None:
    assert await cancelled(await make(PYTHON, "-c", TALKS.format("0")), place, stand_still=True) < 1.5


async def test_shutting_down_leaves_nothing_running(make: Make, place: Path) -> None:
    cell = await make(PYTHON, "-c", TALKS.format("0"))
    task = asyncio.ensure_future(run(cell))
    await until(lambda: bool(numbers(place / "up")))
    await cell.call(Verb.SHUTDOWN)
    assert not lives(numbers(place / "up")[0])
    with pytest.raises(AgentExecutionError, match="was killed by SIGTERM"):
        await task


# --- the terminal ------------------------------------------------------------------------------------


async def test_with_a_pty_it_sees_a_terminal(make: Make) -> None:
    code = "import os; print(*(os.isatty(n) for n in (0,1,2)), *os.get_terminal_size(), os.environ['TERM']); print('ä')"
    cell = await make(PYTHON, "-c", code, pty=True)
    assert (await run(cell))["output"] == "True True True 120 40 xterm-256color\nä\n"
    cell = await make(PYTHON, "-c", code.replace("*os.get_terminal_size(), ", ""))
    assert (await run(cell))["output"] == "False False False dumb\nä\n"


async def test_a_prompt_on_standard_input_goes_with_a_terminal(make: Make) -> None:
    code = "import os,sys; print(len(sys.stdin.read()), os.isatty(1))"
    cell = await make(PYTHON, "-c", code, pty=True, prompt_by=PromptBy.STDIN)
    assert (await run(cell, "x" * 100_000))["output"] == "100000 True\n"


async def test_much_output_through_a_terminal_arrives_whole(make: Make) -> None:
    result = await run(await make("seq", "100000", pty=True))
    assert result["output"] == "".join(f"{number}\n" for number in range(1, 100_001))
