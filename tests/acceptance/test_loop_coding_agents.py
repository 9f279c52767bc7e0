"""One loop each with the real Claude Code and the real Codex on a scripted model."""

from __future__ import annotations

from pathlib import Path

import pytest
from coding_ground import CACHE, require_program
from loop_shell import LoopShell
from shell import Shell

from ostler.testing import ScriptedModel, run, say

_FILE = """printf '{"agent-T001": {"lifecycle_state": "complete", "breakpoint": {"type": "task_complete", \
"task_id": "T001", "summary": "said in the file"}}}' > communications.json"""


@pytest.mark.parametrize("driver", ["claude", "codex"])
def test_a_loop_with_a_real_coding_agent(shell: Shell, tmp_path: Path, driver: str) -> None:
    """The first start writes communications.json, and its check fails; the second uses `ostler signal`."""
    require_program(driver)
    shell.environment["PATH"] = f"{CACHE}:{shell.environment['PATH']}"
    loops = LoopShell(shell, tmp_path)
    script = [
        run(_FILE),
        say("I am done."),
        run(f"touch made; {shell.program} signal complete -m 'made it'"),
        say("Now it is.").using(input_tokens=200, output_tokens=30),
    ]
    with ScriptedModel(script) as model:
        variables = "".join(f"    {name}: '{value}'\n" for name, value in model.environment(driver).items())
        text = f"---\nlifecycle:\n  driver: {driver}\n  home: private\n  env:\n{variables}---\n"
        (shell.home / "agents" / "coder.md").write_text(text)
        (shell.project / "ostler.toml").write_text('[loop]\nretry-interval = "0s"\n')
        said = shell.run("loop", "PROMPT.md", "--agent", "coder", "--check", "test -f made", "--max-iterations", "2")
        assert said.code == 0, (said, shell.run("loop", "show", "T001"), shell.run("logs", "T001-2"))
        prompts = [request.prompt for request in model.requests]
    assert [one["ended_by"] for one in loops.iterations("T001")] == ["check", "breakpoint"]
    task = loops.task("T001")
    assert (task["state"], task["summary"]) == ("completed", "made it")
    assert "communications.json" not in task["changed_files"]
    assert task["tokens"] > 0
    assert "the check `test -f made` failed" in prompts[2], "the second start was told, with a fresh context"
    assert "I am done." not in str(prompts[2])
    assert f"(ostler is {shell.program})" in prompts[0], "the login shell of an agent may have a PATH of its own"
