"""`ostler.toml` as `ostler init` writes it, and the JSON Schemas: both have every key of the records."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from ostler.definitions import ProjectSettings, json_schema, load_settings, settings_template
from ostler.definitions.template import SCHEMA_FILES, Kind

ROOT = Path(__file__).resolve().parents[2]


def tables() -> dict[str, Any]:
    """The record of each table; of those with names, that of one of them."""
    hints = get_type_hints(ProjectSettings)
    names = [field.name for field in dataclasses.fields(ProjectSettings)]
    return {name: get_args(hints[name])[1] if get_args(hints[name]) else hints[name] for name in names}


def uncommented() -> str:
    """With every key in force."""
    return re.sub(r"^# (?=\[|[a-z-]+ = )", "", settings_template(), flags=re.MULTILINE)


def keys(kind: Any) -> set[str]:
    return {kind.spelled(field.name) for field in dataclasses.fields(kind)}


def test_it_changes_nothing_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "ostler.toml").write_text(settings_template())
    assert load_settings(tmp_path) == ProjectSettings()


def test_every_table_and_every_key_is_in_it() -> None:
    written = tomllib.loads(uncommented())
    assert set(written) == set(tables())
    for name, kind in tables().items():
        table = next(iter(written[name].values())) if name in {"crew", "agent"} else written[name]
        assert set(table) == keys(kind), name


def test_every_line_of_it_is_valid_and_the_defaults_are_true(tmp_path: Path) -> None:
    (tmp_path / "ostler.toml").write_text(uncommented())
    settings, defaults = load_settings(tmp_path), ProjectSettings()
    assert settings.tasks.timeout == defaults.tasks.timeout
    assert settings.loop.evolve(**examples("loop")) == defaults.loop
    assert settings.daemon.output_rate == defaults.daemon.output_rate
    assert settings.crew["coder"].agent == "claude"


def examples(table: str) -> dict[str, Any]:
    """The defaults of the keys for which an example is written."""
    values = getattr(ProjectSettings(), table)
    names = ("blocked_timeout", "max_iterations", "until", "max_tokens", "max_cost_usd", "ci")
    return {name: getattr(values, name) for name in names}


def test_its_first_line_names_the_schema() -> None:
    assert settings_template().splitlines()[0] == f"#:schema ./.ostler/{SCHEMA_FILES['project']}"


# --- schemas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["agent", "project"])
def test_the_published_schema_is_that_of_the_records(kind: Kind) -> None:
    published = json.loads((ROOT / "docs" / "schemas" / SCHEMA_FILES[kind]).read_text())
    assert published == json_schema(kind), "run scripts/schemas"


def test_a_key_has_the_sentence_of_its_record() -> None:
    tasks = json_schema("project")["$defs"]["TasksTable"]["properties"]
    assert tasks["max-failures"]["description"] == "Failed attempts before a task is parked for a person."
    definition = json_schema("agent")["$defs"]["LimitKeys"]["properties"]
    assert "megabytes" in definition["memory"]["description"]
