"""What once went wrong on the manager's side of level process: nonsense that is said, chatter, and want."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from defect_agents import Mayfly, Nuisance
from defect_ground import do, keeper, plan_for
from isolation.ground import RecordingListener, until
from machine_ground import lives, slowdown
from process_ground import Begin, beginning, isolation, listener, site

from ostler.agent_process.framing import MAX_SHORT
from ostler.errors import AgentGoneError, AgentInitializationError, InvalidOperationError
from ostler.home import KEEPER
from ostler.isolation import Site, Verb
from ostler.isolation.held.python_cell import PythonCell
from ostler.isolation.holder import UnitStatus
from ostler.isolation.process import launch
from ostler.isolation.process.level import ProcessIsolation
from ostler.keeper import protocol
from ostler.model.attempt import AttemptOutcome

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio

HUGE = "1" + "0" * 400


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    return beginning(isolation, listener, plan_for)


# --- nonsense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f'{{"t":"say","kind":"metric","name":"x","value":{HUGE}}}',
        f'{{"t":"say","kind":"progress","fraction":{HUGE}}}',
        '{"t":"ask","id":"\\ud800","kind":"human","reason":"x"}',
        '{"t":"unask","id":["x"]}',
        '{"t":"say","kind":"signal","name":"x","payload":{"x":"\\ud800"}}',
        '{"t":"answer","id":"process:\\ud800","ok":1}',
        f'{{"t":"ask","id":1,"kind":"human","timeout_seconds":{HUGE}}}',
        '{"t":"made","error":7}',
    ],
)
async def test_no_nonsense_hides_a_death(begin: Begin, listener: RecordingListener, text: str) -> None:
    cell = await begin()
    with pytest.raises(AgentGoneError):
        await asyncio.wait_for(cell.call(Verb.PROCESS, do("babble", text=text, code=3)), 60)
    await until(lambda: bool(listener.exits))
    assert len(listener.exits) == 1
    assert listener.exits[0].outcome in {AttemptOutcome.ERROR, AttemptOutcome.EXIT_CODE}
    assert not lives(cell.handle["pid"])
    await cell.destroy()


async def test_what_nobody_foresaw_ends_its_agent_and_no_other(
    begin: Begin, listener: RecordingListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, other = await begin(), await begin()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("not foreseen")

    monkeypatch.setattr(cell, "_take", fail)
    with pytest.raises(AgentGoneError):
        await asyncio.wait_for(cell.ping(), 60)
    await until(lambda: bool(listener.exits))
    assert "ZeroDivisionError: not foreseen" in (listener.exits[0].detail or "")
    assert await other.call(Verb.PROCESS, do("echo", value=1)) == 1


async def test_one_who_cannot_bear_an_end_keeps_nobody_from_theirs(
    begin: Begin, listener: RecordingListener, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    frail, others = await begin(), [await begin() for _ in range(3)]

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(frail, "_end_unasked", fail)
    os.kill(frail.handle["pid"], signal.SIGKILL)
    os.kill(others[0].handle["pid"], signal.SIGKILL)
    await until(lambda: len(listener.exits) == 1)
    assert await others[1].call(Verb.PROCESS, do("echo", value=1)) == 1
    os.kill(keeper(site), signal.SIGKILL)
    await until(lambda: len(listener.exits) == 3)
    assert {how.outcome for how in listener.exits[1:]} == {AttemptOutcome.LOST}


# --- chatter -----------------------------------------------------------------------------------------

_FLOODS = {
    "progress": {"t": "say", "kind": "progress", "fraction": 0.5, "details": {"k": [0] * 20_000}},
    "pong": {"t": "pong", "n": -1, "x": [[]] * 15_000},
    "signal": {"t": "say", "kind": "signal", "name": "x", "payload": {"k": "v" * 50_000}},
    "tiny": {"t": "say", "kind": "tokens", "count": 1, "model": None},
}


@pytest.mark.parametrize("kind", _FLOODS)
async def test_a_talkative_agent_holds_up_no_neighbour(begin: Begin, listener: RecordingListener, kind: str) -> None:
    loud, calm = await begin(), await begin()
    await loud.call(Verb.PROCESS, do("flood", message=_FLOODS[kind]))
    took, end = [], time.monotonic() + 3
    while time.monotonic() < end:
        began = time.perf_counter()
        assert await calm.call(Verb.PROCESS, do("echo", value=1)) == 1
        took.append(time.perf_counter() - began)
        listener.messages.clear()
    assert not listener.exits
    assert len(took) > 10
    await loud.destroy()
    # A tenth of a second on a quiet machine; once it was seconds.
    assert statistics.quantiles(took, n=20)[-1] < 0.3 * slowdown()
    await calm.destroy()


async def test_what_is_too_long_is_refused_where_it_is_said(begin: Begin, listener: RecordingListener) -> None:
    cell = await begin()
    for how, length in (("signal", 300_000), ("signal", 2_000_000), ("progress", 300_000), ("progress", 2_000_000)):
        refusal = await cell.call(Verb.PROCESS, do("tell", how=how, length=length))
        assert "must be at most 256 KiB as JSON; pass a path to larger data" in refusal
    for how in ("signal", "progress"):
        assert await cell.call(Verb.PROCESS, do("tell", how=how, length=200_000)) == "said"
    await until(lambda: len(listener.messages) == 2)
    assert not listener.exits


@pytest.mark.parametrize("start", ['{"t":"say","kind":"signal","name":"', '{"kind":"x","t":"answer","ok":"'])
async def test_what_is_said_unasked_is_short(begin: Begin, listener: RecordingListener, start: str) -> None:
    cell, text = await begin(), f'{start}{"x" * MAX_SHORT}"}}'
    with pytest.raises(AgentGoneError):
        await asyncio.wait_for(cell.call(Verb.PROCESS, do("babble", text=text, times=1)), 60)
    await until(lambda: bool(listener.exits))
    assert "a message that may not be long is longer than" in (listener.exits[0].detail or "")


# --- want --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def few_descriptors() -> Iterator[list[int]]:
    """None is left; those in the list can be closed to have some again."""
    bounds, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, bounds[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield held
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, bounds)


async def test_a_program_without_descriptors_loses_no_keeper(
    begin: Begin, site: Site, listener: RecordingListener
) -> None:
    site.outlive = timedelta(0)  # then whoever loses its keeper loses its agents
    cell = await begin()
    before = keeper(site)
    with few_descriptors() as held:
        for _ in range(7):
            with contextlib.suppress(AgentInitializationError, InvalidOperationError):
                await begin()
            assert await cell.call(Verb.PROCESS, do("echo", value=1)) == 1
            os.close(held.pop())
    assert await (await begin()).call(Verb.PROCESS, do("echo", value=2)) == 2
    assert (keeper(site), listener.exits) == (before, [])


async def test_a_keeper_that_is_just_leaving_is_not_the_last_word(begin: Begin, site: Site) -> None:
    assert site.directory is not None
    place = site.directory / KEEPER
    place.mkdir(parents=True)
    loop = asyncio.get_running_loop()
    listening = protocol.listen(str(place), protocol.SOCKET, 8)

    async def refuse() -> None:
        peer, _ = await loop.sock_accept(listening)
        listening.close()
        (place / protocol.SOCKET).unlink()
        await loop.sock_recv(peer, 65536)
        with peer:
            await loop.sock_sendall(
                peer, protocol.encode({"id": 1, "error": "this keeper is ending", "kind": "ending"})
            )

    refusing = asyncio.create_task(refuse())
    assert await (await begin()).call(Verb.PROCESS, do("echo", value=1)) == 1
    await refusing


async def test_whoever_waits_is_told_whatever_becomes_of_the_burial(
    begin: Begin, listener: RecordingListener, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [await begin() for _ in range(2)]

    async def fail(*_: Any) -> bool:
        raise InvalidOperationError("no keeper today")

    monkeypatch.setattr(launch, "start", fail)
    os.kill(keeper(site), signal.SIGKILL)
    await until(lambda: len(listener.exits) == 2)
    assert not any(lives(cell.handle["pid"]) for cell in cells)


# --- early deaths ------------------------------------------------------------------------------------


async def test_one_that_dies_while_nobody_could_listen_is_not_taken_for_alive(
    isolation: ProcessIsolation, listener: RecordingListener, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await begin(replace(plan_for(), maker=Nuisance))).destroy()  # the keeper is up
    hello = PythonCell._hello  # noqa: SLF001 - the moment after which the loop is held up

    def held_up(self: PythonCell, status: UnitStatus) -> Any:
        asyncio.get_running_loop().call_soon(time.sleep, 1.0)
        return hello(self, status)

    plan = replace(plan_for(), maker=Mayfly)
    await isolation.prepare(plan)
    monkeypatch.setattr(PythonCell, "_hello", held_up)
    with pytest.raises((AgentInitializationError, AgentGoneError), match="exit code 3"):
        await (await isolation.start(plan, listener)).call(Verb.INITIALIZE)
