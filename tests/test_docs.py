"""The docs are true: their code runs, their links lead somewhere, their tables say what the code says."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import click
import pytest

import ostler
from ostler import errors
from ostler.api.table import ROUTES
from ostler.cli.main import root
from ostler.definitions.keys import LifecycleKeys
from ostler.durations import write_duration
from ostler.isolation import IsolationLevels
from ostler.model.events import EVENT_CLASSES
from ostler.model.record import Record
from ostler.model.states import AGENT_TRANSITIONS
from ostler.model.types import Interval
from ostler.policy.access import ROLE_PERMISSIONS
from ostler.policy.quota import PLANS
from ostler.telemetry.metrics import METRICS, prometheus_name

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "docs" / "guides"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python( no-run)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")
#: Records whose fields a table lists with default and range.
LISTED = {
    "AgentSpawnOptions",
    "HealthCheckConfig",
    "LifecycleSettings",
    "ResourceLimits",
    "RestartPolicy",
    "RetentionPolicy",
    "TerminationOptions",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- code and links ----------------------------------------------------------------------------------


def blocks(page: Path, *, run_only: bool = True) -> list[str]:
    return [code for unrun, code in BLOCK.findall(page.read_text()) if not (run_only and unrun)]


def compiled(page: Path, code: str) -> Any:
    return compile(code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


@pytest.mark.parametrize("page", sorted(GUIDES.glob("*.md")), ids=lambda page: page.name)
def test_the_code_of_a_guide_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `python -m asyncio`: all blocks of a page in order, in an empty directory."""
    for code in blocks(page, run_only=False):
        compiled(page, code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    code = compiled(page, "\n".join(blocks(page)))

    async def run() -> None:
        found = eval(code, {"__name__": "__main__"})  # noqa: S307 - our own docs
        if inspect.isawaitable(found):
            await found

    asyncio.run(run())


def test_the_example_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    tour, readme = ROOT / "examples" / "tour.py", ROOT / "README.md"
    assert blocks(readme) == [tour.read_text().partition("\n\n")[2]]  # all but its docstring
    environment = {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, tour], env=environment, capture_output=True, text=True, check=True)
    shown = "".join(f"    {line}\n" for line in done.stdout.splitlines())
    assert f"It prints:\n\n{shown}\n" in readme.read_text()
    assert not list(tmp_path.iterdir())


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    broken = []
    for link, anchor in LINK.findall(text):
        target = (page.parent / link).resolve() if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{link}#{anchor}")
    named = re.findall(r"`((?:src|tests|examples|scripts|docs|benchmarks)/[\w/.-]+)`", text)
    broken += [path for path in named if not (ROOT / path).exists()]
    assert not broken


def test_the_walks_of_the_architecture_name_what_is_there() -> None:
    """`lifecycle/start.py` `started`, `other`: the file is in src/ostler, and has these functions or classes."""
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "architecture.md").read_text())
    source = ROOT / "src" / "ostler"
    missing = [path for path in re.findall(r"`(\w+/[\w/]*(?:\.py)?)`", text) if not (source / path).exists()]
    for path, names in re.findall(r"`(\w+/[\w/]+\.py)`((?: →)?(?:,? `\w+`)+)", text):
        code = (source / path).read_text()
        missing += [
            f"{path} {name}" for name in re.findall(r"\w+", names) if not re.search(rf"(def|class) {name}\b", code)
        ]
    assert not missing


# --- tables ------------------------------------------------------------------------------------------


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The rows of each table of a page, by the first cell of its heading; without backticks."""
    found: dict[str, list[list[str]]] = {}
    for table in re.findall(r"(?:^\|.*\|\n)+", page.read_text(), re.MULTILINE):
        rows = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table.splitlines()]
        found[rows[0][0]] = found.get(rows[0][0], []) + rows[2:]
    return found


def column(page: str, heading: str, number: int = 1) -> dict[str, str]:
    return {row[0]: row[number] for row in tables(GUIDES / page)[heading]}


def words(cell: str) -> set[str]:
    return {word for word in cell.split(", ") if word}


def records() -> list[Any]:
    return [
        pytest.param(page, heading, id=heading)
        for page in PAGES
        for heading in tables(page)
        if heading != "Client" and isinstance(getattr(ostler, heading, None), type)
    ]


def test_the_records_that_users_set_are_all_listed() -> None:
    assert {one.id for one in records()} == LISTED


@pytest.mark.parametrize(("page", "heading"), records())
def test_a_table_of_a_record_has_its_defaults_and_ranges(page: Path, heading: str) -> None:
    kind: Any = getattr(ostler, heading)
    default, hints = kind(), typing.get_type_hints(kind, include_extras=True)
    expected = {}
    for field in dataclasses.fields(kind):
        value = getattr(default, field.name)
        if not isinstance(value, tuple | Record):
            expected[field.name] = (text_of(value), range_of(hints[field.name]))
    assert {name: (given, limits) for name, given, limits, *_ in tables(page)[heading]} == expected


def text_of(value: Any) -> str:
    match value:
        case timedelta():
            return write_duration(value)
        case Enum():
            return str(value.value)
        case None | bool():
            return "none" if value is None else "yes" if value else "no"
    return str(value)


def range_of(hint: Any) -> str:
    for one in getattr(hint, "__metadata__", ()):
        if isinstance(one, Interval):
            return f"from {text_of(one.ge)}" if one.le is None else f"{text_of(one.ge)} to {text_of(one.le)}"
    return "".join(range_of(inner) for inner in typing.get_args(hint)[:1] if typing.get_args(inner))


def test_states() -> None:
    written = {state: words(cell) for state, cell in column("lifecycle.md", "state").items()}
    assert written == {state.value: {one.value for one in into} for state, into in AGENT_TRANSITIONS.items()}


def test_plans_and_roles() -> None:
    for tier, plan in PLANS.items():
        _, number, isolation, restart, health, priority = next(
            row for row in tables(GUIDES / "access.md")["plan"] if row[0] == tier
        )
        assert number == ("unlimited" if plan.max_concurrent is None else str(plan.max_concurrent))
        assert health == ("yes" if plan.custom_health_checks else "no")
        for cell, values in ((isolation, plan.isolation), (restart, plan.restart), (priority, plan.priorities)):
            assert cell == "all" if len(values) == 4 else words(cell) == set(values)
    roles = {role: words(cell) for role, cell in column("access.md", "role").items()}
    assert roles.pop("admin") == {"all but workspaces.cross"}
    assert roles == {role: set(held) for role, held in ROLE_PERMISSIONS.items() if role != "admin"}


def test_events_and_metrics() -> None:
    assert set(column("observing.md", "event")) == set(EVENT_CLASSES)
    metrics = {name for cell in column("observing.md", "metric") for name in words(cell)}
    assert metrics == {prometheus_name(spec) for spec in METRICS.values()}


def test_limits_by_level_and_how_a_start_ended() -> None:
    levels = IsolationLevels(ostler.SystemClock())
    for number, level in enumerate((ostler.IsolationLevel.NONE, ostler.IsolationLevel.THREAD), 1):
        written = {name: cell.partition(":")[0] for name, cell in column("isolation.md", "limit", number).items()}
        held = levels.get(level).capabilities.limits
        assert written == {**{name: held[name].value for name in held}, "processes": "not bounded"}
    assert set(column("isolation.md", "outcome")) == set(ostler.AttemptOutcome)


def test_keys_of_definition_files_and_what_the_context_gives() -> None:
    keys = {LifecycleKeys.spelled(one.name) for one in dataclasses.fields(LifecycleKeys) if one.name != "given"}
    assert set(column("definitions.md", "key")) == keys
    given = {name for cell in column("agents.md", "of the context") for name in words(re.sub(r"\(.*?\)", "", cell))}
    assert [name for name in given if not hasattr(ostler.AgentContext, name)] == []


def test_commands_and_exit_codes() -> None:
    written = {cell.split()[0] for cell in column("command-line.md", "command")}
    assert written == set(root.list_commands(click.Context(root)))
    codes = {int(code) for code in column("command-line.md", "exit code") if code.isdecimal()}
    assert codes == set(errors.ExitCode)


def test_routes_and_problem_codes() -> None:
    written = {(row[0], row[1], row[2]) for row in tables(GUIDES / "http-api.md")["method"]}
    assert written == {(route.method, route.path, route.permission) for route in ROUTES}
    codes = {row[0]: (row[1], row[2]) for row in tables(GUIDES / "http-api.md")["code"]}
    expected = {one.code: (str(one.status), str(int(one.cli_exit))) for one in errors.CLASS_OF_CODE.values()}
    for code, status in ((errors.UNAUTHENTICATED, 401), (errors.TOO_LARGE, 413)):
        expected[code] = (str(status), str(int(errors.exit_code_of(code))))
    assert codes == expected
