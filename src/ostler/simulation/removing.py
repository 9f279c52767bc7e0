"""The end of a record: a run that nobody needs any more, with all its turns."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

from ostler.errors import InvalidOperationError, SimulationNotFoundError, VersionConflictError
from ostler.model import RunState, SimulationRun
from ostler.simulation.history import require_run
from ostler.store import Store
from ostler.store.commands import MoveRun, RemoveRun
from ostler.store.commands.simulations import REMOVING, is_marked

_PAGE = 100
_SHOWN = 3


async def remove_run(store: Store, run_id: UUID | str) -> int:
    """Remove a run and its turns; how many turns those were. One from which others were forked is refused.

    Turns go from the last to the first, some hundred in a commit. Where that is broken off, a shorter run is left,
    which can be removed again. An open run goes too; whoever plays it is refused at its next turn.
    """
    run = await require_run(store, run_id)
    left: SimulationRun | None = run
    while left is not None:
        # Before the mark, so that whoever plays a run that stays is not disturbed.
        await _require_no_forks(store, left)
        try:
            await _remove(store, left)
        except SimulationNotFoundError:
            break  # another one removed it as well, and was quicker
        except VersionConflictError:
            left = await store.get_run(run.run_id)  # somebody else was at it: look at everything anew
        else:
            break
    return run.turn - (run.forked_at or 0)


async def _remove(store: Store, run: SimulationRun) -> None:
    """Nothing is forked from a marked run, and one whose mark was taken off has another version."""
    marked = run
    if not is_marked(run):
        # Whatever its version: somebody may play it so fast that none would be found.
        marked = await store.commit(MoveRun(run_id=run.run_id, to=RunState.ENDED, outcome=REMOVING))
    try:
        await _require_no_forks(store, marked)
    except InvalidOperationError:
        if marked is not run:
            await _take_mark_off(store, run, marked.version)
        raise
    left: SimulationRun | None = marked
    while left is not None:
        left = await store.commit(RemoveRun(run_id=run.run_id, expected_version=left.version))


async def _take_mark_off(store: Store, run: SimulationRun, version: int) -> None:
    back = MoveRun(run_id=run.run_id, to=run.state, outcome=run.outcome, expected_version=version)
    with contextlib.suppress(VersionConflictError, SimulationNotFoundError):  # then somebody else has decided
        await store.commit(back)


async def _require_no_forks(store: Store, run: SimulationRun) -> None:
    forks = [str(one.run_id) async for one in _forks(store, run)]
    if forks:
        more = f" and {len(forks) - _SHOWN} more" if len(forks) > _SHOWN else ""
        raise InvalidOperationError(
            f"run {run.run_id} holds the first turns of {', '.join(forks[:_SHOWN])}{more}, which were forked from it; "
            "remove these first"
        )


async def _forks(store: Store, run: SimulationRun) -> AsyncIterator[SimulationRun]:
    before: UUID | None = None
    while page := await store.list_runs(run.workspace_id, before=before, limit=_PAGE):
        for one in page:
            if one.parent_id == run.run_id:
                yield one
        before = page[-1].run_id
