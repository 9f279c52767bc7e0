"""The stop ladder of an agent, rung by rung: asked, then TERM and CONT to all of its group, and only then force."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from machine_ground import lives, until
from promise_ground import Fleet, opened

from ostler import AgentGoneError, AgentInstance, TerminationOptions
from ostler.isolation.process.keeper_client import KeeperHolder

pytestmark = pytest.mark.anyio

BRIEF = TerminationOptions(graceful_timeout=timedelta(seconds=2))


@pytest.fixture
async def fleet(home: Path) -> AsyncIterator[Fleet]:
    async with opened(home) as found:
        yield found


async def with_tidy_child(fleet: Fleet, note: Path) -> AgentInstance:
    one = await fleet.spawn()
    await fleet.do(one, "raise_one", program="tidy", argument=str(note))
    return one


async def test_what_an_agent_leaves_is_asked_before_it_is_struck(fleet: Fleet, tmp_path: Path) -> None:
    one = await with_tidy_child(fleet, tmp_path / "note")
    result = await fleet.manager.terminate(one.instance_id, BRIEF)
    assert (result.success, result.was_graceful) == (True, True)
    assert (tmp_path / "note").read_text() == "TERM"
    assert fleet.tree(one) == set()


async def test_also_when_the_agent_dies_by_itself(fleet: Fleet, tmp_path: Path) -> None:
    one = await with_tidy_child(fleet, tmp_path / "note")
    with pytest.raises(AgentGoneError):
        await fleet.do(one, "leave", code=3)
    await until((tmp_path / "note").exists)
    assert fleet.tree(one) == set()


async def test_a_deaf_agent_and_its_children_get_term(fleet: Fleet, tmp_path: Path) -> None:
    one = await with_tidy_child(fleet, tmp_path / "note")
    working = fleet.start(one, "ignore")
    await until(lambda: ignores_term(fleet, one))
    began = time.monotonic()
    result = await fleet.manager.terminate(one.instance_id, BRIEF)
    assert (result.success, result.was_graceful) == (True, False)
    assert (tmp_path / "note").read_text() == "TERM"
    assert time.monotonic() - began < 60
    with pytest.raises(AgentGoneError):
        await working


async def test_one_that_stands_still_is_woken_to_end(fleet: Fleet, tmp_path: Path) -> None:
    one = await fleet.spawn()
    pid = await fleet.pid(one)
    await fleet.do(one, "leave_on_term", note=str(tmp_path / "note"))
    os.kill(pid, signal.SIGSTOP)
    result = await fleet.manager.terminate(one.instance_id, BRIEF)
    assert result.success
    assert not lives(pid)
    await until((tmp_path / "note").exists)


async def test_who_is_to_end_at_once_is_not_asked(fleet: Fleet, tmp_path: Path) -> None:
    one = await with_tidy_child(fleet, tmp_path / "note")
    assert (await fleet.manager.terminate(one.instance_id, TerminationOptions.immediate())).success
    assert not (tmp_path / "note").exists()
    assert fleet.tree(one) == set()


async def test_one_that_could_not_be_ended_is_not_talked_to_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stop has closed its channel, so that the second would wait for nothing."""
    one = await fleet.spawn()
    real, powerless = KeeperHolder.stop, True

    async def stop(self: KeeperHolder, name: str, grace: float) -> list[str]:
        return ["process 99 (state D)"] if powerless else await real(self, name, grace)

    monkeypatch.setattr(KeeperHolder, "stop", stop)
    cell = fleet.manager._runtime.instances[one.instance_id].cell  # noqa: SLF001 - a manager tries again only without a grace
    assert cell is not None
    assert (await cell.stop(timedelta(0))).left_behind == "process 99 (state D)"
    powerless, began = False, time.monotonic()
    assert (await cell.stop(timedelta(seconds=90))).left_behind is None
    assert time.monotonic() - began < 60
    assert fleet.tree(one) == set()


def ignores_term(fleet: Fleet, one: AgentInstance) -> bool:
    """Whether its main process has shut its ears."""
    masks = (Path(f"/proc/{pid}/status").read_text() for pid in fleet.tree(one))
    ignored = (int(mask.partition("SigIgn:")[2].split()[0], 16) for mask in masks)
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in ignored)
