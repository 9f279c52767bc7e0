from __future__ import annotations

import csv
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from ostler.errors import MissingExtraError, ValidationError
from ostler.simulation import exporting
from ostler.simulation.exporting import ExportForm, export_turns
from ostler.simulation.played import PlayedTurn

pytestmark = pytest.mark.anyio

FIXED = ["turn", "agent", "number", "active", "decision"]


def turns(*given: PlayedTurn) -> Callable[[], AsyncIterator[PlayedTurn]]:
    async def every() -> AsyncIterator[PlayedTurn]:
        for one in given:
            yield one

    return every


def states(*given: Mapping[str, Any]) -> Callable[[], AsyncIterator[PlayedTurn]]:
    """One agent, one state in each turn."""
    return turns(*(PlayedTurn(turn=at, states={"a": one}, numbers={"a": 1}) for at, one in enumerate(given, 1)))


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


GAME = turns(
    PlayedTurn(
        turn=1,
        decisions={"ann": {"buy": 2}, "bob": None, "gone": "bye"},
        failures={"cleo": {"kind": "error", "message": "überfordert"}},
        operations=({"operation": "pause_agent", "agent_name": "cleo"},),
        states={
            "ann": {"wealth": 3, "at": {"x": 1, "y": 2.5}},
            "bob": {"wealth": 4, "mood": "gut, sehr"},
            "cleo": {"tags": ["a", 1]},
        },
        paused={"cleo": 2},
        numbers={"ann": 1, "bob": 2, "cleo": 3},
        global_state={"tax": 0.1},
        digest="ab",
    ),
    PlayedTurn(turn=2, resumed=("cleo",), states={"ann": {"wealth": 5}}, numbers={"ann": 1}, digest="cd"),
)


async def test_json_lines_have_everything_of_each_turn(tmp_path: Path) -> None:
    to = tmp_path / "game.jsonl"

    assert await export_turns(GAME, to, "jsonl") == 2

    first, second = (json.loads(line) for line in to.read_text().splitlines())
    assert first == {
        "turn": 1,
        "resumed": [],
        "decisions": {"ann": {"buy": 2}, "bob": None, "gone": "bye"},
        "failures": {"cleo": {"kind": "error", "message": "überfordert"}},
        "operations": [{"operation": "pause_agent", "agent_name": "cleo"}],
        "states": {
            "ann": {"wealth": 3, "at": {"x": 1, "y": 2.5}},
            "bob": {"wealth": 4, "mood": "gut, sehr"},
            "cleo": {"tags": ["a", 1]},
        },
        "paused": {"cleo": 2},
        "numbers": {"ann": 1, "bob": 2, "cleo": 3},
        "global_state": {"tax": 0.1},
        "digest": "ab",
    }
    assert second["resumed"] == ["cleo"]
    assert "überfordert" in to.read_text(), "as people read it"


async def test_csv_has_a_row_for_each_agent_after_each_turn(tmp_path: Path) -> None:
    to = tmp_path / "game.csv"

    assert await export_turns(GAME, to, ExportForm.CSV) == 4

    with to.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [*FIXED, "wealth", "at.x", "at.y", "mood", "tags"]
    assert rows == [
        ["1", "ann", "1", "true", '{"buy":2}', "3", "1", "2.5", "", ""],
        ["1", "bob", "2", "true", "null", "4", "", "", "gut, sehr", ""],
        ["1", "cleo", "3", "false", "", "", "", "", "", '["a",1]'],
        ["2", "ann", "1", "true", "", "5", "", "", "", ""],
    ]


async def test_parquet_keeps_the_types(tmp_path: Path) -> None:
    to = tmp_path / "game.parquet"

    assert await export_turns(GAME, to, "parquet") == 4

    table = parquet.read_table(to)
    types = {field.name: str(field.type) for field in table.schema}
    assert types == {
        "turn": "int64",
        "agent": "string",
        "number": "int64",
        "active": "bool",
        "decision": "string",
        "wealth": "int64",
        "at.x": "int64",
        "at.y": "double",
        "mood": "string",
        "tags": "string",
    }
    assert table["wealth"].to_pylist() == [3, 4, None, 5]
    assert table["active"].to_pylist() == [True, True, False, True]
    assert table["decision"].to_pylist() == ['{"buy":2}', "null", None, None]


@pytest.mark.parametrize(
    ("values", "kind", "kept"),
    [
        ([1, 2.5], "double", [1.0, 2.5]),
        ([1, "one"], "string", ["1", "one"]),
        ([True, 1], "string", ["true", "1"]),
        ([True, None], "bool", [True, None]),
        ([None, None], "string", [None, None]),
        ([2**63, 1], "string", [str(2**63), "1"]),
        ([2**60 + 1, 0.5], "string", [str(2**60 + 1), "0.5"]),
        ([{}, [1]], "string", ["{}", "[1]"]),
        (["\ud800x", "y"], "string", ["\\ud800x", "y"]),
    ],
)
async def test_values_of_several_types(tmp_path: Path, values: list[Any], kind: str, kept: list[Any]) -> None:
    to = tmp_path / "values.parquet"

    await export_turns(states(*({"v": value} for value in values)), to, "parquet")

    column = parquet.read_table(to)["v"]
    assert (str(column.type), column.to_pylist()) == (kind, kept)


async def test_no_two_columns_have_one_name(tmp_path: Path) -> None:
    to = tmp_path / "names.csv"
    state = {"turn": 9, "agent": {"x": 1}, "agent.x": 2, "state.agent.x": 3}

    await export_turns(states(state), to, "csv")

    with to.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["turn"] == "1"
    assert row["state.turn"] == "9"
    assert (row["agent.x"], row["state.agent.x"], row["state.state.agent.x"]) == ("1", "2", "3")


async def test_a_successor_in_the_same_turn_has_not_decided(tmp_path: Path) -> None:
    """The names are the same, the agents are not."""
    to = tmp_path / "heirs.csv"
    add = {"operation": "add_agent", "kind": "k"}
    game = turns(
        PlayedTurn(
            turn=1,
            decisions={"king": "abdicate", "guest": "stay", "old": 1},
            operations=(
                {**add, "agent_name": "guest", "resolved_name": "guest", "cause": "outside"},
                {"operation": "remove_agent", "agent_name": "king", "cause": "agent"},
                {**add, "agent_name": "king", "resolved_name": "king", "cause": "agent"},
                {**add, "agent_name": "old", "cause": "agent", "done": False, "reason": "full"},
            ),
            states={"guest": {}, "king": {}, "old": {}},
            numbers={"guest": 2, "king": 3, "old": 1},
        )
    )

    await export_turns(game, to, "csv")

    with to.open(newline="") as file:
        decisions = {row["agent"]: row["decision"] for row in csv.DictReader(file)}
    assert decisions == {"guest": '"stay"', "king": "", "old": "1"}


@pytest.mark.parametrize("form", list(ExportForm))
async def test_a_state_without_fields_has_a_column_of_its_own(tmp_path: Path, form: ExportForm) -> None:
    to = tmp_path / "odd"

    assert await export_turns(states({"v": 1}, [1, 2], 5, None), to, form) == 4  # type: ignore[arg-type]  # on purpose

    if form is ExportForm.PARQUET:
        assert parquet.read_table(to)["state"].to_pylist() == [None, "[1,2]", "5", None]


async def test_texts_of_agents_come_back_as_they_were(tmp_path: Path) -> None:
    texts = ["=1+1", "+x", "-y", "@z", 'say "no", now', "two\nlines", "a\rb", "", "ünï", "\t"]
    to = tmp_path / "texts.csv"

    await export_turns(states(*({"said": text} for text in texts)), to, "csv")

    with to.open(newline="", encoding="utf-8") as file:
        assert [row["said"] for row in csv.DictReader(file)] == texts


@pytest.mark.parametrize("form", list(ExportForm))
async def test_a_run_without_turns_is_a_file_too(tmp_path: Path, form: ExportForm) -> None:
    to = tmp_path / "none"

    assert await export_turns(turns(), to, form) == 0

    assert to.exists()
    if form is ExportForm.PARQUET:
        assert parquet.read_table(to).column_names == FIXED


async def test_rows_are_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_BATCH", 3)
    to = tmp_path / "many.parquet"

    assert await export_turns(states(*({"v": number} for number in range(10))), to, "parquet") == 10

    assert parquet.ParquetFile(to).num_row_groups == 4
    assert parquet.read_table(to)["v"].to_pylist() == list(range(10))


@pytest.mark.parametrize("form", list(ExportForm))
async def test_what_breaks_off_leaves_the_old_file_and_no_other(tmp_path: Path, form: ExportForm) -> None:
    to = tmp_path / "game"
    to.write_text("old")
    passes = []

    async def breaking() -> AsyncIterator[PlayedTurn]:
        passes.append(1)
        async for one in GAME():
            yield one
        if form is ExportForm.JSONL or len(passes) == 2:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await export_turns(breaking, to, form)

    assert to.read_text() == "old"
    assert files(tmp_path) == ["game"]


async def test_a_new_file_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    to = tmp_path / "game"
    to.write_text("old")

    await export_turns(GAME, to, "jsonl")

    assert to.read_text().startswith('{"turn":1')


async def test_a_link_stays_a_link_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, old in (("old.jsonl", "old"), ("new.jsonl", None)):
        aim, link = tmp_path / "there" / name, tmp_path / name
        link.symlink_to(aim)
        if old is not None:
            aim.write_text(old)

        await export_turns(GAME, link, "jsonl")

        assert link.is_symlink()
        assert aim.read_text().startswith('{"turn":1')
    assert sorted(files(tmp_path / "there")) == ["new.jsonl", "old.jsonl"]


async def test_a_file_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    to = tmp_path / "game"
    for mode in (0o600, 0o640, 0o664):
        to.write_text("old")
        to.chmod(mode)

        await export_turns(GAME, to, "jsonl")

        assert stat.S_IMODE(to.stat().st_mode) == mode


async def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for name in ("pipe", "null", "round"):
        with pytest.raises(ValidationError, match=r"to must be a (regular )?file"):
            await export_turns(GAME, tmp_path / name, "csv")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "null").is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)  # noqa: PTH116 - it must not have become a file


async def test_the_longest_name_that_a_directory_bears_will_do(tmp_path: Path) -> None:
    await export_turns(GAME, tmp_path / ("x" * 255), "csv")
    with pytest.raises(ValidationError, match=r"to must be a file .*File name too long"):
        await export_turns(GAME, tmp_path / ("x" * 256), "csv")


async def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(MissingExtraError, match=r"exporting Parquet .*ostler\[parquet\]"):
        await export_turns(GAME, tmp_path / "game", "parquet")

    assert not files(tmp_path)


async def test_what_cannot_be_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="form must be one of jsonl, csv, parquet, was 'xlsx'"):
        await export_turns(GAME, tmp_path / "game", "xlsx")
    for place in (tmp_path / "no" / "game.csv", tmp_path):
        with pytest.raises(ValidationError, match="to must be a file in a directory that exists"):
            await export_turns(GAME, place, "csv")
