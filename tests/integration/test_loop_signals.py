"""Breakpoints: what an agent writes into communications.json, and what a Python agent signals."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from loop_ground import LoopGround, entry, put, until

from ostler import Agent, AgentContext
from ostler.loop import Breakpoint, BreakpointType, LoopResultType
from ostler.loop.signals import SignalFile
from ostler.model.wait import WaitKind
from ostler.store import loops as rows

pytestmark = pytest.mark.anyio
R = LoopResultType


async def place(ground: LoopGround, key: str = "T001") -> Path:
    task = await ground.task(key)
    assert task.workdir is not None
    return Path(task.workdir["path"])


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each time that a file was read."""
    found: list[Path] = []
    read = SignalFile.read

    def counted(file: SignalFile) -> dict[str, object]:
        found.append(file.path)
        return read(file)

    monkeypatch.setattr(SignalFile, "read", counted)
    return found


async def looked_again(looks: list[Path], times: int) -> None:
    seen = len(looks)
    await until(lambda: len(looks) >= seen + times)


async def test_004_026_the_file_has_exactly_the_form_of_the_seed(loop_ground: LoopGround) -> None:
    written = {
        "agent-T001": {
            "lifecycle_state": "complete",
            "breakpoint": {"type": "task_complete", "task_id": "T001", "summary": "Implemented calculator API"},
        }
    }
    await loop_ground.add()
    loop_ground.steps(f"put '{json.dumps(written, indent=2)}'; hang")
    result = await loop_ground.run()
    assert (result.result_type, result.summary) == (R.TASK_COMPLETE, "Implemented calculator API")
    (iteration,) = await loop_ground.iterations()
    assert iteration.breakpoint == Breakpoint(
        type=BreakpointType.TASK_COMPLETE, task_id="T001", summary="Implemented calculator API"
    )
    assert iteration.instance_id is not None
    (event,) = await loop_ground.manager.store.read(rows.signals_of, iteration.instance_id)
    assert event.payload is not None
    assert (event.name, event.payload["origin"]) == ("task_complete", "communications.json")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ('{"lifecycle_state": "complete"}', R.TASK_COMPLETE),
        ('{"lifecycle_state": "blocked", "breakpoint": {"blocked_on": "human", "summary": "?"}}', R.BLOCKED),
        ('{"lifecycle_state": "waiting_pr", "breakpoint": {"type": "pr_created"}}', R.PR_CREATED),
        ('{"breakpoint": {"type": "task_complete", "mood": "good"}, "more": [1]}', R.TASK_COMPLETE),
        ('{"lifecycle_state": "working", "breakpoint": {"type": "task_complete"}}', R.TASK_COMPLETE),
    ],
)
async def test_004_027_states_and_types(
    loop_ground: LoopGround, caplog: pytest.LogCaptureFixture, said: str, kind: LoopResultType
) -> None:
    await loop_ground.add()
    loop_ground.steps(f"put '{{\"agent-T001\": {said}}}'")
    with caplog.at_level(logging.WARNING, "ostler.loop"):
        assert (await loop_ground.run(wait=False)).result_type is kind
    fits = "working" not in said and '"breakpoint": {"type": "task_complete", "mood"' not in said
    assert ("that counts" in caplog.text) == (not fits)


async def test_004_027_working_is_no_breakpoint(loop_ground: LoopGround, looks: list[Path]) -> None:
    await loop_ground.add(loop={"breakpoint_check_interval": "50ms"})
    loop_ground.steps("""put '{"agent-T001": {"lifecycle_state": "working"}}'; hang""")
    async with loop_ground.running() as running:
        await loop_ground.hangs()
        file = await place(loop_ground) / "communications.json"
        unusable: tuple[object, ...] = (
            entry(kind="nonsense"),
            {"agent-T001": {"lifecycle_state": "idle"}},
            {"agent-T001": {"breakpoint": {"type": "task_complete", "task_id": ["T001"]}}},
            {"agent-T001": {"breakpoint": {"type": "blocked", "blocked_on": 7}}},
            "[" * 100_000,
            [],
        )
        for written in unusable:
            put(file, written)
            await looked_again(looks, 2)
        assert not running.done(), "nothing of this can be used, and nothing breaks"
        put(file, entry())
        assert (await running).result_type is R.TASK_COMPLETE


async def test_a_completion_state_that_is_not_known_is_told_to_the_next_agent(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    loop_ground.steps(
        """put '{"agent-T001": {"lifecycle_state": "idle"}}'""",
        """put '{"agent-T001": {"breakpoint": {"type": "finished"}}}'""",
        """printf '{"agent-T001": {"lifecycle' > communications.json""",
        "complete",
    )
    assert (await loop_ground.run()).iterations == 4
    assert "lifecycle_state 'idle' is not known" in loop_ground.prompt(2)
    assert "unknown type 'finished'" in loop_ground.prompt(3)
    assert "communications.json cannot be read" in loop_ground.prompt(4)


async def test_004_031_a_half_written_file_is_read_again(loop_ground: LoopGround, looks: list[Path]) -> None:
    await loop_ground.add(loop={"breakpoint_check_interval": "50ms"})
    loop_ground.steps("hang")
    async with loop_ground.running() as running:
        await loop_ground.hangs()
        text = json.dumps(entry())
        file = await place(loop_ground) / "communications.json"
        with file.open("w") as opened:
            for part in (text[:20], text[20:60]):
                opened.write(part)
                opened.flush()
                await looked_again(looks, 2)
            assert not running.done()
            opened.write(text[60:])
        assert (await running).result_type is R.TASK_COMPLETE


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (entry("T002"), "an entry 'agent-T002'"),
        ({"agent-T001": entry("T002")["agent-T002"]}, "of the task 'T002'"),
        (entry(attempt=7), "of attempt 7; this is 1"),
    ],
)
async def test_004_031_foreign_and_stale_entries_are_refused_and_audited_once(
    loop_ground: LoopGround, looks: list[Path], written: object, told: str
) -> None:
    await loop_ground.add(loop={"breakpoint_check_interval": "50ms"})
    loop_ground.steps("hang")
    async with loop_ground.running() as running:
        await loop_ground.hangs()
        file = await place(loop_ground) / "communications.json"
        put(file, written)
        await until(loop_ground.refusals)
        put(file, json.dumps(written, indent=4))
        await looked_again(looks, 4)
        (refusal,) = await loop_ground.refusals()
        assert told in str(refusal.detail)
        assert (refusal.subject, running.done()) == ("task:T001", False)
        put(file, entry(attempt=1))
        assert (await running).result_type is R.TASK_COMPLETE


async def test_004_032_a_respawn_does_not_see_the_old_breakpoint(loop_ground: LoopGround) -> None:
    await loop_ground.add(checks=("test -f made",))
    loop_ground.steps("complete", "cat communications.json && touch $stage/saw-it; exit 0", "touch made; complete")
    assert (await loop_ground.run()).iterations == 3
    assert await loop_ground.ends() == ["check", "exit", "breakpoint"]
    assert not (loop_ground.stage / "T001" / "saw-it").exists()


async def test_004_033_the_file_is_never_part_of_the_work(loop_ground: LoopGround) -> None:
    (loop_ground.repository / "communications.json").write_text("{}\n")
    loop_ground.git("add", "--force", "communications.json")
    loop_ground.git("commit", "--quiet", "--message=as the seed has it")
    await loop_ground.add()
    commit = "git add --force --all; git -c user.name=a -c user.email=a@b commit --quiet -m mine"
    loop_ground.steps(f"touch made; complete; {commit}; complete again", key="T001")
    assert (await loop_ground.run()).result_type is R.TASK_COMPLETE
    task = await loop_ground.task()
    assert task.changed_files == ("made",)
    assert "communications" not in await loop_ground.orchestrator.diff("T001")
    await loop_ground.orchestrator.accept("T001")
    assert loop_ground.git("show", "main:communications.json") == "{}\n"
    assert loop_ground.git("log", "--format=%H", "main", "--", "communications.json").count("\n") == 1
    assert loop_ground.git("status", "--porcelain") == ""


async def test_004_033_also_where_it_is_new(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    commit = "git add --force --all; git -c user.name=a -c user.email=a@b commit --quiet -m mine"
    loop_ground.steps(f"touch made; complete; {commit}")
    await loop_ground.run()
    assert (await loop_ground.task()).changed_files == ("made",)
    await loop_ground.orchestrator.accept("T001")
    assert loop_ground.git("ls-tree", "--name-only", "main").split() == ["a.txt", "made"]
    assert loop_ground.git("log", "--format=%H", "main", "--", "communications.json") == ""


async def test_004_022_a_path_that_is_given_is_shared(loop_ground: LoopGround, looks: list[Path]) -> None:
    shared = loop_ground.folder / "communications.json"
    put(shared, {**entry("T009"), **entry("T001", summary="of an earlier night")})
    for key in ("T001", "T002"):
        await loop_ground.add(loop={"breakpoint_check_interval": "50ms"})
        loop_ground.steps("hang", key=key)
    async with (
        loop_ground.running("T001", comm_file_path=shared) as first,
        loop_ground.running("T002", comm_file_path=shared) as second,
    ):
        await loop_ground.hangs("T001")
        await loop_ground.hangs("T002")
        assert json.loads(shared.read_text()) == entry("T009"), "the old entry is cleared, that of others stays"
        put(shared, {**entry("T009"), **entry("T001", summary="of an earlier night")})
        await looked_again(looks, 4)
        assert not first.done(), "written back by another program, which had read it before"
        put(shared, {**entry("T009"), **entry("T001", summary="one"), **entry("T002", summary="two")})
        assert ((await first).summary, (await second).summary) == ("one", "two")
    assert await loop_ground.refusals() == []


async def test_the_same_words_again_count_where_the_agent_has_ended(loop_ground: LoopGround) -> None:
    shared = loop_ground.folder / "communications.json"
    await loop_ground.add(checks=("test -f made",))
    said = f"""put "$(entry complete task_complete done)" {shared}"""
    loop_ground.steps(said, f"touch made; {said}")
    assert (await loop_ground.run(comm_file_path=shared)).iterations == 2


async def test_the_file_may_be_no_file_at_all(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    loop_ground.steps(
        "mkfifo communications.json",
        "ln -s /dev/zero communications.json",
        "mkdir communications.json",
        "rm -rf communications.json; complete",
    )
    assert (await loop_ground.run()).iterations == 4
    assert await loop_ground.ends() == ["exit", "exit", "exit", "breakpoint"]


async def test_004_040_where_the_file_cannot_be_watched_it_is_polled(
    loop_ground: LoopGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise OSError("no more watches")

    monkeypatch.setattr("watchfiles.main.RustNotify", refuse)
    await loop_ground.add()
    loop_ground.steps("complete; hang")
    assert (await loop_ground.run(breakpoint_check_interval=0.05)).result_type is R.TASK_COMPLETE


async def test_a_signal_that_is_read_at_the_very_end_is_not_lost(loop_ground: LoopGround) -> None:
    """The reader is cancelled while it writes what it has read; the last look finds it."""
    task = await loop_ground.add()
    loop_ground.steps("hang")
    async with loop_ground.running():
        await loop_ground.hangs()
        task = await loop_ground.task()
        assert task.instance_id is not None
        instance = await loop_ground.manager.require_instance(task.instance_id)
        file = SignalFile(loop_ground.orchestrator.tasks, task, loop_ground.folder / "communications.json", True)
        put(file.path, entry())
        reading = asyncio.ensure_future(file.take(instance))
        store = loop_ground.manager.store
        write, begun = store.run, asyncio.Event()

        async def slowly(*values: object) -> object:
            begun.set()
            await asyncio.sleep(60)
            return await write(*values)  # type: ignore[arg-type]  # whatever it is

        store.run = slowly  # type: ignore[assignment, method-assign]  # of this test
        await begun.wait()
        reading.cancel()
        store.run = write  # type: ignore[method-assign]  # as it was
        assert await file.take(instance, has_ended=True)


# --- a Python agent ----------------------------------------------------------------------------------


class Speaker(Agent):
    async def initialize(self, context: AgentContext) -> None:
        self.context = context

    async def process(self, request: dict[str, str]) -> str:
        if "start 2" not in request["prompt"]:
            self.context.signal("blocked", {"blocked_on": ["human: which?"], "summary": "two ways"})
            await asyncio.sleep(600)
        assert self.context.workdir is not None
        (self.context.workdir / "made").touch()
        self.context.signal("complete", {"summary": "the second way"})
        return "done"


async def test_a_python_agent_signals_with_its_context(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    loop = loop_ground.loop()
    async with asyncio.timeout(60):
        found = await loop.run_agent_loop(Speaker, "T001", wait=False)
        assert (found.result_type, found.blocked_on) == (R.BLOCKED, ("human",))
        wait = await loop_ground.wait()
        assert (wait.kind, wait.reason) == (WaitKind.HUMAN, "which?")
        await loop_ground.orchestrator.answer(wait.wait_id, "the second")
        result = await loop.run_agent_loop(Speaker, "T001")
    assert (result.result_type, result.summary) == (R.TASK_COMPLETE, "the second way")
    assert (await loop_ground.task()).changed_files == ("made",)
