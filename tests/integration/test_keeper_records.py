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
from keeper_client import Home, wait_until
from ostler.keeper.records import Journal

from ostler.keeper import records


def record(number: int, **more: Any) -> dict[str, Any]:
    return {"unit": f"u{number}", "box": f"u{number}", "code": number, **more}


def test_what_was_written_is_known_to_the_next(tmp_path: Path) -> None:
    path = str(tmp_path / "exits.jsonl")
    first = Journal(path, pytest.fail)
    for number in range(5):
        first.add(record(number))
    first.forget("u2")
    first.close()
    with Path(path).open("ab") as file:
        file.write(b'\xff\n[]\n{"unit": 1}\n{"unit": "half", "b')
    second = Journal(path, pytest.fail)
    assert list(second.known) == ["u0", "u1", "u3", "u4"]
    assert second.known["u3"]["code"] == 3
    second.close()
    assert len(Path(path).read_text().splitlines()) == 4


def test_it_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 100)
    monkeypatch.setattr(records, "_MAX_BYTES", 50_000)
    path = tmp_path / "exits.jsonl"
    journal = Journal(str(path), pytest.fail)
    largest = 0
    for number in range(3000):
        journal.add(record(number, detail="x" * 100))
        if number % 10 == 0:
            journal.flush()
            largest = max(largest, path.stat().st_size)
    journal.close()
    assert largest < 150_000
    kept = [json.loads(line)["unit"] for line in path.read_text().splitlines()]
    assert kept[-1] == "u2999"


def test_a_disk_that_takes_nothing_is_said_and_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    journal = Journal(str(tmp_path / "exits.jsonl"), said.append)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        journal.add(record(1))
        journal.flush()
    assert "No space left" in said[0]
    assert "u1" in journal.known
    journal.close()
    assert list(Journal(str(tmp_path / "exits.jsonl"), pytest.fail).known) == ["u1"]


# --- a disk that is full for a while -----------------------------------------------------------------


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
    return sorted(Journal(str(copy), pytest.fail).known)


@pytest.mark.parametrize("truncates", [True, False])
def test_what_a_full_disk_refused_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    path = tmp_path / "exits.jsonl"
    said: list[str] = []
    journal = Journal(str(path), said.append)
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
    assert [("cannot be written" in one, "written again" in one) for one in said] == [(True, False), (False, True)]
    journal.forget("u2")
    journal.close()
    assert known_to_the_next(path) == ["u1", "u3", "u4"]


def _refused(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_what_waits_is_tried_again_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    path = tmp_path / "exits.jsonl"
    journal = Journal(str(path), lambda _: None)
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
    said: list[str] = []
    path = tmp_path / "exits.jsonl"
    journal = Journal(str(path), said.append)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", _refused)
        journal.add(record(1))
        journal.flush()
    journal.close()
    assert len(said) == 2
    assert path.read_text().count("u1") == 2, "once: its unit and its box"


def test_what_waits_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MAX_BYTES", 5_000)
    path = tmp_path / "exits.jsonl"
    journal = Journal(str(path), lambda _: None)
    with room_for(path, 10):
        for number in range(300):
            journal.add(record(number))
            journal.flush()
            if number >= 10:
                journal.forget(f"u{number}")
        assert sum(map(len, journal._waiting)) < 6_000  # noqa: SLF001 - nothing else can be seen of it from outside
    journal.close()
    assert known_to_the_next(path) == sorted(f"u{number}" for number in range(10))


def test_a_journal_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    said: list[str] = []
    place = tmp_path / "away"
    journal = Journal(str(place / "exits.jsonl"), said.append)
    assert "No such file" in said[0]
    journal.add(record(1))
    journal.flush()
    place.mkdir()
    journal.close()
    assert known_to_the_next(place / "exits.jsonl") == ["u1"]


def test_an_end_that_cannot_be_written_is_told_and_written_later(tmp_path: Path) -> None:
    home = Home(tmp_path / "keeper")
    try:
        manager = home.manager()
        keeper, path = manager.about["pid"], home.directory / "exits.jsonl"
        manager.start("first.1", ["/bin/sh", "-c", "exit 1"])
        manager.exit_of("first.1")
        soft, hard = resource.prlimit(keeper, resource.RLIMIT_FSIZE)
        resource.prlimit(keeper, resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        manager.start("second.1", ["/bin/sh", "-c", "exit 2"])
        assert manager.exit_of("second.1")["code"] == 2
        assert known_to_the_next(path) == ["first.1"]
        resource.prlimit(keeper, resource.RLIMIT_FSIZE, (soft, hard))
        wait_until(lambda: known_to_the_next(path) == ["first.1", "second.1"])
    finally:
        home.end()
