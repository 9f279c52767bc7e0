from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell, build_program


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed program: the first worker that needs it builds it for all."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the run, which the workers share
    with (folder / "installed.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not (path := lock.read()):
            path = str(build_program(folder / "installed"))
            lock.write(path)
    return Path(path)


@pytest.fixture
def shell(program: Path, tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(program, tmp_path)
    yield shell
    shell.close()


@pytest.fixture(scope="module")
def open_shell(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Shared by the tests of one module, each of which uses names of its own."""
    shell = Shell(program, tmp_path_factory.mktemp("shared"))
    yield shell
    shell.close()
