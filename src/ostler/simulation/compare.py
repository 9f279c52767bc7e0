"""A run played once more from its first turn: whether the same comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.simulation.history import Readable, find_run, kept_at, require_turn, turns_after
from ostler.simulation.runs import RecordedOrchestrator
from ostler.simulation.scenario import Scenario
from ostler.simulation.turn import Performed
from ostler.simulation.view import LifecycleRequest, Operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """True when every turn that was played again had the digest of the record."""

    #: The turns that came out the same.
    turns: int
    #: The first that did not.
    differs_at: int | None = None

    def __bool__(self) -> bool:
        return self.differs_at is None


def _repeat(run: RecordedOrchestrator, entry: Mapping[str, Any]) -> None:
    """Do again what was done from outside before the turn."""
    operation, name = Operation(entry["operation"]), entry["agent_name"]
    if not entry.get("done", True):
        run.note_outside(Performed(operation=operation, agent_name=name, done=False, reason=entry["reason"]))
        return
    more = {key: entry[key] for key in ("kind", "params", "auto_resume_turns") if key in entry}
    if operation is Operation.ADD:
        more["initial_state"] = run.state.form.read(entry["initial_state"])
    run.perform(LifecycleRequest(operation=operation, agent_name=name, **more))


async def compare_run(
    store: Readable,
    run_id: UUID | str,
    scenario: Scenario,
    *,
    last: int | None = None,
    manager: AgentLifecycleManager | None = None,
) -> Comparison:
    """Ask every brain again, from the first turn of the run (of a fork: its own first), and stop where it differs."""
    run = await find_run(store, run_id)
    first, end = run.forked_at or 0, run.turn if last is None else last
    require_turn(run, "last", end)
    if end < first:
        raise InvalidOperationError(f"run {run.run_id} has turns {first + 1} to {run.turn} of its own; choose one")
    kept = await kept_at(store, run, first)
    async with RecordedOrchestrator.restored(scenario, run.settings, kept, manager) as again:
        async for row in turns_after(store, run.run_id, first, end):
            core = kept.advance(row)  # raises where the row is not as it was written
            for entry in core["operations"]:
                if entry["cause"] == "outside":
                    _repeat(again, entry)
            await again.play_turn()
            if again.writer.digest != row.digest:
                return Comparison(turns=row.turn - 1 - first, differs_at=row.turn)
    return Comparison(turns=end - first)
