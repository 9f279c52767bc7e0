"""The plainer questions to a store: one row by its key, or a page of them in order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from ostler.errors import ValidationError
from ostler.model import (
    HOME_WORKSPACE_ID,
    Attempt,
    Definition,
    Fault,
    Lease,
    Principal,
    SimulationRun,
    SimulationTurn,
    Token,
    Wait,
    Workspace,
    shown,
)
from ostler.model.validation import whole_number
from ostler.store.base import PAGE, Store
from ostler.store.commands.checking import (
    count_faults,
    kind_faults,
    moment_faults,
    optional_faults,
    require,
    word_faults,
)
from ostler.store.commands.leases import OWNER
from ostler.store.kinds import Kind
from ostler.store.port import Session, WaitWindow

R = TypeVar("R")

#: Beyond it no database can even be asked.
_HIGHEST = 2**63 - 1
_HIGHEST_ID = 2**128 - 1


class Lookups(Store):
    """What follows from being able to read; a subclass says how."""

    @abstractmethod
    async def _read(self, read: Callable[[Session], R]) -> R: ...

    async def _load(self, kind: Kind, *key: Any) -> Any:
        return await self._read(lambda session: session.load(kind, key))

    async def get_lease(self) -> Lease | None:
        found: Lease | None = await self._load(Kind.LEASE, OWNER)
        return found

    async def get_workspace(self, workspace_id: UUID) -> Workspace | None:
        require_id("workspace_id", workspace_id)
        found: Workspace | None = await self._load(Kind.WORKSPACE, workspace_id)
        return found

    async def list_workspaces(self, after: UUID | None = None, limit: int = 100) -> list[Workspace]:
        return await self._listing(Kind.WORKSPACE, after, limit)

    async def list_chains(self, after: UUID | None = None, limit: int = 100) -> list[UUID]:
        most = bounded(limit)

        def read(session: Session) -> list[UUID]:
            found: list[UUID] = []
            first = 0 if after is None else after.int + 1
            while len(found) < most and first <= _HIGHEST_ID:
                one = session.chain_from(UUID(int=first))
                if one is None:
                    break
                found.append(one)
                first = one.int + 1
            return found

        return await self._read(read)

    async def get_principal(self, principal_id: UUID) -> Principal | None:
        require_id("principal_id", principal_id)
        found: Principal | None = await self._load(Kind.PRINCIPAL, principal_id)
        return found

    async def find_token(self, token_hash: str) -> Token | None:
        require(word_faults("token_hash", token_hash))
        found: Token | None = await self._read(lambda session: session.token(token_hash))
        return found

    async def get_definition(self, definition_id: UUID) -> Definition | None:
        require_id("definition_id", definition_id)
        found: Definition | None = await self._load(Kind.DEFINITION, definition_id)
        return found

    async def list_definitions(self, after: UUID | None = None, limit: int = 100) -> list[Definition]:
        return await self._listing(Kind.DEFINITION, after, limit)

    async def _listing(self, kind: Kind, after: UUID | None, limit: int) -> list[Any]:
        require(optional_faults("after", after, UUID))
        key = None if after is None else (after,)
        most = bounded(limit)
        return list(await self._read(lambda session: session.listing(kind, key, most)))

    async def list_attempts(self, instance_id: UUID, limit: int = PAGE, *, after: int = 0) -> list[Attempt]:
        require_id("instance_id", instance_id)
        key, most = (instance_id, counted("after", after)), bounded(limit)
        return await self._read(lambda session: session.attempts(instance_id, most, key))

    async def open_attempts(self, limit: int = PAGE, *, after: Attempt | None = None) -> list[Attempt]:
        most = bounded(limit)
        require(optional_faults("after", after, Attempt))
        key = None if after is None else (after.instance_id, after.number)
        return await self._read(lambda session: session.attempts(None, most, key))

    async def open_waits(
        self,
        *,
        due_until: datetime | None = None,
        limit: int = PAGE,
        after: Wait | None = None,
        instance_id: UUID | None = None,
    ) -> list[Wait]:
        if due_until is not None:
            require(moment_faults("due_until", due_until))
        require(optional_faults("after", after, Wait))
        require(optional_faults("instance_id", instance_id, UUID))
        window = WaitWindow(limit=bounded(limit), due_until=due_until, after=after, instance_id=instance_id)
        return await self._read(lambda session: session.waits(window))

    async def get_wait(self, wait_id: UUID) -> Wait | None:
        require_id("wait_id", wait_id)
        found: Wait | None = await self._load(Kind.WAIT, wait_id)
        return found

    # --- simulations ----------------------------------------------------------------------------

    async def get_run(self, run_id: UUID) -> SimulationRun | None:
        require_id("run_id", run_id)
        found: SimulationRun | None = await self._load(Kind.SIMULATION_RUN, run_id)
        return found

    async def list_runs(
        self, workspace_id: UUID = HOME_WORKSPACE_ID, *, before: UUID | None = None, limit: int = 100
    ) -> list[SimulationRun]:
        require_id("workspace_id", workspace_id)
        require(optional_faults("before", before, UUID))
        most = bounded(limit)
        return await self._read(lambda session: session.runs(workspace_id, before, most))

    async def get_turn(self, run_id: UUID, turn: int) -> SimulationTurn | None:
        require_id("run_id", run_id)
        found: SimulationTurn | None = await self._load(Kind.SIMULATION_TURN, run_id, _turn("turn", turn))
        return found

    async def read_turns(self, run_id: UUID, *, after: int = -1, limit: int = 100) -> list[SimulationTurn]:
        require_id("run_id", run_id)
        start, most = _turn("after", after), bounded(limit)
        return await self._read(lambda session: session.turns(run_id, start, most))

    async def whole_turn(self, run_id: UUID, until: int) -> SimulationTurn | None:
        require_id("run_id", run_id)
        last = _turn("until", until)
        return await self._read(lambda session: session.whole_turn(run_id, last))


def bounded(limit: int) -> int:
    """A page has at least one row, and never more than a reader can bear."""
    most = whole_number(limit)
    if most is None:
        require(kind_faults("limit", limit, int))
    elif most >= 1:
        return min(most, PAGE)
    raise ValidationError([Fault(field="limit", bound="must be at least 1", value=str(limit))])


def counted(field: str, value: int) -> int:
    number = whole_number(value)
    require(count_faults(field, value if number is None else number))
    return number or 0


def _turn(field: str, value: int) -> int:
    """-1 stands for before the first."""
    number = whole_number(value)
    if number is None or not -1 <= number <= _HIGHEST:
        raise ValidationError([Fault(field=field, bound="must be -1 or the number of a turn", value=shown(value))])
    return number


def require_id(field: str, value: UUID) -> None:
    if type(value) is not UUID:  # looked at for every question, so the common case makes no generator
        require(kind_faults(field, value, UUID))
