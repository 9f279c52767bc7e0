"""Starts the daemon of a home at boot: one systemd user unit for each home."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from ostler.client.blocking import BlockingClient, UnreachableError
from ostler.home import DAEMON_LOG, project_of

_SECONDS = 60.0
#: Exit codes with which the daemon would end again: faulty words, another daemon that has the home.
_FINAL = (2, 7)


class BootError(Exception):
    """Nothing was changed: systemd refused, or is not there. Then `cron` is a line of a crontab that does the same."""

    def __init__(self, sentence: str, cron: str | None = None) -> None:
        super().__init__(sentence)
        self.cron = cron


class BootUnit(NamedTuple):
    name: str
    path: Path
    text: str
    #: The words of the daemon that it starts.
    words: tuple[str, ...]


class Enabled(NamedTuple):
    unit: BootUnit
    #: Whether the daemon was started by the unit; else one runs already.
    started: bool
    #: Whether it starts at boot, not only when the user logs in.
    lingers: bool
    #: Why the unit could not be verified; None where it was.
    unverified: str | None


def unit_of(home: Path) -> BootUnit:
    """The unit of a home, with the PATH of this program."""
    words = (sys.executable, "-P", "-m", "ostler.daemon", "--home", str(home))
    label = re.sub(r"[^a-zA-Z0-9_.]+", "-", project_of(home).name).strip("-.")[:40] or "home"
    name = f"ostler-{label}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}.service"
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    text = f"""\
# Written by `ostler enable`; `ostler disable` removes it.
[Unit]
Description=Ostler of {_plain(str(project_of(home)))}

[Service]
Type=exec
ExecStart={" ".join(_quoted(word).replace("$", "$$") for word in words)}
WorkingDirectory=/
Environment={_quoted(f"PATH={os.environ.get('PATH', os.defpath)}")}
StandardOutput=append:{_plain(str(home / DAEMON_LOG))}
StandardError=inherit
# Agents go on while the daemon is restarted; when it is stopped, it ends them in order.
KillMode=process
TimeoutStopSec=120
# Lets Ostler hold the limits of agents.
Delegate=yes
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={" ".join(map(str, _FINAL))}

[Install]
WantedBy=default.target
"""
    return BootUnit(name, folder / name, text, words)


def _plain(text: str) -> str:
    if not text.isprintable():
        raise BootError(f"the path {text!a} has characters that a unit of systemd cannot hold; move the home")
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    return '"' + _plain(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def cron_line(home: Path) -> str:
    """What starts the daemon at boot where there is no systemd."""
    search, log = shlex.quote(os.environ.get("PATH", os.defpath)), shlex.quote(str(home / DAEMON_LOG))
    return f"@reboot PATH={search} {shlex.join(unit_of(home).words)} >> {log} 2>&1".replace("%", "\\%")


def enable(home: Path) -> Enabled:
    """Write the unit, verify it, and have systemd start it: now, where no daemon runs, and at each boot."""
    unit = unit_of(home)
    if (missing := _missing_systemd()) is not None:
        raise BootError(f"{missing}; let cron start it: run `crontab -e` and add this line", cron_line(home))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = unit.path.read_text() if unit.path.is_file() else None
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    unit.path.write_text(unit.text)
    try:
        unverified = verify(unit)
        _systemctl("daemon-reload")
        _systemctl("enable", unit.name)
    except BootError:
        if before is None:
            unit.path.unlink()
        else:
            unit.path.write_text(before)
        raise
    runs = _runs(home)
    if not runs:
        _systemctl("start", unit.name)
    return Enabled(unit, not runs, lingers(), unverified)


def disable(home: Path) -> bool:
    """Remove the unit; False where there is none. A daemon that runs goes on."""
    unit = unit_of(home)
    if not unit.path.is_file():
        return False
    is_served = _missing_systemd() is None
    if is_served:
        _systemctl("disable", unit.name)
    for path in (unit.path.parent / "default.target.wants" / unit.name, unit.path):
        path.unlink(missing_ok=True)
    if is_served:
        _systemctl("daemon-reload")
    return True


def is_enabled(home: Path) -> bool:
    return unit_of(home).path.is_file()


def verify(unit: BootUnit) -> str | None:
    """Raises what systemd finds wrong with the unit. Returns why it could not be asked, where it could not."""
    if shutil.which("systemd-analyze") is None:
        return "there is no systemd-analyze"
    done = _run("systemd-analyze", "--user", "verify", str(unit.path))
    lines = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    if lines:
        raise BootError(f"systemd refuses the unit: {'; '.join(lines)}")
    return None if done.returncode == 0 else (done.stderr.strip() or "systemd-analyze failed").splitlines()[-1]


def lingers() -> bool:
    """Whether units of this user are started at boot, before a login."""
    if shutil.which("loginctl") is None:
        return False
    done = _run("loginctl", "show-user", getpass.getuser(), "--property=Linger")
    return done.stdout.strip() == "Linger=yes"


def enable_linger() -> None:
    done = _run("loginctl", "enable-linger")
    if done.returncode != 0:
        raise BootError(
            f"loginctl refused: {done.stderr.strip()}; run `sudo loginctl enable-linger {getpass.getuser()}`"
        )


def _missing_systemd() -> str | None:
    """Why systemd cannot start anything for this user; None where it can."""
    if shutil.which("systemctl") is None:
        return "there is no systemd here"
    done = _run("systemctl", "--user", "show-environment")
    reasons = done.stderr.strip().splitlines() or ["it gives no reason"]
    return None if done.returncode == 0 else f"systemd does not serve this user here ({reasons[-1]})"


def _runs(home: Path) -> bool:
    try:
        BlockingClient(home).call("health")
    except UnreachableError:
        return False
    return True


def _systemctl(*words: str) -> None:
    done = _run("systemctl", "--user", *words)
    if done.returncode != 0:
        raise BootError(f"`systemctl --user {' '.join(words)}` failed: {done.stderr.strip()}")


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - programs of systemd
        words, capture_output=True, text=True, check=False, timeout=_SECONDS, stdin=subprocess.DEVNULL
    )
