from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from ostler.model.context import MAX_BYTES, MAX_DEPTH, ContextData
from ostler.model.spawn import Definition, SpawnRequest

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ID = UUID(int=7)
LARGE = "context must be at most 256 KiB as JSON; pass a path to larger data"


def context_errors(context: Any) -> tuple[str, ...]:
    return SpawnRequest(agent_definition_id=ID, context=context).validate().errors


def nested(depth: int) -> dict[str, Any]:
    root: dict[str, Any] = {}
    inner = root
    for _ in range(depth - 1):
        inner["a"] = {}
        inner = inner["a"]
    return root


@pytest.mark.parametrize(
    ("context", "error"),
    [
        ({"a": "x" * 1_000_000}, f"{LARGE}, was 976 KiB"),
        ({"a": [0] * 300_000}, LARGE),
        ({"a": {"b": "x\0"}}, "context.a.b must not contain NUL"),
        ({"\0": 1}, "context.'\\x00' must not contain NUL"),
        ({"a": ["ok", "\ud800"]}, "context.a.1 must be text without lone surrogates, was '\\ud800'"),
        ({"\ud800": 1}, "context.'\\ud800' must be text without lone surrogates, was '\\ud800'"),
        ({"a": float("nan")}, "context.a must be a finite number, was nan"),
        ({"a": float("-inf")}, "context.a must be a finite number, was -inf"),
        ({"a": {1}}, "context.a must be a JSON value, was {1}"),
        ({"a": b"x"}, "context.a must be a JSON value, was b'x'"),
        ({"a": NOW}, "context.a must be a JSON value, was 2026-03-01T00:00:00+00:00"),
        ({1: 2}, "context must have only text as keys, was 1"),
        ({"a": {1: 2}}, "context.a must have only text as keys, was 1"),
        ({"a": 10**5000}, "context must not hold whole numbers of thousands of digits"),
        ({"Key": 1, "kEY": 2}, "context.kEY must not differ from Key by case alone"),
        ({"straße": 1, "STRASSE": 2}, "context.STRASSE must not differ from straße by case alone"),
        (nested(MAX_DEPTH + 1), "context must be nested at most 32 deep"),
        (nested(900), "context must be nested at most 32 deep"),
        (nested(100_000), "context must be nested at most 32 deep"),
    ],
    ids=range(19),
)  # fmt: skip
def test_context_that_cannot_be_kept_is_refused_in_one_sentence(context: Any, error: str) -> None:
    assert context_errors(context) == (error,)


def test_context_as_deep_and_as_large_as_allowed_is_good() -> None:
    assert context_errors(nested(MAX_DEPTH)) == ()
    assert context_errors({"a": "x" * (MAX_BYTES - len('{"a": ""}'))}) == ()
    assert context_errors({"a": [None, True, 1, 1.5, "x", {"b": ()}]}) == ()


def test_context_that_contains_itself_or_doubles_endlessly_is_refused_soon() -> None:
    loop: dict[str, Any] = {}
    loop["me"] = loop
    assert context_errors(loop) == ("context must be nested at most 32 deep",)
    doubled: list[Any] = []
    for _ in range(30):
        doubled = [doubled, doubled]
    assert len(context_errors({"a": doubled})) == 1


def test_the_first_of_each_kind_of_fault_in_a_context_is_named() -> None:
    errors = context_errors({"a": ["\0"] * 1000, "b": float("nan"), "B": 1})
    assert len(errors) == 3


def test_context_is_read_with_keys_in_any_case() -> None:
    data = ContextData({"TaskId": 5})
    assert data["taskid"] == data["TASKID"] == 5
    assert "taskID" in data
    assert list(data) == ["TaskId"]
    assert len(ContextData()) == 0
    assert data.get("other") is None


def test_the_context_of_one_agent_can_be_passed_on_to_the_next() -> None:
    request = SpawnRequest(agent_definition_id=ID, context=ContextData({"a": 1})).checked()
    assert request.context == {"a": 1}
    assert SpawnRequest.from_json(request.to_json()) == request


def test_a_manifest_must_be_json_but_may_tell_keys_apart_by_case() -> None:
    definition = Definition(
        definition_id=ID, name="d", kind="python", manifest={"a": 1, "A": 2}, created_at=NOW, updated_at=NOW
    )
    assert definition.validate()
    bad = definition.evolve(manifest={"a": "\0"}, source="\ud800")
    assert {fault.field for fault in bad.validate()} == {"source", "manifest.a"}
    assert definition.evolve(manifest=None).validate().errors == ("manifest must be a mapping, was None",)
