"""What a keeper is, as the machine sees it: one thread that imports no packages and inherits all orphans."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import SOURCE, Home, keeper_argv, wait_until
from test_keeper_templates import Agent

from ostler.keeper import tree

#: Instead of its last words: not to be a keeper, but to say what one has loaded, and where it would look for more.
_SAY = (
    "main.__name__; "
    "print(*(module.__file__ for module in sys.modules.values() if getattr(module, '__file__', None)), *sys.path)"
)
ORPHAN = """
import os, time
if os.fork() == 0:
    if os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home" / "keeper")
    yield made
    made.end()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_has_one_thread_and_no_package_after_a_storm_of_starts(home: Home) -> None:
    manager = home.manager()
    keeper = manager.about["pid"]
    numbers = [manager.say_start(f"u{n}.1", ["/bin/sh", "-c", "true & true & wait"]) for n in range(100)]
    for number in numbers:
        manager.hear(number)
    Agent(manager, "forked.1").started()
    for n in range(100):
        manager.exit_of(f"u{n}.1")
    assert status_of(keeper)["Threads"] == "1"
    mapped = Path(f"/proc/{keeper}/maps").read_text()
    assert "/lib" in mapped
    assert "site-packages" not in mapped


def test_what_it_loads_is_ours_or_of_the_standard_library() -> None:
    argv = [word.replace("main()", _SAY) for word in keeper_argv(Path("/nowhere"))]
    words = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    library = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    loaded = {word for word in words if Path(word).is_file()}
    ours = {path.removeprefix(f"{SOURCE}/ostler/") for path in loaded if path.startswith(f"{SOURCE}/ostler/")}
    assert "keeper/main.py" in ours
    assert {path for path in ours if not path.startswith("keeper/")} == {"__init__.py", "lazy_imports.py", "version.py"}
    assert not [path for path in loaded if not path.startswith((f"{library}/", f"{SOURCE}/ostler/"))]
    assert not [word for word in words if "site-packages" in word], "nor would it look there"
    slow = {"asyncio", "dataclasses", "hashlib", "inspect", "logging", "pathlib", "subprocess", "threading"}
    assert not slow & {Path(path).stem for path in loaded}, "the first spawn in a home waits for it"


def test_a_process_that_loses_its_parent_becomes_its_child(home: Home) -> None:
    manager = home.manager()
    manager.start("a.1", [sys.executable, "-I", "-S", "-c", ORPHAN])
    log = manager.log_of("a.1")
    wait_until(lambda: log.exists() and log.read_text().strip().isdigit())
    orphan = int(log.read_text())
    wait_until(lambda: orphan in tree.children(manager.about["pid"]))
