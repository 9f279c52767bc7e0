"""The journal of exits: bounded, forgetful on request, and no obstacle when the disk is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ostler.keeper import records
from ostler.keeper.records import Journal


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
