"""The one who looks after all: heartbeats, probes, samples, and what the store could not take at first.

One task for a whole house, not one per agent: ten thousand idle agents cost a walk over a dictionary.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

from ostler.errors import AgentExecutionError, AgentGoneError, OstlerError
from ostler.isolation.base import Cell, Exit, Usage, Verb
from ostler.isolation.probes import probe
from ostler.lifecycle.fail import died
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.lifecycle.settle import settle
from ostler.lifecycle.why import judge
from ostler.model import (
    ACTIVE_STATES,
    HOME_WORKSPACE_ID,
    AgentHealthStatus,
    AgentMetrics,
    AgentState,
    AttemptOutcome,
    HealthState,
    ProbeType,
    RestartPolicyType,
)
from ostler.policy import ProbeOutcome, ProbeResult, next_health
from ostler.seams import Deadline
from ostler.store.commands import ReportHealth, ReportMetrics

_WATCHED = frozenset({AgentState.READY, AgentState.PROCESSING, AgentState.WAITING})
#: CPU below this is noise.
_SOME_CPU = 0.05
#: Health that stays as it is, but for another reason, is written down no more often than this.
_REASON_SECONDS = 10.0


class Watch:
    def __init__(self, house: House) -> None:
        self._house = house
        self._task: asyncio.Task[None] | None = None
        self._looks: dict[asyncio.Task[None], None] = {}
        self._swept = house.clock.mono()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="ostler-watch")

    def _looked(self, look: asyncio.Task[None]) -> None:
        self._looks.pop(look, None)

    async def close(self) -> None:
        for look in list(self._looks):  # a slow probe must not hold up the end
            look.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        house = self._house
        while True:
            await house.clock.sleep(house.settings.tick.total_seconds())
            self.look()
            if house.clock.mono() - self._swept >= house.settings.sweep_interval.total_seconds():
                self._swept = house.clock.mono()
                house.run(self._sweep(), "ostler-sweep")

    def look(self) -> None:
        """Begin a look at everyone who is due; none waits for another."""
        house, now = self._house, self._house.clock.mono()
        sampling = house.settings.metrics_interval.total_seconds()
        states = dict.fromkeys(AgentState, 0)
        for life in house.living():
            states[life.state] += 1
            if life.unsettled:
                house.run(settle(house, life), "ostler-settle")
            if life.state not in _WATCHED or life.cell is None or life.pulse.looking:
                continue
            probing = now >= life.pulse.next_probe
            if probing:
                life.pulse.next_probe = now + life.check.interval.total_seconds()
            due = now - life.pulse.sampled >= sampling
            if (probing or due) and not _nothing_new(life, life.cell, now, due=due):
                life.pulse.looking = True
                look = house.run(self._look_at(life, life.cell, probing=probing), "ostler-look")
                self._looks[look] = None
                look.add_done_callback(self._looked)
        house.metrics.set(
            "lifecycle.instances.active", sum(count for state, count in states.items() if state in ACTIVE_STATES)
        )
        for state, count in states.items():
            house.metrics.set("lifecycle.instances.by_state", count, state=state.value)

    async def _look_at(self, life: Life, cell: Cell, *, probing: bool) -> None:
        try:
            result = await self._probe(life, cell) if probing else None
            if result is not None and life.cell is cell:
                await self._judge(life, result)
            if life.cell is cell:
                await sample(self._house, life, cell)
        except OstlerError as error:
            self._house.log.emit("look_failed", instance_id=life.instance_id, error=str(error))
        finally:
            life.pulse.looking = False

    async def _probe(self, life: Life, cell: Cell) -> ProbeResult | None:
        """The heartbeat always; it is the cheapest sign of life. A probe of another kind on top of it."""
        house, check, attempt = self._house, life.check, life.attempt
        try:
            async with Deadline(house.clock, check.timeout):
                await cell.ping()
                life.pulse.heartbeat = house.clock.mono()
                if check.probe is ProbeType.CUSTOM:
                    complaint = await cell.call(Verb.HEALTH)
                    return _passed() if complaint is None else _failed(str(complaint))
        except TimeoutError:
            return _failed(f"no answer within {check.timeout.total_seconds():g} s")
        except AgentExecutionError as error:
            return _failed(str(error))
        except AgentGoneError as error:
            # The notice of its end was lost, or is on its way: this one is as good.
            how = cell.ended or Exit(outcome=AttemptOutcome.LOST, detail=str(error))
            await died(house, life, attempt, how)
            return None
        if check.probe is ProbeType.HEARTBEAT:
            return _passed()
        return await probe(check, house.clock)

    async def _judge(self, life: Life, result: ProbeResult) -> None:
        house, before = self._house, life.pulse.health.state
        result = self._unable(life, self._stalled(life, result))
        started = house.clock.wall() - _since(house, life.pulse.started)
        after = next_health(life.pulse.health, result, life.check, house.clock.wall(), started)
        life.pulse.health = after
        changed = after.state is not before or life.record.health.state is not before
        if not changed and not self._says_more(life):
            return
        report = ReportHealth(instance_id=life.instance_id, attempt=life.attempt, health=after)
        async with life.lock:
            if not life.record.is_active:
                return
            await house.commit(life, report)
        if changed:
            await self._turned(life, before, after)

    async def _turned(self, life: Life, before: HealthState, after: AgentHealthStatus) -> None:
        house = self._house
        life.pulse.reason_told = float("-inf")  # a new state is written anyhow; the next reason need not wait
        house.metrics.count("lifecycle.health.changes", state=after.state.value)
        house.log.emit(
            "health_changed",
            instance_id=life.instance_id,
            from_health=before,
            to_health=after.state,
            details=after.details,
        )
        if after.state is HealthState.UNHEALTHY and _restarts(life):
            detail = f"unhealthy: {after.details or 'its probes failed'}"
            how = Exit(outcome=AttemptOutcome.STOPPED, detail=detail)
            await died(house, life, life.attempt, how)

    def _says_more(self, life: Life) -> bool:
        """The same health for another reason. Kept, but not at every probe: a reason may count something."""
        now, told = self._house.clock.mono(), life.pulse.reason_told
        if life.pulse.health.details == life.record.health.details or now - told < _REASON_SECONDS:
            return False
        life.pulse.reason_told = now
        return True

    def _unable(self, life: Life, result: ProbeResult) -> ProbeResult:
        """A probe that could not be made says nothing of the agent; but whoever set it up must hear of it, once."""
        if result.outcome is not ProbeOutcome.UNABLE:
            life.pulse.unable = False
            return result
        details = f"the probe could not be made: {result.details or 'it is not said why'}"
        if not life.pulse.unable:
            life.pulse.unable = True
            self._house.log.emit("look_failed", instance_id=life.instance_id, error=details)
        return ProbeResult(outcome=ProbeOutcome.UNABLE, details=details)

    def _stalled(self, life: Life, result: ProbeResult) -> ProbeResult:
        """A failed probe says more when nothing else of it moves either."""
        verdict = judge(self._house, life) if result.outcome is ProbeOutcome.FAILED else None
        if verdict is None or not verdict.stalled:
            life.pulse.stalled = False
            return result
        evidence = "; ".join(verdict.evidence)
        if not life.pulse.stalled:
            life.pulse.stalled = True
            self._house.log.emit("stalled", instance_id=life.instance_id, evidence=evidence)
        return _failed(f"stalled: {evidence}")

    async def _sweep(self) -> None:
        """Remove what has been kept long enough, in bounded batches; and look whether the plans are kept."""
        with contextlib.suppress(OstlerError):
            await self._check_plans()
            more = True
            while more:
                more = (await self._house.store.sweep(self._house.settings.retention)).more

    async def _check_plans(self) -> None:
        """A plan may have become smaller than what lives under it. Nobody is ended for that; it is said."""
        house = self._house
        for workspace_id in {life.record.workspace_id for life in house.living()} - {None}:
            found = await house.store.statistics(workspace_id or HOME_WORKSPACE_ID)
            if found.max_concurrent is not None and found.active_instances > found.max_concurrent:
                house.log.emit("over_limit", current=found.active_instances, max=found.max_concurrent)


def _since(house: House, mono: float) -> timedelta:
    return timedelta(seconds=house.clock.mono() - mono)


def _nothing_new(life: Life, cell: Cell, now: float, *, due: bool) -> bool:
    """An idle agent on our own loop has nothing to tell. To find that out takes no task, and there may be thousands."""
    pulse, last = life.pulse, life.tally.last_metrics
    if life.check.probe is not ProbeType.HEARTBEAT or pulse.health.state is not HealthState.HEALTHY:
        return False
    if not cell.alive_now() or last is None or last.cpu_percent:
        return False
    tally = life.tally
    if (last.completed_tasks, last.failed_tasks, last.tokens_used) != (tally.completed, tally.failed, tally.tokens):
        return False
    if last.open_tasks != len(life.calls) or (life.own_metrics or None) != last.custom:
        return False
    pulse.heartbeat = now
    if due:
        pulse.sampled = now
    return True


def _passed() -> ProbeResult:
    return ProbeResult(outcome=ProbeOutcome.PASSED)


def _failed(details: str) -> ProbeResult:
    return ProbeResult(outcome=ProbeOutcome.FAILED, details=details)


def _restarts(life: Life) -> bool:
    policy = life.options.restart_policy
    return policy is not None and policy.type is not RestartPolicyType.NONE


async def sample(house: House, life: Life, cell: Cell) -> None:
    """One measurement; written down when it says something new, for an idle agent has nothing to tell."""
    now = house.clock.mono()
    passed = now - life.pulse.sampled
    if passed < house.settings.metrics_interval.total_seconds():
        return
    usage = await cell.usage()
    before = usage.cpu_seconds if life.pulse.cpu_seconds is None else life.pulse.cpu_seconds
    spent = max(usage.cpu_seconds - before, 0.0)
    percent = round(100 * spent / passed, 2) if passed else 0.0
    life.pulse.sampled = now
    if spent > 0 or life.pulse.cpu_seconds is None:
        life.pulse.cpu_seconds = usage.cpu_seconds
        life.pulse.cpu_change = now
    metrics = _metrics(house, life, usage, percent)
    last = life.tally.last_metrics
    if last is not None and not _differs(last, metrics):
        return
    life.tally.last_metrics = metrics
    command = ReportMetrics(instance_id=life.instance_id, attempt=life.attempt, metrics=metrics)
    async with life.lock:
        if life.record.is_active:
            await house.commit(life, command)


def _metrics(house: House, life: Life, usage: Usage, percent: float) -> AgentMetrics:
    return AgentMetrics(
        sampled_at=house.clock.wall(),
        cpu_percent=percent if percent >= _SOME_CPU else 0.0,
        memory_bytes=usage.memory_bytes,
        memory_is_shared=usage.memory_is_shared,
        thread_count=usage.thread_count,
        open_tasks=len(life.calls),
        completed_tasks=life.tally.completed,
        failed_tasks=life.tally.failed,
        tokens_used=life.tally.tokens,
        custom=dict(life.own_metrics) if life.own_metrics else None,
    )


def _differs(old: AgentMetrics, new: AgentMetrics) -> bool:
    """Memory that is shared with others says nothing about this one."""
    if not new.memory_is_shared and new.memory_bytes != old.memory_bytes:
        return True
    return any(getattr(old, name) != getattr(new, name) for name in _TELLING)


#: What makes a sample worth keeping; the moment and the number of threads alone do not.
_TELLING = ("cpu_percent", "open_tasks", "completed_tasks", "failed_tasks", "tokens_used", "custom")
