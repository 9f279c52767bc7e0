"""`make bench`: every table in one run, so that each figure stands beside its floor on the same machine.

`make bench ARGS=--quick` leaves the largest sizes out; `ARGS="transitions"` runs one part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Iterator

from crowd import crowd_tables
from living import lives_tables
from ostler.testing.postgres import PostgresUnavailableError, temporary_postgres
from populations import operations_table
from processes import process_table
from reading import SIZES, filled_postgres, filled_sqlite, reading_table
from replay import COUNTS, replay_table
from thousand import thousand_table
from transitions import postgres_table, sqlite_table
from turns import turns_tables
from watching import watching_table

PARTS = ("transitions", "reading", "replay", "lives", "processes", "populations")


def sync_microseconds() -> float:
    """What one durable write of a page costs on this disk; every figure below hangs on it."""
    with tempfile.NamedTemporaryFile(dir=tempfile.gettempdir()) as file:
        file.write(b"\0" * 4096)
        os.fdatasync(file.fileno())
        begin = time.perf_counter()
        for _ in range(200):
            os.pwrite(file.fileno(), b"\1" * 4096, 0)
            os.fdatasync(file.fileno())
        return (time.perf_counter() - begin) / 200 * 1e6


@contextlib.contextmanager
def server(*, needed: bool) -> Iterator[str | None]:
    if not needed:
        yield None
        return
    try:
        with temporary_postgres() as address:
            yield address
    except PostgresUnavailableError as error:
        print(f"PostgreSQL is left out: {error}")
        yield None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all when none is given")
    parser.add_argument("--quick", action="store_true", help="leave the largest sizes out")
    chosen = parser.parse_args()
    unknown = set(chosen.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    parts = chosen.parts or list(PARTS)
    print(
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} cores, "
        f"a durable 4 KiB write takes {sync_microseconds():.0f} µs\n"
    )
    sizes, counts = (SIZES[:2], COUNTS[:1]) if chosen.quick else (SIZES, COUNTS)
    with server(needed=bool(set(parts) & {"transitions", "reading", "replay"})) as address:
        if "transitions" in parts:
            print(sqlite_table())
            print(postgres_table(address) if address else "")
        if "reading" in parts:
            print(reading_table("SQLite", filled_sqlite, sizes))
            if address:
                print(reading_table("PostgreSQL", lambda count: filled_postgres(address, count), sizes))
        if "replay" in parts:
            print(replay_table(address, counts))
    if "lives" in parts:
        print(*lives_tables(quick=chosen.quick), sep="\n")
        print(watching_table(quick=chosen.quick))
        print(*crowd_tables(quick=chosen.quick), sep="\n")
    if "processes" in parts:
        print(process_table(quick=chosen.quick))
        print(thousand_table(quick=chosen.quick))
    if "populations" in parts:
        print(operations_table(quick=chosen.quick))
        print(*turns_tables(quick=chosen.quick), sep="\n")


if __name__ == "__main__":
    main()
