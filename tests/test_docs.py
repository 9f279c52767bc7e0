"""The docs are true: the reference is current, the code runs, the links lead somewhere, promises name their tests."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ostler.simulation import begin_run, load_scenario

from ostler import AGENT_TRANSITIONS, PLANS, TASK_TRANSITIONS, AgentState, TaskState, open_store

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PROMISE = re.compile(r"^\s*- \*\*Promise\.\*\* .+ — held by `([\w/.-]+\.py)::(\w+)`$")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
BLOCK = re.compile(r"^```python( no-run)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def promises() -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{number}", line)
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if "**Promise.**" in line
    ]


def has_test(path: Path, name: str) -> bool:
    if not path.is_file() or not name.startswith("test_"):
        return False
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in nodes)


def blocks(page: Path, *, run_only: bool = True) -> list[str]:
    return [code for unrun, code in BLOCK.findall(page.read_text()) if not (run_only and unrun)]


@pytest.mark.parametrize(("where", "line"), promises(), ids=[where for where, _ in promises()])
def test_every_promise_names_a_test_that_exists(where: str, line: str) -> None:
    found = PROMISE.match(line)
    assert found, f"{where} must end with — held by `path::test_name`"
    assert has_test(ROOT / found[1], found[2]), f"{where}: there is no {found[2]} in {found[1]}"


def test_the_search_for_tests_bites() -> None:
    here = Path(__file__)
    assert has_test(here, "test_the_search_for_tests_bites")
    assert not has_test(here, "test_that_nobody_wrote")
    assert not has_test(here, "has_test")
    assert len(promises()) > 20


def test_the_reference_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_tour_of_the_readme_is_the_example() -> None:
    assert blocks(ROOT / "README.md") == [(ROOT / "examples" / "tour.py").read_text()]


def test_the_tour_prints_what_the_readme_says(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    tour = ROOT / "examples" / "tour.py"
    done = subprocess.run([sys.executable, tour], env=environment, capture_output=True, text=True, check=True)
    shown = "".join(f"    {line}\n" for line in done.stdout.splitlines())
    assert f"It prints:\n\n{shown}\n" in (ROOT / "README.md").read_text()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=lambda page: page.name)
def test_the_code_of_a_guide_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `python -m asyncio`: all blocks of a page in order, `await` allowed anywhere."""
    monkeypatch.chdir(tmp_path)
    code = compile("\n".join(blocks(page)), str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not code.co_flags & inspect.CO_COROUTINE:
        assert not blocks(page), "a guide awaits something"
        return

    async def run() -> None:
        await eval(code, {"__name__": "__main__"})  # noqa: S307 - our own docs

    asyncio.run(run())


def test_the_scenario_of_the_guide_is_played_with_the_code_of_the_example(tmp_path: Path) -> None:
    (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```$", (ROOT / "docs/guides/populations.md").read_text())
    shutil.copy(ROOT / "examples/economy/economy.py", tmp_path)
    (tmp_path / "economy.toml").write_text(text)
    scenario = load_scenario(tmp_path / "economy.toml", overrides={"turns": 5, "parameters.tax": 0.2})

    async def run() -> None:
        async with open_store(tmp_path / "home") as store, begin_run(store, scenario) as economy:
            report = await economy.finish()
            assert (report.turn, report.failed) == (5, 0)
            coins = sum(purse.coins for purse in economy.state.states.values())
            assert coins + economy.state.global_state["treasury"] == 2000

    asyncio.run(run())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    broken = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    named = re.findall(r"`((?:src|tests|examples|scripts|docs|benchmarks)/[\w/.-]+)`", text)
    broken += [path for path in named if not (ROOT / path).exists()]
    assert not broken, f"{page.name} leads nowhere with {', '.join(broken)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_that_is_not_run_is_at_least_python(page: Path) -> None:
    for code in blocks(page, run_only=False):
        compile(code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def rows(heading: str) -> dict[str, list[str]]:
    """The table under a heading of the concepts page, by its first column."""
    section = (ROOT / "docs" / "concepts.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize(
    ("heading", "moves"),
    [("The life of an instance", AGENT_TRANSITIONS), ("The way of a task", TASK_TRANSITIONS)],
    ids=["instance", "task"],
)
def test_the_state_tables_of_the_concepts_are_those_of_the_code(
    heading: str, moves: Mapping[AgentState | TaskState, frozenset[AgentState | TaskState]]
) -> None:
    written = {state: set(cells[0].split(", ")) - {"nothing"} for state, cells in rows(heading).items()}
    assert written == {state.value: {target.value for target in targets} for state, targets in moves.items()}


def test_the_plans_of_the_concepts_are_those_of_the_code() -> None:
    for tier, plan in PLANS.items():
        number, isolation, restart, health, priority = rows("Plans")[tier.value]
        assert number == ("unlimited" if plan.max_concurrent is None else str(plan.max_concurrent))
        assert health == ("yes" if plan.custom_health_checks else "no")
        for cell, values in ((isolation, plan.isolation), (restart, plan.restart), (priority, plan.priorities)):
            admitted = {value.value for value in values}
            assert cell == "all" if len(admitted) == 4 else set(cell.split(", ")) == admitted
