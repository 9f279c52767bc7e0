"""The unit that starts the daemon of a home at boot: what it says, and what systemd says to it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from ostler.client import boot

STAND_IN = """#!/bin/sh
echo "$@" >> {calls}
[ "$1" != show-user ] || echo Linger=no
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose units are in a directory of the test, and whose search path is empty."""
    for name in ("config", "bin", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def give_systemd(user: Path) -> Path:
    """Programs in the place of systemd's own, which need a machine that was booted with it."""
    for name in ("systemctl", "loginctl"):
        program = user / "bin" / name
        program.write_text(STAND_IN.format(calls=user / "calls"))
        program.chmod(0o755)
    return user / "calls"


def values(text: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}=")]


def test_the_unit_of_a_home(user: Path) -> None:
    unit = boot.unit_of(Path("/srv/a project/.ostler"))
    assert unit.path.parent == user / "config" / "systemd" / "user"
    assert unit.name.startswith("ostler-a-project-")
    assert values(unit.text, "ExecStart") == [
        f'"{sys.executable}" "-P" "-m" "ostler.daemon" "--home" "/srv/a project/.ostler"'
    ]
    assert values(unit.text, "Environment") == [f'"PATH={user / "bin"}"']
    assert values(unit.text, "Delegate") == ["yes"]
    assert values(unit.text, "KillMode") == ["process"]
    assert values(unit.text, "WantedBy") == ["default.target"]
    assert boot.unit_of(Path("/srv/another/.ostler")).name != unit.name


@pytest.mark.parametrize("name", ["plain", "a b", 'quo"te', "per%cent", "dol$lar", "back\\slash", "ü"])
def test_systemd_finds_nothing_wrong_with_it(user: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = boot.unit_of(user / name / ".ostler")
    unit.path.parent.mkdir(parents=True)
    unit.path.write_text(unit.text)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(user / "run"))
    unverified = boot.verify(unit)
    assert (unverified is None) == (shutil.which("systemd-analyze") is not None)


def test_what_systemd_refuses_is_told(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = boot.unit_of(user / ".ostler")
    unit.path.parent.mkdir(parents=True)
    unit.path.write_text(unit.text.replace("KillMode=process", "KillMode=never"))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(user / "run"))
    if shutil.which("systemd-analyze") is None:
        assert boot.verify(unit) == "there is no systemd-analyze"
        return
    with pytest.raises(boot.BootError, match="never"):
        boot.verify(unit)


def test_a_path_that_no_unit_can_hold_is_refused(user: Path) -> None:
    with pytest.raises(boot.BootError, match="move the home"):
        boot.unit_of(user / "two\nlines" / ".ostler")


def test_enable_and_disable(user: Path) -> None:
    calls, home = give_systemd(user), user / "project" / ".ostler"
    enabled = boot.enable(home)
    assert (enabled.started, enabled.lingers) == (True, False)
    assert enabled.unit.path.read_text() == enabled.unit.text
    assert boot.is_enabled(home)
    name = enabled.unit.name
    assert [call for call in calls.read_text().splitlines() if "--user" in call] == [
        "--user show-environment",
        "--user daemon-reload",
        f"--user enable {name}",
        f"--user start {name}",
    ]
    boot.enable(home)  # again is harmless
    calls.unlink()
    assert boot.disable(home)
    assert not enabled.unit.path.exists()
    assert f"--user disable {name}" in calls.read_text()
    assert not boot.disable(home)


def test_without_systemd_a_line_for_cron_is_offered(user: Path) -> None:
    home = user / "100% mine" / ".ostler"
    with pytest.raises(boot.BootError, match="no systemd") as refused:
        boot.enable(home)
    assert not boot.is_enabled(home)
    assert refused.value.cron is not None
    words = shlex.split(refused.value.cron.replace("\\%", "%"))
    assert words[:3] == ["@reboot", f"PATH={user / 'bin'}", sys.executable]
    assert words[words.index("--home") + 1] == str(home)


def test_a_unit_that_fails_to_be_enabled_is_not_left_behind(user: Path) -> None:
    give_systemd(user)
    (user / "bin" / "systemctl").write_text('#!/bin/sh\n[ "$2" != enable ] || { echo "no right" >&2; exit 1; }\n')
    with pytest.raises(boot.BootError, match="no right"):
        boot.enable(user / ".ostler")
    assert not boot.is_enabled(user / ".ostler")
