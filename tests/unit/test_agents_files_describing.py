from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from ostler.agents import AgentManifest
from ostler.agents.files import Project, explain, lifecycle_schema
from ostler.agents.files.checking import leaves
from ostler.agents.files.describing import _declared
from ostler.agents.files.forms import FORMS
from ostler.agents.files.keys import LIFECYCLE, Key
from ostler.agents.files.project import PROJECT
from ostler.errors import ValidationError


def every(key: Key, path: str = "") -> Iterator[tuple[str, Key]]:
    inner = [*key.keys, *(key.each.keys if key.each else ())]
    for one in inner:
        here = f"{path}.{one.name}" if path else one.name
        yield here, one
        yield from every(one, here)


LIFECYCLE_KEYS = [path for path, key in every(LIFECYCLE)]


@pytest.mark.parametrize("path", LIFECYCLE_KEYS)
def test_every_key_can_be_explained(path: str) -> None:
    said = explain(f"lifecycle.{path}")
    assert said.startswith(f"lifecycle.{path}\n  ")
    assert explain(path).splitlines()[1:] == said.splitlines()[1:]
    assert "Example: " in said


def test_an_explanation_says_form_range_default_and_inner_keys() -> None:
    assert explain("lifecycle.limits.memory").splitlines() == [
        "lifecycle.limits.memory",
        "  Memory of the agent and of what it starts.",
        "  Written as a size with its unit, such as 512M or 2G",
        "  Allowed: 64 MB to 8192 MB",
        "  Unless written: 512 MB",
        "  Example: 2G",
    ]
    assert "One of: human, gates, never" in explain("review.accept")
    assert "    max-delay: No delay is longer." in explain("restart")
    assert "    driver: " in explain("lifecycle")


def test_the_keys_of_a_project_are_explained_too() -> None:
    assert "Agents at the same time." in explain("limits.agents")
    assert "    retention: How long things are kept." in explain("ostler.toml")
    assert "A program that speaks ACP." in explain("driver.codex.acp")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("lifecycle.restrat", "lifecycle.restrat is not known; did you mean restart?"),
        ("lifecycle.restart.dely", "lifecycle.restart.dely is not known; did you mean delay?"),
        ("lifecycle.limits.memory.x", "lifecycle.limits.memory.x is not known"),
        ("", " is not known"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(path: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        explain(path)
    assert said in str(caught.value)


def properties(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for shape in [schema, *schema.get("anyOf", [])]:
        for name, inner in shape.get("properties", {}).items():
            here = f"{path}.{name}" if path else name
            yield here
            yield from properties(inner, here)


def test_the_schema_has_exactly_the_keys_of_the_table() -> None:
    schema = lifecycle_schema()
    assert sorted(properties(schema)) == sorted(LIFECYCLE_KEYS)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["additionalProperties"] is False


def admits(schema: dict[str, Any], value: Any) -> bool:
    """As much of JSON Schema as the schema uses."""
    if "anyOf" in schema:
        return any(admits(shape, value) for shape in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"] and type(value) is type(schema["const"]))
    if "enum" in schema:
        return value in schema["enum"]
    kinds: dict[str, Any] = {
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "array": list,
        "object": dict,
    }
    if not isinstance(value, kinds[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, str):
        return bool(re.search(schema.get("pattern", ""), value, re.ASCII)) and len(value) >= schema.get("minLength", 0)
    if isinstance(value, list):
        return all(admits(schema["items"], item) for item in value)
    if isinstance(value, dict):
        named = re.compile(schema.get("propertyNames", {}).get("pattern", ""))
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(
            bool(named.search(name))
            and (admits(known[name], one) if name in known else bool(rest) and admits(rest, one))
            for name, one in value.items()
        )
    return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))


@pytest.mark.parametrize(
    ("value", "admitted"),
    [
        ({}, True),
        ({"restart": "on-failure:3", "limits": {"memory": "2G", "tokens": "2M", "time": "1h30m", "cpu": 50}}, True),
        ({"restart": {"policy": "no", "max": 3}, "driver": {"command": ["a"]}, "exit-codes": {"75": "retry"}}, True),
        ({"restart": False, "driver": "acp:x", "env": ["A"], "pty": True, "loop": {"gates": "pytest"}}, True),
        ({"restrat": "no"}, False),
        ({"restart": "sometimes"}, False),
        ({"restart": {"max": 11}}, False),
        ({"restart": {"multiplier": 9}}, False),
        ({"limits": {"memory": "2"}}, False),
        ({"limits": {"time": ""}}, False),
        ({"limits": {"cpu": 101}}, False),
        ({"exit-codes": {"256": "done"}}, False),
        ({"exit-codes": {"1": "dunno"}}, False),
        ({"env": ["A=b"]}, False),
        ({"isolation": "jail"}, False),
    ],
)
def test_the_schema_admits_what_the_reader_admits(value: dict[str, Any], admitted: bool) -> None:
    assert admits(lifecycle_schema(), value) is admitted


@pytest.mark.parametrize(
    ("record", "table"), [(AgentManifest, LIFECYCLE), (Project, PROJECT)], ids=["lifecycle", "project"]
)
def test_every_field_that_the_table_names_exists(record: type, table: Key) -> None:
    for key, _ in leaves(table):
        owner: Any = record
        for part in key.field.split(".") if key.field else ():
            hints = typing.get_type_hints(owner)
            assert part in hints, f"{key.name} goes to {key.field}"
            owner = next(iter(typing.get_args(hints[part])), hints[part])


def test_every_key_has_a_form_with_words_and_a_sentence() -> None:
    for path, key in [*every(LIFECYCLE), *every(PROJECT)]:
        assert FORMS[key.form].hint, path
        assert key.says.endswith("."), path
    assert _declared(AgentManifest, "") == (None, None)


@pytest.mark.parametrize("code", ["import ostler", "import ostler.cli", "import ostler.agents.files"])
def test_naming_the_readers_does_not_load_the_yaml_parser(code: str) -> None:
    script = f"{code}\nimport sys; sys.exit('ruamel.yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
