"""Looking at a PostgreSQL store: nothing is made, nothing is written, and the console script can do it too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from ostler import (
    AgentSpawnOptions,
    ReserveInstance,
    SpawnRequest,
    StoreBusyError,
    StoreError,
    StoreTooNewError,
    open_store,
    view_store,
)
from ostler.store.postgres import mapped_errors

pytestmark = pytest.mark.anyio

PROGRAM = Path(sys.executable).parent / "ostler"
REQUEST = SpawnRequest(agent_definition_id=uuid4(), options=AgentSpawnOptions(name="ada"))


def ostler(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)


def tables(address: str) -> int:
    with psycopg.connect(address) as connection:
        row = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    return int(row[0]) if row else -1


async def test_an_empty_database_is_told_and_left_empty(postgres_address: str) -> None:
    done = ostler("ps", "--home", postgres_address)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no Ostler store in this database" in done.stderr
    assert tables(postgres_address) == 0


async def test_what_is_there_is_shown_and_cannot_be_changed(postgres_address: str) -> None:
    async with open_store(postgres_address) as store:
        ada = await store.commit(ReserveInstance(request=REQUEST))
    async with view_store(postgres_address) as store:
        assert await store.get_instance(ada.instance_id) == ada
        with pytest.raises(StoreError, match="opened for reading only"):
            await store.commit(ReserveInstance(request=REQUEST))
    shown = json.loads(ostler("ps", "-o", "json", "--home", postgres_address).stdout)
    assert [one["name"] for one in shown] == ["ada"]
    assert ostler("audit", "verify", "--home", postgres_address).returncode == 0


async def test_a_store_of_a_newer_program_is_refused(postgres_address: str) -> None:
    async with open_store(postgres_address):
        pass
    with psycopg.connect(postgres_address) as connection:
        connection.execute("INSERT INTO ostler_schema (version) VALUES (999)")
    with pytest.raises(StoreTooNewError, match="newer Ostler"):
        await view_store(postgres_address).open()


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    done = ostler("ps", "--home", "postgresql://ostler:secret@/none?host=/nonexistent")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr
    assert "the database server did not answer" in done.stderr


def test_a_server_that_refuses_has_answered(postgres_address: str) -> None:
    done = ostler("ps", "--home", postgres_address.replace("user=postgres", "user=nobody-known"))
    assert done.returncode == 1
    assert "the database server refused: " in done.stderr
    assert "did not answer" not in done.stderr
    assert "check the user, the password and the database in the address" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "sorry, too many clients already",
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
        'too many connections for role "ada"',
        "the database system is starting up",
        "the database system is shutting down",
    ],
)
def test_a_server_that_is_busy_or_on_its_way_is_not_a_wrong_password(words: str) -> None:
    with pytest.raises(StoreBusyError, match="try again in a moment") as told, mapped_errors():
        raise psycopg.OperationalError(f'connection to server on socket "x" failed: FATAL:  {words}')
    assert "check the user" not in str(told.value)
    for kind in (psycopg.errors.TooManyConnections, psycopg.errors.AdminShutdown, psycopg.errors.CannotConnectNow):
        with pytest.raises(StoreBusyError), mapped_errors():
            raise kind("in another language")


def test_a_role_that_may_have_no_connection_is_told_so(postgres_address: str) -> None:
    with psycopg.connect(postgres_address, autocommit=True) as connection:
        connection.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
    done = ostler("ps", "--home", postgres_address.replace("user=postgres", "user=crowded"))
    assert done.returncode == 1
    assert "too many connections for role" in done.stderr
    assert "check the user" not in done.stderr
