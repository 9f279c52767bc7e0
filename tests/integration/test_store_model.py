from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ostler.store import open_store
from ostler.testing import MemoryTables, memory_store
from ostler.testing.store_suite import OpenStore
from ostler.testing.store_suite.machine import StoreMachine

#: Examples and steps for each store, in `make test` and in `make torture`.
BRIEF = {"memory": (30, 40), "sqlite": (30, 40), "postgres": (10, 30)}
LONG = {"memory": (1000, 80), "sqlite": (400, 80), "postgres": (150, 60)}


@pytest.fixture(params=sorted(BRIEF))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fresh(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], OpenStore]:
    """Gives a new, empty home each time it is called."""
    numbers = itertools.count()

    def new_memory() -> OpenStore:
        tables = MemoryTables()
        return lambda seams: memory_store(seams, tables)

    def new_sqlite() -> OpenStore:
        where = tmp_path / str(next(numbers))
        return lambda seams: open_store(where, seams)

    def new_postgres() -> OpenStore:
        address = request.getfixturevalue("make_database")()
        return lambda seams: open_store(address, seams)

    return {"memory": new_memory, "sqlite": new_sqlite, "postgres": new_postgres}[kind]


def drive(fresh: Callable[[], OpenStore], examples: int, steps: int) -> None:
    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__()
            self.home = fresh()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(300)
def test_a_store_driven_by_chance_does_what_a_few_dictionaries_do(kind: str, fresh: Callable[[], OpenStore]) -> None:
    drive(fresh, *BRIEF[kind])


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_store_driven_by_chance_for_long_does_what_a_few_dictionaries_do(
    kind: str, fresh: Callable[[], OpenStore]
) -> None:
    drive(fresh, *LONG[kind])
