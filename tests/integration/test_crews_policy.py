"""Intensity, backoff and strategies of crews; settings that change, and files that are broken."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from coding_ground import Coder, require_program
from crew_ground import Ground, coder, member, opened, register, until

import ostler
from ostler import (
    AgentNotFoundError,
    AgentSpawnOptions,
    CommandSpec,
    CrewSettings,
    CrewStrategy,
    DefinitionError,
    InvalidOperationError,
    IsolationLevel,
    MemberState,
    NotFoundError,
    TaskState,
    ValidationError,
)
from ostler.definitions.project import ConfigFile
from ostler.drivers import spec_for
from ostler.policy.crew import CrewDecision, Ends, MemberEnd, backoff_of, decide_end, replaced_with
from ostler.tasks.queue import TaskQueue
from ostler.testing import ScriptedModel, run, say

pytestmark = pytest.mark.anyio
_T = TaskState
NOW = datetime(2026, 11, 17, 2, 0, tzinfo=UTC)
DONE = MemberEnd(member="coder-1", task="T1")
ERROR = MemberEnd(member="coder-1", task="T1", error="exit code 3\nmore of it")


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    async with opened(tmp_path) as ground:
        yield ground


# --- what follows from an end ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "end", "ends"),
    [
        ({}, DONE, Ends.NOTHING),
        ({}, ERROR, Ends.NOTHING),
        ({"on_done": "stop"}, DONE, Ends.MEMBER),
        ({"on_done": "shutdown"}, DONE, Ends.EVERYTHING),
        ({"on_error": "restart"}, ERROR, Ends.NOTHING),
        ({"on_error": "stop"}, ERROR, Ends.MEMBER),
        ({"on_error": "shutdown"}, ERROR, Ends.EVERYTHING),
    ],
)
async def test_each_action_ends_what_it_says(settings: dict[str, Any], end: MemberEnd, ends: Ends) -> None:
    policy = CrewSettings(agent="fixer", **settings).checked()
    assert decide_end(policy, end, (NOW,), 1, NOW).ends is ends


async def test_errors_that_are_too_many_within_the_window_end_the_crew() -> None:
    policy = CrewSettings(agent="fixer", max_errors=2, error_window=timedelta(minutes=1)).checked()
    old = NOW - timedelta(minutes=2)
    assert decide_end(policy, ERROR, (old, NOW, NOW), 1, NOW).ends is Ends.NOTHING
    found = decide_end(policy, ERROR, (NOW, NOW, NOW), 1, NOW)
    many = "3 errors within 1 min, more than 2"
    said = f"manual intervention required: {many}; at last coder-1 erred on T1: exit code 3"
    assert found == CrewDecision(ends=Ends.CREW, reason=said)


async def test_the_backoff_doubles_up_to_five_minutes() -> None:
    policy = CrewSettings(agent="fixer", backoff=timedelta(seconds=2)).checked()
    assert [backoff_of(policy, number).total_seconds() for number in (1, 2, 3, 9, 4000)] == [2, 4, 8, 300, 300]


async def test_strategies_say_who_else_begins_afresh() -> None:
    numbers = (1, 2, 3)
    assert replaced_with(CrewStrategy.ONE_FOR_ONE, 2, numbers) == ()
    assert replaced_with(CrewStrategy.ONE_FOR_ALL, 2, numbers) == (1, 3)
    assert replaced_with(CrewStrategy.REST_FOR_ONE, 2, numbers) == (3,)


@pytest.mark.parametrize(
    "settings", [{"on_done": "requeue"}, {"on_error": "retry"}, {"tasks": "all"}, {"count": -1}, {"max_errors": 0}]
)
async def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CrewSettings(agent="fixer", **settings).checked()


# --- with real agents --------------------------------------------------------------------------------


async def test_a_crew_that_errs_too_often_stops_and_says_why(ground: Ground) -> None:
    keys = [await ground.add("fail", max_failures=9) for _ in range(2)]
    async with ground.supervisor({"coder": coder(1, max_errors=3)}) as supervisor:
        await until(lambda: not supervisor.agent_types)
        (crew,) = await supervisor.list_crews()
        assert (crew.is_up, crew.members) == (False, ())
        assert str(crew.reason).startswith("manual intervention required: 4 errors within 10 min, more than 3; at last")
        assert len(await ground.instances()) == 4
        assert {(await ground.task(key)).state for key in keys} == {_T.QUEUED}
        (again,) = await supervisor.up()
        assert (again.is_up, again.reason) == (True, None)


async def test_a_member_that_erred_backs_off(ground: Ground) -> None:
    key = await ground.add("fail", max_failures=2)
    async with ground.supervisor({"coder": coder(1, backoff=timedelta(minutes=5))}) as supervisor:

        async def backs_off() -> bool:
            return member((await supervisor.list_crews())[0], "coder-1").state is MemberState.BACKOFF

        await until(backs_off)
        assert (await ground.task(key)).failures == 1
        async with asyncio.timeout(60):
            await supervisor.stop()


@pytest.mark.parametrize(
    ("strategy", "again"), [("one-for-one", set()), ("one-for-all", {1, 3}), ("rest-for-one", {3})]
)
async def test_the_others_begin_afresh_and_their_tasks_spend_nothing(
    ground: Ground, strategy: str, again: set[int]
) -> None:
    async with ground.supervisor({"coder": coder(3, strategy=strategy, backoff=timedelta(minutes=5))}) as supervisor:
        keys = []
        for text in ("gate", "gate-fail", "gate"):  # they are handed out in order
            keys.append(await ground.add(text, max_failures=9, backoff=600))  # a fresh member takes its own again
            await until(ground.begun(keys[-1]))
        before = {name: handle.instance_id for name, handle in supervisor.agents.items()}
        assert [ground.members_of(key) for key in keys] == [["coder-1"], ["coder-2"], ["coder-3"]]
        ground.let_go(keys[1])
        await until(lambda: "coder-2" not in supervisor.agents)

        def replaced() -> bool:
            live = {name: handle.instance_id for name, handle in supervisor.agents.items()}
            return len(live) == 2 and {name for name in live if live[name] != before[name]} == {
                f"coder-{number}" for number in again
            }

        await until(replaced)
        same = {name for name, handle in supervisor.agents.items() if handle.instance_id == before[name]}
        assert same == {f"coder-{number}" for number in {1, 3} - again}
        for key in (keys[0], keys[2]):
            assert (await ground.task(key)).failures == 0


async def test_a_member_that_stops_leaves_the_others(ground: Ground) -> None:
    bad = await ground.add("fail", max_failures=9)
    async with ground.supervisor({"coder": coder(2, on_error="stop")}) as supervisor:
        await until(lambda: len(ground.members_of(bad)) == 2)
        await until(lambda: not supervisor.agent_contexts)
        (crew,) = await supervisor.list_crews()
        assert [one.state for one in crew.members] == [MemberState.STOPPED] * 2
        assert crew.is_up


async def test_with_restart_on_error_the_task_is_parked_at_once(ground: Ground) -> None:
    bad, good = await ground.add("fail", max_failures=9), await ground.add("write")
    async with ground.supervisor({"coder": coder(1, on_error="restart")}):
        await ground.parked(bad)
        await ground.becomes(good, _T.COMPLETED)
    assert ground.members_of(bad) == ["coder-1"]


# --- settings ----------------------------------------------------------------------------------------


def write(ground: Ground, text: str) -> Path:
    file = ground.project / "ostler.toml"
    file.write_text(text)
    return file


async def test_every_new_member_reads_fresh_and_live_ones_keep_theirs(ground: Ground) -> None:
    write(ground, '[crew.coder]\nagent = "fixer"\nmodel = "one"\n')
    first, second = await ground.add("gate"), await ground.add("write")
    async with ground.supervisor() as supervisor:
        await until(ground.begun(first))
        write(ground, '[crew.coder]\nagent = "fixer"\nmodel = "two"\ncount = 2\n')
        ground.let_go(first)
        await ground.becomes(second, _T.COMPLETED)
        await until(lambda: len(supervisor.agent_types) == 2)
    models = [one.job["request"]["model"] for one in await ground.instances() if one.job is not None]
    assert models == ["one", "two"]


async def test_a_broken_file_keeps_the_last_good_settings_and_is_shown_with_its_line(ground: Ground) -> None:
    write(ground, '[crew.coder]\nagent = "fixer"\n')
    async with ground.supervisor() as supervisor:
        write(ground, '[crew.coder]\nagent = "fixer"\non-eror = "stop"\n')
        (crew,) = await supervisor.reload()
        assert f"{ground.project}/ostler.toml:3: crew.coder.on-eror is not known; did you mean on-error?" in str(
            crew.trouble
        )
        key = await ground.add("write")
        await ground.becomes(key, _T.COMPLETED)
        write(ground, '[crew.coder]\nagent = "fixer"\non-error = "stop"\n')
        (crew,) = await supervisor.reload()
        assert (crew.trouble, crew.on_error) == (None, "stop")


async def test_a_file_that_was_never_good_is_an_error_with_file_and_line(ground: Ground) -> None:
    write(ground, "[crew.coder]\ncount = 1\n")
    with pytest.raises(DefinitionError, match=r"ostler\.toml:1: crew\.coder\.agent"):
        await ground.supervisor().__aenter__()
    with pytest.raises(DefinitionError):
        ground.supervisor().factory.new_agent("coder-1", "fixer")
    write(ground, '[crew."../coder"]\nagent = "fixer"\n')
    with pytest.raises(DefinitionError, match=r"ostler\.toml:1: .*must be 1 to 51 letters"):
        ConfigFile(ground.project)()


async def test_get_config_is_the_file_as_it_is_now(ground: Ground) -> None:
    write(ground, '[crew.coder]\nagent = "fixer"\n')
    assert ostler.get_config(ground.project).crew["coder"].count == 1
    write(ground, '[crew.coder]\nagent = "fixer"\ncount = 12\n')
    assert ostler.get_config(ground.project).crew["coder"].count == 12
    assert ostler.get_config(ground.project) is ostler.get_config(ground.project), "it is read once for each change"


async def test_a_crew_that_is_no_longer_declared_stops(ground: Ground) -> None:
    write(ground, '[crew.coder]\nagent = "fixer"\n')
    async with ground.supervisor() as supervisor:
        write(ground, "")
        await supervisor.reload()
        await until(lambda: not supervisor.agent_types)
        with pytest.raises(NotFoundError, match="no crew is declared"):
            await supervisor.up("coder")


async def test_tasks_of_a_crew_that_is_no_longer_declared_are_free_for_the_queue_at_once(ground: Ground) -> None:
    """They used to wait for the next look, up to half a minute later."""
    write(ground, '[crew.coder]\nagent = "fixer"\n')
    supervisor = ground.supervisor()
    queue = TaskQueue(ground.tasks, selects=lambda task: not supervisor.owns(task))
    supervisor.on_settings = queue.wake
    await supervisor.open(await queue.open())
    try:
        key = await ground.add("write")
        assert supervisor.owns(await ground.task(key)), "its crew is declared, though not up"
        (ground.project / "ostler.toml").unlink()
        await ground.becomes(key, _T.COMPLETED)
        assert ground.members_of(key) == [], "no member worked on it"
    finally:
        await supervisor.close()
        await queue.close()


async def test_why_says_that_the_crew_of_a_task_is_not_up(ground: Ground) -> None:
    supervisor = ground.supervisor({"coder": coder(1)})
    await supervisor.open()
    try:
        key = await ground.add("hang")
        answer = await ground.tasks.why(key)
        assert (answer.verdict, answer.what_would_change_it) == (
            "crew coder takes it, and is not up",
            ("`ostler crew up coder` brings it up",),
        )
        assert ground.tasks.untaken(await ground.task(key)) == "; ".join((answer.verdict, *answer.what_would_change_it))
        await supervisor.up()
        await until(ground.begun(key))
        behind = await ground.tasks.why(await ground.add("write"))
        assert (behind.verdict, behind.evidence) == (
            "the only place of crew coder is taken",
            (f"crew coder works on {key}",),
        )
        await supervisor.stop()
    finally:
        await supervisor.close()


async def test_a_fault_of_ours_in_one_member_leaves_the_others_at_work(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to cancel the group of all members, without a word."""
    monkeypatch.setattr("ostler.crews.members._STORE_SECONDS", 0.01)
    async with ground.supervisor({"coder": coder(2)}) as supervisor:
        go_on = supervisor._go_on  # noqa: SLF001 - a fault is put where no caller can cause one

        async def fail_once(*_: Any) -> bool:
            monkeypatch.setattr(supervisor, "_go_on", go_on)
            raise RuntimeError("a fault")

        monkeypatch.setattr(supervisor, "_go_on", fail_once)
        keys = [await ground.add("write") for _ in range(3)]
        for key in keys:
            await ground.becomes(key, _T.COMPLETED)
        await until(lambda: len(supervisor.agent_types) == 2)
        assert "a fault" in "".join(ground.tasks.tasks.failed_background.values())


async def test_mistakes_name_the_next_step(ground: Ground) -> None:
    supervisor = ground.supervisor({"coder": coder(0), "nobody": coder(agent="fixr")})
    await supervisor.open()
    try:
        with pytest.raises(NotFoundError, match="did you mean coder"):
            await supervisor.up("codr")
        with pytest.raises(AgentNotFoundError, match="did you mean fixer"):
            await supervisor.up("nobody")
        with pytest.raises(InvalidOperationError, match="ostler crew up coder"):
            await supervisor.scale("coder", 2)
        with pytest.raises(NotFoundError, match="there are coder, nobody"):
            await supervisor.stop("zzz")
    finally:
        await supervisor.close()


async def test_the_plain_queue_leaves_tasks_of_a_crew_alone_up_or_not(ground: Ground) -> None:
    register(ground.manager, ground.stage, "other")
    ours, theirs = await ground.add("write"), await ground.add("write", agent="other")
    supervisor = ground.supervisor({"coder": coder(1)})
    queue = TaskQueue(ground.tasks, selects=lambda task: task.agent is not None and not supervisor.owns(task))
    await supervisor.open(await queue.open())
    try:
        await ground.becomes(theirs, _T.COMPLETED)
        assert (await ground.task(ours)).attempt == 0
        await supervisor.up()
        assert (await ground.becomes(ours, _T.COMPLETED)).member == "coder-1"
    finally:
        await supervisor.stop()
        await supervisor.close()
        await queue.close()


# --- the constructor of the guide --------------------------------------------------------------------


async def test_an_agent_in_python_reads_its_settings_where_it_is_made(ground: Ground) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "crews.md"
    sample = guide.read_text().split("```python\n# newcomer.py\n")[1].split("```")[0]
    (ground.project / "newcomer.py").write_text(sample)
    write(ground, '[crew.coder]\nagent = "newcomer"\nmodel = "small"\n')
    sys.path.insert(0, str(ground.project))
    try:
        module = __import__("newcomer")
        defaults = AgentSpawnOptions(isolation_level=IsolationLevel.PROCESS)
        ground.manager.registry.register(module.Newcomer, name="newcomer", defaults=defaults)
        key = await ground.add("look", agent="newcomer")
        async with ground.supervisor():
            task = await ground.becomes(key, _T.COMPLETED)
    finally:
        sys.path.remove(str(ground.project))
        sys.modules.pop("newcomer", None)
    assert task.summary == f"small in {ground.project}/.ostler/work/coder-1"


# --- a real coding agent -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["claude"])
async def test_a_real_coding_agent_is_a_member(ground: Ground, name: str) -> None:
    require_program(name)
    done = say("All is well.").using(input_tokens=200, output_tokens=30)
    async with ScriptedModel([run("echo hi > made.txt"), done, run("false"), done]) as model:
        environment = {**Coder(name, ground.stage).environment(model)}
        defaults = AgentSpawnOptions(isolation_level=IsolationLevel.PROCESS, env=environment)
        spec: CommandSpec = spec_for(name, home="private")
        ground.manager.registry.register(spec, name="real", defaults=defaults)
        keys = [await ground.add(f"Make file {number}.", agent="real") for number in (1, 2)]
        async with ground.supervisor({"coder": coder(1, agent="real", model="opus")}) as supervisor:
            first, second = [await ground.becomes(key, _T.COMPLETED) for key in keys]
            assert member((await supervisor.list_crews())[0], "coder-1").cost_usd is not None
        prompts = [request.prompt for request in model.requests]
        assert "opus" in model.requests[0].model
    assert (first.changed_files, second.changed_files) == (("made.txt",), ())
    assert (first.member, first.summary) == ("coder-1", "All is well.")
    assert first.session != second.session, "the second generation remembers nothing of the first"
    assert all("1" not in prompt for prompt in prompts[2:])
