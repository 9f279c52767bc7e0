"""`ostler doctor`: finds out by doing what this machine can do, each line with its remedy."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from ostler.cli.common import Daemon, list_tasks, the_home, the_project
from ostler.cli.output import as_json, counted, has_colour, plain, seconds_since, short_path
from ostler.client.blocking import BlockingClient, DaemonError, UnreachableError
from ostler.durations import rough_duration, size_text
from ostler.errors import ExitCode

_GIT = (2, 30)
_LOW_DISK = 2 * 1024**3
_SECONDS = 10.0
_SHOWN = 5
_AGENTS = ("claude", "codex", "pi", "gemini", "aider", "opencode")
_LIMITS = {"max_memory_mb": "memory", "max_cpu_percent": "CPU", "processes": "processes"}
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Finding(NamedTuple):
    #: ok, warn or fail.
    level: str
    text: str
    remedy: str = ""


@click.command()
@click.option("-o", "--output", "form", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
def doctor(form: str) -> None:
    """Find out what works on this machine. Exit code 1 where something that Ostler needs does not."""
    findings = []
    for finding in _findings():
        findings.append(finding)
        if form == "text":
            _print(finding)
    if form == "json":
        as_json([finding._asdict() for finding in findings])
    if any(finding.level == "fail" for finding in findings):
        raise click.exceptions.Exit(ExitCode.FAILED)


def _print(finding: Finding) -> None:
    label = f"{finding.level:<4}"
    if has_colour():
        label = click.style(label, fg=_COLOURS[finding.level])
    click.echo(f"{label}  {plain(finding.text)}{'  ' if finding.remedy else ''}{plain(finding.remedy)}")


def _findings() -> Iterator[Finding]:
    yield _python()
    yield _git()
    yield _limits()
    yield _agents()
    home = the_home()
    yield _disk(home)
    yield from _place(home)
    yield _settings()
    yield _daemon(home)
    yield from _orphans(home)


def _python() -> Finding:
    return Finding("ok", f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}")


def _version_of(program: str) -> str | None:
    """What the program says of its version; None where it is not there or does not answer."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - found on the user's own PATH
            [path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    words = (done.stdout or done.stderr).split()
    return next((word.strip("v,()") for word in words if word.lstrip("v")[:1].isdigit()), "?")


def _git() -> Finding:
    version = _version_of("git")
    if version is None:
        return Finding("warn", "git not found: tasks cannot have worktrees.", "apt-get install git")
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if number < _GIT:
        return Finding("warn", f"git {version} is old", "2.30 or newer is needed for worktrees")
    return Finding("ok", f"git {version}")


def _limits() -> Finding:
    """A command is really started with limits; its record says which of them are held."""
    try:
        with tempfile.TemporaryDirectory(prefix="ostler-doctor-") as folder:
            enforcement, kind = asyncio.run(_try(Path(folder)))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user has to know
        return Finding(
            "fail", f"no agent can be started: {error}", "set OSTLER_TRACEBACK=1 and try `ostler run -- true`"
        )
    weak = [name for name, how in enforcement.items() if how != "enforced"]
    held = [name for name in enforcement if name not in weak]
    if not weak:
        return Finding("ok", f"limits: {', '.join(held)} enforced ({kind})")
    others = ", ".join(f"{name} {enforcement[name]}" for name in weak)
    enforced = f"{', '.join(held)} enforced; " if held else ""
    remedy = "run under systemd with a delegated cgroup (`systemd-run --user --scope -p Delegate=yes`) to enforce them"
    return Finding("warn", f"limits: {enforced}{others} ({kind})", remedy)


async def _try(home: Path) -> tuple[dict[str, str], str]:
    import ostler  # noqa: PLC0415 - loads the whole library

    async with ostler.open(home) as manager:
        agent = await manager.start(["true"], isolation="process", memory="256M", cpu=0.5)
        record = await agent.record()
        await agent.ask("")
    held = record.enforcement or {}
    return {label: str(held[name]) for name, label in _LIMITS.items() if name in held}, _cgroup()


def _cgroup() -> str:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "cgroup v2"
    return "cgroup v1" if Path("/sys/fs/cgroup/memory").exists() else "no cgroups"


def _agents() -> Finding:
    versions = {name: version for name in _AGENTS if (version := _version_of(name)) is not None}
    missing = ", ".join(name for name in _AGENTS if name not in versions)
    if not versions:
        return Finding("warn", f"no coding agent on PATH (looked for {missing})", "npm install -g @openai/codex")
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding("ok", installed + (f"; not found: {missing}" if missing else ""))


def _disk(home: Path) -> Finding:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        return Finding("fail", f"home {short_path(home)} cannot be written", "choose another with --home")
    free = shutil.disk_usage(place).free
    text = f"home {short_path(home)}, {size_text(free)} free"
    return Finding("ok", text) if free > _LOW_DISK else Finding("warn", text, "free some space; logs and records grow")


def _place(home: Path) -> Iterator[Finding]:
    """Whether the home is where it was last opened, and what was done when it was not."""
    from ostler.lifecycle.identity import read_identity  # noqa: PLC0415 - loads the whole library

    identity = read_identity(home)
    if "path" in identity and identity["path"] != str(home):
        yield Finding("warn", f"the home was at {identity['path']}", "the next start of the daemon settles that")
    if "notice" in identity:
        yield Finding("ok", str(identity["notice"]))


def _daemon(home: Path) -> Finding:
    try:
        status = BlockingClient(home).call("status")
    except UnreachableError:
        return Finding("ok", "daemon not running; commands start it")
    except DaemonError as error:
        return Finding("fail", str(error))
    up_for = rough_duration(seconds_since(status["started_at"]))
    return Finding("ok", f"daemon running (pid {status['pid']}) for {up_for}")


def _settings() -> Finding:
    from ostler.definitions import validate_files  # noqa: PLC0415 - loads YAML and pydantic

    root = the_project()
    files = validate_files(root) if root.is_dir() else []
    broken = sum(bool(faults) for _, faults in files)
    if broken:
        return Finding("warn", f"{counted(broken, 'file')} of {len(files)} broken", "see `ostler agents validate`")
    return Finding("ok", f"settings and definitions: {counted(len(files), 'file')}, no faults")


def _orphans(home: Path) -> Iterator[Finding]:
    """Workdirs that no task owns; only the daemon knows the tasks."""
    if not (home / "tasks").is_dir():
        return
    daemon = Daemon(starts=False)
    try:
        keys = {str((task["workdir"] or task)["key"]) for task in list_tasks(daemon, include_finished=True)}
    except DaemonError:
        return
    paths = asyncio.run(_list_orphans(home, keys))
    if paths:
        names = ", ".join(short_path(path) for path in paths[:_SHOWN])
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        yield Finding("warn", f"workdirs that belong to no task: {names}{more}", "they go to the vault within minutes")


async def _list_orphans(home: Path, keys: Collection[str]) -> list[Path]:
    from ostler.workdirs import Workdirs  # noqa: PLC0415 - loads the whole library

    async with Workdirs(home) as workdirs:
        return await workdirs.orphans(keys)
