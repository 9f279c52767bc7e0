"""What a keeper is, as the machine sees it: one thread that imports nobody's packages and inherits all orphans."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import SOURCE, Home, wait_until
from test_keeper_templates import Agent

from ostler.isolation.process import launch
from ostler.keeper import tree

#: Instead of its last words: not to be a keeper, but to say what one has loaded, and where it would look for more.
_SAY = (
    "main.__name__; print(*(one.__file__ for one in sys.modules.values() if getattr(one, '__file__', None)), *sys.path)"
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
    made = Home(tmp_path / "keeper")
    yield made
    made.end()


def said_by(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_has_one_thread_and_no_package_after_a_storm_of_starts(home: Home) -> None:
    manager = home.manager()
    keeper = manager.about["pid"]
    numbers = [manager.say_start(f"u{n}.1", ["/bin/sh", "-c", "true & true & wait"]) for n in range(100)]
    for number in numbers:
        manager.hear(number)
    with Agent(manager, "forked.1") as agent:
        agent.started()
        for n in range(100):
            manager.exit_of(f"u{n}.1")
        assert said_by(keeper)["Threads"] == "1"
        mapped = Path(f"/proc/{keeper}/maps").read_text()
        assert "/lib" in mapped
        assert "site-packages" not in mapped


def test_what_it_loads_is_ours_or_of_the_standard_library() -> None:
    argv = [one.replace("main()", _SAY) for one in launch.keeper_argv(Path("/nowhere"))]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    library = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    loaded = {one for one in said if Path(one).is_file()}
    ours = {one.removeprefix(f"{SOURCE}/ostler/") for one in loaded if one.startswith(f"{SOURCE}/ostler/")}
    assert "keeper/main.py" in ours
    assert {one for one in ours if not one.startswith("keeper/")} == {"__init__.py", "lazy_imports.py", "version.py"}
    assert not [one for one in loaded if not one.startswith((f"{library}/", f"{SOURCE}/ostler/"))]
    assert not [one for one in said if "site-packages" in one], "nor would it look there"
    slow = {"asyncio", "dataclasses", "hashlib", "inspect", "logging", "pathlib", "subprocess", "threading"}
    assert not slow & {Path(one).stem for one in loaded}, "the first spawn in a home waits for it"


def test_who_loses_his_parent_becomes_its_child(home: Home, tmp_path: Path) -> None:
    manager = home.manager()
    log = tmp_path / "log"
    manager.start("a.1", [sys.executable, "-I", "-S", "-c", ORPHAN], log=str(log))
    wait_until(lambda: log.exists() and log.read_text().strip().isdigit())
    orphan = int(log.read_text())
    wait_until(lambda: orphan in tree.children(manager.about["pid"]))
