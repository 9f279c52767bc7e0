"""Tables: every line fits the terminal, what matters stays in sight, and in a pipe nothing is cut."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any

import pytest

from ostler.cli import agents, look, table, tasks
from ostler.cli.live import work_lines
from ostler.cli.table import Column, Table, crop, show, width_of

LONG = "a-name-that-goes-on-" * 10
STATES = ("processing", "initializing", "terminating", "failed")


def agent(number: int, **more: Any) -> dict[str, Any]:
    name = f"{number}-{LONG if number % 3 == 0 else 'worker'}"
    return {
        "name": name[:200],
        "definition": "the-definition-of-a-reviewer" if number % 2 else "command/9f",
        "state": STATES[number % len(STATES)],
        "health": {"state": "unhealthy"},
        "created_at": (datetime.now(UTC) - timedelta(days=3)).isoformat(),
        "terminated_at": None,
        "attempt": 1,
        "metrics_now": {"cpu_percent": 12.0, "memory_bytes": 1 << 30, "tokens_used": 123456, "custom": {"cost_usd": 1}},
        "spawn_options": {"isolation_level": "process", "tags": ["night", "docs"]},
        "instance_id": f"0199-{number}",
        "error_message": None,
        "doing": f"reads file {number} of the two hundred that it was told to read, one after the other",
        **more,
    }


def task(number: int, **more: Any) -> dict[str, Any]:
    key = f"T{number:03}"
    return {
        "key": key,
        "state": "completed",
        "agent": "the-definition-of-a-reviewer",
        "created_at": (datetime.now(UTC) - timedelta(days=3)).isoformat(),
        "cost_usd": 12.5,
        "attempt": 1,
        "tags": ["night"],
        "title": "Mend the parser, which loses the last line of a file that does not end with a line feed",
        "next": f"needs review: ostler diff {key}",
        **more,
    }


AGENTS = [agent(number) for number in range(200)]
TASKS = [task(number) for number in range(200)]


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
@pytest.mark.parametrize(("columns", "items"), [(agents.COLUMNS, AGENTS), (tasks.COLUMNS, TASKS)])
def test_no_line_is_wider_than_the_terminal(columns: tuple[Column, ...], items: list[Any], width: int) -> None:
    lines = Table(columns, items, width).lines()
    assert len(lines) == 201
    assert max(map(width_of, lines)) <= width


@pytest.mark.parametrize("width", [80, 200])
def test_state_of_each_agent_is_whole_and_what_it_does_is_seen(width: int) -> None:
    head, *lines = Table(agents.COLUMNS, AGENTS, width).lines()
    for line, item in zip(lines, AGENTS, strict=True):
        assert line[head.index("STATE") :].split()[0] == item["state"]
        assert line[head.index("DOING") :].startswith("reads file")
        assert line[: head.index("STATE")].split()[0].rstrip("…") in item["name"]


def test_columns_leave_in_their_declared_order_and_come_back_with_more_room() -> None:
    assert Table(agents.COLUMNS, AGENTS, 80).lines()[0].split() == [
        *("NAME", "AGENT", "STATE", "UP", "EXIT", "COST", "DOING")
    ]
    assert Table(agents.COLUMNS, AGENTS, 50).lines()[0].split() == ["NAME", "STATE", "DOING"]
    natural = Table(agents.COLUMNS, AGENTS).lines()[0].split()
    assert Table(agents.COLUMNS, AGENTS, 200).lines()[0].split() == natural


@pytest.mark.parametrize("step", ["needs review: ostler diff {key}", "held; release it: ostler task requeue {key}"])
def test_the_next_step_of_a_task_is_whole_at_80_columns(step: str) -> None:
    items = [task(number, next=step.format(key=f"T{number:03}")) for number in range(200)]
    for line, item in zip(Table(tasks.COLUMNS, items, 80).lines()[1:], items, strict=True):
        key, state, *_ = line.split()
        assert (key, state) == (item["key"], item["state"])
        assert line.endswith(item["next"])


@pytest.mark.parametrize(("columns", "items"), [(agents.COLUMNS, AGENTS), (tasks.COLUMNS, TASKS)])
def test_in_a_pipe_and_in_the_wide_form_nothing_is_cut(columns: tuple[Column, ...], items: list[Any]) -> None:
    piped = Table(columns, items).lines()
    wide = Table(columns, items, 80, wide=True).lines()
    for column in columns:
        for lines in [wide] if column.only_wide else [piped, wide]:
            assert column.head in lines[0] or (column.if_any and not any(map(column.cell, items)))
            assert all(column.cell(item) in line for line, item in zip(lines[1:], items, strict=True))
    assert "…" not in "".join(piped + wide)


def test_short_cells_are_whole_and_the_long_ones_share_the_rest() -> None:
    columns = [Column(head, itemgetter(head), least=5) for head in "ABC"]
    (_, line) = Table(columns, [{"A": "short", "B": "b" * 50, "C": "c" * 50}], 40).lines()
    assert line == f"short  {'b' * 15}…  {'c' * 14}…"


def test_wide_characters_and_accents_keep_the_columns_in_line() -> None:
    columns = [Column("NAME", lambda item: item[0], least=6), Column("STATE", lambda item: item[1])]
    rows = [("日本語の名前", "ready"), ("e\N{COMBINING ACUTE ACCENT}te\N{COMBINING ACUTE ACCENT}", "ready")]
    lines = Table(columns, rows, 14).lines()
    assert {width_of(line) for line in lines[1:]} == {14}
    assert lines[1].startswith("日本語… ")
    assert crop("日本語", 4) == "日…"


def test_a_list_that_goes_on_keeps_its_columns() -> None:
    columns = [Column("KIND", lambda item: item[0], usual=10), Column("TEXT", lambda item: item[1], least=4)]
    listed = Table(columns, [], 30)
    assert listed.lines() == ["KIND        TEXT"]
    assert listed.line(("spawned", "x" * 100)) == f"spawned     {'x' * 17}…"
    assert Table(columns, []).line(("a-kind-that-is-wide", "x" * 100)) == f"a-kind-that-is-wide  {'x' * 100}"


def test_control_characters_leave_as_escapes_and_are_counted() -> None:
    (_, line) = Table([Column("NAME", lambda item: item, least=6)], ["\x1b[2Jcleared"], 10).lines()
    assert line == "\\x1b[2Jcl…"


def test_what_works_now_is_a_line_with_tokens_and_cost() -> None:
    since = datetime.now(UTC).isoformat()
    rows = [{"who": f"coder-{number}", "task": "T021", "since": since, "agent": agent(1)} for number in range(12)]
    first, *_, last = lines = work_lines(rows)
    assert re.fullmatch(r"coder-0 +T021 +\S+ s +123 k tokens +\$1\.00 +reads file 1 of .*", first)
    assert (len(lines), last) == (10, "and 3 more")
    assert work_lines([]) == []
    assert work_lines([rows[0] | {"agent": {}}])[0].split()[:2] == ["coder-0", "T021"]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (None, f"T021  {'why ' * 20}   6 min   $0.42"),
        (60, f"T021  {('why ' * 20)[:37].rstrip()}…   6 min   $0.42"),
        (20, "T021  why why why why why…   6 min   $0.42"),
    ],
)
def test_a_line_among_others_is_cut_in_its_text_only(
    width: int | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "terminal_width", lambda: width)
    assert table.fit_line("T021  ", ("why " * 20).strip(), "6 min", "", "$0.42", usual=0).split() == line.split()


@pytest.mark.parametrize("form", ["table", "wide"])
def test_an_empty_list_says_so_where_people_read(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    show([], form, tasks.COLUMNS, empty="no task is open; add one")
    assert capsys.readouterr() == ("", "ostler: no task is open; add one\n")


def test_an_empty_list_for_programs_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("json", "jsonl", "name"):
        show([], form, tasks.COLUMNS, empty="no task is open; add one")
    assert capsys.readouterr() == ("[]\n", "")


def test_an_event_is_told_by_whom_it_is_about_and_what_happened() -> None:
    base = {"sequence": 7, "occurred_at": datetime.now(UTC).isoformat(), "workspace_id": "w", "instance_id": None}
    moved = {"event_type": "task_state_changed", "previous_state": "queued", "new_state": "running", "reason": None}
    events = [
        base | moved | {"task_id": "0199", "key": "T021", "crew": "coder", "member": "coder-1"},
        base | {"event_type": "crew_changed", "crew": "coder", "project": "", "is_up": True},
        base | {"event_type": "agent_progress", "instance_id": "0199-abcdef", "message": "reads"},
    ]
    lines = Table(look.EVENT_COLUMNS, events, 80).lines()[1:]
    assert [line.split(maxsplit=3)[3] for line in lines] == [
        "T021    task_state_changed  queued → running",
        "coder   crew_changed        is_up=True",
        "abcdef  progress            message=reads",
    ]


def test_numbers_at_the_end_stay_beside_their_names_and_only_states_are_coloured() -> None:
    columns = [
        Column("WHAT", itemgetter(0)),
        Column("STATE", itemgetter(1)),
        Column("NUMBER", itemgetter(2), 0, 0, True),
    ]
    (_, line) = Table(columns, [("failed", "failed", "3")], 80).lines(colour=True)
    assert line == "failed  \x1b[31mfailed\x1b[0m       3"
