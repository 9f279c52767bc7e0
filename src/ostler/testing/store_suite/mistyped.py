"""Values of a wrong type, in commands and in questions: what a typing mistake or a foreign caller hands in."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import ValidationError
from ostler.model import AgentState, AuditEntry, Lease, SpawnRequest, TaskState, from_micros
from ostler.policy import RetentionPolicy
from ostler.store import Actor, Store
from ostler.store.commands import (
    Command,
    CreateTask,
    MoveInstance,
    MoveTask,
    OpenWait,
    PruneAudit,
    PruneEvents,
    RecordAudit,
    ReleaseLease,
    RemoveAnswers,
    RemoveInstances,
    RemoveTasks,
    RemoveWaits,
    RenewLease,
    ReportHealth,
    ReportMetrics,
    ReserveInstance,
    TakeLease,
    UpdateTask,
)
from ostler.testing.store_suite.ground import DEFINITION, HOME, StoreGround, reservation, reserved

ANYONE = UUID(int=1)
NOW = from_micros(0)
UNZONED = datetime(2026, 1, 1)  # noqa: DTZ001 - the fault


def made(command: Any, **fields: Any) -> Command[Any]:
    """As if there were no types: a checker would refuse most of these rows."""
    wish: Command[Any] = command(**fields)
    return wish


def move(**fields: Any) -> Command[Any]:
    return made(MoveInstance, instance_id=ANYONE, to=AgentState.READY, **fields)


def lease(**fields: Any) -> Lease:
    return Lease(name="owner", owner="me", epoch=1, acquired_at=NOW, expires_at=NOW).evolve(**fields)


def entry(**fields: Any) -> AuditEntry:
    words: dict[str, Any] = {"actor": "a", "action": "b", "subject": "c", "outcome": "ok"}
    return AuditEntry(workspace_id=HOME, number=1, occurred_at=NOW, **words).evolve(**fields)


MISTYPED: dict[str, tuple[Command[Any], tuple[str, ...]]] = {
    "request that is a mapping": (made(ReserveInstance, request={}), ("request must be of type SpawnRequest, was {}",)),
    "request that is missing": (made(ReserveInstance, request=None), ("request must be of type SpawnRequest",)),
    "options that are a mapping": (
        made(ReserveInstance, request=SpawnRequest(agent_definition_id=DEFINITION, options={})),  # type: ignore[arg-type]  # wrong on purpose
        ("options must be of type AgentSpawnOptions",),
    ),
    "default name of bytes": (reservation(default_name=b"x"), ("default_name must be text, was b'x'",)),
    "default name of a number": (reservation(default_name=5), ("default_name must be text, was 5",)),
    "task of the start of a wrong type": (reservation(task_id="x"), ("task_id must be a UUID",)),
    "health that is a mapping": (
        made(ReportHealth, instance_id=ANYONE, health={}),
        ("health must be of type AgentHealthStatus",),
    ),
    "metrics that are missing": (
        made(ReportMetrics, instance_id=ANYONE, metrics=None),
        ("metrics must be of type AgentMetrics",),
    ),
    "wait that is missing": (made(OpenWait, wait=None), ("wait must be of type Wait, was None",)),
    "actor that is a name": (made(CreateTask, task="t", by="me"), ("by must be of type Actor, was 'me'",)),
    "actor that is nobody": (move(by=None), ("by must be of type Actor, was None",)),
    "actor and task of a wrong type": (made(CreateTask, task=5, by="me"), ("by must be", "task must be text")),
    "principal of a wrong type": (
        made(CreateTask, task="t", by=Actor(principal_id="me")),  # type: ignore[arg-type]  # wrong on purpose
        ("by.principal_id must be a UUID",),
    ),
    "correlation that is empty and no text": (
        move(by=Actor(correlation_id=b"")),  # type: ignore[arg-type]  # wrong on purpose
        ("by.correlation_id must be text",),
    ),
    "idempotency that is a key": (reservation(idempotency="k"), ("idempotency must be of type Idempotency, was 'k'",)),
    "enforcement that is a list": (move(enforcement=["advisory"]), ("enforcement must be a mapping",)),
    "enforcement that is an empty list": (move(enforcement=[]), ("enforcement must be a mapping, was []",)),
    "enforcement of a wrong level": (move(enforcement={"memory": "loud"}), ("enforcement.memory must be one of",)),
    "enforcement of a number": (
        move(enforcement={5: None}),
        ("enforcement.5 must be text", "enforcement.5 must be one"),
    ),
    "freezing that is zero": (move(freezing=0), ("freezing must be true or false, was 0",)),
    "grace that is missing": (move(was_graceful=None), ("was_graceful must be true or false, was None",)),
    "act that is empty and no text": (move(act=b""), ("act must be text",)),
    "error that is text": (move(error="x"), ("error must be of type AgentError",)),
    "beside that is a mapping": (move(beside={}), ("beside must be of type Beside",)),
    "lease without a duration": (made(TakeLease, owner="me", ttl="x"), ("ttl must be a duration, was 'x'",)),
    "lease of nobody": (made(TakeLease, owner=None), ("owner must be text, was None",)),
    "lease that is stolen by a word": (made(TakeLease, owner="me", steal="no"), ("steal must be true or false",)),
    "renewal of no lease": (made(RenewLease, lease=None, ttl=5), ("lease must be of type Lease", "ttl must be a dur")),
    "renewal of a broken lease": (made(RenewLease, lease=lease(owner=5)), ("owner must be text",)),
    "release of no lease": (made(ReleaseLease, lease={}), ("lease must be of type Lease, was {}",)),
    "audit detail of a wrong type": (
        made(RecordAudit, what="a", about="b", detail=5),
        ("detail must be text, was 5",),
    ),
    "ids that are a number": (
        made(RemoveInstances, ids=5, policy=RetentionPolicy()),
        ("ids must be a tuple of UUIDs",),
    ),
    "ids that are text": (made(RemoveTasks, ids=("a", 5), policy=RetentionPolicy()), ("ids.0 must", "ids.1 must")),
    "policy that is missing": (made(RemoveTasks, ids=(), policy=None), ("policy must be of type RetentionPolicy",)),
    "policy out of range": (made(RemoveInstances, ids=(), policy=RetentionPolicy(batch=0)), ("batch must be 1 to",)),
    "moment that is text": (made(RemoveWaits, ids=(), before="now"), ("before must be a time with its zone",)),
    "moment without a zone": (made(RemoveWaits, ids=(), before=UNZONED), ("before must be a time with its zone",)),
    "answers that are named by text": (made(RemoveAnswers, keys="k", before=NOW), ("keys must be a tuple of keys",)),
    "answers that are named by halves": (
        made(RemoveAnswers, keys=((HOME,), (HOME, 5)), before=NOW),
        ("keys.0 must be a workspace and a key", "keys.1 must be a workspace and a key"),
    ),
    "event number of text": (made(PruneEvents, until="5"), ("until must be a whole number",)),
    "chain of a wrong type": (made(PruneAudit, workspace_id="x", last=entry()), ("workspace_id must be a UUID",)),
    "last entry of a wrong type": (made(PruneAudit, workspace_id=HOME, last=5), ("last must be of type AuditEntry",)),
    "last entry that is broken": (
        made(PruneAudit, workspace_id=HOME, last=entry(number="1")),
        ("last.number must be a whole number",),
    ),
    "reason of a task of a wrong type": (
        made(MoveTask, task_id=ANYONE, to=TaskState.RUNNING, reason=5),
        ("reason must be text, was 5",),
    ),
    "changes that are a list": (made(UpdateTask, task_id=ANYONE, changes=["a"]), ("changes must be a mapping",)),
    "changes by names of all kinds": (
        made(MoveTask, task_id=ANYONE, to=TaskState.RUNNING, changes={5: 1, "state": 2}),
        ("5 cannot be changed", "state cannot be changed"),
    ),
    "changes that are missing": (made(UpdateTask, task_id=ANYONE, changes=None), ("changes must be a mapping",)),
}


Question = Callable[[Any], Awaitable[Any]]

QUESTIONS: dict[str, tuple[Question, str]] = {
    "commit of text": (lambda store: store.commit("x"), "command must be of type Command, was 'x'"),
    "commit of a class": (lambda store: store.commit(CreateTask), "command must be of type Command"),
    "sweep by text": (lambda store: store.sweep("x"), "policy must be of type RetentionPolicy, was 'x'"),
    "sweep by nothing much": (lambda store: store.sweep({}), "policy must be of type RetentionPolicy, was {}"),
    "lease for text": (lambda store: store.take_lease("me", ttl="x"), "ttl must be a duration, was 'x'"),
    "instance by text": (lambda store: store.get_instance("x"), "instance_id must be a UUID, was 'x'"),
    "instances by an empty mapping": (
        lambda store: store.list_instances({}),
        "wanted must be of type GetInstancesFilter, was {}",
    ),
    "instances of no workspace": (lambda store: store.list_instances(None, None), "workspace_id must be a UUID"),
    "statistics by text": (lambda store: store.statistics("x"), "workspace_id must be a UUID, was 'x'"),
    "task by a number": (lambda store: store.get_task(5), "task_id must be a UUID, was 5"),
    "tasks by an empty mapping": (lambda store: store.list_tasks({}), "wanted must be of type TaskFilter, was {}"),
    "tasks of text": (lambda store: store.list_tasks(None, "x"), "workspace_id must be a UUID"),
    "events after text": (lambda store: store.read_page("x"), "after must be 0 or the number of an event, was 'x'"),
    "events after true": (lambda store: store.read_page(True), "after must be 0 or the number of an event, was True"),
    "events by text": (lambda store: store.read_page(limit="5"), "limit must be a whole number, was '5'"),
    "events by true": (lambda store: store.read_page(limit=True), "limit must be a whole number, was True"),
    "events of text": (lambda store: store.read_page(workspace_id="x"), "workspace_id must be a UUID"),
    "events of an instance by text": (lambda store: store.read_events(instance_id="x"), "instance_id must be a UUID"),
    "audit of text": (lambda store: store.read_audit("x"), "workspace_id must be a UUID"),
    "audit after text": (lambda store: store.read_audit(after="x"), "after must be a whole number"),
    "audit after a hundred digits": (lambda store: store.read_audit(after=10**99), "after must be"),
    "head of text": (lambda store: store.audit_head("x"), "workspace_id must be a UUID"),
    "chain of text": (lambda store: store.verify_audit("x"), "workspace_id must be a UUID"),
    "chain against text": (lambda store: store.verify_audit(kept_head="x"), "kept_head must be of type AuditHead"),
    "workspace by text": (lambda store: store.get_workspace("x"), "workspace_id must be a UUID"),
    "workspaces after text": (lambda store: store.list_workspaces("x"), "after must be a UUID"),
    "workspaces by none": (lambda store: store.list_workspaces(limit=None), "limit must be a whole number"),
    "principal by text": (lambda store: store.get_principal("x"), "principal_id must be a UUID"),
    "token by bytes": (lambda store: store.find_token(b"x"), "token_hash must be text"),
    "token by NUL": (lambda store: store.find_token("\0"), "token_hash must not contain NUL"),
    "definition by text": (lambda store: store.get_definition("x"), "definition_id must be a UUID"),
    "definitions after text": (lambda store: store.list_definitions("x"), "after must be a UUID"),
    "attempts of text": (lambda store: store.list_attempts("x"), "instance_id must be a UUID"),
    "attempts after text": (lambda store: store.list_attempts(ANYONE, after="x"), "after must be a whole number"),
    "open attempts after an id": (lambda store: store.open_attempts(after=ANYONE), "after must be of type Attempt"),
    "wait by text": (lambda store: store.get_wait("x"), "wait_id must be a UUID"),
    "waits until text": (lambda store: store.open_waits(due_until="x"), "due_until must be a time with its zone"),
    "waits until no zone": (lambda store: store.open_waits(due_until=UNZONED), "due_until must be a time with its"),
    "waits after an id": (lambda store: store.open_waits(after=ANYONE), "after must be of type Wait"),
    "waits of text": (lambda store: store.open_waits(instance_id="x"), "instance_id must be a UUID"),
    "run by text": (lambda store: store.get_run("x"), "run_id must be a UUID"),
    "runs of text": (lambda store: store.list_runs("x"), "workspace_id must be a UUID"),
    "runs before text": (lambda store: store.list_runs(before="x"), "before must be a UUID"),
    "turn of text": (lambda store: store.get_turn("x", 1), "run_id must be a UUID"),
    "turn by text": (lambda store: store.get_turn(ANYONE, "1"), "turn must be -1 or the number of a turn, was '1'"),
    "turns of text": (lambda store: store.read_turns("x"), "run_id must be a UUID"),
    "turns after text": (lambda store: store.read_turns(ANYONE, after="x"), "after must be -1 or the number"),
    "whole turn of text": (lambda store: store.whole_turn("x", 5), "run_id must be a UUID"),
    "whole turn until text": (lambda store: store.whole_turn(ANYONE, "x"), "until must be -1 or the number"),
}


class _OfAnotherMake:
    """As numpy's whole numbers are: no int, but good for one."""

    def __index__(self) -> int:
        return 1


class MistypedContract(StoreGround):
    @pytest.mark.parametrize("case", QUESTIONS)
    async def test_a_question_of_a_wrong_type_is_refused_in_one_sentence(self, store: Store, case: str) -> None:
        ask, sentence = QUESTIONS[case]
        before, audit = await store.head(), await store.audit_head()
        with pytest.raises(ValidationError) as refused:
            await ask(store)
        (message,) = (fault.message for fault in refused.value.faults)
        assert sentence in message
        assert message.isprintable()
        assert (await store.head(), await store.audit_head()) == (before, audit)

    async def test_a_whole_number_may_be_of_another_make(self, store: Store) -> None:
        one: Any = _OfAnotherMake()
        await store.take_lease("me", ttl=timedelta(seconds=1))
        await reserved(store)
        await reserved(store)
        assert (await store.read_page(one, limit=one)).events == (await store.read_page(1, limit=1)).events
        assert await store.read_audit(after=one, limit=one) == await store.read_audit(after=1, limit=1)
        assert await store.list_attempts(ANYONE, after=one) == []
        assert await store.read_turns(ANYONE, after=one) == []

    async def test_an_epoch_of_a_wrong_type_is_refused(self, store: Store) -> None:
        wrong: Any = "1"
        with pytest.raises(ValidationError, match="epoch must be a whole number, was '1'"):
            store.adopt_epoch(wrong)
        await store.take_lease("me", ttl=timedelta(seconds=1))
        with pytest.raises(ValidationError, match="ttl must be a duration"):
            await store.renew_lease(ttl=wrong)
