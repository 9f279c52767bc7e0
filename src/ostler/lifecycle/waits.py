"""What an agent itself waits for. Durable, seen by everybody, ended by one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid5

from ostler.agents import WaitAnswer, WaitAsked
from ostler.errors import AgentNotFoundError, InvalidOperationError, OstlerError, ValidationError
from ostler.lifecycle.clocks import CURRENT_RUN, arm, pause
from ostler.lifecycle.doors import Asker, reach, require_kind
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life, Run
from ostler.lifecycle.settle import settle
from ostler.model import AgentState, Fault, Permission, Wait, WaitKind
from ostler.store import SYSTEM, Actor
from ostler.store.commands import EndWait, OpenWait

TIMED_OUT = "timeout"
_GONE = "the agent is gone"
_SILENT = "the agent does not wait for it any more"
#: An agent that was found again asks again for what it waits for, at once; what it has not asked for by then is over.
_ASKS_AGAIN_SECONDS = 60.0


async def wait_for(house: House, life: Life, asked: WaitAsked) -> WaitAnswer:
    """Written down, then waited for; the agent's state says so meanwhile."""
    wait = _wait(house, life, asked)
    if life.waits is None:
        life.waits = {}
    expected = (life.unasked or {}).pop(wait.wait_id, None)
    answered = life.waits.get(wait.wait_id) or asyncio.get_running_loop().create_future()
    life.waits[wait.wait_id] = answered
    run = expected or _run(life, asked)
    try:
        if expected is None:  # else it counts as waiting since it was found again
            _begin(house, run)
        await _write(house, life, wait, asked)
        life.note_quiet()
        await settle(house, life)
        answer = await answered
        await _until_resumed(life)
    except BaseException:
        if not life.left:  # else it waits on, and asks the next manager
            house.run(close_wait(house, wait.wait_id, "cancelled"), "ostler-close-wait")
        raise
    finally:
        _over(house, run)
        house.timers.drop(wait.wait_id)
        if life.waits is not None:
            life.waits.pop(wait.wait_id, None)
    await settle(house, life)
    return answer if isinstance(answer, WaitAnswer) else WaitAnswer(outcome="done")


def _wait(house: House, life: Life, asked: WaitAsked) -> Wait:
    detail = {**(asked.detail or {}), "kind": asked.kind, "attempt": life.attempt}
    wait = house.new_wait(
        life.record,
        WaitKind.AGENT,
        reason=asked.reason or asked.kind,
        due_at=house.clock.wall() + asked.timeout if asked.timeout else None,
        detail=detail,
    )
    if asked.ask_id is None:
        return wait
    # Asked again, it is the same wait. An agent names its questions itself, but only its own.
    named = uuid5(life.instance_id, f"{life.attempt}:{asked.ask_id}")
    call_id = str(asked.call_id) if asked.call_id else None
    return wait.evolve(wait_id=named, detail={**detail, "ask_id": str(asked.ask_id), "call_id": call_id})


def _run(life: Life, asked: WaitAsked) -> Run | None:
    """The request that waits: by its name, or, where the agent lives in this program, by who asks."""
    if asked.call_id is not None:
        return next((run for run in life.calls.values() if run.call_id == asked.call_id), None)
    run = CURRENT_RUN.get()
    return run if run is not None and run in life.calls.values() else None


async def _write(house: House, life: Life, wait: Wait, asked: WaitAsked) -> None:
    """Write it down, unless it stands there already: then it goes on, or its answer is waiting."""
    again = life.adopted is not None and asked.ask_id is not None
    known = await house.store.get_wait(wait.wait_id) if again else None
    if known is None:
        if asked.timeout is not None:
            house.timers.add(wait, asked.timeout)
        await house.firm(house.store.commit(OpenWait(wait=wait)))
    elif known.ended_at is not None:
        answer = WaitAnswer(outcome=known.outcome or "done", answer=(known.detail or {}).get("answer"))
        _tell(life, wait.wait_id, answer)
    elif house.timers.remaining(wait.wait_id) is None:
        house.timers.found(known)


def expect(house: House, life: Life, waits: Sequence[Wait]) -> None:
    """One that is found again had opened these. They go on, but must be asked for again."""
    if not waits:
        return
    life.waits, life.unasked = life.waits or {}, {}
    runs = {str(run.call_id): run for run in life.calls.values()}
    for wait in waits:
        run = life.unasked[wait.wait_id] = runs.get((wait.detail or {}).get("call_id", ""))
        _begin(house, run)
        held: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        held.add_done_callback(partial(_ended_unasked, house, life, wait.wait_id))
        life.waits[wait.wait_id] = held
        house.timers.found(wait)
    house.clock.call_later(_ASKS_AGAIN_SECONDS, partial(_silent, house, life))


def _ended_unasked(house: House, life: Life, wait_id: UUID, held: asyncio.Future[object]) -> None:
    if life.unasked and wait_id in life.unasked and held.exception() is not None:  # it ended before it could ask
        _give_up(house, life, wait_id, _GONE)


def _silent(house: House, life: Life) -> None:
    if house.shut is not None or life.left or not life.unasked:
        return
    if life.state is AgentState.SUSPENDED:  # it may be frozen, and then it cannot ask
        house.clock.call_later(_ASKS_AGAIN_SECONDS, partial(_silent, house, life))
        return
    for wait_id in list(life.unasked):
        _give_up(house, life, wait_id, _SILENT)
    house.run(settle(house, life), "ostler-settle")


def _give_up(house: House, life: Life, wait_id: UUID, why: str) -> None:
    _over(house, (life.unasked or {}).pop(wait_id, None))
    (life.waits or {}).pop(wait_id, None)
    house.timers.drop(wait_id)
    house.run(close_wait(house, wait_id, why), "ostler-close-wait")


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
    require_kind("wait_id", wait_id, UUID)
    _require_word(outcome)
    if answer is not None:
        require_kind("answer", answer, Mapping)
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


def _require_word(outcome: str) -> None:
    """An agent goes by it, so there must be one, and none that says that nobody answered."""
    require_kind("outcome", outcome, str)
    if not outcome.strip():
        raise ValidationError([Fault(field="outcome", bound="must be a word, such as done or approved")])
    if outcome == TIMED_OUT:
        bound = f"must be another word than {TIMED_OUT!r}, by which the agent knows that nobody has answered"
        raise ValidationError([Fault(field="outcome", bound=bound)])


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
    if life is not None:
        _tell(life, wait.wait_id, WaitAnswer(outcome=outcome, answer=answer))
    return ended


def _tell(life: Life, wait_id: UUID, answer: WaitAnswer) -> None:
    future = (life.waits or {}).get(wait_id)
    if future is not None and not future.done():
        future.set_result(answer)


async def close_wait(house: House, wait_id: UUID, outcome: str) -> None:
    """Nobody waits for this any more."""
    try:
        await house.insist(lambda: house.store.commit(EndWait(wait_id=wait_id, outcome=outcome)))
    except InvalidOperationError:
        return  # it was answered, or never written
    except OstlerError as error:
        house.log.emit("report_lost", instance_id="", error=str(error))
