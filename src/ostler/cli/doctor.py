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

from ostler.cli.common import the_home
from ostler.cli.output import as_json, has_colour, plain, seconds_since, short_path
from ostler.client.blocking import BlockingClient, DaemonError, UnreachableError
from ostler.durations import rough_duration, size_text
from ostler.errors import ExitCode

_GIT = (2, 30)
_LOW_DISK = 2 * 1024**3
_SECONDS = 10.0
_PAGE = 1000
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
    found = _version_of("git")
    if found is None:
        return Finding("warn", "git not found: tasks cannot have worktrees.", "apt-get install git")
    number = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if number < _GIT:
        return Finding("warn", f"git {found} is old", "2.30 or newer is needed for worktrees")
    return Finding("ok", f"git {found}")


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
    told = ", ".join(f"{name} {enforcement[name]}" for name in weak)
    enforced = f"{', '.join(held)} enforced; " if held else ""
    remedy = "run under systemd with a delegated cgroup (`systemd-run --user --scope -p Delegate=yes`) to enforce them"
    return Finding("warn", f"limits: {enforced}{told} ({kind})", remedy)


async def _try(home: Path) -> tuple[dict[str, str], str]:
    import ostler  # noqa: PLC0415 - loads the whole library

    async with ostler.open(home) as manager:
        agent = await manager.start(["true"], isolation="process", memory="256M", cpu=0.5)
        record = await agent.record()
        await agent.ask("")
    found = record.enforcement or {}
    return {told: str(found[name]) for name, told in _LIMITS.items() if name in found}, _cgroup()


def _cgroup() -> str:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "cgroup v2"
    return "cgroup v1" if Path("/sys/fs/cgroup/memory").exists() else "no cgroups"


def _agents() -> Finding:
    found = {name: version for name in _AGENTS if (version := _version_of(name)) is not None}
    missing = ", ".join(name for name in _AGENTS if name not in found)
    told = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Finding("warn", f"no coding agent on PATH (looked for {missing})", "npm install -g @openai/codex")
    return Finding("ok", told + (f"; not found: {missing}" if missing else ""))


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
        found = BlockingClient(home).call("status", within=_SECONDS)
    except UnreachableError:
        return Finding("ok", "daemon not running; commands start it")
    except DaemonError as error:
        return Finding("fail", f"daemon: {error}", "ostler restart-daemon")
    return Finding(
        "ok", f"daemon running (pid {found['pid']}) since {rough_duration(seconds_since(found['started_at']))}"
    )


def _orphans(home: Path) -> Iterator[Finding]:
    """Workdirs that no task owns; only the daemon knows the tasks."""
    if not (home / "tasks").is_dir():
        return
    client, keys = BlockingClient(home), set[str]()
    try:
        while found := client.call("tasks", include_finished=True, limit=_PAGE, offset=len(keys), within=_SECONDS):
            keys |= {str((task["workdir"] or task)["key"]) for task in found}
            if len(found) < _PAGE:
                break
    except (UnreachableError, DaemonError):
        return
    paths = asyncio.run(_list_orphans(home, keys))
    if paths:
        told = ", ".join(short_path(path) for path in paths[:_SHOWN])
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        yield Finding("warn", f"workdirs that belong to no task: {told}{more}", "they go to the vault within minutes")


async def _list_orphans(home: Path, keys: Collection[str]) -> list[Path]:
    from ostler.workdirs import Workdirs  # noqa: PLC0415 - loads the whole library

    async with Workdirs(home) as workdirs:
        return await workdirs.orphans(keys)
