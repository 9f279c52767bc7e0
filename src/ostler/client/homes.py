"""The homes of this user on this machine. Each daemon notes its home in a directory of the user when it starts."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ostler.client.blocking import BlockingClient, DaemonError, UnreachableError
from ostler.client.boot import BootError, is_enabled
from ostler.home import DATABASE_FILE, HOME_NAME, KEEPER

#: How long a daemon may take to say how it is.
_ANSWER_SECONDS = 5.0


class HomeView(NamedTuple):
    path: str
    #: running, hanging (a daemon is there and does not answer), stopped; or `agents only` where they outlive it.
    state: str
    #: Whether it starts at boot.
    enabled: bool = False
    pid: int | None = None
    version: str | None = None
    started_at: str | None = None
    #: Those that are active; None where nobody can say.
    agents: int | None = None
    #: Those that are not finished.
    tasks: int | None = None


def registry() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "ostler" / "homes"


def note_home(home: Path) -> None:
    """Remember that there is this home. One file for each, so that daemons that start at once do not meet."""
    place = registry() / hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    with contextlib.suppress(OSError):  # a user without a directory of his own has no list
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = place.with_name(f".{place.name}.{os.getpid()}")
        written.write_bytes(os.fsencode(home))
        written.replace(place)


def list_homes(also: Iterable[Path] = ()) -> list[HomeView]:
    """By path; those that were noted, `~/.ostler` and these others, where they are there. Others are forgotten."""
    homes = {home for home in (Path.home() / HOME_NAME, *also) if _is_home(home)}
    for note in registry().glob("[!.]*"):
        with contextlib.suppress(OSError):
            home = Path(os.fsdecode(note.read_bytes()))
            if _is_home(home):
                homes.add(home)
            else:
                note.unlink()
    return [look_at(home) for home in sorted(homes)]


def look_at(home: Path) -> HomeView:
    """How a home is, as its daemon says it."""
    view = HomeView(str(home), "stopped")
    with contextlib.suppress(BootError):
        view = view._replace(enabled=is_enabled(home))
    try:
        status = BlockingClient(home).call("status", within=_ANSWER_SECONDS)
    except UnreachableError:
        return view._replace(state="agents only" if keeps_agents(home) else "stopped")
    except DaemonError:
        return view._replace(state="hanging")
    return view._replace(
        state="running",
        pid=status["pid"],
        version=status["version"],
        started_at=status["started_at"],
        agents=status["statistics"]["active_instances"],
        tasks=_unfinished(status["tasks"]["by_state"]),
    )


def _unfinished(by_state: dict[str, Any]) -> int:
    return sum(int(number) for state, number in by_state.items() if state not in {"accepted", "rejected"})


def _is_home(home: Path) -> bool:
    return (home / DATABASE_FILE).is_file()


def keeps_agents(home: Path) -> bool:
    """Whether agents may live without a daemon: then their keeper holds its lock."""
    try:
        with (home / KEEPER / "keeper.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
