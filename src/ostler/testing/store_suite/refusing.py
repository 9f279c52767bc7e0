"""Bad input: refused in one sentence per fault, before anything is written, and at nobody else's cost."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import ValidationError
from ostler.model import (
    AgentHealthStatus,
    AgentInstance,
    AgentMetrics,
    AgentSpawnOptions,
    AgentState,
    AttemptOutcome,
    Definition,
    ResourceLimits,
    SpawnRequest,
)
from ostler.store import Actor, Store
from ostler.store.commands import (
    Command,
    CreateTask,
    EndAttempt,
    EndWait,
    MoveInstance,
    MoveTask,
    RecordIdentity,
    ReportHealth,
    ReportMetrics,
    ReserveInstance,
    RestartInstance,
)
from ostler.store.kinds import Kind
from ostler.testing.store_suite.ground import DEFINITION, HOME, StoreGround, brought_to, reservation, reserved
from ostler.testing.store_suite.mistyped import MISTYPED

ANYONE = UUID(int=1)
MEGABYTE = "x" * 2**20
ELEVEN = tuple(f"t{number}" for number in range(11))


def spawn(context: Any = None, definition_id: Any = DEFINITION, **options: Any) -> ReserveInstance:
    made = AgentSpawnOptions(**options)
    return ReserveInstance(request=SpawnRequest(agent_definition_id=definition_id, options=made, context=context))


BAD: dict[str, tuple[Command[Any], tuple[str, ...]]] = {
    "definition of a wrong type": (spawn(definition_id="abc"), ("agent_definition_id must be a UUID",)),
    "definition that is empty": (spawn(definition_id=UUID(int=0)), ("agent_definition_id must not be",)),
    "eleven tags": (spawn(tags=ELEVEN), ("options.tags must have at most 10 entries, was 11",)),
    "tags that are numbers": (spawn(tags=(1, 2)), ("options.tags.0 must be text", "options.tags.1 must be text")),
    "tag with a percent sign": (spawn(tags=("a%",)), ("options.tags.0 must be 1 to 50 letters",)),
    "memory out of range": (spawn(resource_limits=ResourceLimits(max_memory_mb=1)), ("64 to 8192, was 1",)),
    "a megabyte of context": (spawn({"a": MEGABYTE}), ("context must be at most 256 KiB",)),
    "NUL in the context": (spawn({"a": ["b\0"]}), ("context.a.0 must not contain NUL",)),
    "lone surrogate in the context": (spawn({"a": "\ud800"}), ("context.a must be text without lone surrogates",)),
    "lone surrogate in a key": (spawn({"\ud800": 1}), ("without lone surrogates",)),
    "context that is no JSON": (spawn({"a": object()}), ("context.a must be a JSON value",)),
    "NUL in the name": (spawn(name="a\0b"), ("options.name must be printable",)),
    "lone surrogate in the name": (spawn(name="\udfff"), ("options.name must be",)),
    "name of a wrong type": (spawn(name=5), ("options.name must be text",)),
    "two faults at once": (spawn({"a": "\0"}, tags=ELEVEN), ("options.tags must have", "context.a must not contain")),
    "default name with NUL": (reservation(default_name="a\0"), ("default_name must be printable",)),
    "workspace of a wrong type": (reservation(workspace_id="home"), ("workspace_id must be a UUID",)),
    "state that is plain text": (MoveInstance(instance_id=ANYONE, to="ready"), ("to must be AgentState.READY",)),  # type: ignore[arg-type]  # wrong on purpose
    "state that is none": (MoveInstance(instance_id=ANYONE, to="flying"), ("to must be one of initializing",)),  # type: ignore[arg-type]  # wrong on purpose
    "instance of a wrong type": (MoveInstance(instance_id="x", to=AgentState.READY), ("instance_id must be a UUID",)),  # type: ignore[arg-type]  # wrong on purpose
    "health of a wrong type": (
        ReportHealth(instance_id=ANYONE, health=AgentHealthStatus(state="fine")),  # type: ignore[arg-type]  # wrong on purpose
        ("state must be one of unknown",),
    ),
    "health below zero": (
        ReportHealth(instance_id=ANYONE, health=AgentHealthStatus(consecutive_failures=-1)),
        ("consecutive_failures must be at least 0, was -1",),
    ),
    "metrics without a zone": (
        ReportMetrics(instance_id=ANYONE, metrics=AgentMetrics(sampled_at="now")),  # type: ignore[arg-type]  # wrong on purpose
        ("sampled_at must be a time with its zone",),
    ),
    "restart reason of a wrong type": (
        RestartInstance(instance_id=ANYONE, max_attempts="many"),  # type: ignore[arg-type]  # wrong on purpose
        ("max_attempts must be a whole number",),
    ),
    "identity that is no JSON": (
        RecordIdentity(instance_id=ANYONE, attempt=1, identity={"a": object()}),
        ("identity.a must be a JSON value",),
    ),
    "outcome that is none": (
        EndAttempt(instance_id=ANYONE, attempt=1, outcome="vanished"),  # type: ignore[arg-type]  # wrong on purpose
        ("outcome must be one of clean",),
    ),
    "wait outcome with NUL": (EndWait(wait_id=ANYONE, outcome="a\0"), ("outcome must not contain NUL",)),
    "task without words": (CreateTask(task="  "), ("task must say what is to be done",)),
    "task of a wrong type": (CreateTask(task=5), ("task must be text",)),  # type: ignore[arg-type]  # wrong on purpose
    "task tags of a wrong type": (CreateTask(task="t", tags=(1,)), ("tags.0 must be text",)),  # type: ignore[arg-type]  # wrong on purpose
    "task with eleven tags": (CreateTask(task="t", tags=ELEVEN), ("tags must have at most 10",)),
    "task state of plain text": (MoveTask(task_id=ANYONE, to="running"), ("to must be TaskState.RUNNING",)),  # type: ignore[arg-type]  # wrong on purpose
    "actor with NUL": (CreateTask(task="t", by=Actor(name="a\0")), ("by.name must not contain NUL",)),
    "correlation with NUL": (
        CreateTask(task="t", by=Actor(correlation_id="a\0")),
        ("by.correlation_id must not contain NUL",),
    ),
    **MISTYPED,
}


class RefusingContract(StoreGround):
    @pytest.mark.parametrize("case", BAD)
    async def test_bad_input_is_refused_in_one_sentence_per_fault_before_anything_is_written(
        self, store: Store, case: str
    ) -> None:
        command, sentences = BAD[case]
        before, audit = await store.head(), await store.audit_head()
        with pytest.raises(ValidationError) as refused:
            await store.commit(command)
        messages = [fault.message for fault in refused.value.faults]
        assert len(messages) == len(sentences), messages
        for message, sentence in zip(sorted(messages), sorted(sentences), strict=True):
            assert sentence in message
            assert len(message) < 200
            assert message.isprintable()
        assert (await store.head(), await store.audit_head()) == (before, audit)

    async def test_what_no_check_foresaw_fails_alone(self, store: Store) -> None:
        """A program's mistake in one command must not take down those that share its commit."""

        class Broken(CreateTask):
            def apply(self, unit: Any) -> Any:
                raise ZeroDivisionError(unit)

        answers = await asyncio.gather(
            reserved(store), store.commit(Broken(task="t")), reserved(store), return_exceptions=True
        )
        assert isinstance(answers[0], AgentInstance)
        assert isinstance(answers[1], ZeroDivisionError)
        assert isinstance(answers[2], AgentInstance)
        assert len(await store.list_instances()) == 2

    async def test_what_the_database_cannot_hold_fails_alone(self, store: Store) -> None:
        class Unfit(CreateTask):
            def apply(self, unit: Any) -> Any:
                record = Definition(
                    definition_id=ANYONE,
                    name="n",
                    kind="k",
                    manifest={},
                    created_at=unit.now,
                    updated_at=unit.now,
                    version=2**70,
                )
                unit.put(Kind.DEFINITION, record)

        wishes = (reserved(store), store.commit(Unfit(task="t")), reserved(store))
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        assert isinstance(answers[0], AgentInstance)
        assert isinstance(answers[2], AgentInstance)
        assert len(await store.list_instances()) == 2

    async def test_words_from_outside_are_kept_readable(self, store: Store) -> None:
        failed = await brought_to(store, AgentState.FAILED)
        last_words = "x\0\ud800" * 100_000
        await store.commit(
            EndAttempt(instance_id=failed.instance_id, attempt=1, outcome=AttemptOutcome.ERROR, detail=last_words)
        )
        again = RestartInstance(instance_id=failed.instance_id, max_attempts=3, reason="was \0 gone \ud800")
        await store.commit(again)
        (first, _) = await store.list_attempts(failed.instance_id)
        assert first.detail is not None
        assert "\0" not in first.detail
        assert len(first.detail) < 11_000
        assert first.detail.endswith("more characters)")
        assert (await store.verify_audit(HOME)).is_sound
