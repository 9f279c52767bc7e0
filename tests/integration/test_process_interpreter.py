"""The interpreter of an agent runs as the one of its program does: with or without asserts, warnings and the like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ostler

SOURCE = str(Path(ostler.__file__).resolve().parent.parent)
AGENT = """
import sys, warnings
import ostler

class Mirror(ostler.Agent):
    def process(self, request):
        try:
            assert not request
            asserts = False
        except AssertionError:
            asserts = True
        try:
            warnings.warn("what is said to be wrong", UserWarning, stacklevel=1)
            is_fatal = False
        except UserWarning:
            is_fatal = True
        return {
            "asserts": asserts, "debug": __debug__, "fatal warnings": is_fatal, "docs": Mirror.about.__doc__,
            "flags": [sys.flags.optimize, sys.flags.dev_mode, sys.flags.utf8_mode, sys.flags.bytes_warning],
            "prefix": sys.pycache_prefix, "digits": sys.get_int_max_str_digits(),
        }

    def about(self):
        "Seen unless the program runs without."
"""
#: Prints what it is itself, and what each of its agents is: first those of a program before it.
PROGRAM = """
import asyncio, json, sys
from datetime import timedelta
import ostler
from mirror import Mirror

async def main(home):
    settings = ostler.LifecycleSettings(outlive=timedelta(seconds=60))
    async with ostler.open(home, settings=settings) as manager:
        known = manager.registry.register(Mirror, name="mirror")
        options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.PROCESS)
        request = ostler.SpawnRequest(agent_definition_id=known.id, options=options)
        await manager.spawn(request)
        manager.keep_agents = sys.argv[2] == "stay"
        agents = sorted(await manager.get_active_instances(), key=lambda one: one.created_at)
        said = [await manager.process(one.instance_id, 1) for one in agents]
    print(json.dumps([Mirror().process(1), *said]))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "mirror.py").write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def run(program: Path, *options: str, stays: bool = False, **variables: str) -> list[dict[str, Any]]:
    words = [sys.executable, *options, str(program / "program.py"), str(program / "home"), "stay" if stays else "end"]
    env = {**os.environ, "PYTHONPATH": SOURCE, **variables}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    said: list[dict[str, Any]] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-O",),
        ("-OO",),
        ("-W", "error"),
        ("-W", "error::UserWarning"),
        ("-X", "dev"),
        ("-X", "utf8"),
        ("-X", "utf8=0"),
        ("-bb",),
        ("-X", "int_max_str_digits=5000"),
    ],
    ids=" ".join,
)
def test_an_agent_is_interpreted_as_its_program_is(program: Path, options: tuple[str, ...]) -> None:
    own, agent = run(program, *options, LC_ALL="C")  # in which Python would choose UTF-8 by itself
    assert agent == own


def test_so_is_one_of_a_program_that_was_told_by_variables(program: Path) -> None:
    prefix = str(program / "bytecode")
    own, agent = run(program, PYTHONOPTIMIZE="1", PYTHONWARNINGS="error::UserWarning", PYTHONPYCACHEPREFIX=prefix)
    assert agent == own
    assert own["flags"][0] == 1
    assert own["prefix"] == prefix


def test_two_programs_with_one_keeper_each_have_agents_of_their_own_kind(program: Path) -> None:
    """The template of the first is still there when the second comes."""
    first, agent = run(program, stays=True)
    second, older, younger = run(program, "-O", stays=True)
    _, *all_of_them = run(program)
    assert agent == older == first
    assert younger == second
    assert [one["asserts"] for one in all_of_them] == [True, False, True]
