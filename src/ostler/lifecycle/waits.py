"""The clock of calls, and the waits of the agent during which it stands still: durable, answered once."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from ostler.agents.messages import WaitAnswer
from ostler.errors import AgentGoneError, InvalidOperationError, NotFoundError
from ostler.lifecycle.instance import Instance, deliver_answer, refuse_with
from ostler.lifecycle.messages import Answer, Call, CallDue, WaitCancelled, WaitDue, WaitRequested
from ostler.lifecycle.phases import Adopting, OpenWait, Pausing, Serving, Suspended, wait_id_for
from ostler.model.access import SYSTEM, Actor
from ostler.model.states import AgentState
from ostler.model.wait import Wait, WaitKind
from ostler.store import reports as commands
from ostler.store import waits
from ostler.store.moves import Move

#: The outcome by which an agent knows that its time is over; no caller may give it.
TIMED_OUT = "timeout"
#: Words of an agent that name a kind of wait; any other word is of kind `agent`.
_KINDS = {kind.value: kind for kind in WaitKind} | {"approval": WaitKind.HUMAN}
#: Suspensions and delays before a restart; they end by the verbs of the instance.
OWN_KINDS = frozenset({WaitKind.BACKOFF, WaitKind.RESUME})


# --- the clock and the state of calls -------------------------------------------------------------------


def start_clock(instance: Instance, call: Call) -> None:
    """Run down its execution time. The clock stands still while it waits for an answer or is frozen."""
    stop_clock(instance, call)
    if call.waits or call.ended:
        return
    clock = instance.runtime.clock
    call.armed_at = clock.mono()
    call.timer = clock.call_later(max(call.left, 0.0), lambda: instance.post(CallDue(call=call)))


def stop_clock(instance: Instance, call: Call) -> None:
    if call.timer is not None:
        call.timer.cancel()
        call.timer = None
    if call.armed_at is not None:
        call.left -= instance.runtime.clock.mono() - call.armed_at
        call.armed_at = None


def move_for_calls(instance: Instance) -> Move | None:
    """The state follows the calls: processing while any of them works, waiting afterwards."""
    if not isinstance(instance.phase, Serving | Pausing | Adopting):
        return None
    works = any(call.works for call in instance.calls.values())
    if works and instance.state is not AgentState.PROCESSING:
        to = AgentState.PROCESSING
    elif not works and instance.state is AgentState.PROCESSING:
        to = AgentState.WAITING
    else:
        return None
    return Move(to=to, catch_up=True, metrics=instance.metrics_now())


def sync_state(instance: Instance) -> None:
    """Write the state where the calls have changed it."""
    move = move_for_calls(instance)
    if move is not None:
        instance.write_lazily(commands.begin_call, move, None)
        instance.moved_to(move.to)


# --- waits -------------------------------------------------------------------------------------------


async def wait_requested(instance: Instance, message: WaitRequested) -> None:
    """Open the wait, or join the one that an earlier manager opened for the same question."""
    if message.attempt != instance.attempt:
        refuse_with(message, AgentGoneError("a later attempt of this agent has begun"))
        return
    if isinstance(instance.phase, Suspended) and instance.cell is None:
        refuse_with(message, AgentGoneError("the agent was parked"))
        return
    wait = _wait_of(instance, message)
    call = None if message.wait.call_id is None else instance.calls.get(message.wait.call_id)
    if call is not None:
        call.waits.add(wait.wait_id)
        stop_clock(instance, call)
    move = move_for_calls(instance)
    store = instance.runtime.store
    try:
        stored, changes = await store.run(commands.open_agent_wait, instance.current(), move, wait)
    except Exception:
        if call is not None:
            call.waits.discard(wait.wait_id)
            start_clock(instance, call)
        raise
    if move is not None:
        instance.moved_to(move.to)
    instance.apply(changes)
    earlier = instance.waits.get(stored.wait_id)
    waiting = instance.waits[stored.wait_id] = OpenWait(wait=stored, reply=message.reply, call=call)
    if earlier is not None and earlier.timer is not None:
        earlier.timer.cancel()
    if stored.ended_at is not None:
        deliver(instance, stored.wait_id, WaitAnswer(outcome=stored.outcome or "", answer=stored.answer))
    else:
        set_wait_timer(instance, waiting)


def _wait_of(instance: Instance, message: WaitRequested) -> Wait:
    question, clock = message.wait, instance.runtime.clock
    kind = _KINDS.get(question.kind, WaitKind.AGENT)
    detail: dict[str, Any] = {**(question.detail or {}), "kind": question.kind, "attempt": instance.attempt}
    if question.call_id is not None:
        detail["call_id"] = str(question.call_id)
    if question.ask_id is not None:
        detail["ask_id"] = str(question.ask_id)
    return Wait(
        wait_id=wait_id_for(instance.record, question),
        workspace_id=instance.record.workspace_id,
        kind=WaitKind.AGENT if kind in OWN_KINDS else kind,
        instance_id=instance.instance_id,
        task_id=instance.record.task_id,
        reason=question.reason or question.kind,
        detail=detail,
        created_at=clock.wall(),
        due_at=None if question.timeout is None else clock.wall() + question.timeout,
    )


def set_wait_timer(instance: Instance, waiting: OpenWait) -> None:
    """Its time goes on across managers: by the wall clock, but never longer than it was meant to be in all."""
    wait, clock = waiting.wait, instance.runtime.clock
    if wait.due_at is None:
        return
    left = max(min(wait.due_at - clock.wall(), wait.due_at - wait.created_at), timedelta(0))
    waiting.timer = clock.call_later(left.total_seconds(), lambda: instance.post(WaitDue(wait_id=waiting.wait.wait_id)))


async def answer(instance: Instance, message: Answer) -> None:
    """Of two answers one counts; the other caller gets `InvalidOperationError`."""
    ended = await _end(
        instance, message.wait_id, WaitAnswer(outcome=message.outcome, answer=message.answer_data), message.by
    )
    message.answer(ended)


async def wait_due(instance: Instance, message: WaitDue) -> None:
    if message.wait_id not in instance.waits:
        return
    try:
        await _end(instance, message.wait_id, WaitAnswer(outcome=TIMED_OUT), SYSTEM)
    except (InvalidOperationError, NotFoundError):
        return  # answered in the last moment


async def _end(instance: Instance, wait_id: UUID, answer_: WaitAnswer, by: Actor) -> Wait:
    act = None if by is SYSTEM else "answer"
    ended = await instance.runtime.store.run(waits.end_wait, wait_id, answer_.outcome, answer_.answer, by=by, act=act)
    if isinstance(instance.phase, Suspended):
        instance.phase.undelivered.append((wait_id, answer_))
    else:
        deliver(instance, wait_id, answer_)
    return ended


def deliver(instance: Instance, wait_id: UUID, answer_: WaitAnswer) -> None:
    """The agent goes on. One that was adopted and has not asked again gets the answer when it does."""
    waiting = instance.waits.pop(wait_id, None)
    if waiting is None:
        return
    if waiting.timer is not None:
        waiting.timer.cancel()
    if waiting.call is not None:
        waiting.call.waits.discard(wait_id)
        start_clock(instance, waiting.call)
    deliver_answer(waiting, answer_)
    sync_state(instance)


def wait_cancelled(instance: Instance, message: WaitCancelled) -> None:
    _drop(instance, message.wait_id, "cancelled")
    sync_state(instance)


def end_waits_of_call(instance: Instance, call: Call) -> None:
    for wait_id in tuple(call.waits):
        _drop(instance, wait_id, "cancelled")


def end_unasked_waits(instance: Instance, asked_for: frozenset[UUID]) -> None:
    """An adopted agent has said what it waits for; other waits of it are over."""
    for wait_id, waiting in tuple(instance.waits.items()):
        ask_id = (waiting.wait.detail or {}).get("ask_id")
        if waiting.reply is None and (ask_id is None or UUID(ask_id) not in asked_for):
            _drop(instance, wait_id, "the agent does not wait for it any more")


def _drop(instance: Instance, wait_id: UUID, outcome: str) -> None:
    waiting = instance.waits.pop(wait_id, None)
    if waiting is None:
        return
    if waiting.timer is not None:
        waiting.timer.cancel()
    if waiting.call is not None:
        waiting.call.waits.discard(wait_id)
        start_clock(instance, waiting.call)
    writing = instance.runtime.store.submit_lazy(waits.end_wait, wait_id, outcome)
    writing.add_done_callback(partial(_dropped, instance))


def _dropped(instance: Instance, writing: Any) -> None:
    error = None if writing.cancelled() else writing.exception()
    if error is not None and not isinstance(error, InvalidOperationError | NotFoundError):  # else it was answered
        instance.runtime.log.emit("report_lost", instance_id=instance.instance_id, error=str(error))
