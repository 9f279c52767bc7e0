"""The example of the README runs as it stands. The demo and the economy have tests of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_first_example_of_the_readme(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-B", EXAMPLES / "tour.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["Hello you", "it has worked and waits for the next request", "graceful: True"]
