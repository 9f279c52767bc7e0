"""Facts that could not be written: they stay true, and are written again until the store takes them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ostler.errors import StaleWriterError, StoreError
from ostler.lifecycle import reports
from ostler.lifecycle.calls import call_id_for
from ostler.lifecycle.instance import RETRY_SECONDS, Instance
from ostler.lifecycle.messages import Terminate, WriteDue, WriteFailed
from ostler.lifecycle.phases import Adopting, Leaving, Pausing, Serving
from ostler.model.states import AgentState
from ostler.store import reports as commands
from ostler.store.moves import Move, move_instance
from ostler.store.reports import CallEnd
from ostler.store.requests import RequestEnd


def write_failed(instance: Instance, message: WriteFailed) -> None:
    if isinstance(message.error, StaleWriterError):
        instance.lose_ownership(message.error)
    elif not instance.retry_pending:
        instance.retry_pending = True
        instance.runtime.log.emit("report_lost", instance_id=instance.instance_id, error=str(message.error))
        instance.runtime.clock.call_later(RETRY_SECONDS, lambda: instance.post(WriteDue()))


def write_due(instance: Instance, message: WriteDue) -> None:
    """As it is by now: the row takes the legal steps that it has missed."""
    del message
    instance.retry_pending = False
    phase = instance.phase
    if isinstance(phase, Leaving) and phase.intent is not None and not phase.empty:
        instance.write(move_instance, phase.intent).add_done_callback(partial(_intent_written, instance))
    elif isinstance(phase, Serving | Adopting | Pausing) and instance.state is not instance.record.state:
        instance.write_state()
    reports.flush(instance, now=True)
    for end in instance.pending_ends.values():
        writing = instance.write(commands.end_call, None, CallEnd(request=end, after=instance.outbox.last))
        writing.add_done_callback(partial(_written, instance, end))


def _written(instance: Instance, end: RequestEnd, writing: asyncio.Future[Any]) -> None:
    if not writing.cancelled() and writing.exception() is None:
        _settle(instance, end)


def _settle(instance: Instance, end: RequestEnd) -> None:
    """The answer is durable now; the agent need not keep it any longer."""
    request = end.request
    if instance.pending_ends.get(request.request_id) is end:
        del instance.pending_ends[request.request_id]
    if instance.cell is not None and request.attempt == instance.attempt:
        instance.cell.ack([call_id_for(instance, request.request_id, request.tries)])


async def write_intent(instance: Instance, message: Terminate) -> Move | None:
    """Before it is acted on. Ending never needs the disk: an intent that cannot be written now is written later."""
    if instance.state is AgentState.TERMINATING:
        return None
    reason = message.options.reason
    move = Move(to=AgentState.TERMINATING, by=message.by, reason=reason, act="terminate", catch_up=True)
    try:
        await instance.commit(move_instance, move)
    except StaleWriterError:
        raise
    except StoreError as error:
        instance.moved_to(AgentState.TERMINATING)
        instance.post(WriteFailed(error=error))
        return move
    return None


def _intent_written(instance: Instance, writing: asyncio.Future[Any]) -> None:
    if isinstance(instance.phase, Leaving) and not writing.cancelled() and writing.exception() is None:
        instance.phase.intent = None


async def write_rest(instance: Instance) -> None:
    """All that the agent said and answered, before its end is written."""
    await reports.drain(instance)
    for end in tuple(instance.pending_ends.values()):
        await instance.runtime.store.run(commands.end_call, instance.current(), None, CallEnd(request=end))
        _settle(instance, end)
