"""What one death comes to: the reason, whether it comes back and when, as one command for the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from ostler.isolation.base import Exit
from ostler.lifecycle.house import House
from ostler.model import AgentInstance, Wait, WaitKind, clipped
from ostler.policy import RestartDecision, RestartFacts, decide_restart
from ostler.store import AgentError
from ostler.store.commands import AttemptEnd, Beside, Restarting

_QUOTED = 1000
#: As many of its latest starts are looked at; no burst window holds more.
_STARTS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    decision: RestartDecision
    #: The backoff before its return; None when it stays dead.
    wait: Wait | None
    #: What the move to failed says.
    said: dict[str, Any]


async def plan_death(
    house: House, record: AgentInstance, how: Exit, *, pause: UUID | None = None, final: bool = False
) -> Death:
    """`pause` is the suspension that ends with it; `final` keeps the policy from being asked."""
    policy = record.spawn_options.restart_policy if record.spawn_options else None
    # Our own sentences quote it, and they too have a limit; the whole of it is kept as the error.
    text = clipped(how.detail or how.outcome.value, _QUOTED)
    starts = await house.store.list_attempts(record.instance_id, after=max(record.attempt - _STARTS, 0))
    facts = RestartFacts(
        restart_count=record.restart_count,
        lifetime_restarts=record.lifetime_restarts,
        recent_starts=tuple(one.intended_at for one in starts),
        failing_since=record.failing_since,
        cause=text,
    )
    now = house.clock.wall()
    decision = decide_restart(None if final else policy, facts, now, house.chance)
    wait = restarting = None
    if decision.restart:
        wait = house.new_wait(
            record,
            WaitKind.BACKOFF,
            reason=decision.sentence,
            due_at=now + decision.delay,
            detail={"attempt": record.attempt, "max_attempts": decision.max_attempts},
        )
        restarting = Restarting(
            attempt_number=decision.attempt_number,
            max_attempts=decision.max_attempts,
            delay=decision.delay,
            reason=decision.sentence,
        )
    error = AgentError(
        message=how.detail or how.outcome.value,
        exception_type=how.exception_type,
        stack_trace=how.stack_trace,
        is_recoverable=wait is not None,
    )
    beside = Beside(
        ended=AttemptEnd(outcome=how.outcome, detail=how.detail),
        open_wait=wait,
        end_wait=pause,
        wait_outcome="failed",
        restarting=restarting,
    )
    reason = text if final else decision.sentence
    return Death(decision=decision, wait=wait, said={"reason": reason, "error": error, "beside": beside})
