from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys

import pytest

from ostler import errors
from ostler.errors import (
    CursorGoneError,
    DeadlineError,
    DefinitionError,
    InvalidOperationError,
    MissingExtraError,
    OstlerError,
    ValidationError,
)
from ostler.model.states import AgentState
from ostler.model.validation import Fault

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]
FAULTS = (
    Fault(field="max_memory_mb", bound="must be 64 to 8192", value="1"),
    Fault(field="name", bound="is required"),
)


def build(cls: type[OstlerError]) -> OstlerError:
    if issubclass(cls, ValidationError):
        return cls(FAULTS)
    if issubclass(cls, CursorGoneError):
        return cls(cursor=3, horizon=9)
    if issubclass(cls, MissingExtraError):
        return cls("PostgreSQL", "postgres")
    return cls()


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_an_ostler_error(cls: type[Exception]) -> None:
    assert issubclass(cls, OstlerError)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_stands_in_the_drawn_tree(cls: type[Exception]) -> None:
    assert f" {cls.__name__}" in (errors.__doc__ or "")


@pytest.mark.parametrize("cls", ALL)
def test_the_docstring_is_the_default_message(cls: type[OstlerError]) -> None:
    assert cls.__doc__
    if cls not in {ValidationError, DefinitionError, CursorGoneError, MissingExtraError}:
        assert str(cls()) == cls.__doc__
        assert str(cls("said otherwise")) == "said otherwise"


@pytest.mark.parametrize("cls", ALL)
def test_time_outs_and_only_they_are_timeout_errors(cls: type[Exception]) -> None:
    assert issubclass(cls, TimeoutError) == issubclass(cls, DeadlineError)
    if cls.__name__.endswith("TimeoutError"):
        assert issubclass(cls, DeadlineError)


@pytest.mark.parametrize("name", ["AgentNotFoundError", "TaskNotFoundError", "LicenseError",
    "AuthorizationError", "AgentInitializationError", "InvalidOperationError", "ValidationError",
    "ConflictError", "StaleWriterError"])  # fmt: skip
def test_the_errors_that_the_contract_names_exist(name: str) -> None:
    assert issubclass(getattr(errors, name), OstlerError)


def test_a_stale_writer_is_a_conflict() -> None:
    assert issubclass(errors.StaleWriterError, errors.ConflictError)


def test_an_illegal_move_names_both_states() -> None:
    error = InvalidOperationError(current=AgentState.READY, wanted=AgentState.INITIALIZING)
    assert (error.current, error.wanted) == ("ready", "initializing")
    assert str(error) == "cannot go from ready to initializing"
    spoken = InvalidOperationError("it is still starting", current="initializing", wanted="processing")
    assert str(spoken) == "it is still starting"
    assert (spoken.current, spoken.wanted) == ("initializing", "processing")


def test_a_validation_error_carries_every_fault_and_says_each_in_a_sentence() -> None:
    error = ValidationError(list(FAULTS))
    assert error.faults == FAULTS
    assert str(error) == "max_memory_mb must be 64 to 8192, was 1; name is required"
    assert str(ValidationError([])) == ValidationError.__doc__


def test_a_lost_cursor_says_where_to_go_on() -> None:
    error = CursorGoneError(cursor=3, horizon=9)
    assert (error.cursor, error.horizon) == (3, 9)
    assert "take a snapshot and follow from 9" in str(error)


def test_a_missing_part_says_what_to_install() -> None:
    error = MissingExtraError("PostgreSQL", "postgres")
    assert error.extra == "postgres"
    assert "pip install 'ostler[postgres]'" in str(error)


@pytest.mark.parametrize("cls", ALL)
def test_an_error_survives_a_process_pool(cls: type[OstlerError]) -> None:
    error = build(cls)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - our own bytes
        assert type(again) is cls
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_without_docstrings_an_error_still_says_what_it_is() -> None:
    code = "import ostler; print(ostler.AgentGoneError(), '-', ostler.AgentGoneError('so it is'))"
    told = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout == "agent gone - so it is\n"
