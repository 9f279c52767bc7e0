"""Random commands agree with a simple model: single cases do not find the order that breaks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from store_ground import Place
from store_machine import StoreMachine

#: Examples and steps on each database, in `make test` and in `make torture`.
BRIEF = {"memory": (30, 40), "sqlite": (20, 40), "postgres": (6, 30)}
LONG = {"memory": (1000, 80), "sqlite": (400, 80), "postgres": (150, 60)}


@pytest.fixture(params=sorted(BRIEF))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fresh(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Place]:
    """Gives a new, empty place each time it is called."""
    numbers = itertools.count()

    def make() -> Place:
        match kind:
            case "memory":
                return Place(kind, ":memory:")
            case "sqlite":
                return Place(kind, str(tmp_path / str(next(numbers))))
            case _:
                return Place(kind, request.getfixturevalue("make_database")())

    return make


def drive(fresh: Callable[[], Place], examples: int, steps: int) -> None:
    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__()
            self.fresh = fresh

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


def test_random_commands_agree_with_a_few_dictionaries(kind: str, fresh: Callable[[], Place]) -> None:
    drive(fresh, *BRIEF[kind])


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_many_long_random_runs_agree_with_a_few_dictionaries(kind: str, fresh: Callable[[], Place]) -> None:
    drive(fresh, *LONG[kind])
