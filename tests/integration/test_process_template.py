"""A template: where the code of its agents comes from, and what becomes of a module that cannot be forked."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from inside_agents import load
from inside_ground import Template

from ostler.isolation.process.launch import template_argv

__all__ = ["load"]

# --- where the code comes from -----------------------------------------------------------------------

_SMALL = """
from ostler.agents import Agent
class Mine(Agent):
    def process(self, request):
        return {answer}
"""


def test_files_that_can_be_edited_are_named(load: Callable[..., Template], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'beside'")
    template = load("import beside, json, pytest\n" + _SMALL.format(answer="beside.word"))
    files = template.answer["files"]
    for path in (template.path, tmp_path / "beside.py"):
        found = path.stat()
        assert files[str(path)] == [found.st_mtime_ns, found.st_size]
    assert not any("site-packages" in one or one.endswith("/json/__init__.py") for one in files)
    assert template.start("Mine").ask()["ok"] == "beside"


def test_a_file_written_while_it_is_loaded_counts_as_changed(load: Callable[..., Template]) -> None:
    touch = "import os, time\ntime.sleep(0.02)\nos.utime(__file__)\ntime.sleep(0.02)\n"
    template = load(touch + _SMALL.format(answer="1"))
    assert template.answer["files"][str(template.path)][0] == 0


def test_a_changed_module_is_loaded_anew(load: Callable[..., Template]) -> None:
    first = load(_SMALL.format(answer="'old'"))
    agent = first.start("Mine")
    second = load(_SMALL.format(answer="'much newer'"))
    assert first.answer["files"][str(first.path)] != second.answer["files"][str(first.path)]
    assert agent.ask()["ok"] == "old"
    assert second.start("Mine").ask()["ok"] == "much newer"


def test_agents_of_one_template_draw_different_numbers(load: Callable[..., Template]) -> None:
    template = load("import random\n" + _SMALL.format(answer="random.random()"))
    drawn = {template.start("Mine").ask()["ok"] for _ in range(3)}
    assert len(drawn) == 3


def test_a_spare_becomes_the_next_agent(load: Callable[..., Template]) -> None:
    template = load("import random\n" + _SMALL.format(answer="random.random()"))
    spares, drawn = [], set()
    for _ in range(3):
        spares.append(template.fork_spare())
        agent = template.start("Mine")
        assert agent.pid == spares[-1]
        drawn.add(agent.ask()["ok"])
    assert len(set(spares)) == 3
    assert len(drawn) == 3


def test_a_spare_that_is_not_needed_ends(load: Callable[..., Template]) -> None:
    template = load(_SMALL.format(answer="1"))
    pid = template.fork_spare()
    template.close()
    assert os.waitpid(pid, 0) == (pid, 0)


def test_a_class_of_the_users_own_script(load: Callable[..., Template]) -> None:
    text = _SMALL.format(answer="[type(self).__module__, word, sys.modules['__main__'].Mine is Mine]")
    text = f"import sys\n{text}\nword = 'early'\nif __name__ == '__main__':\n    raise SystemExit('it ran')\n"
    template = load(text + "word = 'late'\n", "script", main=True)
    assert template.answer["forks"] is True
    assert template.start("Mine").ask()["ok"] == ["__ostler_main__", "late", True]


def test_a_program_that_was_started_as_part_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "crew").mkdir()
    (tmp_path / "crew" / "__init__.py").touch()
    (tmp_path / "crew" / "beside.py").write_text("word = 'relative'")
    (tmp_path / "crew" / "boss.py").write_text("from .beside import word\n" + _SMALL.format(answer="word"))
    template = Template(tmp_path, "crew/boss", main=True, package="crew")
    try:
        assert template.start("Mine").ask()["ok"] == "relative"
    finally:
        template.close()


def test_a_module_of_the_same_name_elsewhere_is_not_taken_for_it(load: Callable[..., Template]) -> None:
    # That of the standard library is loaded long before.
    template = load(_SMALL.format(answer="__file__"), "pathlib")
    assert template.start("Mine").ask()["ok"] == str(template.path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("def", "SyntaxError"),
    ],
)
def test_a_module_that_does_not_load_says_why(load: Callable[..., Template], text: str, said: str) -> None:
    template = load(text)
    assert said in template.answer["failed"]
    assert "mine.py" in template.answer["failed"]
    assert template.process.wait(60) == 1


# --- what cannot be forked ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True, name='clock').start()", "a thread when"),
        ("thread.start_new_thread(time.sleep, (60,))", "a library that starts threads"),
        ("pair = socket.socketpair()", "socket:"),
        ("loop = asyncio.new_event_loop()", "anon_inode"),
        ("file = open(__file__)", "mine.py"),
        ("child = subprocess.Popen(['sleep', '0.5'], stdin=subprocess.DEVNULL)", "starts a program"),
    ],
)
def test_a_module_that_cannot_be_forked_says_why(load: Callable[..., Template], first: str, why: str) -> None:
    """Its agents get an interpreter each; see the contract suite and `test_keeper_templates`."""
    imports = "import asyncio, socket, subprocess, threading, time, _thread as thread\n"
    template = load(f"{imports}{first}\n{_SMALL.format(answer='request')}")
    assert template.answer["forks"] is False
    assert why in template.answer["why"]


_SETS = """
import os
os.environ["FROM_MODULE"] = "set"
os.environ["COLOUR"] = os.environ["COLOUR"] + "dish"
"""


def test_what_a_module_does_to_its_environment_stays(load: Callable[..., Template]) -> None:
    """As it would if the agent itself had loaded it; many a library is switched on or off in this way."""
    template = load(_SETS + _SMALL.format(answer="dict(os.environ)"))
    seen = template.start("Mine").ask()["ok"]
    assert {name: seen.get(name) for name in ("FROM_MODULE", "COLOUR", "MARK")} == {
        "FROM_MODULE": "set",
        "COLOUR": "reddish",
        "MARK": "of the agent",
    }


def test_a_log_that_is_only_added_to_may_be_shared(load: Callable[..., Template], tmp_path: Path) -> None:
    log = tmp_path / "shared.log"
    template = load(f"log = open({str(log)!r}, 'a', buffering=1)\n" + _SMALL.format(answer="log.write('line\\n')"))
    assert template.answer["forks"] is True
    agents = [template.start("Mine") for _ in range(3)]
    assert [one.ask()["ok"] for one in agents] == [5, 5, 5]
    assert log.read_text() == "line\n" * 3


def test_a_template_finds_what_it_stands_on_wherever_that_is() -> None:
    """Packages may have been found by a variable of the program, which a template does not have."""
    python, *rest = template_argv()
    ended = subprocess.run([python, "-S", *rest], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "No module named" not in ended.stderr
    assert ended.stderr.strip().endswith("Bad file descriptor"), "it comes as far as the socket of its keeper"


@pytest.mark.parametrize(
    ("main", "expected"), [(False, {"mine.py"}), (True, {"mine.py", "crew/__init__.py", "crew/part.py"})]
)
def test_what_is_the_agents_own_counts_wherever_it_is_installed(tmp_path: Path, main: bool, expected: set[str]) -> None:
    """Its module, and the package of that: here of a program that was started with `python -m`."""
    site = tmp_path / "site-packages"
    for package in ("crew", "foreign"):
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").touch()
        (site / package / "part.py").touch()
    (site / "mine.py").write_text("import crew.part, foreign.part\n" + _SMALL.format(answer="1"))
    template = Template(site, "mine", main=main, package="crew" if main else None)
    try:
        files = {Path(one) for one in template.answer["files"]}
        assert {one.relative_to(site).as_posix() for one in files if one.is_relative_to(site)} == expected
    finally:
        template.close()
