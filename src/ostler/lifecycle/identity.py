"""The identity of a home: a file in it with an id and the path where it was last opened.

A home that is opened at another path was moved, or it is a copy of one that is still at the old path. A moved home goes
on: paths in its records are rewritten, and what ran is recovered. A copy gets an id of its own and adopts nothing, for
the processes and the work belong to the home that it was copied from.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import struct
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ostler.home import DATABASE_FILE, IDENTITY_FILE, KEEPER
from ostler.keeper.protocol import connect
from ostler.store.relocate import Paths, detach_copy, earlier_home, rewrite_paths
from ostler.store.store import Store

_log = logging.getLogger("ostler.lifecycle")
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.02


class Identity(NamedTuple):
    home_id: str
    path: Path


async def settle_home(store: Store, home: Path, now: datetime) -> str | None:
    """What was done since the home is not where it was, as a sentence. The caller holds the lock of the home."""
    identity = _read(home)
    old = await store.read(earlier_home) if identity is None else identity.path
    if old is None or _is_same(old, home):
        if identity is None or identity.path != home:
            _write(home, identity.home_id if identity else _new_id())
        return None
    paths = Paths(old, home)
    if _is_copy(old, identity):
        sentence = await _settle_copy(store, paths)
        _write(home, _new_id(), f"{now:%Y-%m-%d %H:%M} UTC: {sentence}")
    else:
        sentence = await _settle_move(store, paths)
        _write(home, identity.home_id if identity else _new_id(), f"{now:%Y-%m-%d %H:%M} UTC: {sentence}")
    _log.warning("%s", sentence)
    return sentence


async def _settle_move(store: Store, paths: Paths) -> str:
    ended = _end_keeper(paths.new)
    count = await store.run(rewrite_paths, paths)
    agents = "; its agents, which knew the old place, were ended and are recovered" if ended else ""
    return f"the home was moved from {paths.old} to {paths.new}: paths in {count} records were rewritten{agents}"


async def _settle_copy(store: Store, paths: Paths) -> str:
    # By the token in it a keeper finds its processes; those of the other home must not be taken for ours.
    shutil.rmtree(paths.new / KEEPER, ignore_errors=True)
    attempts, tasks = await store.run(detach_copy)
    await store.run(rewrite_paths, paths)
    return (
        f"{paths.new} is a copy of the home {paths.old}, which is still there: it has an identity of its own now and "
        f"adopted nothing; {attempts} running agents are failed here, {tasks} unfinished tasks are held back "
        "(`ostler task requeue KEY` releases one)"
    )


def _is_same(old: Path, home: Path) -> bool:
    if old == home:
        return True
    try:
        return old.samefile(home)
    except OSError:
        return False


def _is_copy(old: Path, identity: Identity | None) -> bool:
    if identity is None:
        return (old / DATABASE_FILE).exists()
    other = _read(old)
    return other is not None and other.home_id == identity.home_id


def _end_keeper(home: Path) -> bool:
    """End the keeper that came along with a moved home: its agents have the old paths in their environment.

    The next keeper of the home ends what it leaves. Whether there was one.
    """
    try:
        with contextlib.closing(connect(str(home / KEEPER))) as connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return False
    pid = struct.unpack("3i", credentials)[0]
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < until:
        try:
            connect(str(home / KEEPER)).close()
        except OSError:
            break
        time.sleep(_POLL_SECONDS)
    return True


# --- the file ----------------------------------------------------------------------------------------


def _read(home: Path) -> Identity | None:
    values = read_identity(home)
    return Identity(str(values["id"]), Path(values["path"])) if {"id", "path"} <= values.keys() else None


def read_identity(home: Path) -> dict[str, Any]:
    """`id`, `path` and, of a home that was moved or copied, `notice`; empty where it cannot be read."""
    try:
        values = json.loads((home / IDENTITY_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write(home: Path, home_id: str, notice: str | None = None) -> None:
    values = {"id": home_id, "path": str(home), **({} if notice is None else {"notice": notice})}
    part = home / f".{IDENTITY_FILE}"
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(home / IDENTITY_FILE)
    except OSError as error:  # a full disk: the next start notes it
        _log.warning("the place of the home %s could not be noted: %s", home, error)


def _new_id() -> str:
    return os.urandom(16).hex()
