"""Commands on the machine. After a reboot what `ostler enable` lets systemd start goes on with tasks and crews."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from machine_ground import everyone, keeper_of
from shell import Shell, until
from test_crews_cli import SETTINGS, add, agent_file, crews

from ostler.client.boot import unit_of


def state(sh: Shell, key: str) -> str:
    return str(json.loads(sh.ok("task", "show", key))["state"])


def power_off(sh: Shell) -> None:
    """Daemon, keeper and agents at once."""
    pids = {sh.daemon_pid(), keeper_of(sh.home), *everyone(sh.home)}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def is_off() -> bool:
        for pid in everyone(sh.home):  # what was forked while the others were killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not sh.left_over()

    until(is_off, "something survived the power cut")


def test_tasks_and_crews_go_on_after_a_reboot(shell: Shell) -> None:
    (shell.project / "ostler.toml").write_text(
        SETTINGS.replace('agent = "fixer"', 'agent = "fixer"\ntasks = "tag:night"')
    )
    agent_file(shell)
    alone, of_crew = add(shell, "gate"), add(shell, "gate", "--tag", "night")
    shell.ok("crew", "up", "-d")
    until(lambda: all((shell.project / f"{key}.begun").exists() for key in (alone, of_crew)))
    power_off(shell)
    for key in (alone, of_crew):
        (shell.project / f"{key}.go").touch()
    unit = unit_of(shell.home)
    words = [str(shell.program.parent / "python") if word == sys.executable else word for word in unit.words]
    with (shell.home / "daemon.log").open("ab") as log:
        daemon = subprocess.Popen(
            words, env=shell.environment, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        until(lambda: shell.run("--no-start", "status").code == 0, "the daemon did not come up")
        until(lambda: {state(shell, alone), state(shell, of_crew)} == {"completed"})
        assert crews(shell)["coder"]["is_up"]
        (home,) = json.loads(shell.ok("homes", "-o", "json"))
        assert (home["path"], home["state"], home["tasks"]) == (str(shell.home), "running", 2)
        assert "completed" in shell.ok("df")
    finally:
        shell.run("down")
        assert daemon.wait(60) == 0


def test_the_schemas_are_installed_and_printed(shell: Shell) -> None:
    shell.ok("init", "sub")
    site = next((shell.program.parent.parent / "lib").glob("python3*/site-packages/ostler/schemas"))
    for what, name in (("settings", "ostler.schema.json"), ("definition", "agent.schema.json")):
        printed = json.loads(shell.ok("schema", what))
        assert json.loads((site / name).read_text()) == printed
        assert json.loads((shell.project / "sub" / ".ostler" / name).read_text()) == printed


def test_enable_says_what_to_do_without_systemd(shell: Shell, tmp_path: Path) -> None:
    assert "there is no home" in shell.run("enable", OSTLER_HOME=str(tmp_path / "none"), PATH=str(tmp_path)).err
    refused = shell.run("enable", PATH=str(tmp_path))
    assert refused.code == 1
    assert "there is no systemd here; let cron start it" in refused.err
    assert refused.out.startswith("@reboot ")
    assert str(shell.home) in refused.out
    assert "is not enabled" in shell.run("disable", PATH=str(tmp_path)).err
