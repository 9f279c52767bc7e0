"""`ostler sim show`, `replay` and `export`: what a person sees of runs that were played."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.parquet
import pytest
from sim_scene import Scene

FAR = """
from ostler import Agent

class Far(Agent):
    def process(self, request):
        return {"give": 1, "to": request["name"]}
"""
NOBODY = "00000000-0000-7000-8000-00000000dead"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A home with two runs, to be looked at only: one of twelve turns, and a fork of it."""
    scene = Scene(tmp_path_factory.mktemp("played"))
    scene.told("run", scene.file)
    scene.told("fork", "last", "--at", "5", "--set", "parameters.weight=3", "--turns", "9")
    return scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "scene")


def test_show_lists_the_runs_newest_first(played: Scene) -> None:
    fork, run = played.told("show")
    assert (run["name"], run["turn"], run["state"], run["scenario"]) == ("market", 12, "ended", str(played.file))
    assert (fork["parent_id"], fork["forked_at"], fork["turn"]) == (run["run_id"], 5, 9)
    lines = played.sim("show").stdout.splitlines()
    assert lines[0].split() == ["ID", "NAME", "TURN", "STATE", "SEED", "FROM", "BEGAN"]
    assert [line.split()[0] for line in lines[1:]] == [fork["run_id"], run["run_id"]]
    done = played.sim("show", "-n", "1")
    assert (len(done.stdout.splitlines()), "-n" in done.stderr) == (2, True)


def test_show_tells_one_run_at_any_turn(played: Scene) -> None:
    turns = played.turns()
    for number in (3, 5):
        turn = played.told("show", "last", "--turn", str(number))["turn"]
        assert (turn["states"], turn["paused"]) == (turns[number].states, turns[number].paused)
        assert turn["decisions"] == turns[number].decisions
        assert turn["operations"] == [dict(one) for one in turns[number].operations]
    text = played.sim("show", "last").stdout
    for word in ("forked from", "global state", "AGENT", "child_3", "active"):
        assert word in text
    facts = dict(line.split(maxsplit=1) for line in text.split("\n\n")[0].splitlines() if line)
    assert (facts["turn"], facts["parameters"]) == ("9", '{"weight": 3}')
    assert facts["settings"] == "max_agents=60, failure_pause_turns=2, snapshot_every=4"
    assert "3 of 9" in played.sim("show", "last", "--turn", "3").stdout
    assert played.told("show", "last")["turn"]["turn"] == 9


def test_replay_tells_the_turns(played: Scene) -> None:
    lines = played.sim("replay", "last", "-o", "jsonl").stdout.splitlines()
    turns = [json.loads(line) for line in lines]
    assert [turn["turn"] for turn in turns] == list(range(10))
    assert [turn["decisions"] for turn in turns] == [turn.decisions for turn in played.turns()]
    lines = played.sim("replay", "last", "--from", "2", "--to", "4").stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line[0] != " "] == ["turn 2", "turn 3", "turn 4"]
    done = played.sim("replay", "last", "--to", "10")
    assert (done.returncode, "from 0 to 9" in done.stderr) == (3, True)


def test_replay_tells_counts_first_then_failures_then_operations(played: Scene) -> None:
    every = played.turns()
    turn = next(turn for turn in every if turn.failures and turn.operations and turn.paused)
    text = played.sim("replay", "last").stdout
    assert text.count("failed, paused: RuntimeError: no luck (market.py:") == sum(len(one.failures) for one in every)
    brief = played.sim("replay", "last", "--turn", str(turn.turn)).stdout.splitlines()
    head = f"turn {turn.turn}: {len(turn.states)} agents, {len(turn.decisions)} decided, "
    assert brief[0].startswith(head)
    assert f", {len(turn.paused)} paused" in brief[0]
    assert len(brief) == 1 + len(turn.failures)
    whole = played.sim("replay", "last", "--turn", str(turn.turn), "-v").stdout.splitlines()
    assert whole[: len(brief)] == brief
    assert len(whole) == len(brief) + len(turn.resumed) + len(turn.operations)
    for span in (["--from", "4", "--to", "2"], ["--turn", "3", "--to", "4"], ["--check", "--from", "2"]):
        assert played.sim("replay", "last", *span).returncode == 2, span


def test_replay_with_check_asks_every_brain_again(scene: Scene) -> None:
    scene.sim("run", scene.file)
    done = scene.sim("replay", "last", "--check")
    assert (done.returncode, done.stdout) == (0, "12 turns were played again, and every one was the same\n")
    code = scene.folder / "market.py"
    code.write_text(code.read_text().replace("what < 0.3:", "what < 0.9:"))
    done = scene.sim("replay", "last", "--check")
    assert (done.returncode, "is not the same when it is played again" in done.stderr) == (1, True)


def test_replay_with_check_spawns_brains_that_live_elsewhere(scene: Scene) -> None:
    text = scene.file.read_text().replace(
        'trader = "market:Trader"', 'trader = { agent = "market:Far", isolation = "none" }'
    )
    scene.file.write_text(text.replace("params = { step = 2 }", ""))
    code = scene.folder / "market.py"
    code.write_text(code.read_text() + FAR)
    assert scene.told("run", scene.file, "--turns", "3")["paused"] == 0
    done = scene.sim("replay", "last", "--check")
    assert (done.returncode, done.stdout[:8]) == (0, "3 turns "), done.stderr


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_export_writes_all_turns_into_a_file(played: Scene, tmp_path: Path, form: str) -> None:
    file = tmp_path / f"turns.{form}"
    done = played.sim("export", "last", file)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    if form == "jsonl":
        found = {json.loads(line)["turn"] for line in file.read_text().splitlines()}
    elif form == "csv":
        with file.open(newline="") as lines:
            found = {int(row["turn"]) for row in csv.DictReader(lines)}
    else:
        found = set(pyarrow.parquet.read_table(file)["turn"].to_pylist())
    assert found == set(range(10))
    before = file.read_bytes()
    again = played.sim("export", "last", file)
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    assert file.read_bytes() == before
    assert played.sim("export", "last", file, "--force").returncode == 0


def test_export_must_be_told_what_to_write(played: Scene, tmp_path: Path) -> None:
    done = played.sim("export", "last", tmp_path / "turns.xls")
    assert (done.returncode, "end its name in jsonl, csv, parquet, or use --format" in done.stderr) == (2, True)
    assert played.sim("export", "last", tmp_path / "turns.txt", "--format", "csv").returncode == 0
    done = played.sim("export", "last", tmp_path / "nowhere" / "turns.csv")
    assert (done.returncode, f"FILE would stand in {tmp_path / 'nowhere'}" in done.stderr) == (2, True)
    done = played.sim("export", "last", "-", "--format", "csv")
    assert (done.returncode, "ostler sim replay RUN -o jsonl" in done.stderr) == (2, True)


# --- which run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [["resume", NOBODY], ["fork", "ffff", "--at", "1"], ["replay", "nobody"], ["show", ""], ["export", "x", "x.csv"]],
)
def test_a_run_that_is_not_there_gives_4(played: Scene, command: list[str]) -> None:
    done = played.sim(*command)
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert "ostler sim show" in done.stderr or "give the id of one" in done.stderr


def test_a_name_that_two_runs_have_is_told_with_their_ids(played: Scene) -> None:
    fork, run = (str(one.run_id) for one in played.runs())
    for text, said in (("market", "2 runs are called 'market'"), (run[:2], f"2 runs begin with '{run[:2]}'")):
        done = played.sim("show", text)
        assert (done.returncode, f"{said}: {fork}, {run}; give the id of one" in done.stderr) == (4, True), done.stderr
    assert played.told("show", "last~1")["run"]["run_id"] == run
    done = played.sim("show", "last~2")
    assert (done.returncode, "there are only 2 runs here" in done.stderr) == (4, True)


def test_a_home_that_cannot_be_is_told(scene: Scene) -> None:
    for command in (["show"], ["show", "last"], ["replay", "x"], ["replay", "x", "--check"], ["resume", "x"]):
        done = scene.sim(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"no Ostler home at {scene.home}; check the path, or begin a run: `ostler sim run FILE`" in done.stderr
    for home, said in (("", "it is empty"), (str(scene.file), "is a file, and a home is a directory")):
        for start in (["show"], ["run", str(scene.file)]):
            done = scene.sim(*start, "--home", home)
            assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not scene.home.exists()
