"""Requests with an id: each is answered once, and its answer is kept."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from ostler.model.attempt import Request, RequestState
from ostler.model.text import clipped
from ostler.store.record_table import RecordTable
from ostler.store.transaction import Reader, Transaction

REQUESTS = RecordTable(Request, "requests", renamed={"request_id": "id", "answer": "answer_json"}, key_columns=2)
#: A larger answer is delivered, not kept.
MAX_ANSWER_BYTES = 1024 * 1024
#: Of one instance; then the oldest that have ended go.
MAX_KEPT = 1000
_MAX_ERROR = 8000


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestEnd:
    """How a request ended."""

    request: Request
    state: RequestState
    answer: str | None = None
    error: str | None = None

    @property
    def row(self) -> Request:
        """As it is kept, but for the time."""
        kept = self.answer is None or len(self.answer.encode()) <= MAX_ANSWER_BYTES
        error = None if self.error is None else clipped(self.error, _MAX_ERROR)
        return self.request.evolve(state=self.state, answer=self.answer if kept else None, error=error)


def get_request(reader: Reader, instance_id: UUID, request_id: str) -> Request | None:
    row = reader.fetch_one(
        f"{REQUESTS.select} WHERE instance_id = :instance_id AND id = :id", instance_id=instance_id, id=request_id
    )
    return REQUESTS.read_one(row)


def list_requests(reader: Reader, instance_id: UUID, state: RequestState | None = None) -> list[Request]:
    """Newest first."""
    rows = reader.fetch(f"{REQUESTS.select} WHERE instance_id = :id ORDER BY begun_at DESC, id DESC", id=instance_id)
    return [request for request in REQUESTS.read(rows) if state is None or request.state is state]


def begin_request(tx: Transaction, request: Request) -> None:
    _put(tx, request.evolve(begun_at=tx.now), keeps=frozenset())


def end_request(tx: Transaction, end: RequestEnd) -> None:
    _put(tx, end.row.evolve(ended_at=tx.now), keeps=frozenset({"begun_at"}))
    tx.execute(
        """DELETE FROM requests WHERE instance_id = :id AND ended_at < (
             SELECT ended_at FROM requests WHERE instance_id = :id AND ended_at IS NOT NULL
             ORDER BY ended_at DESC LIMIT 1 OFFSET :kept)""",
        id=end.request.instance_id,
        kept=MAX_KEPT - 1,
    )


def lose_requests(tx: Transaction, instance_id: UUID, why: str) -> None:
    """The agent ended before it answered; the same id begins again."""
    tx.execute(
        """UPDATE requests SET state = 'lost', error = :why, ended_at = :now
           WHERE instance_id = :id AND state = 'running'""",
        id=instance_id,
        why=clipped(why, _MAX_ERROR),
        now=tx.now,
    )


def _put(tx: Transaction, request: Request, *, keeps: frozenset[str]) -> None:
    """Insert it, or change the row that is there; columns in `keeps` stay as they are then."""
    values = REQUESTS.encode(request)
    changed = values.keys() - {"instance_id", "id"} - keeps
    changes = ", ".join(f"{name} = excluded.{name}" for name in sorted(changed))
    tx.execute(
        f"""INSERT INTO requests ({", ".join(values)}) VALUES ({", ".join(f":{name}" for name in values)})
            ON CONFLICT (instance_id, id) DO UPDATE SET {changes}""",
        **values,
    )
