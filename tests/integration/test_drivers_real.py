"""Real Claude Code, Codex and pi on a scripted model: they work, are limited, stopped, frozen, killed and resumed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid5

import pytest
from coding_ground import Coder, coder, kill_program, manager, marked, working
from isolation.ground import until

from ostler import AgentExecutionError, AgentGoneError, AgentLifecycleManager, UsageLimitError
from ostler.agents.command import temp_of
from ostler.testing import ScriptedModel, hang, limit, midhang, run, say, usage_limit

__all__ = ["coder", "manager"]

pytestmark = pytest.mark.anyio

#: A tool call that starts a process in the tool's own group and one in a session of its own, and waits.
KIDS = "setsid tail -f /dev/null & tail -f /dev/null & echo started > started; tail -f /dev/null"


async def test_it_edits_a_file_and_answers(coder: Coder, manager: AgentLifecycleManager) -> None:
    command = 'echo "$OSTLER_INSTANCE $OSTLER_ATTEMPT $OSTLER_WORKDIR $TMPDIR" > made.txt; test -d "$TMPDIR"'
    done = say("I made it.\nAll is well.").using(input_tokens=200, output_tokens=30, cached_tokens=50)
    async with ScriptedModel([run(command), done]) as model:
        agent = await coder.start(manager, model)
        answer = await agent.ask("Make a file.")
        assert [request.prompt.strip() for request in model.requests] == ["Make a file."] * 2
    instance, attempt, workdir, temp = (coder.place / "made.txt").read_text().split()
    assert (instance, attempt, workdir) == (str(agent.instance_id), "1", str(coder.place))
    assert is_gone(Path(temp)), "its TMPDIR went with the run"
    assert (answer["exit_code"], answer["meaning"], answer["message"]) == (0, "done", "I made it.\nAll is well.")
    assert answer["tokens"] == {"input": 300, "output": 40, "cached": 50}
    assert (answer["cost_usd"] is None) == (coder.name == "codex")
    assert answer["session"]
    assert answer["turns"] >= 1
    lines = [line.text async for line in agent.log()]
    assert lines[-1] == "I made it.\nAll is well."
    assert any(line.startswith("• ") and f": {command}"[:60] in line for line in lines)
    raw = [line.text async for line in agent.log(raw=True)]
    assert raw[-1].startswith("{")
    shown = await manager.details(await agent.record())
    assert shown["metrics_now"]["tokens_used"] == 290
    assert shown["doing"] == "All is well."


async def test_a_session_goes_on_and_is_counted_once(coder: Coder, manager: AgentLifecycleManager) -> None:
    async with ScriptedModel([say("One.").using(input_tokens=100, output_tokens=10)]) as model:
        agent = await coder.start(manager, model)
        first = await agent.ask("Begin.")
        model.set_script([say("Two.").using(input_tokens=1000, output_tokens=20, cached_tokens=400)])
        second = await agent.ask({"prompt": "Go on.", "session": first["session"]})
        messages = model.requests[-1].body.get("messages") or model.requests[-1].body["input"]
        assert "One." in str(messages), "the model is told what was said before"
        with pytest.raises(AgentExecutionError, match=f"^{coder.name} failed"):
            await agent.ask({"prompt": "Go on.", "session": "00000000-0000-0000-0000-000000000000"})
    assert second["session"] == first["session"]
    assert second["tokens"] == {"input": 1000, "output": 20, "cached": 400}
    assert second["session_usage"]["tokens"] == {"input": 1100, "output": 30, "cached": 400}
    if coder.name == "claude":
        assert second["session_usage"]["cost_usd"] == pytest.approx(first["cost_usd"] + second["cost_usd"])
    metrics = (await manager.details(await agent.record()))["metrics_now"]
    assert metrics["tokens_used"] == 110 + 620


async def test_a_rate_limit_says_when_to_come_again(coder: Coder, manager: AgentLifecycleManager) -> None:
    async with ScriptedModel([limit(retry_after=1)]) as model:
        agent = await coder.start(manager, model)
        with pytest.raises(
            UsageLimitError, match=f"^{coder.name} was refused by its model: .*[Tt]oo [Mm]any [Rr]eq"
        ) as caught:
            await agent.ask("Do it.")
        model.set_script([say("Now.")])
        assert (await agent.ask("Again."))["message"] == "Now.", "the agent itself is well"
    assert caught.value.retry_at is not None
    assert timedelta(minutes=4) < caught.value.retry_at - datetime.now(UTC) < timedelta(minutes=6)
    assert caught.value.session
    assert caught.value.answer is not None
    assert caught.value.answer["meaning"] == "limited"


async def test_a_usage_limit_says_when_it_ends(coder: Coder, manager: AgentLifecycleManager) -> None:
    resets = (datetime.now(UTC) + timedelta(hours=3)).replace(microsecond=0)
    async with ScriptedModel([usage_limit(resets_at=resets)]) as model:
        agent = await coder.start(manager, model)
        with pytest.raises(UsageLimitError) as caught:
            await agent.ask("Do it.")
    assert caught.value.retry_at is not None
    if coder.name == "pi":  # a server of this kind tells no time
        assert timedelta(minutes=50) < caught.value.retry_at - datetime.now(UTC) < timedelta(minutes=70)
    else:
        assert abs(caught.value.retry_at - resets) <= timedelta(minutes=1)


async def test_one_that_hangs_is_stopped(coder: Coder, manager: AgentLifecycleManager) -> None:
    async with ScriptedModel([hang()]) as model, working(coder, manager, model) as (agent, asking):
        assert marked(agent.instance_id)
        result = await agent.stop()
        assert result.success
        assert marked(agent.instance_id) == {}
        assert await asyncio.to_thread(model.requests[0].ended.wait, 5), "it has let go of its model"
        with pytest.raises(AgentGoneError):
            await asking


async def test_one_that_is_frozen_in_mid_word_goes_on(coder: Coder, manager: AgentLifecycleManager) -> None:
    text = "one two three four five six seven eight"
    async with ScriptedModel([say(text, seconds=1.5)]) as model, working(coder, manager, model) as (agent, asking):
        await asyncio.sleep(0.4)
        await agent.pause("freeze")
        size = sum(path.stat().st_size for path in (manager_home(manager) / "logs").rglob("*.log"))
        await asyncio.sleep(1.5)
        assert sum(path.stat().st_size for path in (manager_home(manager) / "logs").rglob("*.log")) == size
        await agent.resume()
        answer = await asking
    assert isinstance(answer, dict)
    assert answer["message"] == text


async def test_of_one_that_is_killed_nothing_lives_on(coder: Coder, manager: AgentLifecycleManager) -> None:
    async with ScriptedModel([run(KIDS), say("Done.")]) as model, working(coder, manager, model) as (agent, asking):
        await until((coder.place / "started").exists)
        await until(lambda: sum("tail -f" in line for line in marked(agent.instance_id).values()) >= 3)
        kill_program(agent.instance_id)
        with pytest.raises(AgentExecutionError, match=f"^{coder.name} was killed by SIGKILL") as caught:
            await asking
        assert marked(agent.instance_id) == {}, "also what had made itself a session of its own"
    assert caught.value.answer is not None
    assert caught.value.answer["meaning"] == "interrupted"
    assert caught.value.answer["session"]
    assert is_gone(temp_of(uuid5(UUID(str(agent.instance_id)), "1:1:work").hex)), "its TMPDIR is removed all the same"


async def test_one_that_falls_silent_is_cancelled_by_its_time(coder: Coder, manager: AgentLifecycleManager) -> None:
    async with ScriptedModel([midhang()]) as model:
        agent = await coder.start(manager, model)
        with pytest.raises(TimeoutError):
            await agent.ask("Do it.", timeout=4)
        await until(lambda: marked(agent.instance_id) == {})
        model.set_script([say("Back.")])
        assert (await agent.ask("Again."))["message"] == "Back."


def is_gone(place: Path) -> bool:
    return not place.exists()


def manager_home(manager: AgentLifecycleManager) -> Path:
    home = manager._runtime.home  # noqa: SLF001 - where its logs are
    assert home is not None
    return home
