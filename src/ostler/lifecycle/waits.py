"""What an agent itself waits for. Durable, seen by everybody, ended by one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.agents import WaitAnswer, WaitAsked
from ostler.errors import AgentNotFoundError, InvalidOperationError, OstlerError
from ostler.lifecycle.clocks import CURRENT_RUN, arm, pause
from ostler.lifecycle.doors import Asker, reach
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life, Run
from ostler.lifecycle.settle import settle
from ostler.model import AgentState, Permission, Wait, WaitKind
from ostler.store import SYSTEM, Actor
from ostler.store.commands import EndWait, OpenWait

TIMED_OUT = "timeout"


async def wait_for(house: House, life: Life, asked: WaitAsked) -> WaitAnswer:
    """Written down, then waited for; the agent's state says so meanwhile."""
    wait = house.new_wait(
        life.record,
        WaitKind.AGENT,
        reason=asked.reason or asked.kind,
        due_at=house.clock.wall() + asked.timeout if asked.timeout else None,
        detail={**(asked.detail or {}), "kind": asked.kind, "attempt": life.attempt},
    )
    answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    if life.waits is None:
        life.waits = {}
    life.waits[wait.wait_id] = answered
    if asked.timeout is not None:
        house.timers.add(wait, asked.timeout)
    run = CURRENT_RUN.get()
    run = run if run is not None and run in life.calls.values() else None
    try:
        _begin(house, run)
        await house.firm(house.store.commit(OpenWait(wait=wait)))
        life.note_quiet()
        await settle(house, life)
        answer = await answered
        await _until_resumed(life)
    except BaseException:
        house.run(close_wait(house, wait.wait_id, "cancelled"), "ostler-close-wait")
        raise
    finally:
        _over(house, run)
        house.timers.drop(wait.wait_id)
        if life.waits is not None:
            life.waits.pop(wait.wait_id, None)
    await settle(house, life)
    return answer if isinstance(answer, WaitAnswer) else WaitAnswer(outcome="done")


def _begin(house: House, run: Run | None) -> None:
    """A wait has a limit of its own; the time of the request does not pass meanwhile."""
    if run is not None:
        run.waits += 1
        pause(house, run)


def _over(house: House, run: Run | None) -> None:
    if run is not None:
        run.waits -= 1
        if not run.waits and run.task is not None and not run.task.done():
            arm(house, run)


async def _until_resumed(life: Life) -> None:
    """An answer may come while the agent is held; it goes on when it may."""
    while life.state is AgentState.SUSPENDED:
        if life.resumed is None or life.resumed.is_set():
            life.resumed = asyncio.Event()
        await life.resumed.wait()


async def answer_wait(
    house: House, asker: Asker, wait_id: UUID, outcome: str, answer: Mapping[str, Any] | None
) -> Wait:
    """End a wait with a word and, if there is more to say, with data. Exactly one caller does."""
    wait = await house.store.get_wait(wait_id)
    missing = InvalidOperationError(f"there is no wait {wait_id} of an agent; list the waits that are open")
    if wait is None or wait.instance_id is None:
        raise missing
    try:
        await reach(house, asker, wait.instance_id, Permission.AGENTS_PROCESS)
    except AgentNotFoundError as error:  # not the asker's to see, so neither is its wait
        missing.noted = error.noted
        raise missing from None
    if wait.kind is not WaitKind.AGENT:
        raise InvalidOperationError(f"the wait {wait_id} is for {wait.kind}; resume or restart the instance instead")
    return await _end(house, wait, outcome, answer, asker.actor)


async def time_out(house: House, wait: Wait) -> None:
    """Its time is over, and nobody has answered."""
    try:
        await _end(house, wait, TIMED_OUT, None, SYSTEM)
    except InvalidOperationError:
        return  # somebody answered in the last moment
    except OstlerError:
        house.timers.add(wait, timedelta(seconds=1))


async def _end(house: House, wait: Wait, outcome: str, answer: Mapping[str, Any] | None, by: Actor) -> Wait:
    ended = await house.store.commit(EndWait(by=by, wait_id=wait.wait_id, outcome=outcome, answer=answer))
    life = house.lives.get(wait.instance_id) if wait.instance_id else None
    future = (life.waits or {}).get(wait.wait_id) if life else None
    if future is not None and not future.done():
        future.set_result(WaitAnswer(outcome=outcome, answer=answer))
    return ended


async def close_wait(house: House, wait_id: UUID, outcome: str) -> None:
    """Nobody waits for this any more."""
    try:
        await house.insist(lambda: house.store.commit(EndWait(wait_id=wait_id, outcome=outcome)))
    except InvalidOperationError:
        return  # it was answered, or never written
    except OstlerError as error:
        house.log.emit("report_lost", instance_id="", error=str(error))
