"""A user with a repository, and agents that are shell scripts: each start runs the next one of its task."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from shell import Shell, until

PROGRAM = r"""
stage=@STAGE@/$OSTLER_TASK
mkdir -p "$stage"
for old in $(cat "$stage/pids" 2>/dev/null); do kill -0 "$old" 2>/dev/null && echo "$old" >> "$stage/alive"; done
echo $$ >> "$stage/pids"
number=$(wc -l < "$stage/pids")
hang() { touch "$stage/hangs"; exec tail -f /dev/null; }
gate() { touch "$stage/at-$1"; while [ ! -e "$stage/past-$1" ]; do sleep 0.02; done; }
steps=$stage
[ -e "$steps/1.sh" ] || steps=@STAGE@
while [ ! -e "$steps/$number.sh" ] && [ "$number" -gt 1 ]; do number=$((number - 1)); done
. "$steps/$number.sh"
"""


class LoopShell:
    def __init__(self, shell: Shell, folder: Path) -> None:
        self.shell = shell
        self.stage = folder / "stage"
        self.stage.mkdir()
        program = self.stage / "agent.sh"
        program.write_text(PROGRAM.replace("@STAGE@", str(self.stage)))
        (shell.home / "agents").mkdir()
        (shell.home / "agents" / "fixer.md").write_text(
            f"---\nlifecycle:\n  driver: {{command: [sh, {program}]}}\n---\n"
        )
        self.git("init", "--quiet", "--initial-branch=main")
        (shell.project / "PROMPT.md").write_text("Mend the parser\n")
        (shell.project / "ostler.toml").write_text('[loop]\nretry-interval = "0s"\ngrace = "0s"\n')
        (shell.project / ".gitignore").write_text(".ostler\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=first")

    def git(self, *words: str) -> str:
        person = {f"GIT_{role}_{part}": "u@u" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
        environment = {**self.shell.environment, **person}
        done = subprocess.run(
            ["git", *words], cwd=self.shell.project, env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout

    def steps(self, *scripts: str, key: str | None = None) -> None:
        place = self.stage if key is None else self.stage / key
        place.mkdir(exist_ok=True)
        for number, script in enumerate(scripts, 1):
            (place / f"{number}.sh").write_text(script)

    def begin(self, *scripts: str, prompt: str = "PROMPT.md", options: tuple[str, ...] = ()) -> str:
        """A loop in the background; its key."""
        known = [one["key"] for one in self.json("task", "list", "-a", "-o", "json")]
        key = f"T{len(known) + 1:03d}"
        self.steps(*scripts, key=key)
        assert self.shell.ok("loop", prompt, "--agent", "fixer", "-d", *options).startswith(f"{key} is in its loop")
        return key

    def json(self, *words: str) -> Any:
        return json.loads(self.shell.ok(*words))

    def task(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.json("task", "show", key)
        return found

    def iterations(self, key: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.json("loop", "show", key, "-o", "json")
        return found

    def until_waits(self, key: str, kind: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def waits() -> bool:
            found[:] = [wait for wait in self.task(key)["waits"] if wait["kind"] == kind]
            return bool(found)

        until(waits, f"{key} does not wait for {kind}")
        return found[0]

    def until_state(self, key: str, state: str) -> None:
        until(lambda: self.task(key)["state"] == state, f"{key} did not become {state}")

    def at(self, key: str, name: str) -> Path:
        return self.stage / key / name

    def starts(self, key: str) -> int:
        return len(self.at(key, "pids").read_text().split())

    def nothing_lived_on(self, key: str) -> bool:
        pids = self.at(key, "pids").read_text().split()
        return not self.at(key, "alive").exists() and not any(lives(int(pid)) for pid in pids)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
