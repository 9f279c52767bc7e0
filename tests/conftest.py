"""What all tests share: the loop they run on, and a real PostgreSQL server with a fresh database for each test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from ostler.testing.postgres import PostgresUnavailableError, temporary_postgres

pytest.register_assert_rewrite("ostler.testing.isolation_suite", "store_ground")

# A busy machine draws slowly, which is no fault of the test; the time limit of each test bounds it.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

_numbers = itertools.count()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """One server for each worker. Where none can be started the test is skipped; in CI that is a failure."""
    try:
        with temporary_postgres() as address:
            yield address
    except PostgresUnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no PostgreSQL server here: {error}")


@pytest.fixture(scope="session")
def make_database(postgres_server: str) -> Callable[[], str]:
    """Gives the address of a new, empty database each time it is called."""

    def make() -> str:
        name = f"test_{next(_numbers)}"
        with psycopg.connect(postgres_server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return postgres_server.replace("/postgres?", f"/{name}?")

    return make


@pytest.fixture
def postgres_address(make_database: Callable[[], str]) -> str:
    return make_database()
