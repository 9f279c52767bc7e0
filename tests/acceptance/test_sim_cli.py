"""`ostler sim` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ostler
from ostler.cli.main import _run

ECONOMY = Path(__file__).parents[2] / "examples" / "economy"
SCENARIO = """
name = "small"
turns = 4
seed = 3
engine = "small:Engine"
[settings]
on_error = "remove"
[parameters]
tax = 1
sleep = 0
break = 0
[brains]
saver = "small:Saver"
[[agents]]
name = "saver"
kind = "saver"
count = 3
state = { coins = 5 }
"""
CODE = """
import time
print("loaded")

class Saver:
    def decide(self, view):
        print("deciding")
        if view.parameters.get("sleep"):
            time.sleep(view.parameters["sleep"])
        if view.parameters["tax"] == "bad":
            raise ValueError("no such tax")
        return view.random.randint(0, view.parameters["tax"])

class Engine:
    def update(self, state, decisions, world):
        if world.parameters.get("break") == state.turn:
            raise ZeroDivisionError("by zero")
        for member, amount in decisions.pairs():
            member.state["coins"] += amount
"""


class Said(NamedTuple):
    code: int
    out: str
    err: str


Program = Callable[..., Said]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SCENARIO)
    (tmp_path / "small.py").write_text(CODE)
    return tmp_path / "small.toml"


def forget_modules() -> None:
    for name in ("small", "agents", "economy"):
        sys.modules.pop(name, None)


@pytest.fixture
def sim(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Program]:
    """The command inside this program: its exit code, its results and its talk."""
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    path = list(sys.path)

    def run(*words: Any) -> Said:
        monkeypatch.setattr(sys, "argv", ["ostler", "--home", str(home), "sim", *map(str, words)])
        sys.path[:] = path  # each command is a program of its own
        forget_modules()
        code = _run()
        said = capsys.readouterr()
        return Said(int(code), said.out, said.err)

    yield run
    sys.path[:] = path
    forget_modules()
    for one, handler in handlers.items():
        signal.signal(one, handler)


def run_id(said: Said) -> str:
    return next(line for line in said.err.splitlines() if line.startswith("ostler: run ")).split()[-1]


# --- playing -----------------------------------------------------------------------------------------


def test_a_run_says_its_id_and_how_it_ended(sim: Program, file: Path) -> None:
    said = sim("run", file)
    assert said.code == 0
    assert said.out.startswith("small: turn 4, all turns were played; 3 agents, 0 of them paused; digest ")
    assert "deciding" not in said.out, "what brains print is no result"
    assert "loaded" in said.err
    again = json.loads(sim("run", file, "-o", "json").out)
    assert (again["name"], again["turn"], again["played"], again["failed"]) == ("small", 4, 4, 0)
    assert again["digest"].startswith(said.out.split()[-1])


def test_values_come_from_the_file_or_the_line(sim: Program, file: Path) -> None:
    said = sim("run", file, "--seed", 9, "--turns", 2, "--name", "mine", "--set", "parameters.tax=7", "-o", "json")
    assert json.loads(said.out)["turn"] == 2
    shown = json.loads(sim("show", "mine", "-o", "json").out)["run"]
    assert (shown["settings"]["seed"], shown["settings"]["parameters"]["tax"], shown["name"]) == (9, 7, "mine")
    assert shown["scenario"] == str(file)
    wrong = sim("run", file, "--set", "parameters.tox=7", "--set", "settings.max_agents=0", "--set", "agents.0.count=x")
    assert wrong.code == 2
    lines = [line for line in wrong.err.splitlines() if line.startswith("ostler: override:")]
    assert len(lines) == 3
    assert "did you mean parameters.tax?" in lines[0]
    assert sim("run", file, "--set", "nonsense").code == 2


def test_a_scenario_with_faults_gives_2_and_each_with_its_line(sim: Program, file: Path) -> None:
    file.write_text(
        SCENARIO.replace("turns = 4", "turns = -4").replace("small:Saver", "small:Sever").replace("3\nst", "0\nst")
    )
    said = sim("run", file)
    assert said.code == 2
    assert f"{file}:3: turns must be 1 to" in said.err
    assert f"{file}:13: brains.saver names small:Sever, but there is no Sever in small; did you mean Saver?" in said.err
    assert f"{file}:17: agents.0.count must be 1 to" in said.err
    assert sim("run", file.with_name("nothing.toml")).code == 2
    assert sim("list").code == 4, "no home was made"


def test_a_run_goes_on_by_its_id_its_beginning_its_name_or_as_the_last(sim: Program, file: Path) -> None:
    whole = sim("run", file, "-o", "json")
    for name in ("id", "beginning", "name", "last"):
        first = sim("run", file, "--turns", 2, "--name", name)
        text = {"id": run_id(first), "beginning": run_id(first)[:30], "name": name, "last": "last"}[name]
        said = sim("resume", text, "--turns", 4, "-o", "json")
        assert json.loads(said.out)["digest"] == json.loads(whole.out)["digest"]
    assert "the run stands at turn 4 already" in sim("resume", "last").err
    assert sim("resume", "nothing").code == 4
    assert "6 runs" not in sim("resume", "last~3").err
    sim("run", file, "--turns", 1, "--name", "last one")
    sim("run", file, "--turns", 1, "--name", "last one")
    said = sim("resume", "last one")
    assert (said.code, "2 runs match 'last one'" in said.err) == (4, True)


def test_a_run_whose_scenario_was_moved_goes_on_from_its_new_place(sim: Program, file: Path, tmp_path: Path) -> None:
    whole = json.loads(sim("run", file, "-o", "json").out)["digest"]
    sim("run", file, "--turns", 2)
    new = tmp_path / "elsewhere"
    new.mkdir()
    for one in (file, file.with_suffix(".py")):
        shutil.move(one, new)
    said = sim("resume", "last", "--turns", 4)
    assert said.code == 2
    assert "say where it is now with --scenario FILE" in said.err
    said = sim("resume", "last", "--scenario", new / "small.toml", "--turns", 4, "-o", "json")
    assert json.loads(said.out)["digest"] == whole


def test_a_fork_shares_the_turns_and_goes_its_own_way(sim: Program, file: Path) -> None:
    first = sim("run", file, "-o", "json")
    same = json.loads(sim("fork", "last", "--at", 2, "-o", "json").out)
    assert same["digest"] == json.loads(first.out)["digest"]
    other = sim("fork", "last", "--at", 2, "--set", "parameters.tax=9", "--turns", 6, "--name", "taxed", "-o", "json")
    assert json.loads(other.out)["turn"] == 6
    shown = json.loads(sim("show", "taxed", "-o", "json").out)["run"]
    assert (shown["forked_at"], shown["settings"]["parameters"]["tax"]) == (2, 9)
    assert (
        "agents.0.count cannot be changed by a fork" in sim("fork", "last", "--at", 2, "--set", "agents.0.count=9").err
    )
    assert sim("fork", "last", "--at", 99).code == 3
    assert sim("fork", "last", "--at", 4, "--turns", 4).code == 2
    assert sim("resume", "taxed", "--turns", 7).code == 0


def test_a_turn_that_fails_is_told_with_how_to_go_on(sim: Program, file: Path) -> None:
    said = sim("run", file, "--set", "parameters.break=3")
    assert said.code == 1
    assert "the engine failed in turn 3: ZeroDivisionError: by zero (small.py:" in said.err
    assert "the run stands at turn 2; go on with: ostler --home" in said.err
    file.with_suffix(".py").write_text(CODE.replace("raise ZeroDivisionError", "print"))
    assert sim("resume", "last").code == 0


def test_a_population_that_failed_does_not_look_like_a_success(sim: Program, file: Path) -> None:
    said = sim("run", file, "--set", "parameters.tax=bad")
    assert said.code == 1
    assert "turn 1, no agent is active; 0 agents, 0 of them paused, 3 failures" in said.out
    assert "failed: saver in turn 1, removed: ValueError: no such tax (small.py:" in said.err
    assert "settings.on_idle is wait" in sim("run", file, "--set", "settings.on_idle=wait").err


# --- looking -----------------------------------------------------------------------------------------


def test_list_and_show_tell_of_runs(sim: Program, file: Path) -> None:
    assert sim("list").code == 4
    first, second = run_id(sim("run", file)), run_id(sim("run", file, "--turns", 2, "--name", "second"))
    lines = sim("list").out.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", second, first]
    assert [one["run_id"] for one in json.loads(sim("list", "-o", "json", "-n", 1).out)] == [second]
    shown = sim("show", "last~1", "--turn", 3, "-n", 2)
    assert "3 of 4" in shown.out
    assert "only the first 2 of 3 agents are shown" in shown.err
    found = json.loads(sim("show", first, "--turn", 0, "-o", "json").out)["turn"]
    assert found["states"]["saver_2"] == {"coins": 5}
    assert sim("show", first, "--turn", 9).code == 3


def test_replay_tells_the_turns_from_the_record_alone(sim: Program, file: Path) -> None:
    sim("run", file)
    file.with_suffix(".py").unlink()
    assert sim("replay", "last").out.splitlines() == [
        f"turn {turn}: 3 agents, {3 if turn else 0} decided" for turn in range(5)
    ]
    turns = [json.loads(line) for line in sim("replay", "last", "--from", 2, "--to", 3, "-o", "jsonl").out.splitlines()]
    assert [one["turn"] for one in turns] == [2, 3]
    assert sim("check", "last").code == 2


def test_check_plays_a_run_once_more(sim: Program, file: Path) -> None:
    sim("run", file)
    said = sim("check", "last")
    assert (said.code, said.out) == (0, "4 turns were played again, and every one was the same\n")
    file.with_suffix(".py").write_text(CODE.replace("+= amount", "+= amount + (state.turn == 3)"))
    said = sim("check", "last")
    assert (said.code, said.out.startswith("turn 3 is not the same")) == (1, True)


def test_export_writes_all_turns_into_a_file(sim: Program, file: Path, tmp_path: Path) -> None:
    sim("run", file)
    assert sim("export", "last", tmp_path / "out.csv").code == 0
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert (len(rows), list(rows[0])) == (15, ["turn", "agent", "number", "active", "decision", "coins"])
    assert "use --force" in sim("export", "last", tmp_path / "out.csv").err
    assert sim("export", "last", tmp_path / "out", "--format", "jsonl").code == 0
    assert len((tmp_path / "out").read_text().splitlines()) == 5
    assert sim("export", "last", tmp_path / "out.parquet").code == 2


def test_rm_asks_first_and_removes(sim: Program, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim("run", file)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert "say --yes" in sim("rm", "last").err
    said = sim("rm", "last", "--yes")
    assert (said.code, "is removed" in said.err) == (0, True)
    listed = sim("list")
    assert (listed.out, "there is no run yet" in listed.err) == ("", True)


# --- beside a manager --------------------------------------------------------------------------------


def test_a_run_is_played_beside_a_manager_unless_its_brains_are_managed(sim: Program, file: Path, home: Path) -> None:
    hold = textwrap.dedent("""
        import asyncio, sys, ostler
        async def main():
            async with ostler.open(sys.argv[1]):
                print("open", flush=True)
                await asyncio.to_thread(sys.stdin.read)
        asyncio.run(main())
    """)
    managed = file.with_name("managed.toml")
    text = 'name = "m"\nagents = [{ name = "m", kind = "m" }]\n[brains]\n'
    managed.write_text(text + 'm = { agent = "agents:M", isolation = "thread" }\n')
    file.with_name("agents.py").write_text(
        "import ostler\nclass M(ostler.Agent):\n    def process(self, request):\n        return {'n': 1}\n"
    )
    words = [sys.executable, "-c", hold, str(home)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        assert sim("run", file).code == 0
        said = sim("run", managed)
        assert said.code == 7
        assert "stop the daemon with `ostler down`, or name another home with --home" in said.err
        holder.stdin.close()
    said = sim("run", managed)
    assert (said.code, "turn 10, all turns were played" in said.out) == (0, True)
    assert sim("check", "last").code == 0


# --- the program itself ------------------------------------------------------------------------------


def slow(file: Path, home: Path) -> list[str]:
    words = ["--home", str(home), "sim", "run", str(file), "--set", "parameters.sleep=0.05", "--turns", "400"]
    return [sys.executable, "-m", "ostler", *words]


def _stand_at_turn(home: Path, at_least: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        words = [sys.executable, "-m", "ostler", "--home", str(home), "sim", "list", "-o", "json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0 and json.loads(done.stdout or "[]") and json.loads(done.stdout)[0]["turn"] >= at_least:
            return
    raise AssertionError("it does not get on")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_says_how_to_go_on(file: Path, home: Path, sim: Program, number: signal.Signals, code: int) -> None:
    with subprocess.Popen(slow(file, home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        _stand_at_turn(home, 1)
        program.send_signal(number)
        out, err = program.communicate(timeout=60)
    assert (program.returncode, out) == (code, "")
    assert "ostler: stopped; the run stands at turn " in err
    assert "sim resume " in err
    stands = json.loads(sim("list", "-o", "json").out)[0]["turn"]
    said = sim("resume", "last", "--turns", stands + 1, "-o", "json")
    assert json.loads(said.out)["turn"] == stands + 1


def test_progress_is_shown_at_a_terminal(file: Path, home: Path) -> None:
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "ostler", "--home", str(home), "sim", "run", str(file)]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=follower, env=environment, check=False, timeout=60)
    os.close(follower)
    said = os.read(leader, 100_000).decode()
    os.close(leader)
    assert done.returncode == 0
    assert "\rturn 4 of 4" in said
    assert b"turn 4, all turns were played" in done.stdout


def test_the_example_is_played(sim: Program) -> None:
    said = sim("run", ECONOMY / "scenario.toml", "--turns", 20, "-o", "json")
    found = json.loads(said.out)
    assert (said.code, found["turn"], found["failed"]) == (0, 20, 0)
    turn = json.loads(sim("show", "last", "-o", "json").out)["turn"]
    coins = sum(state["coins"] for state in turn["states"].values()) + turn["global_state"]["treasury"]
    assert coins == 3000, "none is made and none is lost"
    assert ostler.__version__
