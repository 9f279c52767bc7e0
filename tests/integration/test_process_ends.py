"""How a start ended, as it is recorded: by what the agent itself said, also where it never became ready. And what it
has of its program while it lives.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from end_agents import Quitter
from promise_ground import Fleet, opened

from ostler import (
    AgentErrorEvent,
    AgentGoneError,
    AgentInitializationError,
    AgentSpawnOptions,
    AgentState,
    AttemptOutcome,
    CommandSpec,
    IsolationLevel,
    ResourceLimits,
    SpawnRequest,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def fleet(home: Path) -> AsyncIterator[Fleet]:
    async with opened(home) as found:
        found.definition = found.manager.registry.register(Quitter, name="quitter").id
        yield found


async def last_error(fleet: Fleet) -> AgentErrorEvent:
    return [event for event in await fleet.manager.list_events() if isinstance(event, AgentErrorEvent)][-1]


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("system", "SystemExit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("strange", "end_agents.Strange", "Strange: unheard of"),
        ("task", "SystemExit", "SystemExit: 3"),
        ("loop", None, "the agent stopped the loop on which it lives"),
    ],
)
async def test_what_an_agent_said_of_its_end_is_its_outcome(
    fleet: Fleet, how: str, kind: str | None, text: str
) -> None:
    one = await fleet.spawn()
    with pytest.raises(AgentGoneError, match=text):
        await fleet.manager.process(one.instance_id, how)
    await fleet.comes_to(one, AgentState.FAILED)
    assert await fleet.outcome(one) == (AttemptOutcome.ERROR, text)
    told = await last_error(fleet)
    assert (told.exception_type, bool(told.stack_trace)) == (kind, kind is not None)


@pytest.mark.parametrize(
    ("how", "outcome", "text", "kind"),
    [
        ("code", AttemptOutcome.EXIT_CODE, "exit code 3", None),
        ("signal", AttemptOutcome.SIGNAL, "killed by SIGSEGV", None),
        ("memory", AttemptOutcome.OOM, "it used more memory than its limit of 64 MB", None),
        ("system", AttemptOutcome.ERROR, "SystemExit: 3", "SystemExit"),
        ("error", AttemptOutcome.ERROR, "ValueError: no", "ValueError"),
    ],
)
async def test_a_death_before_it_was_ready_is_told_for_what_it_was(
    fleet: Fleet, how: str, outcome: AttemptOutcome, text: str, kind: str | None
) -> None:
    options = AgentSpawnOptions(
        isolation_level=IsolationLevel.PROCESS, resource_limits=ResourceLimits(max_memory_mb=64)
    )
    request = SpawnRequest(agent_definition_id=fleet.definition, options=options, context={"how": how})
    with pytest.raises(AgentInitializationError, match=text):
        await fleet.manager.spawn(request)
    told = await last_error(fleet)
    assert (told.exception_type, bool(told.stack_trace)) == (kind, kind is not None)
    assert told.instance_id is not None
    attempts = await fleet.manager.get_attempts(told.instance_id)
    assert (attempts[0].outcome, text in (attempts[0].detail or "")) == (outcome, True)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


async def test_what_it_writes_has_the_rights_that_the_program_gives(fleet: Fleet, umask: Callable[[int], int]) -> None:
    """At its first start, from a template, and in a run of a command."""
    for wanted in (0o022, 0o002, 0o027):
        umask(wanted)
        one = await fleet.spawn()
        assert await fleet.manager.process(one.instance_id, "umask") == wanted
    command = fleet.manager.registry.register(CommandSpec(argv=("sh", "-c", "umask")), name="command")
    two = await fleet.spawn(command.id)
    assert (await fleet.manager.process(two.instance_id, ""))["output"].strip() == "0027"
    (log,) = (fleet.home / "logs" / str(two.instance_id)).glob("*.log")
    assert log.stat().st_mode & 0o777 == 0o600
