"""`ostler top` over a daemon: what its lists show, that they are live, and what each key does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_served import serving
from tasks_ground import FILES, until_async
from textual.pilot import Pilot
from textual.widgets import Label, RichLog
from workdirs_ground import git, make_repository

import ostler
from ostler.cli.top import Reading, Rows, Top
from ostler.client.client import Client

pytestmark = pytest.mark.anyio
#: Runs the text of its task as a shell script.
WORKER = """---
lifecycle:
  driver: {command: [sh, -ec, 'eval "$1"', worker, "{prompt}"]}
---
"""


@dataclass
class Screen:
    """One user before `ostler top`, and the daemon behind it."""

    app: Top
    pilot: Pilot[None]
    client: Client
    repository: Path

    def lines(self, name: str) -> list[str]:
        rows = self.app.screen_stack[0].query_one(f"#{name}", Rows)
        return [str(option.prompt) for option in rows.options]

    async def until(self, holds: Callable[[], bool | Awaitable[bool]], told: Callable[[], object] = lambda: "") -> None:
        async def is_so() -> bool:
            await self.pilot.pause()
            answer = holds()
            return answer if isinstance(answer, bool) else await answer

        await until_async(is_so, lambda: f"{told()} {[self.lines('agents'), self.lines('tasks')]}")

    async def shows(self, name: str, *words: str) -> None:
        """Until a line of the list has all these words."""
        await self.until(lambda: any(all(word in line for word in words) for line in self.lines(name)), lambda: words)

    async def press(self, key: str) -> None:
        await self.pilot.press(key)

    async def leave(self, key: str = "escape") -> None:
        """Back to the lists."""
        await self.pilot.press(key)
        await self.until(lambda: len(self.app.screen_stack) == 1)

    async def choose(self, name: str, key: str) -> None:
        """Give the list the focus, and go to the row."""
        rows = self.app.query_one(f"#{name}", Rows)
        rows.focus()
        rows.highlighted = next(place for place, line in enumerate(self.lines(name)) if key in line)
        await self.until(lambda: self.app.focused is rows and rows.chosen is not None)

    async def reads(self, *words: str) -> None:
        """Until a text over the lists has all these words."""

        def text() -> str:
            match self.app.screen:
                case Reading() as screen:
                    shown: Any = screen.shown
                    return f"{screen.heading}\n{getattr(shown, 'code', shown)}"
                case screen if screen.query(RichLog):
                    return "\n".join(line.text for line in screen.query_one(RichLog).lines)
                case screen:
                    return "\n".join(str(label.content) for label in screen.query(Label))

        await self.until(lambda: all(word in text() for word in words), lambda: (words, text()))

    async def state(self, name: str) -> str:
        return (await self.client.instance(name)).state

    async def start(self, name: str, script: str = "echo begun; exec sleep 600") -> None:
        options = ostler.AgentSpawnOptions(name=name)
        await self.client.spawn(command=["sh", "-c", script], options=options, job="")

    async def add(self, script: str, key: str) -> None:
        new_task = {"task": script, "agent": "worker", "near": str(self.repository), "key": key}
        await self.client.call("add_task", new_task=new_task)


@asynccontextmanager
async def looking(folder: Path) -> AsyncIterator[Screen]:
    repository = make_repository(folder / "project", FILES)
    home = repository / ".ostler"
    (repository / ".git" / "info" / "exclude").write_text(".ostler\n")
    (home / "agents").mkdir(parents=True)
    (home / "agents" / "worker.md").write_text(WORKER)
    async with serving(home), Client(home) as client:
        app = Top(client)
        async with app.run_test(size=(100, 30)) as pilot:
            yield Screen(app, pilot, client, repository)


@pytest.fixture
async def screen(tmp_path: Path) -> AsyncIterator[Screen]:
    async with looking(tmp_path) as screen:
        yield screen


async def test_agents_come_and_go_and_the_chosen_row_stays_chosen(screen: Screen) -> None:
    await screen.start("first")
    await screen.shows("agents", "first", "processing")
    await screen.choose("agents", "first")
    await screen.start("second")
    await screen.shows("agents", "second", "processing")
    rows = screen.app.query_one("#agents", Rows)
    assert rows.chosen is not None
    assert rows.chosen["name"] == "first"
    assert "second" in screen.lines("agents")[0], "the newest is on top"
    await screen.client.terminate("second")
    await screen.until(lambda: len(screen.lines("agents")) == 1)
    assert rows.chosen["name"] == "first"


async def test_a_line_says_that_no_daemon_answers_until_one_does(tmp_path: Path) -> None:
    home = tmp_path / "project" / ".ostler"
    home.mkdir(parents=True)
    async with Client(home) as client, Top(client).run_test(size=(100, 30)) as pilot:
        screen = Screen(pilot.app, pilot, client, tmp_path)  # type: ignore[arg-type]

        def status() -> str:
            return str(pilot.app.query_one("#status", Label).content)

        async with serving(home):
            await screen.until(lambda: "nothing needs you" in status(), status)
        await screen.until(lambda: "these are the last rows" in status(), status)
        assert status().startswith("no daemon answers since ")
        async with serving(home):
            await screen.until(lambda: "nothing needs you" in status(), status)


async def test_keys_on_an_agent(screen: Screen) -> None:
    await screen.start("nightly")
    await screen.shows("agents", "nightly", "processing")
    await screen.choose("agents", "nightly")
    await screen.press("l")
    await screen.reads("begun")
    await screen.leave()
    await screen.press("w")
    await screen.reads("why nightly")
    await screen.leave()
    await screen.press("p")
    await screen.shows("agents", "nightly", "suspended")
    await screen.press("p")
    await screen.shows("agents", "nightly", "processing")
    await screen.press("d")  # it works on no task, which is said
    await screen.press("s")
    await screen.reads("Stop nightly?")
    await screen.leave("n")
    assert await screen.state("nightly") == "processing"
    await screen.press("s")
    await screen.reads("Stop nightly?")
    await screen.leave("y")
    await screen.until(lambda: not screen.lines("agents"))
    assert await screen.state("nightly") == "terminated"


async def test_keys_on_a_task(screen: Screen) -> None:
    await screen.add("echo four >> a.txt; echo done with it", "append")
    await screen.shows("tasks", "append", "completed", "needs review")
    await screen.choose("tasks", "append")
    await screen.reads("1 thing needs you")
    await screen.press("d")
    await screen.reads("+four")
    await screen.leave()
    await screen.press("l")
    await screen.reads("done with it", "(it has ended)")
    await screen.leave()
    await screen.press("w")
    await screen.reads("why append", "waits for your review")
    await screen.leave()
    await screen.press("a")
    await screen.reads("Accept append")
    await screen.leave("y")
    await screen.until(lambda: not screen.lines("tasks"))
    await screen.reads("nothing needs you")
    assert git(screen.repository, "show", "main:a.txt").endswith("four\n")


async def test_an_agent_of_a_task_leads_to_its_task(screen: Screen) -> None:
    await screen.add("echo four >> a.txt; exec sleep 600", "slow")
    await screen.shows("agents", "slow-1", "processing")
    await screen.shows("tasks", "slow", "running")
    await screen.choose("agents", "slow-1")
    await screen.press("d")
    await screen.reads("+four")


async def test_every_line_fits_and_follows_the_width(screen: Screen) -> None:
    await screen.start("a-name-that-goes-on-and-on-" * 4)
    await screen.shows("agents", "a-name", "processing")
    for width in (80, 60, 140):
        await screen.pilot.resize_terminal(width, 24)
        await screen.until(lambda width=width: len(screen.lines("agents")[0]) <= width - 4)  # type: ignore[misc]
        assert "processing" in screen.lines("agents")[0]


async def test_a_daemon_that_went_away_is_said_and_the_next_one_is_found(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    async with Client(home) as client:
        app = Top(client)
        async with app.run_test(size=(100, 30)) as pilot:
            screen = Screen(app, pilot, client, tmp_path)
            await screen.reads("no daemon answers")
            async with serving(home):
                await screen.start("later")
                await screen.shows("agents", "later")
            await screen.reads("no daemon answers")
