"""Commands at level process: each request is a process tree at the keeper, with the same answers as elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from ostler.agents import Agent, AgentKind, AgentManifest, CommandSpec, ExitMeaning, PromptBy
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation import Cell, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.model import AttemptOutcome, ResourceLimits
from ostler.seams import SystemClock
from ostler.testing.isolation_suite.ground import Ear, until

pytestmark = pytest.mark.anyio

PYTHON = sys.executable
CALL = UUID("01890000-0000-7000-8000-0000000ca11d")
GRACE = timedelta(seconds=10)
Begin = Callable[..., Awaitable[Cell]]


def plan_for(place: Path, *argv: str, prompt: str | None = None, **spec: Any) -> StartPlan:
    command = CommandSpec(argv=argv, **spec)
    manifest = AgentManifest(id=UUID(int=2), name="tool", kind=AgentKind.COMMAND, command=command, prompt=prompt)
    return StartPlan(
        instance_id=uuid4(),
        attempt=1,
        name="tool",
        manifest=manifest,
        maker=Agent,
        limits=ResourceLimits(max_memory_mb=128),
        context={},
        workdir=place,
    )


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(directory=tmp_path / "home", outlive=timedelta(seconds=20), epoch=1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


@pytest.fixture
async def isolation(site: Site) -> AsyncIterator[ProcessIsolation]:
    level = ProcessIsolation(SystemClock(), site)
    yield level
    site.outlive = timedelta(0)
    await level.close()


@pytest.fixture
async def ear() -> Ear:
    return Ear()


@pytest.fixture
def begin(isolation: ProcessIsolation, ear: Ear) -> Begin:
    async def begin(plan: StartPlan) -> Cell:
        await isolation.prepare(plan)
        cell = await isolation.start(plan, ear)
        await cell.call(Verb.INITIALIZE)
        return cell

    return begin


def waiting(place: Path, code: str = "pass") -> tuple[str, ...]:
    """Says that it began, waits for a file, says that it is done."""
    text = f"""import time, os, sys; print('began', os.getpid(), flush=True)
{code}
open({str(place / "began")!r}, 'a').write(str(os.getpid()) + ' ')
while not os.path.exists({str(place / "go")!r}): time.sleep(0.005)
print('done')"""
    return (PYTHON, "-c", text)


async def began(place: Path, count: int = 1) -> list[int]:
    def pids() -> list[int]:
        file = place / "began"
        return [int(one) for one in file.read_text().split()] if file.exists() else []

    await until(lambda: len(pids()) == count)
    return pids()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def names_in(place: Path) -> list[str]:
    return sorted(one.name for one in place.iterdir())


async def test_every_way_of_a_prompt(begin: Begin, place: Path) -> None:
    for by in PromptBy:
        code = {
            PromptBy.FILE: "import os; print(open(os.environ['OSTLER_PROMPT_FILE']).read())",
            PromptBy.STDIN: "import sys; print(sys.stdin.read())",
            PromptBy.ARGUMENT: "import sys; print(sys.argv[1])",
        }[by]
        cell = await begin(plan_for(place, PYTHON, "-c", code, prompt_by=by, prompt="Be brief."))
        answer = await cell.call(Verb.PROCESS, "Hello.")
        assert (answer["exit_code"], answer["meaning"], answer["dropped_bytes"]) == (0, "done", 0)
        assert answer["output"] == "Be brief.\n\nHello.\n"
        assert answer["duration_seconds"] > 0
        await cell.destroy()
    assert not names_in(place), "no prompt is left lying about"


async def test_it_sees_a_terminal_where_it_is_to(begin: Begin, place: Path) -> None:
    code = "import os; print(os.isatty(0), os.isatty(1), os.get_terminal_size(1).columns)"
    cell = await begin(plan_for(place, PYTHON, "-c", code, pty=True))
    assert (await cell.call(Verb.PROCESS, "x"))["output"] == "True True 120\n"
    await cell.destroy()


async def test_exit_codes_mean_what_the_definition_says(begin: Begin, place: Path) -> None:
    code = "import os, sys; print('so it goes'); sys.exit(int(open(os.environ['OSTLER_PROMPT_FILE']).read()))"
    cell = await begin(plan_for(place, PYTHON, "-c", code, exit_codes={"3": ExitMeaning.RETRY}))
    assert (await cell.call(Verb.PROCESS, "3"))["meaning"] == "retry"
    with pytest.raises(AgentExecutionError, match=r"failed with exit code 4; its last lines:\nso it goes"):
        await cell.call(Verb.PROCESS, "4")
    assert cell.alive_now()
    assert await cell.call(Verb.HEALTH) is None
    assert await cell.call(Verb.FINAL_STATE) is None
    assert await cell.call(Verb.CLEANUP) == []
    await cell.destroy()


async def test_a_run_that_is_killed_says_by_what(begin: Begin, place: Path, ear: Ear) -> None:
    cell = await begin(plan_for(place, PYTHON, "-c", "import os; os.kill(os.getpid(), 11)"))
    with pytest.raises(AgentExecutionError, match="was killed by SIGSEGV"):
        await cell.call(Verb.PROCESS, "x")
    assert not ear.exits, "a run has failed, not the agent"
    await cell.destroy()


async def test_what_cannot_run_is_refused_as_at_other_levels(
    begin: Begin, isolation: ProcessIsolation, place: Path, ear: Ear
) -> None:
    with pytest.raises(AgentExecutionError, match="must be a program on the agent's PATH") as caught:
        await begin(plan_for(place, "no-such-program-here"))
    assert caught.value.exception_type == "ostler.errors.ValidationError"
    cell = await isolation.start(plan_for(place, "./no-such-program-here"), ear)
    with pytest.raises(AgentExecutionError, match="cannot be run"):
        await cell.call(Verb.PROCESS, "x")
    with pytest.raises(AgentExecutionError, match="must be a text"):
        await cell.call(Verb.PROCESS, 7)
    await cell.destroy()


async def test_much_output_is_bounded_and_counted(begin: Begin, place: Path) -> None:
    code = "import sys; sys.stdout.write('a' * 300_000 + 'z' * 300_000)"
    cell = await begin(plan_for(place, PYTHON, "-c", code, max_output_bytes=2048))
    answer = await cell.call(Verb.PROCESS, "x")
    assert answer["output"].startswith("a" * 1024)
    assert answer["output"].endswith("z" * 1024)
    assert answer["dropped_bytes"] == 600_000 - 2048
    await cell.destroy()


async def test_a_cancelled_run_ends_with_all_it_started(begin: Begin, place: Path) -> None:
    child = (
        "import subprocess; p = subprocess.Popen([sys.executable, '-c', 'import os, signal, time; os.setsid(); "
        "signal.signal(15, signal.SIG_IGN); time.sleep(60)']); "
        f"open({str(place / 'child')!r}, 'w').write(str(p.pid))"
    )
    cell = await begin(plan_for(place, *waiting(place, child)))
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x"))
    (pid,) = await began(place)
    grandchild = int((place / "child").read_text())
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not lives(pid)
    assert not lives(grandchild)
    assert not cell.is_stuck
    (place / "go").touch()
    assert (await cell.call(Verb.PROCESS, "x"))["output"].endswith("done\n")
    await cell.destroy()


async def test_runs_overlap_and_are_frozen_and_stopped_together(begin: Begin, place: Path) -> None:
    cell = await begin(plan_for(place, *waiting(place)))
    calls = [asyncio.ensure_future(cell.call(Verb.PROCESS, str(number))) for number in range(3)]
    pids = await began(place, 3)
    assert cell.alive_now() is None
    assert (await cell.usage()).memory_bytes > 0
    await cell.freeze()
    (place / "go").touch()
    await asyncio.wait(calls, timeout=0.2)
    assert not any(call.done() for call in calls)
    await cell.thaw()
    assert all(one["output"].endswith("done\n") for one in await asyncio.gather(*calls))
    (place / "go").unlink()
    calls = [asyncio.ensure_future(cell.call(Verb.PROCESS, str(number))) for number in range(3)]
    pids += await began(place, 6)
    report = await cell.stop(GRACE)
    assert report.left_behind is None
    for call in calls:
        with pytest.raises(AgentGoneError):
            await call
    assert not any(lives(pid) for pid in pids)
    with pytest.raises(AgentGoneError):
        await cell.call(Verb.PROCESS, "x")
    await cell.destroy()


async def test_a_run_in_flight_is_found_by_the_next_manager(
    begin: Begin, isolation: ProcessIsolation, place: Path, ear: Ear, site: Site
) -> None:
    plan = plan_for(place, *waiting(place))
    cell = await begin(plan)
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    (pid,) = await began(place)
    await isolation.close()
    with pytest.raises(AgentGoneError):
        await call
    assert lives(pid)
    heir = ProcessIsolation(SystemClock(), replace(site, epoch=2))
    found = await heir.recover(cell.handle, plan, ear)
    assert isinstance(found, Cell)
    assert found.in_flight == {CALL: Verb.PROCESS}
    again = asyncio.ensure_future(found.rejoin(CALL))
    (place / "go").touch()
    answer = await again
    assert answer["output"] == f"began {pid}\ndone\n"
    assert answer["duration_seconds"] > 0
    assert not found.in_flight
    await found.destroy()
    await heir.close()


async def test_a_run_that_ended_while_nobody_looked_is_answered(
    begin: Begin, isolation: ProcessIsolation, place: Path, ear: Ear, site: Site
) -> None:
    plan = plan_for(place, *waiting(place))
    cell = await begin(plan)
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    (pid,) = await began(place)
    await isolation.close()
    with pytest.raises(AgentGoneError):
        await call
    (place / "go").touch()
    await until(lambda: not lives(pid))
    heir = ProcessIsolation(SystemClock(), replace(site, epoch=2))
    found = await heir.recover(None, plan, ear)
    assert isinstance(found, Cell)
    assert (await found.rejoin(CALL))["output"].endswith("done\n")
    await found.destroy()
    await heir.close()


async def test_a_killed_keeper_takes_the_run_along_but_not_an_idle_agent(begin: Begin, place: Path, ear: Ear) -> None:
    busy, idle = await begin(plan_for(place, *waiting(place))), await begin(plan_for(place, PYTHON, "-c", "print(1)"))
    call = asyncio.ensure_future(busy.call(Verb.PROCESS, "x"))
    (pid,) = await began(place)
    os.kill(parent_of(pid), signal.SIGKILL)
    with pytest.raises(AgentGoneError):
        await call
    await until(lambda: len(ear.exits) == 1)
    assert ear.exits[0].outcome is AttemptOutcome.LOST
    assert not lives(pid)
    assert (await idle.call(Verb.PROCESS, "x"))["output"] == "1\n"
    await busy.destroy()
    await idle.destroy()


async def test_many_runs_leave_few_logs_and_no_records(begin: Begin, place: Path, site: Site) -> None:
    plan = plan_for(place, "true")
    cell = await begin(plan)
    for _ in range(30):
        await cell.call(Verb.PROCESS, "x")
    assert site.directory is not None
    logs = site.directory / "logs" / str(plan.instance_id)
    end = time.monotonic() + 10
    while len(list(logs.iterdir())) > 20:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    await cell.destroy()
