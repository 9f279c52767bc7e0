"""The installed program in a shell of its own: a home, a project, and nothing of this test's environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

TOOLS = ("PATH", "LANG", "TERM", "VIRTUAL_ENV")
SECONDS = 60.0


class Said(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Started(subprocess.Popen[str]):
    """A program beside the test. It ends with a test that failed, or the failure would wait for it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, trace)


class Shell:
    """One user in one project directory."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.project = folder / "project"
        self.home = self.project / ".ostler"
        self.project.mkdir(parents=True)
        self.home.mkdir(mode=0o700)
        self.environment = {name: os.environ[name] for name in TOOLS if name in os.environ}
        user = folder / "user"
        user.mkdir()
        self.environment |= {"HOME": str(user), "LANG": "C.UTF-8"}

    def run(self, *words: str | Path, stdin: str | None = None, **more: str) -> Said:
        done = subprocess.run(
            [self.program, *words],
            env=self.environment | more,
            cwd=self.project,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: str | Path, **more: str) -> str:
        said = self.run(*words, **more)
        assert said.code == 0, (words, said)
        return said.out

    def start(self, *words: str | Path, **more: str) -> Started:
        """One that goes on; its output is read line by line."""
        return Started(
            [self.program, *words],
            env=self.environment | more,
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def daemon_pid(self) -> int:
        return int(json.loads(self.ok("status", "-o", "json"))["pid"])

    def kill_daemon(self) -> None:
        """As a machine does that runs out of memory: without a word."""
        pid = self.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not _lives(pid))

    def close(self) -> None:
        """Nothing may be left behind."""
        self.run("down")
        until(lambda: not self.left_over(), f"still at work: {self.left_over()}")

    def left_over(self) -> list[str]:
        """Processes that have this project in their words or in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                words = (entry / "cmdline").read_bytes()
                surroundings = (entry / "environ").read_bytes()
            except OSError:
                continue
            mark = str(self.home).encode()
            if mark in words or b"HOME=" + self.environment["HOME"].encode() in surroundings:
                found.append(f"{entry.name} {words.replace(bytes(1), b' ').decode(errors='replace')}")
        return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(is_so: Callable[[], object], told: str = "it did not come to that", seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, told
        time.sleep(0.02)


def build_program(folder: Path) -> Path:
    """A wheel of this checkout in a fresh environment. The dependencies are those of the environment of the tests."""
    root = Path(__file__).resolve().parents[2]
    wheels, venv = folder / "wheels", folder / "venv"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, root], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = next((venv / "lib").glob("python3*/site-packages"))
    wheel = next(wheels.glob("*.whl"))
    subprocess.run([*pip, "install", "--target", str(site), "--no-deps", "--no-index", str(wheel)], check=True)
    ours = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    (site / "dependencies.pth").write_text(f"{ours}\n")
    program = venv / "bin" / "ostler"
    program.write_text(f"#!{venv / 'bin' / 'python'}\nfrom ostler.cli import main\nmain()\n")
    program.chmod(0o755)
    return program
