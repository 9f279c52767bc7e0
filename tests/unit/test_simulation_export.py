"""Exported turns: JSON lines with everything, CSV with a row per agent; whole files or none."""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ostler.errors import ValidationError
from ostler.simulation import PlayedTurn, export_turns

pytestmark = pytest.mark.anyio

TURNS = (
    PlayedTurn(turn=0, states={"ada": {"coins": 1}, "bo": {"mood": "glad"}}, numbers={"ada": 1, "bo": 2}, digest="x"),
    PlayedTurn(
        turn=1,
        decisions={"ada": {"give": [1, 2]}, "cy": 3},
        failures={"bo": {"timed_out": True}},
        operations=(
            {"operation": "remove_agent", "agent_name": "cy", "cause": "agent"},
            {"operation": "add_agent", "agent_name": "cy", "resolved_name": "cy", "cause": "agent"},
        ),
        states={
            "ada": {"coins": 2.5, "place": {"x": 1, "y": {"z": 2}}},
            "bo": {"mood": None},
            "cy": {"turn": 'a"b\r\nc'},
        },
        paused={"bo": 3},
        numbers={"ada": 1, "bo": 2, "cy": 4},
    ),
)


async def write(path: Path, form: str, turns: Sequence[PlayedTurn] = TURNS) -> int:
    async def again() -> AsyncIterator[PlayedTurn]:
        for one in turns:
            yield one

    return await export_turns(again, path, form)


def rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


async def test_json_lines_have_everything_of_each_turn(tmp_path: Path) -> None:
    assert await write(tmp_path / "out.jsonl", "jsonl") == 2
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [json.loads(json.dumps(asdict(turn))) for turn in TURNS]


async def test_csv_has_a_row_for_each_agent_after_each_turn(tmp_path: Path) -> None:
    assert await write(tmp_path / "out.csv", "csv") == 5
    found = rows(tmp_path / "out.csv")
    head = ["turn", "agent", "number", "active", "decision", "coins", "mood", "place.x", "place.y", "state.turn"]
    assert list(found[0]) == head, "a field that is called turn gets a column of its own"
    assert found[0] | {"mood": "", "coins": "1"} == found[0]
    ada = {"turn": "1", "agent": "ada", "number": "1", "active": "true", "decision": '{"give":[1,2]}', "coins": "2.5"}
    assert found[2] == {**dict.fromkeys(head, ""), **ada, "place.x": "1", "place.y": '{"z":2}'}
    assert (found[3]["active"], found[3]["decision"], found[3]["mood"]) == ("false", "", "")
    assert (found[4]["decision"], found[4]["state.turn"]) == ("", 'a"b\r\nc'), "its namesake decided, and left"


async def test_a_run_without_turns_is_a_file_too(tmp_path: Path) -> None:
    assert await write(tmp_path / "out.csv", "csv", ()) == 0
    assert (tmp_path / "out.csv").read_bytes() == b"turn,agent,number,active,decision\r\n"
    assert await write(tmp_path / "out.jsonl", "jsonl", ()) == 0


async def test_what_breaks_off_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old")

    async def breaks() -> AsyncIterator[PlayedTurn]:
        yield TURNS[0]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await export_turns(breaks, tmp_path / "out.jsonl", "jsonl")
    left = [(one.name, one.read_text()) for one in tmp_path.iterdir()]
    assert left == [("out.jsonl", "old")]


async def test_a_file_that_is_replaced_keeps_its_mode_and_a_link_stays_a_link(tmp_path: Path) -> None:
    secret, link = tmp_path / "secret.csv", tmp_path / "link.csv"
    secret.write_text("old")
    secret.chmod(0o600)
    link.symlink_to(secret)
    await write(link, "csv")
    assert link.is_symlink()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(rows(secret)) == 5


async def test_what_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place, said in (
        (tmp_path, "must be a file in a directory that exists"),
        (tmp_path / "no" / "out.csv", "must be a file in a directory that exists"),
        (tmp_path / "pipe", "must be a regular file"),
        (tmp_path / ("x" * 300), "must be a file that can be written"),
    ):
        with pytest.raises(ValidationError, match=said):
            await write(place, "csv")
    with pytest.raises(ValidationError, match="form must be one of csv, jsonl, was 'parquet'"):
        await write(tmp_path / "out", "parquet")
