"""The worked examples run as they stand, and draw the pictures that the guide shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["economy", "rumour"])
def test_an_example_draws_the_picture_of_the_guide(name: str, tmp_path: Path) -> None:
    program = ROOT / "examples" / name / "run.py"
    environment = {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"drawn in {name}.svg" in done.stdout
    # The same seed gives the same history, and the same history the same picture.
    assert (tmp_path / f"{name}.svg").read_text() == (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
    assert not list((tmp_path / "tmp").iterdir())
