"""The program is updated while agents live at a keeper that speaks another version of the protocol."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from shell import Shell, until

import ostler
from ostler.errors import ExitCode
from ostler.keeper.protocol import VERSION

KEPT = "kept by a keeper of an earlier version"


def updated(program: Path, folder: Path) -> Path:
    """The same program, except that its keeper speaks the next version."""
    source = folder / "updated"
    shutil.copytree(Path(ostler.__file__).parent, source / "ostler", ignore=shutil.ignore_patterns("__pycache__"))
    protocol = source / "ostler" / "keeper" / "protocol.py"
    protocol.write_text(protocol.read_text().replace(f"VERSION = {VERSION}\n", f"VERSION = {VERSION + 1}\n"))
    script = folder / "ostler-updated"
    python = program.parent / "python"
    script.write_text(f'#!/bin/sh\nPYTHONDONTWRITEBYTECODE=1 PYTHONPATH={source} exec {python} -m ostler "$@"\n')
    script.chmod(0o755)
    return script


def test_agents_of_an_earlier_keeper_are_left_alone_until_they_have_ended(shell: Shell, tmp_path: Path) -> None:
    release, begun = tmp_path / "release", tmp_path / "begun"
    wait = f"echo $$ > {begun}.new; mv {begun}.new {begun}; until [ -e {release} ]; do sleep 0.05; done"
    shell.ok("run", "-d", "--name", "patient", "--", "sh", "-c", wait)
    until(begun.exists)
    pid, daemon = int(begun.read_text()), shell.daemon_pid()
    shell.program = updated(shell.program, tmp_path)

    refused = shell.run("restart-daemon")
    assert refused.code == ExitCode.WRONG_STATE
    assert KEPT in refused.err
    assert "--yes" in refused.err
    assert shell.daemon_pid() == daemon

    assert KEPT in shell.run("restart-daemon", "--yes").err
    assert shell.daemon_pid() != daemon
    os.kill(pid, 0)
    agents = json.loads(shell.ok("ps", "-o", "json"))
    assert [(agent["name"], KEPT in agent["doing"]) for agent in agents] == [("patient", True)]
    assert KEPT in shell.ok("why", "patient")
    assert KEPT in shell.ok("status")
    started = shell.run("run", "--", "true")
    assert started.code != 0
    assert KEPT in started.err
    stopped = shell.run("stop", "patient")
    assert KEPT in stopped.err

    release.touch()
    until(lambda: shell.run("run", "--", "true").code == 0)
    until(lambda: "patient" not in shell.ok("ps"))
    assert "patient" in shell.ok("ps", "-a")
