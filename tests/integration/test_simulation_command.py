"""`ostler sim` about runs that have a history: forked with less room, moved to another folder, removed."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import pytest
from sim_program import Program
from simulation_scenes import doing, played

from ostler.errors import DefinitionError, InvalidOperationError, SimulationNotFoundError, ValidationError
from ostler.simulation import (
    begin_run,
    fork_run,
    load_scenario,
    remove_run,
    replay,
    resume_run,
    scenario_of_run,
)
from ostler.store import Store, open_store

T = TypeVar("T")
QUIT = """
class Brain:
    def decide(self, view):
        if view.turn == 1 and view.number > 1:
            view.remove_agent()
        return None
"""
COUNTS = """
class Brain:
    def decide(self, view):
        return {"n": view.state["n"] + 1}
"""
BREAKS = """
class Brain:
    asked = False
    def decide(self, view):
        self.asked = True
        return {"n": view.state["n"] + 1}
    def save(self):
        if self.asked:
            raise SystemExit
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Program:
    return Program(tmp_path, monkeypatch, capfd)


def within(program: Program, act: Callable[[Store], Awaitable[T]]) -> T:
    async def opened() -> T:
        async with open_store(program.home) as store:
            return await act(store)

    return asyncio.run(opened())


# --- forks ------------------------------------------------------------------------------------------


def test_a_fork_may_have_room_for_those_who_are_left(program: Program) -> None:
    file = program.scenario(QUIT)
    file.write_text(file.read_text().replace('kind = "one"', 'kind = "one"\ncount = 3'))
    assert program.sim("run", file, "-q").code == 0
    fork = program.sim("fork", "last", "--at", "2", "--set", "settings.max_agents=2", "--turns", "3", "-q")
    assert (fork.code, "1 agents" in fork.out) == (0, True), fork.err
    resumed = program.sim("resume", "last", "--turns", "5", "-q")
    assert resumed.code == 0, resumed.err
    early = program.sim("fork", "last~1", "--at", "0", "--set", "settings.max_agents=2", "-q")
    assert early.code == 2
    assert "max_agents must be at least 3, the agents there are at turn 0" in early.err
    assert "there may be 2 at a time" in program.sim("run", file, "--set", "settings.max_agents=2", "-q").err


# --- another folder ---------------------------------------------------------------------------------


def test_a_scenario_that_was_moved_is_found_by_its_new_place(program: Program) -> None:
    old, new = program.folder / "old", program.folder / "new"
    file = program.scenario(COUNTS, folder=old)
    assert program.sim("run", file, "--turns", "2", "--set", "agents.0.state.n=10", "-q").code == 0
    old.rename(new)
    file = new / file.name
    lost = program.sim("resume", "last", "--turns", "4", "-q")
    assert lost.code == 2
    assert f"{old / file.name} is not there any more; say where it is now with --scenario FILE" in lost.err
    assert f"there is no acts.py in {old}" in lost.err
    for command in ("replay last --check", "resume last --turns 4 -q", "fork last --at 1 --turns 4 -q"):
        done = program.sim(*command.split(), "--scenario", file)
        assert done.code == 0, done.err
    assert program.sim("replay", "last", "--check").code == 0, "a fork knows where its scenario stood"
    assert program.sim("replay", "last", "--scenario", file).code == 2
    assert "must name" not in program.sim("show", "last").out
    (newest,) = within(program, lambda store: store.list_runs(limit=1))
    turns = within(program, lambda store: _states(store, newest.run_id))
    assert turns == [{"ada": {"n": 10 + turn}} for turn in range(5)]
    assert program.sim("resume", "last", "--turns", "9", "--scenario", new / "acts.py").code == 2


async def _states(store: Store, run_id: UUID) -> list[object]:
    return [one.states async for one in replay(store, run_id)]


def test_a_hint_says_where_the_scenario_stands_now(program: Program) -> None:
    old = program.folder / "old"
    file = program.scenario(COUNTS, folder=old)
    assert program.sim("run", file, "--turns", "2", "-q").code == 0
    old.rename(program.folder / "new place")
    file = program.folder / "new place" / file.name
    (file.parent / "acts.py").write_text(BREAKS)
    done = program.sim("resume", "last", "--turns", "4", "-q", "--scenario", file)
    assert done.code == 1
    assert "ostler: save() of ada failed: SystemExit (acts.py:9)" in done.err
    assert f"--turns 4 --scenario '{file}'" in done.err


@pytest.mark.anyio
async def test_a_program_finds_the_scenario_of_a_run(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "acts", raising=False)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "acts.py").write_text(COUNTS)
    file = tmp_path / "old" / "small.toml"
    file.write_text(
        'name = "small"\nturns = 3\n[brains]\none = "acts:Brain"\n'
        '[[agents]]\nname = "ada"\nkind = "one"\nstate = { n = 0 }\n'
    )
    async with begin_run(store, load_scenario(file)) as run:
        await run.run(1)
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(DefinitionError, match=r"there is no acts\.py"):
        scenario_of_run(run.record)
    scenario = scenario_of_run(run.record, file=tmp_path / "new" / "small.toml")
    async with resume_run(store, run.run_id, scenario) as again:
        assert (await again.finish()).turn == 3
    assert again.state.states["ada"] == {"n": 3}
    with pytest.raises(ValidationError, match="run must be a SimulationRun"):
        scenario_of_run("last")  # type: ignore[arg-type]  # wrong on purpose
    run_id, _ = await played(store, doing(lambda _: None), 1)
    made = await store.get_run(run_id)
    assert made is not None
    with pytest.raises(InvalidOperationError, match="was begun by a program"):
        scenario_of_run(made)


# --- removing ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_run_is_removed_when_nothing_was_forked_from_it(store: Store) -> None:
    scenario = doing(lambda _: None)
    run_id, _ = await played(store, scenario, 5)
    other, _ = await played(store, scenario, 1)
    async with fork_run(store, run_id, scenario, at=3) as fork:
        await fork.run(4)
    with pytest.raises(InvalidOperationError, match=f"run {run_id} holds the first turns of {fork.run_id}, .*remove"):
        await remove_run(store, run_id)
    assert await remove_run(store, str(fork.run_id)) == 4
    async with resume_run(store, run_id, scenario) as playing:
        assert await remove_run(store, run_id) == 5
        with pytest.raises(SimulationNotFoundError, match="there is no simulation"):
            await playing.play_turn()
    with pytest.raises(SimulationNotFoundError):
        await remove_run(store, run_id)
    assert [one.run_id for one in await store.list_runs()] == [other]
    with pytest.raises(ValidationError, match="store must be a store"):
        await remove_run(5, run_id)  # type: ignore[arg-type]  # wrong on purpose


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rm_asks_first_and_removes(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    file = program.scenario(COUNTS)
    assert program.sim("run", file, "-q").code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    asked = program.sim("rm", "last")
    assert asked.code == 2
    assert "nobody is here to be asked; say --yes" in asked.err
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    kept = program.sim("rm", "last")
    assert (kept.code, "for good?" in kept.err, "nothing was removed" in kept.err) == (1, True, True)
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    done = program.sim("rm", "last")
    assert (done.code, done.out, "is removed" in done.err) == (0, "", True)
    assert program.sim("run", file, "-q").code == 0
    assert program.sim("rm", "last", "--yes").code == 0
    assert program.sim("rm", "last", "--yes").code == 4
    assert within(program, lambda store: store.list_runs()) == []
