"""Commands about one life: reserve it, and move it from state to state."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model import (
    AGENT_TRANSITIONS,
    HOME_WORKSPACE_ID,
    INACTIVE_STATES,
    AgentErrorEvent,
    AgentInstance,
    AgentSpawnedEvent,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    Attempt,
    Enforcement,
    Fault,
    Record,
    SpawnRequest,
    clean_text,
    clipped,
    fold_tags,
    shown,
)
from ostler.model.text import name_faults
from ostler.model.validation import named
from ostler.policy import slot_refusal
from ostler.store.actor import Actor
from ostler.store.commands.base import Command, check_attempt, check_version, remember, replayed
from ostler.store.commands.beside import Beside
from ostler.store.commands.checking import (
    as_kept,
    count_faults,
    flag_faults,
    kind_faults,
    optional_faults,
    record_faults,
    said_faults,
    word_faults,
)
from ostler.store.kinds import Kind
from ostler.store.unit import Unit

#: Agents tell of their errors at any length; so much of it is kept.
MAX_ERROR = 10_000
MAX_TRACE = 50_000
_NOTHING_MORE = (None,) * 7
#: What a move between two living states changes.
_LIVING = frozenset({"state", "version", "updated_at"})


@dataclass(kw_only=True, eq=False)
class ReserveInstance(Command[AgentInstance]):
    """Intent first: the record, its first attempt and its place in the quota, before anything is started."""

    action: ClassVar[str] = "spawn"
    answered_with: ClassVar[type[Record] | None] = AgentInstance

    request: SpawnRequest
    workspace_id: UUID = HOME_WORKSPACE_ID
    #: Used when the options name none.
    default_name: str | None = None
    #: The task that its first start is a try at.
    task_id: UUID | None = None

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("workspace_id", self.workspace_id, UUID)
        yield from optional_faults("default_name", self.default_name, str)
        yield from name_faults("default_name", self.default_name)
        yield from optional_faults("task_id", self.task_id, UUID)
        yield from record_faults("request", self.request, SpawnRequest)

    @property
    def subject(self) -> str:
        return f"definition:{self.request.agent_definition_id}"

    def apply(self, unit: Unit) -> AgentInstance:
        workspace = unit.workspace(self.workspace_id)
        known = replayed(self, unit, self.workspace_id)
        if isinstance(known, AgentInstance):
            return known
        refusal = slot_refusal(workspace.tier, unit.ledger(self.workspace_id).active)
        if refusal is not None:
            raise refusal.to_error()
        record = self._record(unit)
        unit.put(Kind.INSTANCE, record)
        if self.task_id is not None:
            unit.task(self.task_id)
        first = Attempt(instance_id=record.instance_id, number=1, intended_at=unit.now, task_id=self.task_id)
        unit.put(Kind.ATTEMPT, first)
        unit.emit(
            AgentSpawnedEvent,
            self.by,
            record,
            definition_id=record.definition_id,
            user_id=record.owner_id,
            options=record.spawn_options,
            name=record.name,
        )
        unit.audit(self.by, self.action, f"instance:{record.instance_id}", detail=self.subject)
        remember(self, unit, self.workspace_id, record)
        return record

    def _record(self, unit: Unit) -> AgentInstance:
        options = self.request.options
        return AgentInstance(
            instance_id=unit.ids.new(),
            definition_id=self.request.agent_definition_id,
            state=AgentState.INITIALIZING,
            created_at=unit.now,
            updated_at=unit.now,
            spawn_options=options,
            tags=fold_tags(options.tags if options else None),
            name=(options.name if options else None) or self.default_name,
            owner_id=self.by.principal_id,
            workspace_id=self.workspace_id,
            context=self.request.context,
        )


@functools.lru_cache(maxsize=4096)  # to write a UUID out takes longer than most of what a command does
def _subject(number: int) -> str:
    return f"instance:{UUID(int=number)}"


@dataclass(kw_only=True, eq=False)
class OnInstance(Command[AgentInstance]):
    """A command about an instance that exists. Version and attempt, where given, must still be the current ones."""

    instance_id: UUID
    expected_version: int | None = None
    attempt: int | None = None

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("instance_id", self.instance_id, UUID)
        if self.expected_version is not None:
            yield from count_faults("expected_version", self.expected_version)
        if self.attempt is not None:
            yield from count_faults("attempt", self.attempt)

    @property
    def subject(self) -> str:
        return _subject(self.instance_id.int)

    def _current(self, unit: Unit) -> AgentInstance:
        record = unit.instance(self.instance_id)
        check_attempt(self, record.attempt, self.attempt)
        check_version(self, record.version, self.expected_version)
        return record


@dataclass(kw_only=True, eq=False)
class MoveInstance(OnInstance):
    """The one way from state to state."""

    action: ClassVar[str] = "move"

    to: AgentState
    #: Admits the two moves that only a freeze or a thaw makes.
    freezing: bool = False
    reason: str | None = None
    #: Why it failed; kept on the record while it is failed.
    error: AgentError | None = None
    was_graceful: bool = False
    enforcement: Mapping[str, Enforcement] | None = None
    #: What is written together with it.
    beside: Beside | None = None
    #: What the audit calls it, where the move is part of something with a name.
    act: str | None = None

    def faults(self) -> Iterator[Fault]:
        more = (self.expected_version, self.attempt, self.reason, self.error, self.enforcement, self.beside, self.act)
        plain = more == _NOTHING_MORE and self.freezing is False and self.was_graceful is False
        if plain and type(self.to) is AgentState and type(self.instance_id) is UUID:
            return iter(())  # by far the most common
        return self._all_faults()

    def _all_faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from kind_faults("to", self.to, AgentState)
        yield from said_faults("reason", self.reason)
        if self.act is not None:
            yield from word_faults("act", self.act)
        yield from flag_faults("freezing", self.freezing)
        yield from flag_faults("was_graceful", self.was_graceful)
        if isinstance(self.error, AgentError):
            yield from self.error.faults()
        elif self.error is not None:
            yield from kind_faults("error", self.error, AgentError)
        if self.enforcement is not None:
            yield from _enforcement_faults(self.enforcement)
        if isinstance(self.beside, Beside):
            yield from self.beside.faults(self.instance_id, self.to)
        elif self.beside is not None:
            yield from kind_faults("beside", self.beside, Beside)

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        to, now = self.to, unit.now
        if to not in AGENT_TRANSITIONS[old.state]:
            require_move(old, to, freezing=self.freezing)
        if to is AgentState.INITIALIZING:
            raise InvalidOperationError(
                "a failed instance comes back by a restart, which takes a new attempt", current=old.state, wanted=to
            )
        if to in INACTIVE_STATES or self.error is not None or self.enforcement is not None:
            new = self._with_more(old, unit)
            unit.put(Kind.INSTANCE, new)
        else:
            new = old.evolve(state=to, version=old.version + 1, updated_at=now)
            unit.put(Kind.INSTANCE, new, _LIVING)
        self._emit(unit, old, new)
        unit.audit(self.by, self.act or self.action, self.subject, detail=f"{old.state} to {to}")
        if self.beside is not None:
            self.beside.write(unit, self.by, new)
        return new

    def _with_more(self, old: AgentInstance, unit: Unit) -> AgentInstance:
        """More changes than the state: it ended, or erred, or its limits became known."""
        ends, fails = self.to in INACTIVE_STATES, self.to is AgentState.FAILED
        left = self.beside.final_state if self.beside is not None else None
        return old.evolve(
            state=self.to,
            version=old.version + 1,
            updated_at=unit.now,
            terminated_at=(old.terminated_at or unit.now) if ends else None,
            failing_since=(old.failing_since or unit.now) if fails else old.failing_since,
            error_message=clipped(self.error.message, MAX_ERROR) if self.error else old.error_message,
            enforcement=self.enforcement or old.enforcement,
            final_state=as_kept(left) if left is not None else old.final_state,
        )

    def _emit(self, unit: Unit, old: AgentInstance, new: AgentInstance) -> None:
        reason = clean_text(self.reason) if self.reason else None
        if self.error is not None:
            self.error.emit(unit, self.by, new)
        restarting = self.beside.restarting if self.beside is not None else None
        final = {"is_final": True} if new.state in INACTIVE_STATES and restarting is None else {}
        unit.emit(
            AgentStateChangedEvent, self.by, new, previous_state=old.state, new_state=new.state, reason=reason, **final
        )
        if restarting is not None:
            restarting.emit(unit, self.by, new)
        if new.state is AgentState.TERMINATED:
            unit.emit(
                AgentTerminatedEvent,
                self.by,
                new,
                final_state=new.state,
                was_graceful=self.was_graceful,
                reason=reason,
                uptime=new.uptime(unit.now),
            )


def _enforcement_faults(enforcement: Any) -> Iterator[Fault]:
    if not isinstance(enforcement, Mapping):
        yield Fault(field="enforcement", bound="must be a mapping", value=shown(enforcement))
        return
    for name, level in enforcement.items():
        field = f"enforcement.{named(name)}"
        yield from kind_faults(field, name, str)
        yield from kind_faults(field, level, Enforcement)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentError:
    """What went wrong, as the agent or its keeper tells it."""

    message: str
    exception_type: str | None = None
    stack_trace: str | None = None
    is_recoverable: bool = False

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("error.message", self.message, str)
        yield from optional_faults("error.exception_type", self.exception_type, str)
        yield from optional_faults("error.stack_trace", self.stack_trace, str)
        yield from flag_faults("error.is_recoverable", self.is_recoverable)

    def emit(self, unit: Unit, by: Actor, record: AgentInstance) -> None:
        unit.emit(
            AgentErrorEvent,
            by,
            record,
            error_message=clipped(self.message, MAX_ERROR),
            exception_type=clipped(self.exception_type, MAX_ERROR) if self.exception_type else None,
            stack_trace=clipped(self.stack_trace, MAX_TRACE) if self.stack_trace else None,
            is_recoverable=self.is_recoverable,
        )


def require_move(old: AgentInstance, to: AgentState, *, freezing: bool = False) -> None:
    if not old.can_transition_to(to, freezing=freezing):
        raise InvalidOperationError(
            f"instance {old.instance_id} is {old.state} and cannot become {to}", current=old.state, wanted=to
        )
