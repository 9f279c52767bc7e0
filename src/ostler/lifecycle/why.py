"""Why an instance is as it is. The facts are gathered here; what they mean is decided in `policy`."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from ostler.lifecycle.doors import Asker, reach
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.model import (
    AgentInstance,
    AgentState,
    Attempt,
    AttemptOutcome,
    Permission,
    SuspendDepth,
    Wait,
    WaitKind,
    Why,
)
from ostler.policy import RestartFacts, StallFacts, StallVerdict, WhyFacts, decide_restart, explain, judge_stall


async def why(house: House, asker: Asker, instance_id: UUID) -> Why:
    record = await reach(house, asker, instance_id, Permission.AGENTS_READ)
    life = house.lives.get(instance_id)
    waits = tuple(await house.store.open_waits(instance_id=instance_id))
    attempts = await house.store.list_attempts(instance_id, after=max(record.attempt - 1, 0))
    return explain(_facts(house, record, life, (waits, attempts[-1] if attempts else None)))


def _facts(
    house: House, record: AgentInstance, life: Life | None, found: tuple[tuple[Wait, ...], Attempt | None]
) -> WhyFacts:
    waits, last = found
    if life is not None and record.is_active and life.pulse.health.checked_at is not None:
        record = record.evolve(health=life.pulse.health)  # the latest look; the record has only what changed
    now = house.clock.wall()
    pause = next((wait for wait in waits if wait.kind is WaitKind.RESUME), None)
    depth = SuspendDepth((pause.detail or {}).get("depth", SuspendDepth.HOLD)) if pause else None
    if depth is not None and (life is None or life.cell is None):
        depth = SuspendDepth.PARK  # whatever it was, nothing of it lives now
    ended = last is not None and record.state is AgentState.TERMINATED
    return WhyFacts(
        instance=record,
        now=now,
        state_since=(_moment(house, life.moved) if life else None) or record.updated_at,
        in_flight=len(life.calls) if life else 0,
        in_flight_since=_moment(house, life.oldest_call) if life else None,
        queued=life.slots.queued if life else 0,
        waits=waits,
        depth=depth,
        restart_sentence=next((wait.reason for wait in waits if wait.kind is WaitKind.BACKOFF), _no_return(record)),
        was_graceful=_graceful(last) if ended else None,
        reason=last.detail if last is not None else None,
        stall=judge(house, life) if life else None,
    )


class _NoChance:
    """Whether it comes back is no matter of chance, only when."""

    def random(self) -> float:
        return 0.5


def _no_return(record: AgentInstance) -> str | None:
    """Why a failed one stays down. The record has all that was known when that was decided, so it is asked again."""
    if record.state is not AgentState.FAILED:
        return None
    if record.attempt == 1 and record.enforcement is None:
        return "no restart: its first start failed, and whoever spawned it was told"
    facts = RestartFacts(
        restart_count=record.restart_count,
        lifetime_restarts=record.lifetime_restarts,
        failing_since=record.failing_since,
    )
    policy = record.spawn_options.restart_policy if record.spawn_options else None
    decision = decide_restart(policy, facts, record.terminated_at or record.updated_at, _NoChance())
    return None if decision.restart else decision.sentence


def _graceful(last: Attempt | None) -> bool:
    return last is not None and last.outcome is AttemptOutcome.STOPPED and last.detail is None


def judge(house: House, life: Life) -> StallVerdict:
    """Whether it stands still although it owes work."""
    pulse = life.pulse
    return judge_stall(
        StallFacts(
            state=life.state,
            now=house.clock.wall(),
            last_heartbeat=_moment(house, pulse.heartbeat),
            last_output=_moment(house, pulse.output),
            last_cpu_change=_moment(house, pulse.cpu_change),
            in_flight_since=_moment(house, life.oldest_call),
            frozen=life.depth is SuspendDepth.FREEZE,
            held=life.holding,
            waits=bool(life.waits) and not life.working,
            stall_after=house.settings.stall_after,
        )
    )


def _moment(house: House, mono: float | None) -> datetime | None:
    """A time of the monotonic clock, laid onto the wall clock as it is now."""
    return None if mono is None else house.clock.wall() - timedelta(seconds=house.clock.mono() - mono)
