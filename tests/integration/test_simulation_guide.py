"""The guide of populations is true: its code runs, and its scenario is played with the code of the example."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest

from ostler.simulation import begin_run, load_scenario
from ostler.store.store import Store

pytestmark = pytest.mark.anyio

ROOT = next(one for one in Path(__file__).resolve().parents if (one / "pyproject.toml").exists())
GUIDE = (ROOT / "docs" / "guides" / "populations.md").read_text()


async def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(re.findall(r"(?ms)^```python\n(.*?)^```$", GUIDE))
    code = compile(text, "populations.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, {"__name__": "guide"})  # noqa: S307 - our own docs


async def test_the_scenario_of_the_guide_is_played_with_the_code_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "economy", None)  # undone after the test
    del sys.modules["economy"]
    (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```$", GUIDE)
    shutil.copy(ROOT / "examples" / "economy" / "economy.py", tmp_path)
    (tmp_path / "economy.toml").write_text(text)
    scenario = load_scenario(tmp_path / "economy.toml", overrides={"turns": 5, "parameters.tax": 0.2})
    async with Store(tmp_path / "home") as store, begin_run(store, scenario) as economy:
        report = await economy.finish()
        assert (report.turn, report.failed) == (5, 0)
        coins = sum(purse.coins for purse in economy.state.states.values())
        assert coins + economy.state.global_state["treasury"] == 2000
