"""The list of the homes of a user: noted when a daemon starts, forgotten when they are gone."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import socket
from pathlib import Path

import pytest
from api_served import serving

from ostler.client import homes
from ostler.home import HOME_NAME
from ostler.version import __version__

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    return tmp_path


def make_home(place: Path) -> Path:
    place.mkdir(parents=True)
    (place / "ostler.db").touch()
    return place


async def test_each_home_is_listed_once_and_those_that_vanished_are_forgotten(user: Path) -> None:
    one, two = make_home(user / "one" / HOME_NAME), make_home(user / "odd \udcff name" / HOME_NAME)
    own = make_home(user / "user" / HOME_NAME)
    for home in (one, two, one):
        homes.note_home(home)
    assert [view.path for view in homes.list_homes([one])] == sorted(map(str, (one, two, own)))
    assert {view.state for view in homes.list_homes()} == {"stopped"}
    shutil.rmtree(two)
    assert [view.path for view in homes.list_homes()] == sorted(map(str, (one, own)))
    assert len(list(homes.registry().iterdir())) == 1


async def test_a_running_daemon_says_how_its_home_is(user: Path) -> None:
    async with serving(user / "project" / HOME_NAME) as served:
        view = await asyncio.to_thread(homes.look_at, served.home)
    assert (view.state, view.version, view.agents, view.tasks) == ("running", __version__, 0, 0)
    assert view.pid is not None
    assert not view.enabled


async def test_agents_that_outlived_their_daemon_are_told(user: Path) -> None:
    home = make_home(user / "project" / HOME_NAME)
    (home / "keeper").mkdir()
    with (home / "keeper" / "keeper.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert homes.look_at(home).state == "agents only"
    assert homes.look_at(home).state == "stopped"


async def test_a_daemon_that_does_not_answer_is_told(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_ANSWER_SECONDS", 0.1)
    home = make_home(user / HOME_NAME)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(home / "daemon.sock"))
        silent.listen()
        assert homes.look_at(home).state == "hanging"
