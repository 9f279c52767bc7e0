"""The end of a record: a run that nobody needs any more, with all its turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model import SimulationRun
from ostler.simulation.history import require_run
from ostler.store import Store
from ostler.store.commands import RemoveRun

_PAGE = 100
_SHOWN = 3


async def remove_run(store: Store, run_id: UUID | str) -> int:
    """Remove a run and its turns; how many turns those were. One from which others were forked is refused.

    Turns go from the last to the first, some hundred in a commit. Where that is broken off, a shorter run is left,
    which can be removed again. An open run goes too; whoever plays it is refused at its next turn.
    """
    run = await require_run(store, run_id)
    forks = [str(one.run_id) async for one in _forks(store, run)]
    if forks:
        more = f" and {len(forks) - _SHOWN} more" if len(forks) > _SHOWN else ""
        raise InvalidOperationError(
            f"run {run.run_id} holds the first turns of {', '.join(forks[:_SHOWN])}{more}, which were forked from it; "
            "remove these first"
        )
    left: SimulationRun | None = run
    while left is not None:
        left = await store.commit(RemoveRun(run_id=run.run_id))
    return run.turn - (run.forked_at or 0)


async def _forks(store: Store, run: SimulationRun) -> AsyncIterator[SimulationRun]:
    before: UUID | None = None
    while page := await store.list_runs(run.workspace_id, before=before, limit=_PAGE):
        for one in page:
            if one.parent_id == run.run_id:
                yield one
        before = page[-1].run_id
