"""The journal of exits: bounded, forgetful on request, and no obstacle when the disk is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler.keeper import exit_journal
from ostler.keeper.exit_journal import ExitJournal


def record(number: int, **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("signal", "oom", "by", "why", "ended", "lasted", "written", "dropped", "left"))
    return {**empty, "unit": f"u{number}", "code": number, **more}


def test_what_was_written_is_known_to_the_next(tmp_path: Path) -> None:
    path = str(tmp_path / "exits.jsonl")
    first = ExitJournal(path, pytest.fail)
    for number in range(5):
        first.add(record(number))
    first.forget("u2")
    first.close()
    with Path(path).open("ab") as file:
        file.write(b'\xff\n[]\n{"unit": 1}\n{"unit": "half", "b')
    second = ExitJournal(path, pytest.fail)
    assert list(second.records) == ["u0", "u1", "u3", "u4"]
    assert second.records["u3"]["code"] == 3
    second.close()
    assert len(Path(path).read_text().splitlines()) == 4


def test_it_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_journal, "MAX_RECORDS", 100)
    monkeypatch.setattr(exit_journal, "_MAX_WAITING", 50_000)
    path = tmp_path / "exits.jsonl"
    journal = ExitJournal(str(path), pytest.fail)
    largest = 0
    for number in range(3000):
        journal.add(record(number, why="x" * 100))
        if number % 10 == 0:
            journal.flush()
            largest = max(largest, path.stat().st_size)
    journal.close()
    assert largest < 150_000
    kept = [json.loads(line)["unit"] for line in path.read_text().splitlines()]
    assert kept[-1] == "u2999"


@contextlib.contextmanager
def room_for(path: Path, more: int) -> Iterator[None]:
    """The disk takes so many bytes more of this file, and then it is full; Python ignores the signal of that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def known_to_the_next(path: Path) -> list[str]:
    """Of a copy: the next one writes the file anew."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    journal = ExitJournal(str(copy), pytest.fail)
    journal.close()
    return sorted(journal.records)


def _refused(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("truncates", [True, False])
def test_what_a_full_disk_refused_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    path = tmp_path / "exits.jsonl"
    warnings: list[str] = []
    journal = ExitJournal(str(path), warnings.append)
    journal.add(record(1))
    journal.flush()
    if not truncates:
        monkeypatch.setattr(os, "ftruncate", _refused)
    with room_for(path, 10):
        for number in (2, 3):
            journal.add(record(number))
            journal.flush()
        assert known_to_the_next(path) == ["u1"]
    journal.add(record(4))
    journal.flush()
    assert known_to_the_next(path) == ["u1", "u2", "u3", "u4"]
    assert [("cannot be written" in text, "written again" in text) for text in warnings] == [
        (True, False),
        (False, True),
    ]
    journal.forget("u2")
    journal.close()
    assert known_to_the_next(path) == ["u1", "u3", "u4"]


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "exits.jsonl"
    journal = ExitJournal(str(path), lambda _: None)
    journal.add(record(1))
    journal.flush()
    with room_for(path, 10):
        journal.add(record(2))
        journal.flush()
    journal.close()
    assert known_to_the_next(path) == ["u1", "u2"], "not glued to the torn line"


def test_what_waits_is_tried_again_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    path = tmp_path / "exits.jsonl"
    journal = ExitJournal(str(path), lambda _: None)
    with room_for(path, 10):
        journal.add(record(1))
        journal.flush()
    journal.flush()
    assert known_to_the_next(path) == [], "not at every turn"
    now += 1.0
    journal.flush()
    assert known_to_the_next(path) == ["u1"]
    journal.close()


def test_a_sync_that_fails_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    path = tmp_path / "exits.jsonl"
    journal = ExitJournal(str(path), warnings.append)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", _refused)
        journal.add(record(1))
        journal.flush()
    journal.close()
    assert "Input/output" in warnings[0]
    assert path.read_text().count("u1") == 1


def test_what_waits_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_journal, "_MAX_WAITING", 5_000)
    path = tmp_path / "exits.jsonl"
    journal = ExitJournal(str(path), lambda _: None)
    with room_for(path, 10):
        for number in range(300):
            journal.add(record(number))
            journal.flush()
            if number >= 10:
                journal.forget(f"u{number}")
        assert sum(map(len, journal._waiting)) < 6_000  # noqa: SLF001 - nothing else can be seen of it from outside
    journal.flush()
    journal.close()
    assert known_to_the_next(path) == sorted(f"u{number}" for number in range(10))


def test_a_journal_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    warnings: list[str] = []
    place = tmp_path / "away"
    journal = ExitJournal(str(place / "exits.jsonl"), warnings.append)
    assert "No such file" in warnings[0]
    journal.add(record(1))
    journal.flush()
    place.mkdir()
    journal.close()
    assert known_to_the_next(place / "exits.jsonl") == ["u1"]
