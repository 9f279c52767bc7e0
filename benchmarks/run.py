"""`make bench`: every table in one run, so that each figure stands beside its floor on the same machine.

`make bench ARGS=--quick` measures less; `ARGS="transitions"` runs one part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator

from crew_tables import crews
from http_tables import answers
from lifecycle_tables import calls, fleet, observers, spawns
from log_tables import logs
from loop_tables import loops
from observer_tables import streams
from ostler.testing.postgres import PostgresUnavailableError, temporary_postgres
from population_tables import populations
from record_tables import records
from start_tables import starts
from store_tables import lists, transitions
from table import Table
from work_tables import commands, ray, runs, tasks

PARTS: dict[str, Callable[..., Table | str]] = {
    "lists": lists,
    "logs": logs,
    "records": records,
    "answers": answers,
    "streams": streams,
    "starts": starts,
    "spawns": spawns,
    "calls": calls,
    "fleet": fleet,
    "ray": ray,
    "commands": commands,
    "runs": runs,
    "tasks": tasks,
    "observers": observers,
    "crews": crews,
    "loops": loops,
    "populations": populations,
}


def sync_microseconds() -> float:
    """What one durable write of a page costs on this disk; most figures below depend on it."""
    with tempfile.NamedTemporaryFile(dir=tempfile.gettempdir()) as file:
        file.write(b"\0" * 4096)
        os.fdatasync(file.fileno())
        began = time.perf_counter()
        for _ in range(200):
            os.pwrite(file.fileno(), b"\1" * 4096, 0)
            os.fdatasync(file.fileno())
        return (time.perf_counter() - began) / 200 * 1e6


@contextlib.contextmanager
def server() -> Iterator[str | None]:
    try:
        with temporary_postgres() as address:
            yield address
    except PostgresUnavailableError as error:
        print(f"PostgreSQL is left out: {error}")
        yield None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("transitions", *PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(names)}; all when none is given")
    parser.add_argument("--quick", action="store_true", help="measure less")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    print(
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} cores, "
        f"a durable 4 KiB write takes {sync_microseconds():.0f} µs\n"
    )
    for name in chosen.parts or names:
        if name == "transitions":
            with server() as address:
                print(transitions(address, quick=chosen.quick))
        else:
            print(PARTS[name](quick=chosen.quick))


if __name__ == "__main__":
    main()
