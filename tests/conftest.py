"""What all tests share: the loop they run on, and a real PostgreSQL server with a fresh database for each test."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from ostler.store.store import Store
from ostler.testing.postgres import PostgresUnavailableError, temporary_postgres

pytest.register_assert_rewrite("isolation", "store_ground")

# A busy machine draws slowly, which is no fault of the test; the time limit of each test bounds it.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# A shell lets what it runs in the background ignore Ctrl+C, and programs that these tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A daemon in the program of a test would tell the desktop of who runs it.
os.environ.pop("DBUS_SESSION_BUS_ADDRESS", None)

_numbers = itertools.count()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """One server for each worker. Where none can be started the test is skipped; in CI that is a failure."""
    try:
        with temporary_postgres(durable=False) as address:
            yield address
    except PostgresUnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no PostgreSQL server here: {error}")


@pytest.fixture(scope="session")
def migrated(postgres_server: str) -> str:
    """The name of a database with the tables of a store, to be copied."""
    _on_server(postgres_server, "CREATE DATABASE migrated")

    async def migrate() -> None:
        async with Store(_address(postgres_server, "migrated")):
            pass

    with ThreadPoolExecutor(1) as pool:  # the loop of a test may run already
        pool.submit(lambda: asyncio.run(migrate())).result()
    return "migrated"


@pytest.fixture
def make_database(postgres_server: str) -> Iterator[Callable[..., str]]:
    """Gives the address of a new database each time it is called: an empty one, or a copy of another."""
    made: list[str] = []

    def make(template: str = "template1") -> str:
        made.append(f"test_{next(_numbers)}")
        _on_server(postgres_server, f"CREATE DATABASE {made[-1]} TEMPLATE {template}")
        return _address(postgres_server, made[-1])

    yield make
    for name in made:
        _on_server(postgres_server, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _address(server: str, database: str) -> str:
    return server.replace("/postgres?", f"/{database}?")


def _on_server(address: str, statement: str) -> None:
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(statement.encode())


@pytest.fixture
def postgres_address(make_database: Callable[..., str]) -> str:
    return make_database()


@pytest.fixture
def migrated_address(make_database: Callable[..., str], migrated: str) -> str:
    """Of a database that has its tables already; making them takes longer than a copy."""
    return make_database(migrated)
