"""What an earlier manager left: every start that has not ended, every wait that has not. Each on its own.

Nothing here is guessed. What cannot be found again is lost, and its record says so; whether it comes back is the
same decision as for any other death.
"""

from __future__ import annotations

from ostler.errors import OstlerError
from ostler.isolation.base import Exit
from ostler.lifecycle.dying import plan_death
from ostler.lifecycle.house import House
from ostler.lifecycle.waits import close_wait
from ostler.model import (
    AgentInstance,
    AgentState,
    Attempt,
    AttemptOutcome,
    GetInstancesFilter,
    SuspendDepth,
    Wait,
    WaitKind,
)
from ostler.store.commands import AttemptEnd, Beside, EndAttempt, MoveInstance

_LOST = "the program it lived in has ended"


async def recover(house: House) -> int:
    """Finish or undo every open intent. One bad record does not stop the others."""
    waits = await _waits(house)
    count, after = 0, None
    while attempts := await house.store.open_attempts(after=after):
        after = attempts[-1]
        for attempt in attempts:
            try:
                await _recover(house, attempt, waits)
                count += 1
            except Exception as error:  # noqa: BLE001 - a row that cannot even be read is one of them
                house.log.emit("recovery_failed", instance_id=attempt.instance_id, error=str(error))
    await _finish_all(house)
    await _resume_waits(house)
    return count


async def _finish_all(house: House) -> None:
    """Terminations that were cut off after nothing lived any more."""
    after = None
    while spaces := await house.store.list_workspaces(after=after):
        after = spaces[-1].workspace_id
        for space in spaces:
            wanted = GetInstancesFilter(state=AgentState.TERMINATING, limit=1000)
            for record in await house.store.list_instances(wanted, space.workspace_id):
                try:
                    await _finish(house, record)
                except OstlerError as error:
                    house.log.emit("recovery_failed", instance_id=record.instance_id, error=str(error))


async def _waits(house: House) -> dict[object, Wait]:
    """The pauses that are open, by instance."""
    found: dict[object, Wait] = {}
    after = None
    while page := await house.store.open_waits(after=after):
        after = page[-1]
        found |= {wait.instance_id: wait for wait in page if wait.kind is WaitKind.RESUME}
    return found


async def _recover(house: House, attempt: Attempt, waits: dict[object, Wait]) -> None:
    record = await house.store.get_instance(attempt.instance_id)
    if record is None or record.attempt != attempt.number:
        await _end(house, attempt, _LOST)
        return
    match record.state:
        case AgentState.TERMINATING:
            await _finish(house, record)
        case AgentState.SUSPENDED if not _was_working(waits.get(record.instance_id)):
            # It stood still, so nothing was cut off: it is parked now, and comes back fresh.
            await _end(house, attempt, f"{_LOST} while it was suspended; a resume starts it fresh")
        case AgentState.FAILED | AgentState.TERMINATED:
            await _end(house, attempt, _LOST)
        case _:
            await _lose(house, record, attempt, waits.get(record.instance_id))
    house.log.emit("recovered", instance_id=record.instance_id, outcome=f"it was {record.state}")


def _was_working(wait: Wait | None) -> bool:
    detail = (wait.detail or {}) if wait else {}
    return detail.get("depth") == SuspendDepth.FREEZE and detail.get("previous_state") == AgentState.PROCESSING


async def _end(house: House, attempt: Attempt, detail: str) -> None:
    await house.store.commit(
        EndAttempt(instance_id=attempt.instance_id, attempt=attempt.number, outcome=AttemptOutcome.LOST, detail=detail)
    )


async def _finish(house: House, record: AgentInstance) -> None:
    await house.store.commit(
        MoveInstance(
            instance_id=record.instance_id,
            to=AgentState.TERMINATED,
            reason=f"{_LOST} while it was being terminated",
            beside=Beside(ended=AttemptEnd(outcome=AttemptOutcome.LOST, detail=_LOST)),
        )
    )


async def _lose(house: House, record: AgentInstance, attempt: Attempt, pause: Wait | None) -> None:
    """Dead, without a witness. The restart policy decides as for any other death."""
    # Whoever asked for it was never told that it lives, and has nothing to expect of it.
    unborn = record.state is AgentState.INITIALIZING and attempt.number == 1
    how = Exit(outcome=AttemptOutcome.LOST, detail=_LOST)
    death = await plan_death(house, record, how, pause=pause.wait_id if pause else None, final=unborn)
    await house.store.commit(
        MoveInstance(instance_id=record.instance_id, attempt=record.attempt, to=AgentState.FAILED, **death.said)
    )


async def _resume_waits(house: House) -> None:
    """Waits go on where they were; those of agents that are gone end."""
    after = None
    while page := await house.store.open_waits(after=after):
        after = page[-1]
        for wait in page:
            match wait.kind:
                case WaitKind.AGENT:
                    await close_wait(house, wait.wait_id, "the agent is gone")
                case WaitKind.BACKOFF | WaitKind.RESUME:
                    house.timers.found(wait)
