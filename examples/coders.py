"""The two coders of the demo: real coding agents where they are installed, on a scripted model; else shell programs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostler.testing import ModelRequest, ScriptedModel, Turn, run, say

#: Where `make agents` installs the programs.
CACHE = Path(os.environ.get("OSTLER_AGENTS_DIR") or Path.home() / ".cache" / "ostler" / "agents") / "bin"
PATH = f"{CACHE}:{os.environ['PATH']}"
REAL = {"claude": "Claude Code", "codex": "Codex", "pi": "pi"}
#: What each coder does, by a word of its prompt. The first that fits counts; a comment stands below the task.
WORK = {
    "file of its own": "git checkout -q HEAD hello.txt; echo Bonjour > bonjour.txt",
    "German": "echo Hallo > hello.txt",
    "French": "echo Bonjour > hello.txt",
}


def work_for(prompt: str) -> str:
    return next(command for words, command in WORK.items() if words in prompt)


def answer(request: ModelRequest) -> Turn:
    """As a model would: call the shell once, then say that it is done."""
    return say("It is done.") if request.results else run(work_for(request.prompt))


@contextmanager
def coders(agents: Path) -> Iterator[tuple[str, str]]:
    """Defines two agents in this directory, `ada` and `bo`; yields what they are."""
    found = [name for name in REAL if shutil.which(name, path=PATH)]
    with ScriptedModel(answer) as model:
        told = []
        for name, real in zip(("ada", "bo"), (*found, None, None), strict=False):
            (agents / f"{name}.md").write_text(_scripted() if real is None else _real(real, model))
            told.append("a shell program" if real is None else f"the real {REAL[real]}")
        yield told[0], told[1]


def _real(driver: str, model: ScriptedModel) -> str:
    env = {**model.environment(driver), "PATH": PATH}
    return _definition(f"driver: {driver}", "home: private", f"env: {json.dumps(env)}")


def _scripted() -> str:
    cases = [f"      *'{words}'*) {command};;" for words, command in WORK.items()]
    script = ['    case "$(cat {prompt_file})" in', *cases, "    esac", "    echo It is done."]
    return _definition("driver:", "  command:", "  - sh", "  - -ec", "  - |", *script)


def _definition(*lines: str) -> str:
    return "\n".join(["---", "lifecycle:", *(f"  {line}" for line in lines), "---", ""])
