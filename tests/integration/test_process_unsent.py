"""What an agent says and answers while no manager reads it: bounded, and kept for the next manager."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from defect_ground import do, plan_for
from isolation.ground import RecordingListener, until
from process_ground import Begin, beginning, isolation, listener, site

from ostler.agent_process.framing import MAX_UNSENT
from ostler.agent_process.outbox import MAX_BYTES
from ostler.clock import SystemClock
from ostler.errors import AgentGoneError, InvalidOperationError
from ostler.isolation import Cell, Exit, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.keeper import protocol
from ostler.model.attempt import AttemptOutcome

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio

NextManager = Callable[[], ProcessIsolation]


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    return beginning(isolation, listener, plan_for)


@pytest.fixture
async def next_manager(site: Site) -> AsyncIterator[NextManager]:
    """A manager that takes over from the one before."""
    levels: list[ProcessIsolation] = []

    def take_over() -> ProcessIsolation:
        site.epoch += 1
        levels.append(ProcessIsolation(SystemClock(), site))
        return levels[-1]

    yield take_over
    for level in levels:
        await level.close()


def unsent(site: Site, plan: StartPlan) -> Path:
    assert site.directory is not None
    return site.directory / protocol.RUN / f"{plan.instance_id.hex}.{plan.attempt}" / protocol.UNSENT


async def noted(path: Path) -> str:
    await until(path.exists)
    return path.read_text()


async def start(begin: Begin) -> tuple[StartPlan, Cell]:
    plan = plan_for()
    return plan, await begin(plan)


async def ended(level: ProcessIsolation, cell: Cell, plan: StartPlan, listener: RecordingListener) -> Exit:
    """Its agent is dying: until that is known."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 60
    while True:
        how = await level.adopt(cell.handle, plan, listener)
        if isinstance(how, Exit):
            return how
        how.detach()
        assert loop.time() < end
        await asyncio.sleep(0.01)


async def leave(isolation: ProcessIsolation, cell: Cell, request: dict[str, object]) -> UUID:
    """Ask for what happens once this manager is gone, and go. The id of the call."""
    call_id = uuid4()
    asking = asyncio.ensure_future(cell.call(Verb.PROCESS, request, call_id=call_id))
    await asyncio.sleep(0)  # now it is written
    await isolation.close()
    with pytest.raises(AgentGoneError):
        await asking
    return call_id


async def test_signals_beyond_eight_megabytes_are_refused(begin: Begin, listener: RecordingListener) -> None:
    """None of them is acknowledged, so the agent has to hold them all."""
    cell = await begin()
    count = await cell.call(Verb.PROCESS, do("fill", most=300, length=60_000))
    assert 100 < count <= MAX_BYTES // 60_000
    assert listener.signals.count("filled") == count
    cell.ack(message=count)
    await cell.ping()
    assert await cell.call(Verb.PROCESS, do("fill", most=10, length=60_000)) == 10
    await cell.destroy()


async def test_what_is_said_without_a_manager_takes_a_bounded_file(
    begin: Begin, isolation: ProcessIsolation, site: Site, tmp_path: Path, next_manager: NextManager
) -> None:
    plan, cell = await start(begin)
    note = tmp_path / "note"
    await leave(isolation, cell, do("fill_alone", most=300, length=60_000, note=str(note)))
    count = int(await noted(note))
    assert 100 < count <= MAX_BYTES // 60_000
    assert unsent(site, plan).stat().st_size <= MAX_BYTES < MAX_UNSENT
    listener = RecordingListener()
    heir = await next_manager().adopt(cell.handle, plan, listener)
    assert isinstance(heir, Cell)
    await until(lambda: listener.signals.count("filled") == count)
    assert not unsent(site, plan).exists()
    await heir.destroy()


async def test_an_answer_without_a_manager_survives_the_death_of_the_agent(
    begin: Begin, isolation: ProcessIsolation, site: Site, next_manager: NextManager
) -> None:
    plan, cell = await start(begin)
    call_id = await leave(isolation, cell, do("answer_alone", value=[1, "two"]))
    file = unsent(site, plan)
    await until(lambda: file.exists() and str(call_id) in file.read_text())
    os.kill(cell.handle["pid"], signal.SIGKILL)
    level, listener = next_manager(), RecordingListener()
    heir = await level.adopt(cell.handle, plan, listener)
    assert isinstance(heir, Cell)
    assert await listener.report() == ({call_id: Verb.PROCESS}, frozenset())
    assert await heir.call(Verb.PROCESS, call_id=call_id) == [1, "two"]
    assert listener.exits == [], "not before the answer is committed"
    heir.ack([call_id])
    await until(lambda: bool(listener.exits))
    (how,) = listener.exits
    assert (how.outcome, how.signal) == (AttemptOutcome.SIGNAL, signal.SIGKILL)
    assert heir.ended == how
    with pytest.raises(AgentGoneError):
        await heir.call(Verb.PROCESS, do("echo"))
    await heir.destroy()
    assert isinstance(await level.adopt(cell.handle, plan, listener), Exit), "its record is forgotten"


async def test_a_crash_without_a_manager_is_told_with_its_reason(
    begin: Begin, isolation: ProcessIsolation, next_manager: NextManager
) -> None:
    plan, cell = await start(begin)
    await leave(isolation, cell, do("crash_alone", value=3))
    how = await ended(next_manager(), cell, plan, RecordingListener())
    assert (how.outcome, how.code, how.exception_type) == (AttemptOutcome.ERROR, 3, "SystemExit")


async def test_a_fork_of_the_agent_does_not_speak_for_it(
    begin: Begin, listener: RecordingListener, isolation: ProcessIsolation, tmp_path: Path, next_manager: NextManager
) -> None:
    plan, cell = await start(begin)
    assert await asyncio.wait_for(cell.call(Verb.PROCESS, do("fork_and_speak")), 60) == 7
    assert listener.messages == []
    note = tmp_path / "note"
    await leave(isolation, cell, do("fork_alone", note=str(note)))
    os.kill(int(await noted(note)), signal.SIGKILL)
    level, later = next_manager(), RecordingListener()
    await ended(level, cell, plan, later)
    assert later.signals == ["parent"]


async def test_an_agent_that_is_blocked_is_adopted_by_one_manager_after_another(
    begin: Begin, isolation: ProcessIsolation, next_manager: NextManager
) -> None:
    """The connections of those that are gone wait in its queue."""
    plan, cell = await start(begin)
    await cell.freeze()
    await isolation.close()
    level = next_manager()
    for _ in range(150):
        heir = await level.adopt(cell.handle, plan, RecordingListener())
        assert isinstance(heir, Cell)
        heir.detach()
    heir = await level.adopt(cell.handle, plan, RecordingListener())
    assert isinstance(heir, Cell)
    await heir.thaw()
    assert await heir.call(Verb.PROCESS, do("echo", value="here")) == "here"
    await heir.destroy()


async def test_an_agent_that_takes_no_connection_is_not_called_gone(
    begin: Begin, isolation: ProcessIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, cell = await start(begin)
    connect = protocol.connect

    def is_full(directory: str, name: str = protocol.SOCKET) -> socket.socket:
        if name == protocol.AGENT_SOCKET:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return connect(directory, name)

    monkeypatch.setattr(protocol, "connect", is_full)
    with pytest.raises(InvalidOperationError, match="takes no connection now"):
        await isolation.adopt(cell.handle, plan, RecordingListener())
    monkeypatch.undo()
    heir = await isolation.adopt(cell.handle, plan, RecordingListener())
    assert isinstance(heir, Cell)
    await heir.destroy()
