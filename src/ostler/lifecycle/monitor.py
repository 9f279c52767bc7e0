"""One task for all instances: heartbeats, probes, samples, gauges, retention. Ten thousand idle agents cost a walk."""

from __future__ import annotations

import asyncio
import contextlib

from ostler.clock import Deadline
from ostler.durations import duration_text
from ostler.errors import AgentExecutionError, AgentGoneError, OstlerError
from ostler.isolation.base import Cell, Exit, Verb
from ostler.lifecycle.instance import Instance, Runtime
from ostler.lifecycle.messages import Probed
from ostler.lifecycle.phases import Adopting, Pausing, Serving
from ostler.lifecycle.probes import probe
from ostler.model.attempt import AttemptOutcome
from ostler.model.events import AgentMetricsUpdatedEvent
from ostler.model.states import HealthState, ProbeType
from ostler.policy.health import ProbeOutcome, ProbeResult
from ostler.policy.quota import plan
from ostler.store import queries, retention, workspaces

#: An idle agent that shares its program is measured at least this often.
_IDLE_SAMPLE_SECONDS = 30.0
_PASSED = ProbeResult(outcome=ProbeOutcome.PASSED)


class Monitor:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._task: asyncio.Task[None] | None = None
        #: In the order in which they began: a set would end them in another one each time.
        self._looks: dict[asyncio.Task[None], None] = {}
        self._swept = self._refreshed = runtime.clock.mono()

    def start(self) -> None:
        self._task = self._runtime.loop.create_task(self._run(), name="ostler-monitor")

    async def close(self) -> None:
        """A slow probe does not delay the end."""
        for task in (*self._looks, *([self._task] if self._task is not None else [])):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        runtime = self._runtime
        while True:
            await runtime.clock.sleep(runtime.settings.tick.total_seconds())
            self.look()
            if runtime.clock.mono() - self._refreshed >= runtime.settings.metrics_interval.total_seconds():
                await self.refresh()
            if runtime.clock.mono() - self._swept >= runtime.settings.sweep_interval.total_seconds():
                self._swept = runtime.clock.mono()
                await self.sweep()

    def look(self) -> None:
        """Begin a look at every instance that is due; none waits for another."""
        now, observed = self._runtime.clock.mono(), len(self._runtime.fanout) > 0
        sampling = self._runtime.settings.metrics_interval.total_seconds()
        for instance in list(self._runtime.instances.values()):
            cell, liveness = instance.cell, instance.liveness
            if cell is None or liveness.probing or not isinstance(instance.phase, Serving | Adopting | Pausing):
                continue
            probing = now >= liveness.next_probe
            if probing:
                liveness.next_probe = now + instance.check.interval.total_seconds()
            # A process is measured soon after its start, so that a list shows what it uses.
            is_new = liveness.measured < 0 and instance.level.capabilities.has_own_process
            sampled = is_new or now - liveness.sampled >= sampling
            if not (probing or sampled):
                continue
            if not _is_idle(instance, cell, now, probing=probing, sampled=sampled, observed=observed):
                liveness.probing = True
                look = self._look_at(instance, cell, probing, sampled)
                task = self._runtime.loop.create_task(look, name="ostler-look")
                self._looks[task] = None
                task.add_done_callback(self._looks.pop)

    async def _look_at(self, instance: Instance, cell: Cell, probing: bool, sampled: bool) -> None:
        attempt = instance.attempt
        try:
            if sampled:
                await self._sample(instance, cell)
            if probing and instance.cell is cell:
                result = await self._probe(instance, cell)
                if instance.cell is cell:
                    instance.post(Probed(attempt=attempt, result=result))
        except AgentGoneError as error:
            # The notice of its end was lost, or is on its way; this one is as good.
            how = cell.ended or Exit(outcome=AttemptOutcome.LOST, detail=str(error))
            if instance.cell is cell:
                instance.post(Probed(attempt=attempt, gone=how))
        except OstlerError as error:
            self._runtime.log.emit("look_failed", instance_id=instance.instance_id, error=str(error))
        finally:
            instance.liveness.probing = False

    async def _probe(self, instance: Instance, cell: Cell) -> ProbeResult:
        """The heartbeat always: it is the cheapest sign of life. A probe of another kind on top of it."""
        clock, check = self._runtime.clock, instance.check
        try:
            async with Deadline(clock, check.timeout):
                await cell.ping()
                instance.liveness.heartbeat = clock.mono()
                if check.probe is ProbeType.CUSTOM:
                    complaint = await cell.call(Verb.HEALTH)
                    return _PASSED if complaint is None else _failed(str(complaint))
        except TimeoutError:
            return _failed(f"no answer within {duration_text(check.timeout)}")
        except AgentExecutionError as error:
            return _failed(str(error))
        return _PASSED if check.probe is ProbeType.HEARTBEAT else await probe(check, clock)

    async def _sample(self, instance: Instance, cell: Cell) -> None:
        """One measurement, published live; it is written with the next change of state."""
        usage = await cell.usage()
        if instance.cell is not cell:
            return
        instance.liveness.note_usage(usage)
        metrics = instance.metrics_now()
        if metrics is not None:
            event = AgentMetricsUpdatedEvent(
                workspace_id=instance.record.workspace_id,
                instance_id=instance.instance_id,
                attempt=instance.attempt,
                metrics=metrics,
                occurred_at=metrics.sampled_at,
            )
            self._runtime.fanout.publish([event])

    async def refresh(self) -> None:
        """Plans and gauges, from the store."""
        runtime = self._runtime
        self._refreshed = runtime.clock.mono()
        with contextlib.suppress(OstlerError):
            for workspace in await runtime.store.read(workspaces.list_workspaces):
                runtime.workspaces[workspace.workspace_id] = workspace
            runtime.metrics.set_states(await runtime.store.read(queries.state_counts))

    async def sweep(self) -> None:
        """Remove what was kept long enough; and warn where a plan admits less than is active under it."""
        runtime = self._runtime
        with contextlib.suppress(OstlerError):
            for workspace in tuple(runtime.workspaces.values()):
                maximum = plan(workspace.tier).max_concurrent
                if maximum is not None:
                    now = runtime.clock.wall()
                    statistics = await runtime.store.read(queries.statistics, workspace.workspace_id, now)
                    if statistics.active_instances > maximum:
                        runtime.log.emit("over_limit", current=statistics.active_instances, max=maximum)
            more = True
            while more:
                more = (await runtime.store.run(retention.sweep, runtime.settings.retention)).more


def _is_idle(instance: Instance, cell: Cell, now: float, *, probing: bool, sampled: bool, observed: bool) -> bool:
    """An idle agent inside the program has nothing to tell; finding that out takes no task."""
    liveness = instance.liveness
    if instance.check.probe is not ProbeType.HEARTBEAT or liveness.health.state is not HealthState.HEALTHY:
        return False
    if instance.calls or not cell.is_idle:
        return False
    if sampled:
        if observed or now - liveness.measured >= _IDLE_SAMPLE_SECONDS:
            return False
        liveness.sampled = now
    if probing:
        liveness.heartbeat = now
    return True


def _failed(details: str) -> ProbeResult:
    return ProbeResult(outcome=ProbeOutcome.FAILED, details=details)
