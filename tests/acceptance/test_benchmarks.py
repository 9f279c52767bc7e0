"""The benchmarks of the store still run, with sizes so small that their figures mean nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Each prints its tables; the address of a server is its only word. Reading looks for 100 rows, so it has as many.
PROGRAMS = {
    "transitions": """
from transitions import Size, postgres_table, sqlite_table
tiny = Size(callers=(1, 4), rounds=2, single=6, shared=16)
print(sqlite_table(tiny), postgres_table(sys.argv[1], tiny))
""",
    "reading": """
import functools, reading
reading._ROUNDS = 3
tables = (reading.filled_sqlite, functools.partial(reading.filled_postgres, sys.argv[1]))
print(*(reading.reading_table("tiny", filled, (100, 200)) for filled in tables))
""",
    "replay": """
from replay import replay_table
print(replay_table(sys.argv[1], (2500,)))
""",
}
SHOWN = {
    "transitions": ("bare sqlite3, single commits", "bare psycopg, single commits"),
    "reading": ("owner, state and tag", "statistics"),
    "replay": ("SQLite      2,500", "PostgreSQL  2,500"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_of_the_store_runs(name: str, postgres_server: str, tmp_path: Path) -> None:
    paths = [str(ROOT / "benchmarks"), *sys.path]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), TMPDIR=str(tmp_path))
    command = [sys.executable, "-c", f"import sys{PROGRAMS[name]}", postgres_server]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for row in SHOWN[name]:
        assert row in done.stdout
    assert not list(tmp_path.iterdir())
