"""Somebody without rights: where tests run as root, what root may do must not hide what others may not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from keeper_client import SOURCE, Home, keeper_argv

_NOBODY = 65534
#: None: whoever runs the tests is ordinary enough.
_USER = _NOBODY if os.geteuid() == 0 else None
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def run(argv: list[str], seconds: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
    """As an ordinary user, to its end."""
    return subprocess.run(
        argv,
        user=_USER,
        group=_USER,
        extra_groups=None if _USER is None else [],
        env={"PATH": os.environ["PATH"], **env},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


class Ordinary:
    """A place on the disk that is such a user's, and a Python that it may run: root's own is often in root's home."""

    def __init__(self, place: Path, python: str) -> None:
        self.place = place
        self.python = python

    def keeper_argv(self, directory: Path) -> list[str]:
        return [self.python, *keeper_argv(directory)[1:]]

    def python_with_packages(self) -> str:
        """The same with what these tests have installed: an environment of its own, for a template has no other way."""
        environment = self.place / "venv"
        packages = environment / "lib" / _VERSION / "site-packages"
        packages.mkdir(parents=True)
        (environment / "bin").mkdir()
        (environment / "bin" / "python").symlink_to(self.python)
        (environment / "pyvenv.cfg").write_text(f"home = {Path(self.python).parent}\n")
        found = [SOURCE, *(one for one in sys.path if one.endswith("site-packages"))]
        (packages / "ours.pth").write_text("\n".join(found))
        return str(environment / "bin" / "python")

    def home(self) -> Home:
        return _OrdinaryHome(self)


class _OrdinaryHome(Home):
    def __init__(self, owner: Ordinary) -> None:
        self._owner = owner
        super().__init__(owner.place / "keeper")

    def launch(self, change: str = "") -> None:
        assert not change, "its keeper is started as it is"
        done = run(self._owner.keeper_argv(self.directory))
        assert done.returncode == 0, done.stderr


@contextmanager
def somebody() -> Iterator[Ordinary]:
    """Not in a directory of pytest: those are of root alone."""
    with tempfile.TemporaryDirectory(prefix="ostler-ordinary-") as place:
        if _USER is not None:
            shutil.chown(place, _USER, _USER)
        for python in (sys.executable, f"/usr/bin/{_VERSION}", f"/usr/local/bin/{_VERSION}"):
            if _can_run(python, place):
                yield Ordinary(Path(place), python)
                return
        pytest.skip("an ordinary user can run no Python here that reads our sources")


def _can_run(python: str, place: str) -> bool:
    try:
        return run([python, "-c", f"import os; os.listdir({SOURCE!r}); os.listdir({place!r})"]).returncode == 0
    except OSError:
        return False
