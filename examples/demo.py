"""What Ostler does, told through its command line in a scratch project: run it with `make demo`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from coders import coders

HERE = Path(__file__).resolve().parent
OSTLER = [sys.executable, "-m", "ostler"]
CLERK = """---
description: Asks before it deletes
lifecycle:
  driver: python:clerk:Clerk
  isolation: process
---
"""

NIGHT = """
[crew.night]
agent = "poet"
count = 2
tasks = "tag:night"

[loop]
retry-interval = "0s"

[agent.poet]
driver.command = ["sh", "-ec", '''
case "$(cat {prompt_file})" in
  *earlier*) echo better > fragile.txt;;
  *fragile*) echo "the first try fails"; exit 1;;
  *) echo roses > poem.txt;;
esac''']

[agent.singer]
driver.command = ["sh", "-ec", '''
case "$(cat {prompt_file})" in
  *"CI failed"*) echo la la > song.txt; ostler signal pr -m "The song, with words";;
  *accepted*) echo hum > song.txt; ostler signal pr -m "The song";;
  *) ostler signal blocked --on T003 -m "there is no poem yet";;
esac''']
"""


class Story:
    """Commands as a person would type them, with what they print."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(project.parent)}
        self.environment.pop("OSTLER_HOME", None)

    def say(self, text: str) -> None:
        print(f"\n\033[1m# {text}\033[0m" if sys.stdout.isatty() else f"\n# {text}", flush=True)

    def type(self, line: str, *, quiet: bool = False) -> str:
        """One `ostler` command; returns what it printed."""
        words = shlex.split(line)
        if not quiet:
            print(f"$ ostler {line}", flush=True)
        done = subprocess.run(
            [*OSTLER, *words], cwd=self.project, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if not quiet:
            print(done.stdout, end="", flush=True)
        return done.stdout

    def git(self, line: str, *, quiet: bool = True) -> None:
        """One `git` command of the person."""
        person = {"GIT_AUTHOR_NAME": "You", "GIT_AUTHOR_EMAIL": "you@example.org"}
        person |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in person.items()}
        words = ["git", *shlex.split(line)]
        done = subprocess.run(
            words, cwd=self.project, env=self.environment | person, capture_output=True, text=True, check=True
        )
        if not quiet:
            print(f"$ git {line}\n{done.stdout}", end="", flush=True)

    def until(self, line: str, wanted: str) -> None:
        for _ in range(200):
            if wanted in self.type(line, quiet=True):
                return
            time.sleep(0.1)
        sys.exit(f"`ostler {line}` never said {wanted!r}")

    def kill_daemon(self) -> None:
        pid = json.loads(self.type("status -o json", quiet=True))["pid"]
        print(f"$ kill -9 {pid}", flush=True)
        os.kill(pid, signal.SIGKILL)


def tell(story: Story) -> None:
    story.say("A command runs as an agent: its output, its exit code")
    story.type("""run -- sh -c 'for i in 1 2 3; do echo step $i; done; exit 3'""")

    story.say("In the background, limited, restarted when it fails")
    work = "i=0; while true; do i=$((i+1)); echo step $i of many; sleep 0.2; done"
    story.type(f"run -d --name nightly --restart on-failure:3 --memory 256M -- sh -c {shlex.quote(work)}")
    story.until("logs nightly", "step 3")
    story.type("ps")
    story.type("why nightly")

    story.say("Frozen where it stands, and on again")
    story.type("pause nightly")
    story.type("resume nightly")

    story.say("The daemon is killed. The agent never notices; the next command starts another daemon, which finds it")
    story.kill_daemon()
    story.type("ps")
    story.type("logs -n 2 nightly")

    story.say("An agent in Python asks a person, and waits without using anything")
    shutil.copy(HERE / "clerk.py", story.project)
    agents = story.project / ".ostler" / "agents"
    agents.mkdir(parents=True, exist_ok=True)
    (agents / "clerk.md").write_text(CLERK)
    story.type("run -d --name clerk clerk 'delete the old logs'")
    story.until("waits", "clerk")
    story.type("waits")
    story.type("answer clerk yes")
    story.until("ps -a", "terminated")
    story.type("logs -T clerk")

    tell_of_tasks(story, agents)
    tell_of_the_night(story)

    story.say("Everything is in one durable record")
    story.type("stop nightly")
    story.type("ps -a")
    story.type("audit verify")
    story.type("down")


def tell_of_tasks(story: Story, agents: Path) -> None:
    """Two agents edit one repository, each in a worktree of its own; a person reviews."""
    story.git("init -q -b main")
    (story.project / ".gitignore").write_text(".ostler/\n__pycache__/\n")
    (story.project / "hello.txt").write_text("Hello\n")
    story.git("add .")
    story.git("commit -q -m start")
    with coders(agents) as (ada, bo):
        story.say(f"Two coders get a task each: ada is {ada}, bo is {bo}. Ostler runs the check itself")
        story.type("task add 'Greet in German' --agent ada --check 'test -s hello.txt'")
        story.type("task add 'Greet in French' --agent bo --check 'test -s hello.txt'")
        for key in ("T001", "T002"):
            story.until(f"task show {key}", '"completed"')
        story.type("task list")
        story.type("diff T001")
        story.type("accept T001")

        story.say("The other one changed the same line: nothing is merged, and its coder is told what to do")
        story.type("accept T002")
        story.type("task send-back T002 -m 'main greets in German now; put yours into a file of its own'")
        story.until("task show T002", '"completed"')
        story.type("diff --stat T002")
        story.type("accept T002")

        story.say("A worktree is retired to the vault, whole, and brought back")
        story.type("retire T002")
        story.type("unretire T002")
        story.git("log --oneline --stat", quiet=False)


def tell_of_the_night(story: Story) -> None:
    """A crew works the queue, and a loop drives one task through fresh starts."""
    (story.project / "ostler.toml").write_text(NIGHT)
    story.git("add .")
    story.git("commit -q -m 'Declare a crew'")
    story.say("A crew of two works a queue through the night. One coder fails; its task is done by the other")
    story.type("crew up -d")
    story.type("task add 'Write poem.txt' --tag night --agent poet")
    story.type("task add 'Write fragile.txt' --tag night --agent poet")
    for key in ("T003", "T004"):
        story.until(f"task show {key}", '"completed"')
    story.type("crew ps")
    story.type("task list")

    story.say("A loop starts its agent afresh until the work is proven. It is blocked on T003, so it waits for that")
    (story.project / "PROMPT.md").write_text("Sing the poem.\n")
    story.type("loop PROMPT.md --agent singer --ci 'grep -q la song.txt' -d")
    story.until("waits", "waits for T003")
    story.type("waits")
    story.type("accept T003")

    story.say("It opens a pull request. CI refuses the first one, and a fresh agent is told why; then a person merges")
    story.until("pr list", "passed")
    story.type("loop show T005")
    story.type("pr approve 1")
    story.type("pr merge 1")
    story.type("accept T004")
    story.type("crew stop")
    story.git("log --oneline", quiet=False)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up as after Ctrl+C
    with tempfile.TemporaryDirectory(prefix="ostler-demo-") as folder:
        project = Path(folder) / "project"
        (project / ".ostler").mkdir(parents=True)
        story = Story(project)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            tell(story)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            story.type("down", quiet=True)


if __name__ == "__main__":
    main()
