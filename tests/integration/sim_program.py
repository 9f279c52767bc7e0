"""`ostler sim` in this very process, which is quicker than a program of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ostler.cli import main

SCENARIO = """\
name = "small"
turns = 4
{engine}
[brains]
one = "{module}:{brain}"
[[agents]]
name = "ada"
kind = "one"
state = {{ n = 0 }}
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Program:
    """A folder with a home and scenarios in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.home = folder / "home"
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        self._path = [*sys.path]
        monkeypatch.setenv("OSTLER_HOME", str(self.home))

    def scenario(self, code: str, *, engine: str = "", brain: str = "Brain", folder: Path | None = None) -> Path:
        """Its file; the code stands beside it."""
        place = folder or self.folder
        place.mkdir(exist_ok=True)
        (place / "acts.py").write_text(code)
        line = f'engine = "acts:{engine}"' if engine else ""
        file = place / "small.toml"
        file.write_text(SCENARIO.format(engine=line, module="acts", brain=brain))
        return file

    def sim(self, *arguments: str | Path) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["ostler", "sim", *map(str, arguments)])
        # As in a new process: nothing is known of the code of an earlier scenario.
        self._monkeypatch.setattr(sys, "path", [*self._path])
        self._monkeypatch.delitem(sys.modules, "acts", raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(int(ended.value.code), out, err)
