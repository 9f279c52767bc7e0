"""What all tests share: the loop they run on, and a real PostgreSQL server with a fresh database for each test."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from ostler.testing.postgres import PostgresUnavailableError, temporary_postgres

pytest.register_assert_rewrite("isolation", "store_ground")

# A busy machine draws slowly, which is no fault of the test; the time limit of each test bounds it.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# A shell lets what it runs in the background ignore Ctrl+C, and programs that these tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture
def make_database(postgres_server: str) -> Iterator[Callable[[], str]]:
    """Gives the address of a new, empty database each time it is called."""
    made: list[str] = []

    def make() -> str:
        made.append(f"test_{next(_numbers)}")
        _on_server(postgres_server, f"CREATE DATABASE {made[-1]}")
        return postgres_server.replace("/postgres?", f"/{made[-1]}?")

    yield make
    for name in made:
        _on_server(postgres_server, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _on_server(address: str, statement: str) -> None:
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(statement.encode())


@pytest.fixture
def postgres_address(make_database: Callable[[], str]) -> str:
    return make_database()
