"""Kill -9 in mid-turn: the run goes on after the last complete turn, and its future is the one it would have had."""

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
from ostler.simulation import load_scenario, resume_run
from sim_scene import CODE, SCENARIO, Scene

from ostler.model import RunState
from ostler.store import open_store

VICTIM = Path(__file__).with_name("sim_victim.py")
TURNS = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run that nobody disturbed."""
    scene = Scene(tmp_path_factory.mktemp("whole"))
    return str(scene.told("run", scene.file)["digest"])


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "scene")


def killed_at(scene: Scene, command: list[str], plan: str) -> None:
    done = scene.sim(*command, SIM_MARK=str(scene.folder), SIM_PLAN=f"kill:{plan}")
    assert done.returncode == -signal.SIGKILL, (plan, done.stderr)


@pytest.mark.parametrize("plan", ["deciding:1", "deciding:6", "updating:5", "saving:8", "updating:12"])
def test_a_program_that_is_killed_in_mid_turn_goes_on_as_if_it_had_not_been(
    scene: Scene, whole: str, plan: str
) -> None:
    killed_at(scene, ["run", str(scene.file)], plan)
    last = int(plan.partition(":")[2]) - 1
    assert [turn.turn for turn in scene.turns()] == list(range(last + 1)), "it stands at the last complete turn"
    ended = scene.told("resume", "last")
    assert (ended["digest"], ended["turn"], ended["played"]) == (whole, TURNS, TURNS - last)
    assert [turn.turn for turn in scene.turns()] == list(range(TURNS + 1))


def test_a_program_that_is_killed_again_and_again_comes_to_the_same_end(scene: Scene, whole: str) -> None:
    killed_at(scene, ["run", str(scene.file)], "updating:2")
    for plan in ("deciding:2", "saving:5", "updating:9"):
        killed_at(scene, ["resume", "last"], plan)
    assert scene.told("resume", "last")["digest"] == whole


# --- at each step of a commit -------------------------------------------------------------------

FAULT_POINTS = (
    "store.begin.after",
    "store.save.before",
    "store.commit.before",
    "store.commit.after",
    "store.ack.before",
    "store.ack.after",
)


def die(scene: Scene, fault: str, *run: str) -> list[int]:
    """The turns that were acknowledged before it died."""
    done = subprocess.run(
        [sys.executable, VICTIM, scene.home, scene.file, *run],
        env=scene.environment(OSTLER_FAULT=f"{fault}:kill"),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == -signal.SIGKILL, (fault, done.stderr)
    return [int(line) for line in done.stdout.split()]


async def gone_on(scene: Scene, run_id: UUID) -> str:
    async with open_store(scene.home) as store, resume_run(store, run_id, load_scenario(scene.file)) as run:
        await run.finish()
        return run.record.digest


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_kill_at_each_step_of_a_commit_loses_no_turn_that_was_acknowledged(
    scene: Scene, whole: str, point: str
) -> None:
    acknowledged = die(scene, f"{point}:7")
    (run,) = scene.runs()
    there = [turn.turn for turn in scene.turns()]
    assert there == list(range(len(there)))
    assert set(acknowledged) <= set(there)
    assert len(there) <= len(acknowledged) + 2, "turn 0, and one that was on the disk before anybody was told"
    assert asyncio.run(gone_on(scene, run.run_id)) == whole
    assert [turn.turn for turn in scene.turns()] == list(range(TURNS + 1))


def test_a_kill_at_the_last_commit_leaves_a_run_that_is_complete_and_ended_or_neither(scene: Scene, whole: str) -> None:
    """The last turn and the end of the run are one commit."""
    last = TURNS + 1  # the first is that of the run itself
    die(scene, f"store.commit.before:{last}")
    (run,) = scene.runs()
    assert (run.turn, run.state) == (TURNS - 1, RunState.OPEN)
    assert asyncio.run(gone_on(scene, run.run_id)) == whole
    die(scene, f"store.commit.after:{last}")
    run = scene.runs()[0]
    assert (run.turn, run.state, run.digest) == (TURNS, RunState.ENDED, whole)


# --- with brains in processes of their own ------------------------------------------------------

REMOTE = """
from ostler import Agent

class Remote(Agent):
    def process(self, request):
        Path(__file__).with_name("pids").joinpath(str(os.getpid())).touch()
        return {"give": request["turn"] % 3, "to": request["name"]}
"""


def test_brains_in_processes_of_their_own_do_not_outlive_a_killed_run(scene: Scene) -> None:
    (scene.folder / "market.py").write_text(CODE + REMOTE)
    brains = 'remote = { agent = "market:Remote", isolation = "process" }\n'
    group = '\n[[agents]]\nname = "far"\nkind = "remote"\ncount = 2\nstate = { wealth = 4 }\n'
    text = SCENARIO.replace("[[agents]]", f"{brains}\n[[agents]]", 1) + group
    scene.file.write_text(text.replace("turns = 12", "turns = 6"))
    pids = scene.folder / "pids"
    pids.mkdir()
    expected = scene.told("run", scene.file)["digest"]
    killed_at(scene, ["run", str(scene.file)], "updating:4")
    assert scene.told("resume", "last")["digest"] == expected
    names = [int(one.name) for one in pids.iterdir()]
    assert len(names) >= 4, "brains were really elsewhere"
    end = time.monotonic() + 30
    while alive := [pid for pid in names if is_alive(pid)]:
        assert time.monotonic() < end, f"{alive} are left"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
