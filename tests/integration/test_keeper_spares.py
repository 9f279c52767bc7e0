"""A process forked ahead of its time: who takes it over, and that it never stays behind."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from keeper_client import Home, Manager, Refused, is_alive, wait_until
from test_keeper_templates import Agent


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "keeper")
    yield made
    made.end()


@pytest.fixture
def manager(home: Home) -> Manager:
    return home.manager()


@pytest.fixture
def setup(tmp_path: Path) -> dict[str, Any]:
    edited = tmp_path / "module.py"
    edited.write_text("1")
    return {"spare": "good", "given": str(tmp_path / "given"), "spent": str(tmp_path / "spent"), "files": [str(edited)]}


def _count(pid: int) -> int:
    """Of its open descriptors."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _given(setup: dict[str, Any]) -> int:
    path = Path(setup["given"])
    wait_until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def _warm(manager: Manager, setup: dict[str, Any]) -> int:
    """A template that is ready and has given its spare. The pid of that."""
    with Agent(manager, "first.1", setup) as first:
        first.started()
    return _given(setup)


def test_the_next_agent_takes_the_spare_over_and_its_template_hears_of_it(
    manager: Manager, setup: dict[str, Any]
) -> None:
    spare = _warm(manager, setup)
    with Agent(manager, "a.1", setup, env={"SAID": "so"}) as agent:
        assert agent.started()["pid"] == spare
        assert agent.says("word") == [str(spare), str(manager.about["pid"]), "word", "so"]
        wait_until(Path(setup["spent"]).exists)
        agent.channel.send(b"exit 5")
        record = manager.exit_of("a.1")
        assert (record["pid"], record["code"]) == (spare, 5)
    with Agent(manager, "b.1", setup) as agent:
        other = agent.started()["pid"]
        assert other != spare
        assert agent.says("word")[0] == str(other)


@pytest.mark.parametrize("kind", ["dead", "stranger"])
def test_what_is_no_spare_is_not_used_and_not_touched(manager: Manager, setup: dict[str, Any], kind: str) -> None:
    setup["spare"] = "dead" if kind == "dead" else os.getpid()
    spare = _warm(manager, setup)
    with Agent(manager, "a.1", setup) as agent:
        pid = agent.started()["pid"]
        assert pid not in {spare, os.getpid()}
        assert agent.says("word")[0] == str(pid)
    wait_until(lambda: not is_alive(spare))


def test_a_spare_goes_with_a_template_that_is_stale(manager: Manager, setup: dict[str, Any]) -> None:
    spare = _warm(manager, setup)
    assert is_alive(spare)
    Path(setup["given"]).unlink()
    Path(setup["files"][0]).write_text("22")
    with Agent(manager, "a.1", setup) as agent:
        assert agent.started()["pid"] != spare
        wait_until(lambda: not is_alive(spare))


def test_a_spare_outlives_neither_its_template_nor_the_keeper(
    home: Home, manager: Manager, setup: dict[str, Any]
) -> None:
    spare = _warm(manager, setup)
    pid = manager.about["pid"]
    first = manager.statuses()["first.1"]["pid"]
    template = next(one for one in _children(pid) if one not in {spare, first})
    os.kill(template, 9)
    wait_until(lambda: not is_alive(spare))
    Path(setup["given"]).unlink()
    with Agent(manager, "b.1", setup) as agent:
        agent.started()
    spare = _given(setup)
    os.kill(pid, 9)
    wait_until(lambda: not is_alive(spare))
    home.launch()


def test_a_line_that_is_none_costs_the_template_and_no_descriptor(manager: Manager, setup: dict[str, Any]) -> None:
    keeper = manager.about["pid"]
    before = _count(keeper)
    with Agent(manager, "a.1", {**setup, "spare": "file"}) as agent, pytest.raises(Refused, match="no line"):
        agent.started()
    wait_until(lambda: _count(keeper) == before)
    with Agent(manager, "b.1", key="other") as agent:
        agent.started()


def test_a_keeper_without_descriptors_does_without_a_spare(
    manager: Manager, setup: dict[str, Any], tmp_path: Path
) -> None:
    for number in range(5):
        with contextlib.suppress(Refused):  # its template could not be told either: another try meets only the spare
            _start_without_descriptors(manager, setup, tmp_path / str(number))
            return
    pytest.fail("no start went through")


def _start_without_descriptors(manager: Manager, setup: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    setup = {**setup, "before": str(folder / "before"), "after": str(folder / "after")}
    keeper = manager.about["pid"]
    wanted = len(_children(keeper)) + 2  # the template, and the spare of which it has not told yet
    with Agent(manager, f"{folder.name}a.1", setup, key=folder.name) as agent:
        wait_until(lambda: len(_children(keeper)) >= wanted)
        bounds = resource.prlimit(keeper, resource.RLIMIT_NOFILE)
        resource.prlimit(keeper, resource.RLIMIT_NOFILE, (3, bounds[1]))
        (folder / "before").touch()
        spare = _given(setup)
        wait_until(lambda: not is_alive(spare))
        resource.prlimit(keeper, resource.RLIMIT_NOFILE, bounds)
        (folder / "after").touch()
        pid = agent.started()["pid"]
        assert agent.says("word")[0] == str(pid)
