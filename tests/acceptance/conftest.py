from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell, build_program


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed program: built once for each worker."""
    return build_program(tmp_path_factory.mktemp("installed"))


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
