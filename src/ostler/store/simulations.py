"""Runs of populations: created, played turn by turn, ended, removed; and their rows.

A run and its newest turn are one commit. Of two programs that play one run, the comparison with the turn and the
digest lets one through, so these commands need no owner: runs are also played beside the manager of a home.
"""

from __future__ import annotations

from uuid import UUID

from ostler.errors import InvalidOperationError, SimulationNotFoundError, VersionConflictError
from ostler.model.access import HOME_WORKSPACE_ID, SYSTEM, Actor
from ostler.model.simulation import RunState, SimulationRun, SimulationTurn, SimulationWhole
from ostler.model.text import MAX_REASON, clipped
from ostler.store.record_table import RecordTable
from ostler.store.transaction import Reader, Transaction
from ostler.store.workspaces import require_workspace

RUNS = RecordTable(SimulationRun, "simulation_runs", renamed={"run_id": "id"})
TURNS = RecordTable(SimulationTurn, "simulation_turns")
WHOLES = RecordTable(SimulationWhole, "simulation_wholes")
#: Turns that one command removes.
REMOVED_AT_ONCE = 256


# --- reading -----------------------------------------------------------------------------------------


def get_run(reader: Reader, run_id: UUID) -> SimulationRun | None:
    return RUNS.read_one(reader.fetch_one(f"{RUNS.select} WHERE id = :id", id=run_id))


def require_run(reader: Reader, run_id: UUID) -> SimulationRun:
    run = get_run(reader, run_id)
    if run is None:
        raise SimulationNotFoundError(f"there is no run {run_id}; list what exists, or check the id")
    return run


def list_runs(
    reader: Reader, workspace_id: UUID = HOME_WORKSPACE_ID, *, before: UUID | None = None, limit: int = 100
) -> list[SimulationRun]:
    """Newest first."""
    older = "" if before is None else " AND id < :before"
    values = {} if before is None else {"before": before}
    sql = f"{RUNS.select} WHERE workspace_id = :space{older} ORDER BY id DESC LIMIT :limit"
    return RUNS.read(reader.fetch(sql, space=workspace_id, limit=limit, **values))


def list_forks(reader: Reader, run_id: UUID) -> list[SimulationRun]:
    return RUNS.read(reader.fetch(f"{RUNS.select} WHERE parent_id = :id ORDER BY id", id=run_id))


def list_turns(reader: Reader, run_id: UUID, *, after: int, until: int, limit: int) -> list[SimulationTurn]:
    sql = f"{TURNS.select} WHERE run_id = :id AND turn > :after AND turn <= :until ORDER BY turn LIMIT :limit"
    return TURNS.read(reader.fetch(sql, id=run_id, after=after, until=until, limit=limit))


def last_whole(reader: Reader, run_id: UUID, turn: int) -> SimulationWhole | None:
    """The newest whole state at this turn or before it."""
    sql = f"{WHOLES.select} WHERE run_id = :id AND turn <= :turn ORDER BY turn DESC LIMIT 1"
    return WHOLES.read_one(reader.fetch_one(sql, id=run_id, turn=turn))


# --- writing -----------------------------------------------------------------------------------------


def create_run(tx: Transaction, run: SimulationRun, whole: SimulationWhole, *, by: Actor = SYSTEM) -> SimulationRun:
    """Begin a run with the state that it starts from; with a parent it is a fork."""
    require_workspace(tx, run.workspace_id)
    detail = None
    if run.parent_id is not None:
        parent = require_run(tx, run.parent_id)
        if parent.state is RunState.REMOVING:
            raise InvalidOperationError(f"run {parent.run_id} is being removed and cannot be forked")
        if run.turn > parent.turn:
            raise InvalidOperationError(
                f"run {parent.run_id} stands at turn {parent.turn} and cannot be forked after turn {run.turn}"
            )
        detail = f"forked from {parent.run_id} after turn {run.turn}"
    created = run.evolve(created_at=tx.now, updated_at=tx.now)
    RUNS.insert(tx, created)
    WHOLES.insert(tx, whole)
    tx.audit(run.workspace_id, by, "simulation.create", _subject(run), detail=detail)
    return created


def append_turn(
    tx: Transaction,
    run: SimulationRun,
    turn: SimulationTurn,
    *,
    whole: SimulationWhole | None = None,
    ended: str | None = None,
    by: Actor = SYSTEM,
) -> SimulationRun:
    """The next turn of `run`, as the program that plays it has read it. An ended run is open again, unless `ended`."""
    played = run.evolve(turn=turn.turn, digest=turn.digest)
    after = _move_run(tx, run, played, ended)
    TURNS.insert(tx, turn)
    if whole is not None:
        WHOLES.insert(tx, whole)
    if run.state is RunState.ENDED:
        tx.audit(run.workspace_id, by, "simulation.reopen", _subject(run))
    if ended is not None:
        tx.audit(run.workspace_id, by, "simulation.end", _subject(run), detail=after.outcome)
    return after


def end_run(tx: Transaction, run: SimulationRun, outcome: str, *, by: Actor = SYSTEM) -> SimulationRun:
    """End a run between two turns."""
    after = _move_run(tx, run, run, outcome)
    if run.state is not RunState.ENDED:
        tx.audit(run.workspace_id, by, "simulation.end", _subject(run), detail=after.outcome)
    return after


def mark_removing(tx: Transaction, run_id: UUID, *, by: Actor = SYSTEM) -> SimulationRun:
    """From here on the run takes neither turns nor forks. A run from which others were forked is refused."""
    run = require_run(tx, run_id)
    forks = [str(fork.run_id) for fork in list_forks(tx, run_id)]
    if forks:
        more = f" and {len(forks) - 3} more" if len(forks) > 3 else ""
        raise InvalidOperationError(
            f"run {run_id} holds the first turns of {', '.join(forks[:3])}{more}, which were forked from it; "
            "remove these first"
        )
    tx.execute("UPDATE simulation_runs SET state = :state WHERE id = :id", state=RunState.REMOVING, id=run_id)
    tx.audit(run.workspace_id, by, "simulation.remove", _subject(run), detail=run.name)
    return run


def remove_turns(tx: Transaction, run_id: UUID) -> bool:
    """Remove some turns of a marked run, with the last of them the run itself; False when nothing is left."""
    run = get_run(tx, run_id)
    if run is None:
        return False
    if run.state is not RunState.REMOVING:
        raise InvalidOperationError(f"run {run_id} is {run.state}; mark it for removal first", current=run.state)
    removed = 0
    for table in ("simulation_turns", "simulation_wholes"):
        removed += tx.execute(
            f"""DELETE FROM {table} WHERE run_id = :id AND turn IN (
                SELECT turn FROM {table} WHERE run_id = :id ORDER BY turn DESC LIMIT :limit)""",
            id=run_id,
            limit=REMOVED_AT_ONCE,
        )
    if removed:
        return True
    tx.execute("DELETE FROM simulation_runs WHERE id = :id", id=run_id)
    return False


def _move_run(tx: Transaction, old: SimulationRun, new: SimulationRun, ended: str | None) -> SimulationRun:
    """Compare and set by turn and digest, without reading; on a mismatch see what the row says."""
    state = RunState.OPEN if ended is None else RunState.ENDED
    outcome = None if ended is None else clipped(ended, MAX_REASON - 100)
    changed = tx.execute(
        """UPDATE simulation_runs SET turn = :turn, digest = :digest, state = :state, outcome = :outcome,
           updated_at = :now WHERE id = :id AND turn = :old_turn AND digest = :old_digest AND state <> :removing""",
        id=old.run_id,
        turn=new.turn,
        digest=new.digest,
        state=state,
        outcome=outcome,
        now=tx.now,
        old_turn=old.turn,
        old_digest=old.digest,
        removing=RunState.REMOVING,
    )
    if not changed:
        raise _mismatch(tx, old)
    return new.evolve(state=state, outcome=outcome, updated_at=tx.now)


def _mismatch(tx: Transaction, old: SimulationRun) -> Exception:
    current = require_run(tx, old.run_id)
    if current.state is RunState.REMOVING:
        return InvalidOperationError(
            f"run {old.run_id} is being removed and takes no more turns", current=current.state
        )
    return VersionConflictError(
        f"run {old.run_id} is at turn {current.turn}, and was played here from turn {old.turn}: another program plays "
        "it too; resume it from where it stands"
    )


def _subject(run: SimulationRun) -> str:
    return f"simulation:{run.run_id}"
