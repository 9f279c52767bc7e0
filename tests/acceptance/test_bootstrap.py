"""scripts/bootstrap on machines that lack this or that, played by programs that do nothing but note their call."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bootstrap"
#: What it needs of any machine.
COREUTILS = ("cat", "chmod", "env", "mkdir", "rm", "touch")
PYTHON = """#!/bin/sh
case "$*" in
  *ensurepip*) test -e "$MACHINE/has-venv" ;;
  "-m venv "*) mkdir -p "$3/bin" && cat "$0" > "$3/bin/python" && chmod 755 "$3/bin/python" ;;
esac
"""
APT = """#!/bin/sh
echo "$*" >> "$MACHINE/apt"
test ! -e "$MACHINE/no-network" || exit 100
case "$*" in *python3-venv*) : > "$MACHINE/has-venv" ;; esac
"""
PYTHON_PART = "Python packages into venv (pinned and hashed in constraints.txt)\n"


class Machine:
    """A search path with nothing in it but what is put there."""

    def __init__(self, folder: Path, *, venv: bool, tools: bool, user: int = 0) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        for name in COREUTILS:
            found = shutil.which(name)
            assert found
            (self.programs / name).symlink_to(found)
        self.install("python3", PYTHON)
        self.install("apt-get", APT)
        self.install("id", f"#!/bin/sh\necho {user}\n")
        self.install("sudo", "#!/bin/sh\nexit 1\n")
        if tools:
            self.install("strace", "#!/bin/sh\n")
            self.install("less", "#!/bin/sh\n")
            self.install("tmux", "#!/bin/sh\n")
        if venv:
            (folder / "has-venv").touch()

    def install(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def bootstrap(self) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.programs), "MACHINE": str(self.folder)}
        command = ["/bin/sh", str(SCRIPT), "venv"]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=30
        )

    @property
    def is_ready(self) -> bool:
        return (self.folder / "venv" / ".ready").exists()

    @property
    def asked_of_apt(self) -> str:
        asked = self.folder / "apt"
        return asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize(
    ("venv", "tools", "named"),
    [
        (True, True, ""),
        (True, False, "the system packages strace less tmux, and "),
        (False, False, "the system packages python3-venv strace less tmux, and "),
    ],
)
def test_one_line_says_all_that_is_installed(tmp_path: Path, venv: bool, tools: bool, named: str) -> None:
    machine = Machine(tmp_path, venv=venv, tools=tools)
    done = machine.bootstrap()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"ostler: installing {named}{PYTHON_PART}"
    assert machine.is_ready
    assert ("install -y -qq" in machine.asked_of_apt) == bool(named)


def test_without_the_right_to_install_it_says_so_and_goes_on(tmp_path: Path) -> None:
    machine = Machine(tmp_path, venv=True, tools=False, user=1000)
    done = machine.bootstrap()
    assert done.returncode == 0
    assert (
        done.stderr
        == "ostler: no right to install strace less tmux; the tests that need them will be skipped with the reason\n"
    )
    assert done.stdout == f"ostler: installing {PYTHON_PART}"
    assert (machine.is_ready, machine.asked_of_apt) == (True, "")


def test_without_the_right_to_what_it_cannot_do_without_it_stops(tmp_path: Path) -> None:
    machine = Machine(tmp_path, venv=False, tools=True, user=1000)
    done = machine.bootstrap()
    assert (done.returncode, done.stdout, machine.is_ready) == (1, "", False)
    assert done.stderr.endswith("cannot make virtual environments; run: sudo apt-get install python3-venv\n")


@pytest.mark.parametrize("venv", [True, False])
def test_where_apt_fails_only_what_is_needed_stops_it(tmp_path: Path, venv: bool) -> None:
    machine = Machine(tmp_path, venv=venv, tools=False)
    (tmp_path / "no-network").touch()
    done = machine.bootstrap()
    assert "ostler: could not install" in done.stderr
    assert (done.returncode == 0, machine.is_ready) == (venv, venv)
