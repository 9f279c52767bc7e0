"""Kill -9 in the midst of a migration on a real PostgreSQL server: the old shape or the new one, and nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from ostler.testing.store_suite.ground import brought_to
from ostler.testing.store_suite.simulations import begun

from ostler.model import AgentState
from ostler.store import Seams, open_store
from ostler.store.queries import migrations, statements
from ostler.testing.clock import ManualClock, invariant_faults

pytestmark = pytest.mark.anyio

VICTIM = Path(__file__).with_name("migration_victim.py")
BEFORE, STATEMENT, AFTER = (f"store.migrate.{point}" for point in ("before", "statement", "after"))
#: Columns and indexes say all that a migration makes here, in an order of their own.
SHAPE = (
    "SELECT attrelid::regclass::text, attname || ' ' || atttypid::regtype || ' ' || attnotnull FROM pg_attribute"
    " JOIN pg_class ON pg_class.oid = attrelid WHERE relnamespace = 'public'::regnamespace AND attnum > 0 UNION ALL"
    " SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1, 2"
)
#: Written by a program that knew only the first shape.
EARLIER = UUID(int=7)

Shape = tuple[int, list[tuple[object, ...]]]
Kill = Callable[[str], None]


def sql(address: str, text: str) -> list[tuple[object, ...]]:
    with psycopg.connect(address, autocommit=True) as connection:
        done = connection.execute(text.encode())
        return done.fetchall() if done.description else []


def shape(address: str) -> Shape:
    """The number it goes by, and what is really there; read without Ostler."""
    (number,) = sql(address, "SELECT coalesce(max(version), 0) FROM ostler_schema")[0]
    assert isinstance(number, int)
    return number, sql(address, SHAPE)


@contextmanager
def killing(address: str) -> Iterator[Kill]:
    """Opens the store in a program that is killed at the point which is named, and sees to it that it was."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, str(VICTIM), address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment) as victim:
        assert victim.stdin is not None
        assert victim.stdout is not None
        told, answers = victim.stdin, victim.stdout

        def kill(point: str) -> None:
            told.write(f"{point}:kill\n")
            assert answers.readline() == f"{-signal.SIGKILL}\n", f"{point} was not reached"

        yield kill
        told.close()


async def test_a_migration_that_is_killed_at_any_step_leaves_the_old_shape_or_the_new(
    make_database: Callable[[], str],
) -> None:
    address, known = make_database(), migrations("postgres")
    with killing(address) as kill:
        for number, script in known:
            kill(f"{BEFORE}:1")
            old = shape(address)
            assert old[0] == number - 1
            for nth in range(1, len(statements(script)) + 1):
                kill(f"{STATEMENT}:{nth}")
                assert shape(address) == old, f"killed after statement {nth} of migration {number}"
            kill(f"{AFTER}:1")
            new = shape(address)
            assert new[0] == number
            assert new[1] != old[1]
            if number == 1:
                sql(address, f"INSERT INTO workspaces VALUES ('{EARLIER}', 'earlier', 'teams', now())")
    assert new == _undisturbed(make_database())
    clock = ManualClock(datetime.now(UTC))
    async with open_store(address, Seams(clock=clock)) as store:
        found = await store.get_workspace(EARLIER)
        assert found is not None
        assert found.name == "earlier"
        await brought_to(store, AgentState.READY)
        assert (await begun(store, turns=1)).turn == 1
        assert not await invariant_faults(store, clock.wall())


def _undisturbed(address: str) -> Shape:
    """What a program makes that nobody kills."""
    with psycopg.connect(address) as connection:
        connection.execute("CREATE TABLE ostler_schema (version BIGINT NOT NULL)")
        for number, script in migrations("postgres"):
            for statement in statements(script):
                connection.execute(statement.encode())
            connection.execute("INSERT INTO ostler_schema (version) VALUES (%s)", (number,))
    return shape(address)
