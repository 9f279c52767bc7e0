from __future__ import annotations

from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest

from ostler.model import HOME_WORKSPACE_ID, RunState, SimulationRun, SimulationTurn
from ostler.model.simulation import MAX_BODY_BYTES

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ID = UUID(int=7)


def a_run(**fields: Any) -> SimulationRun:
    known: dict[str, Any] = {"name": "meadow", "seed": 0, "created_at": NOW, "updated_at": NOW}
    return SimulationRun(run_id=ID, **(known | fields))


def a_turn(**fields: Any) -> SimulationTurn:
    known: dict[str, Any] = {"turn": 0, "whole": True, "body": "{}", "occurred_at": NOW}
    return SimulationTurn(run_id=ID, **(known | fields))


def test_a_run_of_little_words_is_sound() -> None:
    run = a_run()
    assert run.validate()
    assert (run.workspace_id, run.state, run.turn, run.version) == (HOME_WORKSPACE_ID, RunState.OPEN, 0, 1)
    assert (run.settings, run.scenario, run.parent_id, run.forked_at, run.digest) == ({}, None, None, None, "")
    assert a_turn().validate()


def test_a_run_takes_the_text_of_a_whole_scenario_file() -> None:
    assert a_run(scenario={"text": "x" * (4 * 1024 * 1024 - 100)}, settings={"a": [1]}).validate()
    frozen = MappingProxyType({"a": 1})
    assert a_run(settings=frozen, scenario=frozen).validate()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "a\nb"}, "name must be printable"),
        ({"name": "x" * 201}, "name must have 1 to 200 characters"),
        ({"seed": -1}, "seed must be 0 to 9223372036854775807"),
        ({"seed": 2**63}, "seed must be 0 to 9223372036854775807"),
        ({"turn": -1}, "turn must be 0 to"),
        ({"version": 0}, "version must be 1 to"),
        ({"state": "open"}, "state must be RunState.OPEN"),
        ({"settings": {"a": object()}}, "settings.a must be a JSON value"),
        ({"settings": {"a": "x" * 2**18}}, "settings must be at most 256 KiB"),
        ({"scenario": {"a": "x" * 2**22}}, "scenario must be at most 4096 KiB"),
        ({"parent_id": ID}, "forked_at must be given together with parent_id"),
        ({"forked_at": 1}, "forked_at must be given together with parent_id"),
        ({"outcome": "x" * 2001}, "outcome must have at most 2000 characters"),
        ({"digest": "A" * 64}, "digest must be a SHA-256"),
        ({"created_at": datetime(2026, 1, 1)}, "created_at must be a time with its zone"),  # noqa: DTZ001 - the fault
    ],
)
def test_what_is_wrong_with_a_run_is_said(fields: dict[str, Any], said: str) -> None:
    (error,) = a_run(**fields).validate().errors
    assert error.startswith(said)


def test_all_faults_of_a_turn_are_said_at_once() -> None:
    said = a_turn(turn=-1, whole=1, body="\0", digest="x", occurred_at=None).validate().errors
    assert [one.split(",")[0] for one in said] == [
        "turn must be 0 to 2147483647",
        "whole must be true or false",
        "occurred_at must be a time with its zone",
        "digest must be a SHA-256 in 64 hex digits",
        "body must not contain NUL",
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{}", "body must be text"),
        ("\ud800", "body must be text without lone surrogates"),
        ("x" * (MAX_BODY_BYTES + 1), "body must be at most 64 MiB; let a turn carry only what changed"),
        ("ä" * (MAX_BODY_BYTES // 2 + 1), "body must be at most 64 MiB"),
    ],
    ids=["bytes", "surrogate", "large", "large in bytes"],
)
def test_a_body_that_no_store_can_keep_is_refused(body: Any, said: str) -> None:
    (error,) = a_turn(body=body).validate().errors
    assert error.startswith(said)


def test_a_body_is_not_looked_into() -> None:
    assert a_turn(body="this is no JSON: é", digest="0" * 64).validate()
    assert a_turn(body="x" * MAX_BODY_BYTES).validate()
