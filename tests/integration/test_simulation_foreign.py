"""Code of a scenario that raises what ends programs, breaks its contract, or is no code at all: its own failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sim_program import Program
from simulation_scenes import Doing, doing, fails, playing, scripted, silent

from ostler.agents.failures import error_place
from ostler.errors import InvalidOperationError, OstlerError, SimulationError, ValidationError
from ostler.simulation import (
    AgentGroup,
    Brains,
    Scenario,
    SimulationOrchestrator,
    begin_run,
    fork_run,
    kept_at,
    replay,
    resume_run,
    state_at,
)
from ostler.simulation.foreign import is_call_off
from ostler.store import Store

pytestmark = pytest.mark.anyio
wrong: Any = None
#: What ends a program, or looks as if somebody had called the work off.
ENDING = (SystemExit, GeneratorExit, asyncio.CancelledError)


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> Any:
        raise error

    return act


class AsyncDoing(Doing):
    async def update(self, state: Any, decisions: Any, world: Any) -> Any:
        await asyncio.sleep(0)
        return super().update(state, decisions, world)


# --- what it raises -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENDING)
@pytest.mark.parametrize("engine", [Doing, AsyncDoing])
async def test_an_engine_that_would_end_the_program_has_failed(kind: type[BaseException], engine: Any) -> None:
    async with playing({"ada": silent}, engine=engine(raising(kind(0)))) as run:
        with pytest.raises(SimulationError, match=f"the engine failed in turn 1: {kind.__name__}"):
            await run.play_turn()


async def test_a_plain_engine_is_no_ctrl_c() -> None:
    async with playing({"ada": silent}, engine=Doing(raising(KeyboardInterrupt()))) as run:
        with pytest.raises(SimulationError, match="the engine failed in turn 1: KeyboardInterrupt"):
            await run.play_turn()


async def test_who_calls_off_a_turn_calls_off_an_async_engine() -> None:
    begun = asyncio.Event()

    class Slow:
        async def update(self, *_: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

    async with playing({"ada": silent}, engine=Slow()) as run:
        playing_on = asyncio.create_task(run.play_turn())
        await begun.wait()
        playing_on.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing_on


def test_a_turn_that_is_thrown_away_says_nothing() -> None:
    class Slow:
        async def update(self, *_: Any) -> None:
            await asyncio.Event().wait()

    async def later(_: Any) -> None: ...

    loop = asyncio.new_event_loop()
    run = SimulationOrchestrator(engine=Slow())
    run.add_agent("ada", later, {})
    turn = run.play_turn()
    task = loop.create_task(turn)
    loop.run_until_complete(asyncio.wait_for(asyncio.wait([task], timeout=0.05), 1))
    turn.close()  # raises what is made of it
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.run_until_complete(run.close())
    loop.close()


def test_ctrl_c_comes_to_the_main_thread_only() -> None:
    heard: list[bool] = []
    thread = threading.Thread(target=lambda: heard.append(is_call_off(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert (heard, is_call_off(KeyboardInterrupt()), is_call_off(SystemExit())) == ([False], True, False)


@pytest.mark.parametrize("kind", ENDING)
async def test_a_brain_that_would_end_the_program_cannot_be_made(store: Store, kind: type[BaseException]) -> None:
    brains = Brains({"ada": raising(kind(0))})
    scenario = Scenario(name="ends", brains=brains, agents=(AgentGroup(name="ada", kind="ada"),))
    with pytest.raises(ValidationError, match=f"brain ada cannot be made with these params: {kind.__name__}"):
        async with begin_run(store, scenario):
            pass


@pytest.mark.parametrize("kind", ENDING)
async def test_what_save_restore_and_the_making_of_an_engine_raise_is_told(
    store: Store, kind: type[BaseException]
) -> None:
    class Keeper(Doing):
        def __init__(self) -> None:
            super().__init__(lambda _: None)

        def save(self) -> Any:
            return 1

        restore = staticmethod(raising(kind(0)))

    class Loser(Keeper):
        save = staticmethod(raising(kind(0)))

    said = f"{kind.__name__}.*test_simulation_foreign.py:"
    with pytest.raises(SimulationError, match=rf"save\(\) of the engine failed: {said}"):
        async with begin_run(store, scripted({"ada": silent}, engine=Loser)):
            pass
    with pytest.raises(SimulationError, match=f"the engine cannot be made: {said}"):
        async with begin_run(store, scripted({"ada": silent}, engine=raising(kind(0)))):
            pass
    scenario = scripted({"ada": silent}, engine=Keeper)
    async with begin_run(store, scenario) as run:
        pass
    with pytest.raises(SimulationError, match=rf"restore\(\) of the engine failed: {said}"):
        async with resume_run(store, run.run_id, scenario):
            pass


# --- what it does and answers -----------------------------------------------------------------------


def nan(state: Any) -> None:
    state.members["ada"].state["n"] = float("nan")


def nothing_shared(state: Any) -> None:
    state.global_state = None


SLIPS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda _: 7, "the engine answered '?7'? in turn 1; let `update` return None"),
    (lambda _: {"zoe": "no"}, "the engine refused the decision of '?zoe'? in turn 1, but nobody here has that name"),
    (lambda _: {5: "no"}, "the engine refused the decision of '?5'? in turn 1, but nobody"),
    (nothing_shared, "the engine left None in the place of global_state in turn 1"),
]


@pytest.mark.parametrize(("act", "said"), SLIPS, ids=["answer", "stranger", "number", "global_state"])
async def test_an_engine_that_breaks_its_contract_is_told_so(
    store: Store, act: Callable[[Any], Any], said: str
) -> None:
    async with playing({"ada": silent}, engine=Doing(act)) as memory:
        with pytest.raises(SimulationError, match=said):
            await memory.run(3)
    async with begin_run(store, doing(act)) as run:
        with pytest.raises(SimulationError, match=said):
            await run.run(3)
        assert run.record.turn == 0


async def test_an_engine_may_give_back_the_state_it_was_given(store: Store) -> None:
    async with playing({"ada": silent}, engine=Doing(lambda state: state)) as memory:
        assert (await memory.run(3)).turn == 3
    async with begin_run(store, doing(lambda state: state)) as run:
        assert (await run.run(3)).turn == 3


async def test_a_state_that_cannot_be_kept_is_the_engines_failure(store: Store) -> None:
    async with begin_run(store, doing(nan)) as run:
        with pytest.raises(SimulationError, match=r"the engine failed in turn 1: states\.ada cannot be kept"):
            await run.run(3)


@pytest.mark.parametrize("engine", ["NaN", "Stranger", "Boom", "Exit", "Seven"])
def test_every_failure_of_an_engine_is_one_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], engine: str
) -> None:
    program = Program(tmp_path, monkeypatch, capfd)
    done = program.sim("run", program.scenario(ENGINES, engine=engine), "-q")
    assert (done.code, done.out) == (1, "")
    assert "ostler: the engine " in done.err
    assert "go on with: ostler sim resume" in done.err


ENGINES = """
class Brain:
    def decide(self, view): return None
class NaN:
    def update(self, state, decisions, world): state.members["ada"].state["n"] = float("nan")
class Stranger:
    def update(self, state, decisions, world): return {"zoe": "no"}
class Boom:
    def update(self, state, decisions, world): raise KeyError("x")
class Seven:
    def update(self, state, decisions, world): return 7
class Exit:
    def update(self, state, decisions, world): raise SystemExit(0)
"""

BRAINS = """
import asyncio
class Base:
    def decide(self, view): return None
class Keyboard(Base):
    def save(self): raise KeyboardInterrupt
class Cancels(Base):
    async def decide(self, view):
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(1)
"""


@pytest.mark.parametrize("brain", ["Keyboard", "Cancels"])
def test_nothing_that_a_scenario_does_looks_like_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], brain: str
) -> None:
    program = Program(tmp_path, monkeypatch, capfd)
    done = program.sim("run", program.scenario(BRAINS, brain=brain), "-q")
    assert (done.code, done.out) == (1, "")
    assert "ostler: the code of the scenario has ended the run: " in done.err


# --- slips of a program -----------------------------------------------------------------------------


async def test_two_runs_at_once_are_refused_and_turns_between_are_not_counted_twice(store: Store) -> None:
    async def later(_: Any) -> None:
        await asyncio.sleep(0)

    async with begin_run(store, scripted({"ada": later}, turns=6)) as run:
        first = asyncio.create_task(run.finish())
        await asyncio.sleep(0)
        for again in (run.run, run.finish):
            with pytest.raises(InvalidOperationError, match="turns are played by another `run`"):
                await again(5)
        await run.play_turn()
        report = await first
        # The one in between is not one of those that `run` was to play.
        assert (report.played, report.turn, run.state.turn) == (6, 7, 7)


async def test_wrong_types_are_told_in_a_sentence(store: Store) -> None:
    scenario = doing(lambda _: None)
    async with begin_run(store, scenario) as run:
        for turns in ("3", 1.5, None, True, -1):
            with pytest.raises(ValidationError, match="turns must be a whole number, 0 or more"):
                await run.run(turns)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ValidationError, match="turns must be a whole number"):
            await run.finish("3")  # type: ignore[arg-type]  # wrong on purpose
    run_id = run.run_id
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: begin_run(store, wrong), "scenario must be a Scenario"),
        (lambda: resume_run(store, run_id, wrong), "scenario must be a Scenario"),
        (lambda: fork_run(store, run_id, wrong, at=0), "scenario must be a Scenario"),
        (lambda: fork_run(store, run_id, scenario, at="x"), "at must be a whole number"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: fork_run(store, run_id, scenario, at=1.5), "at must be a whole number"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: fork_run(store, run_id, scenario, at=0, settings=5), "settings must be"),  # type: ignore[arg-type]  # wrong on purpose
    ]
    for call, said in calls:
        with pytest.raises(ValidationError, match=said):
            async with call():
                pass
    for bad in (5, "memory:"):
        with pytest.raises(ValidationError, match="store must be a store"):
            await state_at(bad, run_id, 0)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ValidationError, match="store must be a store"):
            _ = [one async for one in replay(bad, run_id)]  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValidationError, match="turn must be a whole number"):
        await kept_at(store, run_id, "1")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValidationError, match="first must be a whole number"):
        _ = [one async for one in replay(store, run_id, first="1")]  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValidationError, match="last must be a whole number"):
        _ = [one async for one in replay(store, run_id, last=0.5)]  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("field", ["state", "engine", "settings", "lifecycle_manager", "brains", "around"])
def test_an_orchestrator_is_made_of_what_it_needs(field: str) -> None:
    with pytest.raises(ValidationError, match=f"{field} must be"):
        SimulationOrchestrator(**{field: 5})  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(OstlerError, match="engine must be an object with a method `update`"):
        SimulationOrchestrator(engine=Doing)  # type: ignore[arg-type]  # wrong on purpose


async def test_a_failure_names_the_users_file_or_none(store: Store) -> None:
    async with begin_run(store, scripted({"ada": fails})) as run:
        report = await run.play_turn()
    assert "(simulation_scenes.py:" in report.failures["ada"].message
    from_ours = Brains({"ada": lambda: None})
    with pytest.raises(OstlerError) as caught:
        from_ours.make("zoe", {})
    caught.value.__traceback__ = caught.tb.tb_next
    assert error_place(caught.value) == ""
