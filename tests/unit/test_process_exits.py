from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ostler.agents import Agent
from ostler.agents.base import FunctionMaker
from ostler.agents.command import Ending
from ostler.errors import AgentInitializationError
from ostler.isolation import Exit
from ostler.isolation.held.exit import ending_of, exit_of
from ostler.isolation.holder import UnitExit
from ostler.isolation.process.sources import source_of
from ostler.model.attempt import AttemptOutcome

CRASH = Exit(outcome=AttemptOutcome.ERROR, detail="SystemExit: 3", exception_type="SystemExit")


@pytest.mark.parametrize(
    ("record", "outcome", "detail"),
    [
        ({"code": 0}, AttemptOutcome.CLEAN, "its process ended by itself"),
        ({"code": 3}, AttemptOutcome.EXIT_CODE, "exit code 3"),
        ({"signal": 11}, AttemptOutcome.SIGNAL, "killed by SIGSEGV"),
        ({"signal": 62}, AttemptOutcome.SIGNAL, "killed by signal 62"),
        ({"signal": 9, "oom": True}, AttemptOutcome.OOM, "it used more memory than its limit of 64 MB"),
        ({"signal": 9, "oom": False}, AttemptOutcome.SIGNAL, "killed by SIGKILL"),
        ({"signal": 9, "oom": None}, AttemptOutcome.SIGNAL, "killed by SIGKILL"),
        ({"signal": 9, "by": "memory"}, AttemptOutcome.OOM, "it used more memory than its limit of 64 MB"),
        ({"signal": 9, "by": "pids", "why": "300 of 260"}, AttemptOutcome.SIGNAL, "300 of 260"),
        ({"signal": 15, "by": "stop"}, AttemptOutcome.STOPPED, "it was stopped"),
        ({"code": 0, "by": "lease"}, AttemptOutcome.STOPPED, "no manager came back"),
        ({}, AttemptOutcome.UNKNOWN, "how is not known"),
        ({"code": None, "signal": None}, AttemptOutcome.UNKNOWN, "how is not known"),
    ],
)
def test_an_end_is_told_for_what_it_was(record: dict[str, Any], outcome: AttemptOutcome, detail: str) -> None:
    how = exit_of(UnitExit(**record), 64)
    assert how.outcome is outcome
    assert detail in (how.detail or "")
    assert (how.code, how.signal) == (record.get("code"), record.get("signal"))


def test_the_agents_own_word_counts_but_not_against_the_kernel() -> None:
    assert exit_of(UnitExit(code=3), 64, CRASH) == replace(CRASH, code=3)
    assert exit_of(UnitExit(signal=9, by="stop"), 64, CRASH) == replace(CRASH, signal=9), "we only hastened it"
    assert exit_of(UnitExit(signal=9, oom=True), 64, CRASH).outcome is AttemptOutcome.OOM


def test_when_it_ended_is_told_in_utc() -> None:
    assert exit_of(UnitExit(code=0, ended=1_700_000_000.5), 64).ended_at == datetime(
        2023, 11, 14, 22, 13, 20, 500_000, tzinfo=UTC
    )
    assert exit_of(UnitExit(code=0), 64).ended_at is None


def test_a_run_of_a_command_ends_in_its_own_terms() -> None:
    assert ending_of(UnitExit(code=3), 64) == Ending(code=3)
    assert ending_of(UnitExit(signal=15), 64) == Ending(signal_name="SIGTERM")
    assert ending_of(UnitExit(), 64) == Ending()
    killed = Ending(signal_name="SIGKILL", memory_limit_mb=64)
    assert ending_of(UnitExit(signal=9, oom=True), 64) == ending_of(UnitExit(signal=9, by="memory"), 64) == killed
    assert killed.failure == "used more memory than its limit of 64 MB and was killed (oom)"


# --- where the class stands --------------------------------------------------------------------------


class Plain(Agent):
    class Inner(Agent):
        pass


def make() -> Agent:
    return Plain()


async def greet(request: Any) -> Any:
    return request


def local() -> Callable[[], Agent]:
    class Hidden(Agent):
        pass

    return Hidden


def test_what_stands_at_the_top_of_a_file_is_found() -> None:
    here = {"module": __name__, "path": str(Path(__file__).absolute()), "main": False}
    assert source_of(Plain) == {**here, "qualname": "Plain"}
    assert source_of(Plain.Inner) == {**here, "qualname": "Plain.Inner"}
    assert source_of(make) == {**here, "qualname": "make"}
    assert source_of(FunctionMaker(greet)) == {**here, "qualname": "greet"}


@pytest.mark.parametrize(
    ("maker", "complaint"),
    [
        (lambda: (Plain(),)[0], "a lambda cannot be found"),
        (local(), "defined inside a function; define it at the top of a module"),
        (functools.partial(make), "has no name by which another process finds it"),
        (FunctionMaker(lambda request: request), "a lambda cannot be found"),
        (type("Plain", (Agent,), {"__module__": __name__, "__qualname__": "Plain"}), "is not what is found"),
    ],
)
def test_what_no_other_process_can_find_is_refused(maker: Any, complaint: str) -> None:
    with pytest.raises(AgentInitializationError, match=complaint):
        source_of(maker)


SCRIPT = """
from ostler.agents import Agent
from ostler.errors import AgentInitializationError
from ostler.isolation.process.sources import source_of

class Mine(Agent):
    pass

try:
    found = source_of(Mine)
    print(found["module"], found["path"], found["qualname"], found["main"])
except AgentInitializationError as error:
    print(error)
"""


def test_a_class_of_the_program_itself_is_found_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)

    def said(*arguments: str, text: str | None = None) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], check=True, capture_output=True, text=True, input=text, cwd=tmp_path
        )
        return done.stdout.strip()

    assert said(str(script)) == f"__main__ {script} Mine True"
    assert said("-m", "mine") == f"mine {script} Mine True"
    assert "typed in or read from standard input" in said("-", text=SCRIPT)
    assert "typed in or read from standard input" in said("-c", SCRIPT)
