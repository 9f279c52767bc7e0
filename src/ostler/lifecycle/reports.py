"""What an agent says: signals are committed in order and acknowledged, progress is thinned, tokens are counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ostler.agents.messages import Message, MetricReported, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.errors import AgentGoneError, StoreError
from ostler.isolation.base import Exit
from ostler.lifecycle.instance import RETRY_SECONDS, Instance
from ostler.lifecycle.messages import Asked, Exited, Unasked
from ostler.lifecycle.phases import wait_id_for
from ostler.lifecycle.signs import Said
from ostler.store import reports

#: So many signals may wait to be committed; then the agent is pushed back.
_MAX_PENDING = 10_000
#: So many are written by one command, or so many characters of them.
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
        self._said = instance.said = Said(last=committed, submitted=committed, durable=committed)

    @property
    def _is_stale(self) -> bool:
        return self._instance.said is not self._said or self._instance.is_over

    def heard(self, attempt: int, message: Message) -> asyncio.Future[None] | None:
        instance, said = self._instance, self._said
        number = getattr(message, "number", 0)
        if attempt != instance.attempt or self._is_stale or (number and number <= said.last):
            return None  # an earlier attempt; or a repeat, by an agent that was adopted
        if isinstance(message, Signal | TokensUsed):
            said.last = number or said.last + 1  # levels inside the program do not number them
        instance.signs.output = instance.runtime.clock.mono()
        match message:
            case Signal():
                said.signals.append(message if number else replace(message, number=said.last))
                flush(instance)
            case TokensUsed():
                instance.tally.add_tokens(message.count, instance.runtime.clock.mono())
                self._write_tokens_later()
            case MetricReported():
                instance.tally.keep_metric(message)
            case Progress():
                share = "" if message.fraction is None else f"{message.fraction:.0%}"
                instance.signs.doing = message.message or share or instance.signs.doing
                said.progress = message
                self._write_progress()
        if len(said.signals) >= _MAX_PENDING and said.room is None:
            said.room = asyncio.get_running_loop().create_future()
        return said.room

    async def asked(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        instance = self._instance
        if attempt != instance.attempt or self._is_stale:
            raise AgentGoneError("a later attempt of this agent has begun")
        instance.signs.output = instance.runtime.clock.mono()
        reply: asyncio.Future[WaitAnswer] = asyncio.get_running_loop().create_future()
        instance.post(Asked(attempt=attempt, wait=wait, reply=reply))
        try:
            return await reply
        except asyncio.CancelledError:
            instance.post(Unasked(wait_id=wait_id_for(instance.record, wait)))
            raise

    def exited(self, attempt: int, how: Exit) -> None:
        self._instance.post(Exited(attempt=attempt, how=how))

    def _write_progress(self) -> None:
        """The latest only, and not more often than the settings say."""
        said, instance, clock = self._said, self._instance, self._instance.runtime.clock
        if said.progress_due or said.progress is None:
            return
        early = instance.runtime.settings.progress_interval.total_seconds() - (clock.mono() - said.progress_at)
        if early > 0:
            said.progress_due = True
            clock.call_later(early, self._progress_due)
            return
        latest, said.progress, said.progress_at = said.progress, None, clock.mono()
        if not self._is_stale:
            instance.write_lazily(reports.report_progress, latest.fraction, latest.message, latest.details)

    def _progress_due(self) -> None:
        self._said.progress_due = False
        self._write_progress()

    def _write_tokens_later(self) -> None:
        if not self._said.tokens_due:
            self._said.tokens_due = True
            self._instance.runtime.clock.call_later(_TOKENS_SECONDS, self._tokens_due)

    def _tokens_due(self) -> None:
        self._said.tokens_due = False
        if not self._is_stale:
            flush(self._instance)


def flush(instance: Instance, *, now: bool = False) -> None:
    """Submit the signals that wait. An answer that follows them is not committed before they are.

    One command at a time, so that many signals share it; `now` submits all of them at once.
    """
    said = instance.said
    while said.last > said.submitted and (now or (said.writing is None and said.trouble is None)):
        few = _next_of(said.signals)
        last = few[-1].number if few and said.signals else said.last
        after, said.submitted = said.submitted, last
        said.submitted_signals.extend(few)
        pairs = tuple((one.name, one.payload) for one in few)
        try:
            writing = instance.runtime.store.submit(
                reports.report_signals, instance.current(), pairs, after, last, instance.metrics_now()
            )
        except StoreError as error:
            _put_back(instance, said, error)
            return
        said.writing = writing
        writing.add_done_callback(partial(_written, instance, said, said.round, last))


async def drain(instance: Instance) -> None:
    """All that the agent said is durable when this returns. Raises `StoreError` where it cannot be written now."""
    said = instance.said
    said.trouble = None
    flush(instance, now=True)
    while said.writing is not None:
        await asyncio.wait([said.writing])
    if said.trouble is not None:
        raise type(said.trouble)(str(said.trouble))


def _written(instance: Instance, said: Said, number: int, last: int, writing: asyncio.Future[list[str]]) -> None:
    if said.writing is writing:
        said.writing = None
    if number != said.round:
        return  # it failed with the one before it, and was put back with that
    error = writing.exception()
    if isinstance(error, StoreError):
        _put_back(instance, said, error)
        return
    for lost in writing.result() if error is None else [str(error)]:
        instance.runtime.log.emit("report_lost", instance_id=instance.instance_id, error=lost)
    said.durable = last
    while said.submitted_signals and said.submitted_signals[0].number <= last:
        said.submitted_signals.popleft()
    if error is None and instance.cell is not None and instance.said is said:
        instance.cell.confirm_heard(last)
    if said.room is not None and len(said.signals) <= _MAX_PENDING // 2:
        room, said.room = said.room, None
        if not room.done():
            room.set_result(None)
    if instance.said is said:
        flush(instance)


def _put_back(instance: Instance, said: Said, error: StoreError) -> None:
    """The store cannot write now: nothing is dropped, and all that is not durable is tried again in its order."""
    said.round += 1
    said.signals.extendleft(reversed(said.submitted_signals))
    said.submitted_signals.clear()
    said.submitted = said.durable
    if instance.is_over or instance.said is not said:
        what = f"{error} ({len(said.signals)} signals)"
        instance.runtime.log.emit("report_lost", instance_id=instance.instance_id, error=what)
        return
    said.trouble = error  # holds further writes back until the next try
    instance.runtime.clock.call_later(RETRY_SECONDS, partial(_try_again, instance, said))


def _try_again(instance: Instance, said: Said) -> None:
    said.trouble = None
    if instance.said is said and not instance.is_over:
        flush(instance)


def _next_of(waiting: deque[Signal]) -> list[Signal]:
    taken: list[Signal] = []
    room = _CHARACTERS_AT_ONCE
    while waiting and len(taken) < _AT_ONCE and room > 0:
        one = waiting.popleft()
        taken.append(one)
        room -= _size(one.payload, room)
    return taken


def _size(data: Any, most: int) -> int:
    """About how many characters it takes; it stops counting at `most`."""
    size, inside = 0, [data]
    while inside and size < most:
        one = inside.pop()
        if isinstance(one, Mapping):
            inside += one
            inside += one.values()
        elif isinstance(one, list | tuple):
            inside += one
        size += 8 + (len(one) if isinstance(one, str) else 0)
    return size
