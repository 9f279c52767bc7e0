"""The benchmarks still run; `--quick` measures so little that the figures mean nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWN = {
    "lists": "100 of 1,000",
    "calls": "64 at once: requests/s",
    "observers": "fan-out of the manager",
    "spawns": "fork + ready, no record",
    "transitions": "SQLite, 64 callers : bare",
    "populations": "Turns per second",
}


def measure(folder: Path, *parts: str) -> str:
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-B", ROOT / "benchmarks" / "run.py", "--quick", *parts],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list((folder / "tmp").iterdir())
    return done.stdout


def test_a_part_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    printed = measure(tmp_path, "lists", "calls", "observers")
    assert [SHOWN[part] in printed for part in SHOWN] == [True, True, True, False, False, False]


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_all_parts_are_measured(tmp_path: Path) -> None:
    printed = measure(tmp_path)
    assert [part for part, row in SHOWN.items() if row not in printed] == []
