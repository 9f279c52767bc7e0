"""What the manager hears from one start of one instance, and what it makes of it."""

from __future__ import annotations

from datetime import timedelta

from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.errors import AgentGoneError, OstlerError
from ostler.isolation.base import Exit
from ostler.lifecycle.fail import died
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.lifecycle.waits import wait_for
from ostler.store.commands import ReportProgress, ReportSignal

_MINUTE = 60.0
#: As many numbers of its own may one agent report by name.
_MAX_METRICS = 100


class Ear:
    """Knows which start it belongs to; what an earlier one says later is not believed."""

    __slots__ = ("_house", "_life", "_pending", "_writing")

    def __init__(self, house: House, life: Life) -> None:
        self._house = house
        self._life = life
        #: The latest progress that was not written yet.
        self._pending: Progress | None = None
        self._writing = False

    def heard(self, attempt: int, message: Message) -> None:
        life = self._life
        if attempt != life.attempt or not life.record.is_active:
            return
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
                    self._house.run(self._write_progress(attempt), "ostler-progress")
            case Signal():
                self._house.run(self._write_signal(attempt, message), "ostler-signal")

    async def asked(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        if attempt != self._life.attempt:
            raise AgentGoneError("a later start has taken over")
        self._life.pulse.output = self._house.clock.mono()
        return await wait_for(self._house, self._life, wait)

    def exited(self, attempt: int, how: Exit) -> None:
        if attempt == self._life.attempt:
            self._house.run(died(self._house, self._life, attempt, how), "ostler-died")

    def _count_tokens(self, count: int) -> None:
        tally, now = self._life.tally, self._house.clock.mono()
        tally.tokens += count
        if self._life.limits.max_tokens_per_minute:
            recent = [one for one in tally.recent_tokens or () if now - one[0] < _MINUTE]
            tally.recent_tokens = [*recent, (now, count)]

    def _keep_metric(self, message: MetricReported) -> None:
        own = self._life.own_metrics
        if own is None:
            own = self._life.own_metrics = {}
        if message.name in own or len(own) < _MAX_METRICS:
            own[message.name] = message.value

    async def _write_progress(self, attempt: int) -> None:
        """The latest only, and not more often than the settings say: progress is for looking, not for keeping."""
        house, life = self._house, self._life
        try:
            while (latest := self._pending) is not None:
                gap = house.settings.progress_interval.total_seconds()
                early = gap - (house.clock.mono() - life.pulse.progress_told)
                if early > 0:
                    await house.clock.sleep(early)
                    latest = self._pending or latest
                self._pending = None
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
            self._writing = False

    async def _write_signal(self, attempt: int, message: Signal) -> None:
        house, life = self._house, self._life
        command = ReportSignal(
            instance_id=life.instance_id, attempt=attempt, name=message.name, payload=message.payload
        )
        try:
            await house.store.commit(command)
        except OstlerError as error:
            house.log.emit("report_lost", instance_id=life.instance_id, error=str(error))


def tokens_wait(life: Life, now: float) -> timedelta:
    """How long until the tokens of the last minute leave room for one more request."""
    limit = life.limits.max_tokens_per_minute
    recent = sorted(one for one in life.tally.recent_tokens or () if now - one[0] < _MINUTE)
    over = sum(count for _, count in recent) - limit
    if not limit or over < 0:
        return timedelta(0)
    for told, count in recent:
        over -= count
        if over < 0:
            return timedelta(seconds=told + _MINUTE - now)
    return timedelta(seconds=_MINUTE)
