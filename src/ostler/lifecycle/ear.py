"""What the manager hears from one start of one instance, and what it makes of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.errors import AgentGoneError, OstlerError, ValidationError
from ostler.isolation.base import Exit
from ostler.isolation.calls import wake
from ostler.lifecycle.fail import died, explained
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.lifecycle.waits import wait_for
from ostler.store.commands import ReportProgress, ReportSignals

_MINUTE = 60.0
#: As many numbers of its own may one agent report by name.
_MAX_METRICS = 100
#: So many may wait to be written; whoever says more waits in turn.
_MAX_SIGNALS = 10_000
#: So many are written in one commit, or so many characters of them: what is checked and written at once holds up
#: everybody else.
_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 20
#: What anything takes beside its own length, with what stands around it.
_PLAIN_SIZE = 8


class Ear:
    """Knows which start it belongs to; what an earlier one says later is not believed."""

    __slots__ = ("_house", "_life", "_pending", "_room", "_signals", "_writing")

    def __init__(self, house: House, life: Life) -> None:
        self._house = house
        self._life = life
        #: The latest progress that was not written yet.
        self._pending: Progress | None = None
        self._writing = False
        #: Signals that wait to be written; None while nobody writes.
        self._signals: deque[Signal] | None = None
        #: Resolved when there is room for more of them; None while there is.
        self._room: asyncio.Future[None] | None = None

    def heard(self, attempt: int, message: Message) -> asyncio.Future[None] | None:
        life = self._life
        if attempt != life.attempt or life.left or not life.record.is_active:
            return None
        life.pulse.output = self._house.clock.mono()
        match message:
            case TokensUsed():
                self._count_tokens(message.count)
            case MetricReported():
                self._keep_metric(message)
            case Progress():
                self._pending = message
                if not self._writing:
                    self._writing = True
                    self._tell_progress(attempt)
            case Signal():
                self._hear_signal(attempt, message)
        return self._room

    async def asked(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        await self._found(self._life)
        if attempt != self._life.attempt or self._life.left:
            raise AgentGoneError("a later start has taken over")
        self._life.pulse.output = self._house.clock.mono()
        return await wait_for(self._house, self._life, wait)

    def exited(self, attempt: int, how: Exit) -> None:
        if attempt == self._life.attempt:
            self._house.run(self._died(attempt, how), "ostler-died")

    async def _died(self, attempt: int, how: Exit) -> None:
        await self._found(self._life)
        await died(self._house, self._life, attempt, how)

    @staticmethod
    async def _found(life: Life) -> None:
        """One that is being found again speaks as soon as it is reached; what it says counts when all is in place."""
        if life.adopted is not None:
            await life.adopted.wait()

    def _count_tokens(self, count: int) -> None:
        tally, now = self._life.tally, self._house.clock.mono()
        tally.tokens += count
        if self._life.limits.max_tokens_per_minute:
            recent = tally.recent_tokens = tally.recent_tokens or deque(maxlen=61)
            before = recent.pop()[1] if recent and recent[-1][0] == int(now) else 0
            recent.append((int(now), before + count))

    def _keep_metric(self, message: MetricReported) -> None:
        own = self._life.own_metrics
        if own is None:
            own = self._life.own_metrics = {}
        if message.name in own or len(own) < _MAX_METRICS:
            own[message.name] = message.value

    def _tell_progress(self, attempt: int) -> None:
        """The latest only, and not more often than the settings say: progress is for looking, not for keeping."""
        house = self._house
        gap = house.settings.progress_interval.total_seconds()
        early = gap - (house.clock.mono() - self._life.pulse.progress_told)
        if early > 0:  # by a timer, not by a task: a house that closes does not wait for it
            house.clock.call_later(early, lambda: self._tell_progress(attempt))
        elif house.shut is None:
            house.run(self._write_progress(attempt), "ostler-progress")

    async def _write_progress(self, attempt: int) -> None:
        house, life = self._house, self._life
        latest, self._pending = self._pending, None
        try:
            if latest is not None:
                life.pulse.progress_told = house.clock.mono()
                await house.store.commit(
                    ReportProgress(
                        instance_id=life.instance_id,
                        attempt=attempt,
                        fraction=latest.fraction,
                        message=latest.message,
                        details=latest.details,
                    )
                )
        except OstlerError as error:
            house.log.emit("report_lost", instance_id=life.instance_id, error=str(error))
        finally:
            self._writing = self._pending is not None
            if self._writing:
                self._tell_progress(attempt)

    def _hear_signal(self, attempt: int, message: Signal) -> None:
        """In their order. None is dropped; who says more than can be written has to wait."""
        life = self._life
        if self._signals is None:
            self._signals = deque([message])
            writing = self._write_signals(attempt, self._signals, life.saying)
            life.saying = self._house.run(writing, "ostler-signals")
        else:
            self._signals.append(message)
        if len(self._signals) >= _MAX_SIGNALS and self._room is None:
            self._room = asyncio.get_running_loop().create_future()

    async def _write_signals(
        self, attempt: int, waiting: deque[Signal], earlier: asyncio.Task[None] | None = None
    ) -> None:
        try:
            if earlier is not None:  # another ear of the same life still has something to write
                await asyncio.wait([earlier])
            while waiting:
                await self._write(attempt, _next_of(waiting))
                if len(waiting) <= _MAX_SIGNALS // 2:
                    self._make_room()
        finally:  # whoever waits for room must not wait for a writer that is gone
            self._signals = None
            self._make_room()
            if self._life.saying is asyncio.current_task():
                self._life.saying = None

    async def _write(self, attempt: int, said: list[Signal]) -> None:
        """Many in one commit, for however slow the store is, it is not slower with many."""
        house, instance_id = self._house, self._life.instance_id
        signals = tuple((one.name, one.payload) for one in said)
        try:
            await house.store.commit(ReportSignals(instance_id=instance_id, attempt=attempt, signals=signals))
        except Exception as error:  # noqa: BLE001 - whatever became of these, those after them are written
            if isinstance(error, ValidationError) and len(said) > 1:  # one is unfit, which is not the others' fault
                for one in said:
                    await self._write(attempt, [one])
                return
            why = explained(error) if len(said) == 1 else f"{explained(error)} ({len(said)} signals)"
            house.log.emit("report_lost", instance_id=instance_id, error=why)

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            wake(room)


def _next_of(waiting: deque[Signal]) -> list[Signal]:
    taken: list[Signal] = []
    room = _CHARACTERS_AT_ONCE
    while waiting and len(taken) < _AT_ONCE and room > 0:
        one = waiting.popleft()
        taken.append(one)
        room -= _size(one.payload, room)
    return taken


def _size(data: Any, most: int) -> int:
    """About how many characters it will take, or so many that it is too much."""
    size, inside = 0, [data]
    while inside and size < most:
        one = inside.pop()
        if isinstance(one, Mapping):
            inside += one
            inside += one.values()
        elif isinstance(one, list | tuple):
            inside += one
        size += _PLAIN_SIZE + (
            len(one) if isinstance(one, str) else one.bit_length() // 3 if isinstance(one, int) else 0
        )
    return size


def tokens_wait(life: Life, now: float) -> timedelta:
    """How long until the tokens of the last minute leave room for one more request."""
    limit = life.limits.max_tokens_per_minute
    recent = [one for one in life.tally.recent_tokens or () if now - one[0] < _MINUTE]
    over = sum(count for _, count in recent) - limit
    if not limit or over < 0:
        return timedelta(0)
    for told, count in recent:
        over -= count
        if over < 0:
            return timedelta(seconds=told + _MINUTE - now)
    return timedelta(seconds=_MINUTE)
