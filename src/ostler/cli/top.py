"""`ostler top`: agents and tasks, live over the whole terminal, with a key for each thing that is done with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from rich.syntax import Syntax
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Label, OptionList, RichLog, Static
from textual.widgets.option_list import Option

from ostler.cli.agents import COLUMNS as AGENT_COLUMNS
from ostler.cli.output import cost_text, counted, plain, sentence, silence_text
from ostler.cli.table import Column, Table
from ostler.cli.tasks import COLUMNS as TASK_COLUMNS
from ostler.client.client import Client
from ostler.errors import OstlerError

#: Changes that come together are one drawing.
_TOGETHER_SECONDS = 0.2
_TICK_SECONDS = 1.0
_AGAIN_SECONDS = 1.0
#: A daemon that is silent for so long hangs.
_SILENCE_SECONDS = 4.0
_MOST_ROWS = 1000
_LOG_LINES = 500


class Rows(OptionList):
    """A table of which one row is chosen. Its lines fit, as those that commands print."""

    def __init__(self, title: str, columns: Sequence[Column], key: str, **more: Any) -> None:
        super().__init__(**more)
        self._title, self._columns, self._key = title, columns, key
        self.items: dict[str, dict[str, Any]] = {}

    def show(self, items: Sequence[dict[str, Any]]) -> None:
        """Change the lines that differ. The chosen row stays chosen, wherever it is by then."""
        self.items = {str(item[self._key]): item for item in items}
        width = max(self.content_size.width - 2, 20)
        head, *lines = (Text.from_ansi(line) for line in Table(self._columns, items, width).lines(colour=True))
        self.border_title = f"{self._title} ({len(items)})"
        self.border_subtitle = None if items else "none"
        prompts = dict(zip(self.items, lines, strict=True))
        if [option.id for option in self.options] == list(prompts):
            for option in self.options:
                if option.id is not None and option.prompt != prompts[option.id]:
                    self.replace_option_prompt(option.id, prompts[option.id])
        else:
            chosen, place = self.chosen_key, self.highlighted
            self.set_options(Option(prompt, id=key) for key, prompt in prompts.items())
            if prompts:
                at_most = len(prompts) - 1
                self.highlighted = self.get_option_index(chosen) if chosen in prompts else min(place or 0, at_most)
        self.screen.query_one(f"#{self.id}-head", Label).update(head)

    @property
    def chosen_key(self) -> str | None:
        option = self.highlighted_option
        return None if option is None else option.id

    @property
    def chosen(self) -> dict[str, Any] | None:
        return self.items.get(self.chosen_key or "")


class Reading(ModalScreen[None]):
    """A text to read, over the list."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Back")]

    def __init__(self, title: str, text: Text | Syntax) -> None:
        super().__init__()
        self.heading, self.shown = title, text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="reading") as area:
            area.border_title = self.heading
            yield Static(self.shown)
        yield Footer()


class Logs(ModalScreen[None]):
    """What an agent writes, while it writes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Back")]

    def __init__(self, title: str, lines: AsyncIterator[str]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        log = RichLog(classes="reading", max_lines=10 * _LOG_LINES, wrap=True)
        log.border_title = self._title
        yield log
        yield Footer()

    def on_mount(self) -> None:
        self._follow()

    @work
    async def _follow(self) -> None:
        log = self.query_one(RichLog)
        try:
            async for line in self._lines:
                log.write(Text(line))
        except OstlerError as error:
            log.write(Text(str(error), style="red"))
        else:
            log.write(Text("(it has ended)", style="dim"))


class Question(ModalScreen[bool]):
    """Asks before something is done that is not easily taken back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Label(Text(f"{self._question}  y / n"), id="question")
        yield Footer()


class Top(App[None]):
    """Two lists; a key acts on the chosen row of the one that has the focus."""

    CSS = """
    #status { height: 1; padding: 0 1; }
    .head { height: 1; padding: 0 1; text-style: bold; }
    Rows { height: 1fr; border: round $primary; padding: 0; scrollbar-size-vertical: 1; }
    Rows:focus { border: round $accent; }
    .reading { border: round $accent; padding: 0 1; height: 1fr; }
    Question { align: center middle; }
    #question { border: round $warning; padding: 1 3; background: $surface; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l,enter", "logs", "Logs", priority=False),
        Binding("w", "why", "Why"),
        Binding("p", "pause", "Pause/resume"),
        Binding("s", "stop", "Stop"),
        Binding("d", "diff", "Diff"),
        Binding("a", "accept", "Accept"),
        Binding("q,ctrl+c", "quit", "Quit"),
    ]

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._has_changed = asyncio.Event()
        #: Since when no daemon answers, by the monotonic clock.
        self._lost_at: float | None = None

    def compose(self) -> ComposeResult:
        yield Label("", id="status")
        with Vertical():
            yield Label("", id="agents-head", classes="head")
            living = [column for column in AGENT_COLUMNS if column.head != "EXIT"]
            yield Rows("Agents", living, "instance_id", id="agents")
            yield Label("", id="tasks-head", classes="head")
            yield Rows("Tasks", TASK_COLUMNS, "key", id="tasks")
        yield Footer()

    def on_mount(self) -> None:
        self._listen()
        self._keep_drawing()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    # --- what is shown ---------------------------------------------------------------------------

    @work
    async def _listen(self) -> None:
        """The stream goes on by itself with another daemon; where none comes it is tried again."""
        while True:
            try:
                newest = await self._client.call("events", limit=1)
                self._has_changed.set()  # what came before is fetched, what comes from now on is told
                async for _ in self._client.events(after=newest[-1]["sequence"] if newest else 0, metrics=True):
                    self._has_changed.set()
            except OstlerError:
                self._has_changed.set()
                await asyncio.sleep(_AGAIN_SECONDS)

    @work
    async def _keep_drawing(self) -> None:
        self._has_changed.set()
        while True:
            try:
                await asyncio.wait_for(self._has_changed.wait(), _TICK_SECONDS)
            except TimeoutError:
                await self._tick()
                continue
            self._has_changed.clear()
            await self._fetch()
            await asyncio.sleep(_TOGETHER_SECONDS)

    async def _fetch(self) -> None:
        client, status = self._client, self.query_one("#status", Label)
        try:
            agents = await client.call("instances", include_restarting=True, limit=_MOST_ROWS)
            tasks = await client.call("tasks", limit=_MOST_ROWS)
            totals = await client.call("status")
        except OstlerError as error:
            if await self._answers():
                status.update(Text(str(error), style="bold red"))
            self.set_timer(_AGAIN_SECONDS, self._has_changed.set)
            return
        self._lost_at = None
        need = counted(totals["inbox"], "thing") + (" needs" if totals["inbox"] == 1 else " need") + " you"
        spent = totals["tasks"]["cost_usd"]
        parts = ["ostler top", plain(totals["home"]), need if totals["inbox"] else "nothing needs you"]
        parts += [f"tasks cost {cost_text(spent)}"] if spent else []
        status.update(Text("   ".join(parts)))
        self.query_one("#agents", Rows).show(agents)
        self.query_one("#tasks", Rows).show(tasks)

    async def _tick(self) -> None:
        """The times go on. A stream that has lost its daemon is as quiet as one of a quiet daemon, so that is asked."""
        was_lost = self._lost_at is not None
        if await self._answers() and was_lost:
            self._has_changed.set()
        self._draw()

    async def _answers(self) -> bool:
        """Whether a daemon answers; where none does, a line says that the rows are old."""
        try:
            async with asyncio.timeout(_SILENCE_SECONDS):
                await self._client.call("health")
        except (OstlerError, TimeoutError):
            self._lost_at = self._lost_at or time.monotonic()
            text = silence_text(time.monotonic() - self._lost_at)
            self.query_one("#status", Label).update(Text(text, style="bold red"))
            return False
        self._lost_at = None
        return True

    def _draw(self) -> None:
        for rows in self.query(Rows):
            rows.show(list(rows.items.values()))

    # --- keys ------------------------------------------------------------------------------------

    def on_option_list_option_selected(self) -> None:
        self.action_logs()

    def _chosen(self) -> tuple[Rows, dict[str, Any]] | None:
        rows = self.focused if isinstance(self.focused, Rows) else self.query_one("#agents", Rows)
        if rows.chosen is None:
            self.notify("nothing is chosen", severity="warning")
            return None
        return rows, rows.chosen

    def _chosen_agent(self) -> tuple[str, str] | None:
        """Id and name of the chosen agent, or of the one that works on the chosen task or did last."""
        chosen = self._chosen()
        if chosen is None:
            return None
        rows, item = chosen
        if rows.id == "agents":
            return str(item["instance_id"]), plain(str(item["name"]))
        if item["instance_id"] is None:
            self.notify(f"no agent has worked on {plain(item['key'])} yet", severity="warning")
            return None
        return str(item["instance_id"]), plain(str(item["key"]))

    def _chosen_task(self) -> str | None:
        """The key of the chosen task, or of the one that the chosen agent works on."""
        chosen = self._chosen()
        if chosen is None:
            return None
        rows, item = chosen
        if rows.id == "tasks":
            return str(item["key"])
        task_id = item.get("task_id")
        tasks = self.query_one("#tasks", Rows).items.values()
        key = next((str(task["key"]) for task in tasks if task_id and task["task_id"] == task_id), None)
        if key is None:
            self.notify(f"{plain(str(item['name']))} works on no task", severity="warning")
        return key

    def action_logs(self) -> None:
        agent = self._chosen_agent()
        if agent is not None:
            instance, name = agent
            self.push_screen(Logs(f"logs of {name}", self._log_lines(instance)))

    async def _log_lines(self, instance: str) -> AsyncIterator[str]:
        async for line in self._client.logs(instance, tail=_LOG_LINES, follow=True):
            yield plain(line.text)

    async def _ask(self, verb: str, /, **parameters: Any) -> Any:
        """The answer of the daemon; None where it refused, which is shown."""
        try:
            return await self._client.call(verb, **parameters)
        except OstlerError as error:
            self.notify(sentence(str(error)), severity="error", markup=False)
            return None

    @work
    async def action_why(self) -> None:
        chosen = self._chosen()
        if chosen is None:
            return
        rows, item = chosen
        of_task = rows.id == "tasks"
        name = plain(str(item["key"] if of_task else item["name"]))
        reply = await (
            self._ask("why_task", task=item["key"]) if of_task else self._ask("why", instance=item["instance_id"])
        )
        if reply is not None:
            lines = [f"{sentence(reply['verdict'])}.", *(f"  {sentence(line)}" for line in reply["evidence"])]
            lines += [f"  → {sentence(line)}" for line in reply["what_would_change_it"]]
            self.push_screen(Reading(f"why {name}", Text("\n".join(lines))))

    @work
    async def action_pause(self) -> None:
        agent = self._chosen_agent()
        record = None if agent is None else await self._ask("instance", instance=agent[0])
        if agent is None or record is None:
            return
        instance, name = agent
        if record["state"] == "suspended":
            verb, options = "resume", {}
        else:
            depth = "freeze" if record["spawn_options"]["isolation_level"] == "process" else "hold"
            verb, options = "suspend", {"depth": depth}
        changed = await self._ask(verb, instance=instance, **options)
        if changed is not None:
            self.notify(f"{name} is {changed['state']}", markup=False)

    @work
    async def action_stop(self) -> None:
        agent = self._chosen_agent()
        if agent is None or not await self.push_screen_wait(Question(f"Stop {agent[1]}?")):
            return
        result = await self._ask("terminate", instance=agent[0], options={})
        if result is not None:
            how = "gracefully" if result["was_graceful"] else "by force"
            self.notify(f"{agent[1]} terminated {how}", markup=False)

    @work
    async def action_diff(self) -> None:
        key = self._chosen_task()
        reply = None if key is None else await self._ask("diff", task=key, paths="", stat=False)
        if key is not None and reply is not None:
            text = "\n".join(map(plain, reply["diff"].splitlines())) or f"{key} changes nothing"
            shown = Syntax(text, "diff", theme="ansi_dark", background_color="default", word_wrap=True)
            self.push_screen(Reading(f"diff of {plain(key)}", shown))

    @work
    async def action_accept(self) -> None:
        key = self._chosen_task()
        if key is None or not await self.push_screen_wait(Question(f"Accept {plain(key)} and merge its work?")):
            return
        if await self._ask("accept", task=key) is not None:
            self.notify(f"{plain(key)} is accepted; take it back with: ostler undo {plain(key)}", markup=False)


async def run_top(client: Client) -> None:
    async with client:
        await Top(client).run_async()
