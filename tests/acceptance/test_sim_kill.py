"""`kill -9` at every step of a commit and at any moment: no turn is lost, and the future is the same."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from simulation_scenes import economy, played, steady

from ostler.lifecycle.open import open_manager
from ostler.simulation import RunState, SimulationRun, compare_run, replay, resume_run
from ostler.store import simulations
from ostler.store.store import Store

VICTIM = Path(__file__).with_name("sim_victim.py")
TURNS = 8
STEPS = [f"store.{step}.{when}" for step in ("begin", "save", "commit", "ack") for when in ("before", "after")]
#: The first commit of the program creates the run, the others are turns.
COMMITS = (1, 2, 5, TURNS + 1)


def victim(home: Path, point: str = "", run_id: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(VICTIM), str(home), point, *([run_id] if run_id else [])]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a run that nothing disturbs, by turn."""

    async def play() -> list[str]:
        async with Store(tmp_path_factory.mktemp("whole")) as store:
            run_id, _ = await played(store, economy(), TURNS)
            return [one.digest async for one in replay(store, run_id)]

    return asyncio.run(play())


async def _finish(home: Path, digests: list[str]) -> SimulationRun | None:
    """What the killed program left; then the run goes on, to the end that it would have had."""
    async with Store(home) as store:
        runs = await store.read(simulations.list_runs)
        if not runs:
            return None
        (left,) = runs
        assert left.digest == digests[left.turn]
        assert (left.state is RunState.ENDED) == (left.turn == TURNS), "the last turn and the end are one commit"
        async with resume_run(store, left.run_id, economy()) as run:
            await run.finish(TURNS)
            assert run.record.digest == digests[TURNS]
        assert [one.digest async for one in replay(store, left.run_id)] == digests
        return left


def finish(home: Path, digests: list[str]) -> SimulationRun | None:
    return asyncio.run(_finish(home, digests))


def _kill_and_go_on(home: Path, step: str, commit: int, digests: list[str]) -> None:
    done = victim(home, f"{step}:{commit}:kill")
    assert done.returncode == -signal.SIGKILL, done.stderr
    said = done.stdout.split()
    told = int(said[-1]) if len(said) > 1 else 0
    left = finish(home, digests)
    if left is None:
        assert commit == 1
        assert not said
        return
    assert left.turn >= told, "a turn that was acknowledged is there"
    assert left.turn <= commit - 1


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_each_step_of_a_commit_loses_no_acknowledged_turn(
    tmp_path: Path, digests: list[str], step: str
) -> None:
    for commit in (1, TURNS + 1) if step.endswith("before") else (3,):
        _kill_and_go_on(tmp_path / f"home{commit}", step, commit, digests)


@pytest.mark.torture
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_each_step_of_every_commit_loses_no_acknowledged_turn(
    tmp_path: Path, digests: list[str], step: str
) -> None:
    for commit in range(1, TURNS + 2):
        _kill_and_go_on(tmp_path / f"home{commit}", step, commit, digests)


def test_a_program_that_is_killed_again_and_again_comes_to_the_same_end(tmp_path: Path, digests: list[str]) -> None:
    run_id = ""
    for _ in range(4):
        done = victim(tmp_path, "store.commit.before:3:kill" if not run_id else "store.commit.after:2:kill", run_id)
        run_id = done.stdout.split()[0]
        UUID(run_id)
    done = victim(tmp_path, "", run_id)
    assert done.stdout.split()[-1] == digests[TURNS], done.stderr

    async def compare() -> bool:
        async with Store(tmp_path) as store:
            return bool(await compare_run(store, run_id, economy()))

    assert asyncio.run(compare())


def test_a_kill_at_any_moment_of_a_turn_leaves_a_run_that_goes_on(tmp_path: Path, digests: list[str]) -> None:
    for place, pause in enumerate((0.0, 0.003, 0.012)):
        home = tmp_path / str(place)
        words = [sys.executable, str(VICTIM), str(home), ""]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            program.stdout.readline()
            time.sleep(pause)
            os.kill(program.pid, signal.SIGKILL)
        finish(home, digests)


@pytest.mark.parametrize("killed_after", [2, 3])
def test_a_killed_run_with_brains_in_processes_goes_on_with_the_same_future(tmp_path: Path, killed_after: int) -> None:
    """In turn 3 a brain blocks: killed there, or while the process of it is still being ended."""
    words = [sys.executable, str(VICTIM), str(tmp_path), "", "managed"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        run_id = program.stdout.readline().strip()
        while program.stdout.readline().strip() != str(killed_after):
            assert program.poll() is None
        time.sleep(0.1)
        os.kill(program.pid, signal.SIGKILL)

    async def go_on() -> list[tuple[int, dict[str, object], list[str]]]:
        async with open_manager(tmp_path) as manager:
            async with resume_run(manager.store, run_id, steady(), manager=manager) as run:
                report = await run.finish()
                assert (report.turn, report.ended) == (8, "all turns were played")
            turns = [one async for one in replay(manager.store, run_id)]
            end = time.monotonic() + 60
            while active := await manager.get_active_instances():
                assert time.monotonic() < end, active
                await asyncio.sleep(0.05)
            return [(one.turn, dict(one.decisions), list(one.failures)) for one in turns[1:]]

    both: list[tuple[int, dict[str, object], list[str]]] = [
        (turn, {"ada": {"n": turn}, "bo": {"n": 2 * turn}}, []) for turn in range(1, 9)
    ]
    both[2] = (3, {"bo": {"n": 6}}, ["ada"])
    assert asyncio.run(go_on()) == both
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left
