"""What an agent says: signals are committed in order and acknowledged, progress is thinned, tokens are counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from ostler.agents.messages import Message, MetricReported, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.errors import AgentGoneError, StoreError
from ostler.isolation.base import Exit, Verb
from ostler.lifecycle.instance import RETRY_SECONDS, Instance
from ostler.lifecycle.liveness import Outbox
from ostler.lifecycle.messages import Exited, Reported, WaitCancelled, WaitRequested
from ostler.lifecycle.phases import wait_id_for
from ostler.store import reports

#: The number of signals that may wait to be committed; then the agent has to wait.
_MAX_PENDING = 10_000
#: The most signals, and about the most characters of them, that one command writes.
_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 20
#: Token counts alone are committed after this long.
_TOKENS_SECONDS = 1.0


class Listener:
    """Hears one attempt. Messages of an earlier attempt are dropped."""

    def __init__(self, instance: Instance, attempt: int, *, committed: int = 0) -> None:
        """`committed` is the last numbered message that an earlier manager committed."""
        self._instance = instance
        self._attempt = attempt
        self._outbox = instance.outbox = Outbox(last=committed, submitted=committed, durable=committed)

    @property
    def _is_stale(self) -> bool:
        return self._instance.outbox is not self._outbox or self._instance.is_over

    def on_message(self, attempt: int, message: Message) -> asyncio.Future[None] | None:
        instance, outbox = self._instance, self._outbox
        number = getattr(message, "number", 0)
        if attempt != instance.attempt or self._is_stale or (number and number <= outbox.last):
            return None  # an earlier attempt; or a repeat, by an agent that was adopted
        if isinstance(message, Signal | TokensUsed):
            outbox.last = number or outbox.last + 1  # levels inside the program do not number them
        instance.liveness.output = instance.runtime.clock.mono()
        match message:
            case Signal():
                outbox.signals.append(message if number else replace(message, number=outbox.last))
                flush(instance)
            case TokensUsed():
                instance.counters.add_tokens(message.count, instance.runtime.clock.mono())
                self._write_tokens_later()
            case MetricReported():
                instance.counters.keep_metric(message)
            case Progress():
                share = "" if message.fraction is None else f"{message.fraction:.0%}"
                instance.liveness.doing = message.message or share or instance.liveness.doing
                outbox.progress = message
                self._write_progress()
        if len(outbox.signals) >= _MAX_PENDING and outbox.room_freed is None:
            outbox.room_freed = asyncio.get_running_loop().create_future()
        return outbox.room_freed

    async def on_question(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        instance = self._instance
        if attempt != instance.attempt or self._is_stale:
            raise AgentGoneError("a later attempt of this agent has begun")
        instance.liveness.output = instance.runtime.clock.mono()
        reply: asyncio.Future[WaitAnswer] = asyncio.get_running_loop().create_future()
        instance.post(WaitRequested(attempt=attempt, wait=wait, reply=reply))
        try:
            return await reply
        except asyncio.CancelledError:
            instance.post(WaitCancelled(wait_id=wait_id_for(instance.record, wait)))
            raise

    def on_exit(self, attempt: int, how: Exit) -> None:
        self._instance.post(Exited(attempt=attempt, how=how))

    def on_report(self, attempt: int, calls: Mapping[UUID, Verb], questions: Collection[UUID]) -> None:
        self._instance.post(Reported(attempt=attempt, calls=calls, questions=questions))

    def _write_progress(self) -> None:
        """The latest only, and not more often than the settings say."""
        outbox, instance, clock = self._outbox, self._instance, self._instance.runtime.clock
        if outbox.progress_due or outbox.progress is None or outbox.has_ended:
            return
        early = instance.runtime.settings.progress_interval.total_seconds() - (clock.mono() - outbox.progress_at)
        if early > 0:
            outbox.progress_due = True
            clock.call_later(early, self._progress_due)
            return
        latest, outbox.progress, outbox.progress_at = outbox.progress, None, clock.mono()
        if not self._is_stale:
            instance.write_lazily(reports.report_progress, latest.fraction, latest.message, latest.details)

    def _progress_due(self) -> None:
        self._outbox.progress_due = False
        self._write_progress()

    def _write_tokens_later(self) -> None:
        if not self._outbox.tokens_due:
            self._outbox.tokens_due = True
            self._instance.runtime.clock.call_later(_TOKENS_SECONDS, self._tokens_due)

    def _tokens_due(self) -> None:
        self._outbox.tokens_due = False
        if not self._is_stale:
            flush(self._instance)


def flush(instance: Instance, *, now: bool = False) -> None:
    """Submit the signals that wait. An answer that follows them is not committed before they are.

    One command at a time, so that many signals share it; `now` submits all of them at once.
    """
    outbox = instance.outbox
    while outbox.last > outbox.submitted and (now or (outbox.writing is None and outbox.write_error is None)):
        batch = _next_of(outbox.signals)
        last = batch[-1].number if batch and outbox.signals else outbox.last
        after, outbox.submitted = outbox.submitted, last
        outbox.submitted_signals.extend(batch)
        pairs = tuple((signal.name, signal.payload) for signal in batch)
        try:
            writing = instance.runtime.store.submit(
                reports.report_signals, instance.current(), pairs, after, last, instance.metrics_now()
            )
        except StoreError as error:
            _put_back(instance, outbox, error)
            return
        outbox.writing = writing
        writing.add_done_callback(partial(_written, instance, outbox, outbox.write_round, last))


async def drain(instance: Instance) -> None:
    """The agent has ended: all that it said is durable when this returns.

    Raises `StoreError` where it cannot be written now.
    """
    outbox = instance.outbox
    outbox.write_error, outbox.has_ended = None, True
    flush(instance, now=True)
    while outbox.writing is not None:
        await asyncio.wait([outbox.writing])
    if outbox.write_error is not None:
        raise type(outbox.write_error)(str(outbox.write_error))


def _written(instance: Instance, outbox: Outbox, number: int, last: int, writing: asyncio.Future[list[str]]) -> None:
    if outbox.writing is writing:
        outbox.writing = None
    if number != outbox.write_round:
        return  # it failed with the one before it, and was put back with that
    error = writing.exception()
    if isinstance(error, StoreError):
        _put_back(instance, outbox, error)
        return
    for lost in writing.result() if error is None else [str(error)]:
        instance.runtime.log.emit("report_lost", instance_id=instance.instance_id, error=lost)
    outbox.durable = last
    while outbox.submitted_signals and outbox.submitted_signals[0].number <= last:
        outbox.submitted_signals.popleft()
    if error is None and instance.cell is not None and instance.outbox is outbox:
        instance.cell.ack(message=last)
    if outbox.room_freed is not None and len(outbox.signals) <= _MAX_PENDING // 2:
        room, outbox.room_freed = outbox.room_freed, None
        if not room.done():
            room.set_result(None)
    if instance.outbox is outbox:
        flush(instance)


def _put_back(instance: Instance, outbox: Outbox, error: StoreError) -> None:
    """The store cannot write now: nothing is dropped, and all that is not durable is tried again in its order."""
    outbox.write_round += 1
    outbox.signals.extendleft(reversed(outbox.submitted_signals))
    outbox.submitted_signals.clear()
    outbox.submitted = outbox.durable
    if instance.is_over or instance.outbox is not outbox:
        what = f"{error} ({len(outbox.signals)} signals)"
        instance.runtime.log.emit("report_lost", instance_id=instance.instance_id, error=what)
        return
    outbox.write_error = error  # holds further writes back until the next try
    instance.runtime.clock.call_later(RETRY_SECONDS, partial(_try_again, instance, outbox))


def _try_again(instance: Instance, outbox: Outbox) -> None:
    outbox.write_error = None
    if instance.outbox is outbox and not instance.is_over:
        flush(instance)


def _next_of(waiting: deque[Signal]) -> list[Signal]:
    taken: list[Signal] = []
    room = _CHARACTERS_AT_ONCE
    while waiting and len(taken) < _AT_ONCE and room > 0:
        signal = waiting.popleft()
        taken.append(signal)
        room -= _size(signal.payload, room)
    return taken


def _size(data: Any, most: int) -> int:
    """About how many characters it takes; it stops counting at `most`."""
    size, inside = 0, [data]
    while inside and size < most:
        value = inside.pop()
        if isinstance(value, Mapping):
            inside += value
            inside += value.values()
        elif isinstance(value, list | tuple):
            inside += value
        size += 8 + (len(value) if isinstance(value, str) else 0)
    return size
