"""Commands at level process: each request is a process tree at the keeper, kept until its answer is confirmed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from command_ground import (
    CALL,
    PYTHON,
    Begin,
    began,
    begin,
    begun,
    isolation,
    listener,
    lives,
    names_in,
    place,
    plan_for,
    site,
    units,
    waiting,
)
from isolation.ground import RecordingListener, until

from ostler.agents import ExitMeaning, PromptBy
from ostler.clock import SystemClock
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation import Cell, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.attempt import AttemptOutcome

__all__ = ["begin", "isolation", "listener", "place", "site"]

pytestmark = pytest.mark.anyio

GRACE = timedelta(seconds=10)
#: Says how often it was run.
COUNTS = "import os; open('runs', 'a').write('x'); print(os.path.getsize('runs'), 'run')"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def next_level(site: Site, epoch: int = 2) -> ProcessIsolation:
    return ProcessIsolation(SystemClock(), replace(site, epoch=epoch))


async def forgotten(isolation: ProcessIsolation) -> None:
    """Until the keeper knows of no unit."""
    end = time.monotonic() + 10
    while await units(isolation):
        assert time.monotonic() < end, "what was confirmed is not forgotten"
        await asyncio.sleep(0.01)


async def adopted(
    level: ProcessIsolation, plan: StartPlan, handle: Mapping[str, Any] | None = None
) -> tuple[Cell, Mapping[UUID, Verb]]:
    """The cell, and the calls that it reports."""
    listener = RecordingListener()
    cell = await level.adopt(handle, plan, listener)
    assert isinstance(cell, Cell)
    return cell, (await listener.report())[0]


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
    assert cell.is_idle
    assert await cell.call(Verb.HEALTH) is None
    assert await cell.call(Verb.FINAL_STATE) is None
    assert await cell.call(Verb.CLEANUP) == []
    await cell.destroy()


async def test_a_run_that_is_killed_says_by_what(begin: Begin, place: Path, listener: RecordingListener) -> None:
    cell = await begin(plan_for(place, PYTHON, "-c", "import os; os.kill(os.getpid(), 11)"))
    with pytest.raises(AgentExecutionError, match="was killed by SIGSEGV"):
        await cell.call(Verb.PROCESS, "x")
    assert not listener.exits, "a run has failed, not the agent"
    await cell.destroy()


async def test_what_cannot_run_is_refused_as_at_other_levels(
    begin: Begin, isolation: ProcessIsolation, place: Path, listener: RecordingListener
) -> None:
    with pytest.raises(AgentExecutionError, match="there is no program 'no-such-program-here'"):
        await begin(plan_for(place, "no-such-program-here"))
    cell = await isolation.start(plan_for(place, "./no-such-program-here"), listener)
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
    assert not cell.is_idle
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
    begin: Begin, isolation: ProcessIsolation, place: Path, site: Site
) -> None:
    plan = plan_for(place, *waiting(place))
    cell = await begin(plan)
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    (pid,) = await began(place)
    await isolation.close()
    with pytest.raises(AgentGoneError):
        await call
    assert lives(pid)
    heir = next_level(site)
    found, calls = await adopted(heir, plan, cell.handle)
    assert calls == {CALL: Verb.PROCESS}
    assert not found.may_have_lost_calls
    again = asyncio.ensure_future(found.call(Verb.PROCESS, "x", call_id=CALL))
    (place / "go").touch()
    answer = await again
    assert answer["output"] == f"began {pid}\ndone\n"
    assert answer["duration_seconds"] > 0
    await found.destroy()
    await heir.close()


async def test_a_run_that_ended_while_nobody_looked_is_answered(
    begin: Begin, isolation: ProcessIsolation, place: Path, site: Site
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
    heir = next_level(site)
    found, _ = await adopted(heir, plan)
    assert (await found.call(Verb.PROCESS, "x", call_id=CALL))["output"].endswith("done\n")
    await found.destroy()
    await heir.close()


async def test_a_killed_keeper_takes_the_run_along_but_not_an_idle_agent(
    begin: Begin, place: Path, listener: RecordingListener
) -> None:
    busy, idle = await begin(plan_for(place, *waiting(place))), await begin(plan_for(place, PYTHON, "-c", "print(1)"))
    call = asyncio.ensure_future(busy.call(Verb.PROCESS, "x"))
    (pid,) = await began(place)
    os.kill(parent_of(pid), signal.SIGKILL)
    with pytest.raises(AgentGoneError):
        await call
    await until(lambda: len(listener.exits) == 1)
    assert listener.exits[0].outcome is AttemptOutcome.LOST
    assert not lives(pid)
    assert (await idle.call(Verb.PROCESS, "x"))["output"] == "1\n"
    await busy.destroy()
    await idle.destroy()


async def test_many_runs_leave_few_logs_and_no_records(begin: Begin, place: Path, site: Site) -> None:
    plan = plan_for(place, "echo", "it has a log")
    cell = await begin(plan)
    for _ in range(30):
        await cell.call(Verb.PROCESS, "x")
    assert site.directory is not None
    logs = site.directory / "logs" / str(plan.instance_id)
    end = time.monotonic() + 10
    while len(list(logs.iterdir())) > 2 * 20:  # each with the times of its lines
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    await cell.destroy()


# --- what is kept until it is confirmed --------------------------------------------------------------


async def test_an_answer_that_was_not_confirmed_is_given_again_and_not_run_again(
    begin: Begin, isolation: ProcessIsolation, place: Path, site: Site
) -> None:
    plan = plan_for(place, PYTHON, "-S", "-c", COUNTS)
    cell = await begin(plan)
    answer = await cell.call(Verb.PROCESS, "x", call_id=CALL)
    assert answer["output"] == "1 run\n"
    assert await cell.call(Verb.PROCESS, "x", call_id=CALL) == answer, "asked once more it is joined"
    await isolation.close()
    second = next_level(site)
    found, calls = await adopted(second, plan)
    assert calls == {CALL: Verb.PROCESS}
    assert await found.call(Verb.PROCESS, "x", call_id=CALL) == answer
    await second.close()
    third = next_level(site, 3)
    found, calls = await adopted(third, plan)
    assert calls == {CALL: Verb.PROCESS}
    assert await found.call(Verb.PROCESS, "x", call_id=CALL) == answer
    found.ack([CALL])
    await third.close()
    fourth = next_level(site, 4)
    found, calls = await adopted(fourth, plan)
    assert not calls
    assert (place / "runs").read_text() == "x"
    await found.destroy()
    await fourth.close()


async def test_a_failure_is_kept_too_and_says_its_exit(
    begin: Begin, isolation: ProcessIsolation, place: Path, site: Site
) -> None:
    plan = plan_for(place, PYTHON, "-S", "-c", "import sys; sys.exit(7)")
    cell, killed = await begin(plan), uuid4()
    with pytest.raises(AgentExecutionError, match="failed with exit code 7") as first:
        await cell.call(Verb.PROCESS, "x", call_id=CALL)
    other = await begin(plan_for(place, PYTHON, "-S", "-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(AgentExecutionError, match="was killed by SIGKILL") as caught:
        await other.call(Verb.PROCESS, "x", call_id=killed)
    assert (caught.value.exit_code, caught.value.signal) == (None, "SIGKILL")
    await isolation.close()
    heir = next_level(site)
    found, _ = await adopted(heir, plan)
    with pytest.raises(AgentExecutionError) as again:
        await found.call(Verb.PROCESS, "x", call_id=CALL)
    assert str(again.value) == str(first.value)
    assert (again.value.exit_code, again.value.signal) == (7, None)
    await found.destroy()
    await heir.sweep(keep=())
    await heir.close()


async def test_what_is_answered_and_not_confirmed_is_no_running_work(
    begin: Begin, isolation: ProcessIsolation, place: Path
) -> None:
    cell = await begin(plan_for(place, PYTHON, "-S", "-c", COUNTS))
    before = (await cell.usage()).cpu_seconds
    await cell.call(Verb.PROCESS, "x", call_id=CALL)
    assert cell.is_idle
    assert not cell.is_stuck
    used = await cell.usage()
    assert (used.memory_bytes, used.thread_count) == (0, 0)
    assert used.cpu_seconds >= before
    await cell.freeze()
    await cell.thaw()
    assert len(await units(isolation)) == 1
    cell.ack([CALL])
    await forgotten(isolation)
    assert (await cell.usage()).cpu_seconds >= used.cpu_seconds
    assert (await cell.stop(GRACE)).graceful
    await cell.destroy()


async def test_the_same_call_begins_anew_once_it_is_confirmed(
    begin: Begin, isolation: ProcessIsolation, place: Path
) -> None:
    """An answer never holds the output of two runs."""
    code = f"{COUNTS}; os.path.getsize('runs') == 1 and (print(end='', flush=True), os._exit(3))"
    cell = await begin(plan_for(place, PYTHON, "-S", "-c", code))
    with pytest.raises(AgentExecutionError, match="exit code 3; its last lines:\n1 run"):
        await cell.call(Verb.PROCESS, "x", call_id=CALL)
    cell.ack([CALL])
    answer = await cell.call(Verb.PROCESS, "x", call_id=CALL)
    assert answer["output"] == "2 run\n"
    cell.ack([CALL])
    for number in range(3, 13):
        assert (await cell.call(Verb.PROCESS, "x", call_id=CALL))["output"] == f"{number} run\n"
        cell.ack([CALL])
    await cell.destroy()
    assert await units(isolation) == []


async def test_a_cancelled_run_is_confirmed_by_the_cell(begin: Begin, isolation: ProcessIsolation, place: Path) -> None:
    cell = await begin(plan_for(place, *waiting(place)))
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    await began(place)
    call.cancel()
    await asyncio.wait((call,))
    (place / "go").touch()
    assert (await cell.call(Verb.PROCESS, "x", call_id=CALL))["output"].endswith("done\n"), "its name is free again"
    cell.ack([CALL])
    await forgotten(isolation)
    await cell.destroy()


async def test_a_call_that_is_cancelled_at_any_moment_leaves_nothing(
    begin: Begin, isolation: ProcessIsolation, place: Path
) -> None:
    cell = await begin(plan_for(place, *waiting(place)))
    for steps in range(24):
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
        await asyncio.sleep(0 if steps < 4 else steps * 0.0004)
        call.cancel()
        await asyncio.wait((call,))
        assert call.cancelled()
        assert not cell.is_stuck
    (place / "go").touch()
    assert (await cell.call(Verb.PROCESS, "x", call_id=CALL))["output"].endswith("done\n")
    cell.ack([CALL])
    await forgotten(isolation)
    assert [name for name in names_in(place) if name.startswith(".ostler")] == []
    await cell.destroy()


async def test_a_call_that_is_cancelled_twice_while_it_starts_leaves_nothing(
    begin: Begin, isolation: ProcessIsolation, place: Path
) -> None:
    cell = await begin(plan_for(place, *waiting(place)))
    for steps in range(24):
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
        await asyncio.sleep(0 if steps < 4 else steps * 0.0004)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0)
        await asyncio.wait((call,))
        assert call.cancelled()
    await forgotten(isolation)
    assert not any(lives(pid) for pid in begun(place))
    await cell.destroy()


async def test_the_cpu_of_earlier_runs_counts(begin: Begin, place: Path) -> None:
    """Each run is the last of its group, which goes with it."""
    code = "import time\nwhile time.process_time() < 0.3: pass"
    plan = plan_for(place, PYTHON, "-S", "-c", code)
    cell = await begin(replace(plan, limits=replace(plan.limits, max_cpu_percent=100)))
    for number in (1, 2):
        await cell.call(Verb.PROCESS, "x")
        used = (await cell.usage()).cpu_seconds
        assert used == 0 or used >= number * 0.3, "unknown where the kernel does not count, else all of it"
    await cell.destroy()


async def test_a_run_that_lives_on_keeps_its_prompt_and_the_next_manager_removes_it(
    begin: Begin, isolation: ProcessIsolation, place: Path, site: Site
) -> None:
    code = "\nprint(open(os.environ['OSTLER_PROMPT_FILE']).read())"
    words = waiting(place)
    plan = plan_for(place, *words[:2], words[2] + code)
    cell = await begin(plan)
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "remember me", call_id=CALL))
    await began(place)
    await isolation.close()
    await asyncio.wait((call,))
    assert isinstance(call.exception(), AgentGoneError)
    heir = next_level(site)
    found, _ = await adopted(heir, plan)
    (place / "go").touch()
    assert (await found.call(Verb.PROCESS, "x", call_id=CALL))["output"].endswith("remember me\n")
    assert names_in(place) == ["began", "go"]
    await found.destroy()
    await heir.close()


async def test_a_run_that_its_manager_stopped_is_not_found_by_the_next(
    begin: Begin, isolation: ProcessIsolation, place: Path, site: Site
) -> None:
    plan = plan_for(place, *waiting(place))
    cell = await begin(plan)
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    await began(place)
    await cell.call(Verb.SHUTDOWN)
    with pytest.raises(AgentExecutionError, match="was killed by SIGTERM"):
        await call
    await isolation.close()
    heir = next_level(site)
    found, calls = await adopted(heir, plan)
    assert not calls
    (place / "go").touch()
    assert (await found.call(Verb.PROCESS, "x", call_id=CALL))["output"].endswith("done\n")
    await found.destroy()
    await heir.close()


async def test_a_leftover_of_the_same_call_is_ended_before_it_begins(begin: Begin, place: Path) -> None:
    """A manager that was killed while it began a call may leave a run that the next one does not know."""
    plan = plan_for(place, *waiting(place))
    first, second = await begin(plan), await begin(plan)
    lost = asyncio.ensure_future(first.call(Verb.PROCESS, "x", call_id=CALL))
    (pid,) = await began(place)
    call = asyncio.ensure_future(second.call(Verb.PROCESS, "x", call_id=CALL))
    await began(place, 2)
    assert not lives(pid)
    (place / "go").touch()
    assert (await call)["output"] == f"began {begun(place)[1]}\ndone\n"
    await second.destroy()
    lost.cancel()
    await asyncio.wait((lost,))
    await first.destroy()


async def test_one_without_a_run_is_found_although_its_keeper_had_nothing_to_keep(
    begin: Begin, isolation: ProcessIsolation, place: Path, site: Site
) -> None:
    plan = plan_for(place, "echo", "hello")
    cell = await begin(plan)
    await isolation.close()
    assert site.directory is not None
    socket = site.directory / "keeper" / "keeper.sock"
    await until(lambda: not socket.exists())
    heir = next_level(site)
    found, calls = await adopted(heir, plan, cell.handle)
    assert calls == {}
    assert found.may_have_lost_calls
    assert (await found.call(Verb.PROCESS, "x"))["output"] == "hello\n"
    await found.destroy()
    await heir.close()
