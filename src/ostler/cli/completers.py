"""What completion offers for a word: names, keys and values as they are in the home now.

It is asked at every press of a key: it never starts a daemon, waits for one no longer than a second, and is silent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from ostler.cli.common import ADDRESS_VARIABLE, ENDED, present_directory
from ostler.cli.output import plain
from ostler.client.blocking import BlockingClient
from ostler.home import TOKEN_VARIABLE, chosen_home

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]
#: The variable in which the scripts of the shells pass the words on.
COMPLETE_VARIABLE = "_OSTLER_COMPLETE"
_SECONDS = 1.0
_MOST = 500
#: One word in every shell; a colon would break it in bash, and divides a value from its help in zsh.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+/~-]*")


def _ask(ctx: click.Context, verb: str, **parameters: Any) -> list[dict[str, Any]]:
    """The answer of the daemon that runs; nothing where none does."""
    try:
        home = chosen_home(ctx.find_root().params.get("home"))
        address, token = os.environ.get(ADDRESS_VARIABLE), os.environ.get(TOKEN_VARIABLE)
        client = BlockingClient(home, address=address, token=token, directory=present_directory())
        reply: list[dict[str, Any]] = client.call(verb, within=_SECONDS, **parameters)
    except Exception:  # noqa: BLE001 - whatever it is, it must not be written into a half typed line
        return []
    return reply


def _items(
    ctx: click.Context, parameter: click.Parameter, incomplete: str, values: Iterable[tuple[str, str]]
) -> list[CompletionItem]:
    """Values with their help: those that go on as the word begins, and are not on the line already."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - only for completion

    present = ctx.params.get(parameter.name or "")
    taken = set(present) if isinstance(present, tuple) else set()
    return [
        CompletionItem(value, help=plain(" ".join(text.split())) or None)
        for value, text in dict(values).items()
        if value.startswith(incomplete) and value not in taken and _WORD.fullmatch(value)
    ]


def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shell completes paths itself."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - only for completion

    del ctx, parameter
    return [CompletionItem(incomplete, type="file")]


def values(*words: str) -> Completer:
    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _items(ctx, parameter, incomplete, ((word, "") for word in words))

    return complete


# --- agents ------------------------------------------------------------------------------------------


def agents(*states: str, ended: bool | None = None) -> Completer:
    """Names of agents in these states; with `ended` only those that have ended, or only those that have not."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _items(ctx, parameter, incomplete, _agents(ctx, incomplete, states, ended))

    return complete


def _agents(
    ctx: click.Context, incomplete: str, states: tuple[str, ...] = (), ended: bool | None = None
) -> Iterable[tuple[str, str]]:
    filters: dict[str, Any] = {"include_terminated": ended is not False, "include_restarting": True, "limit": _MOST}
    if _WORD.fullmatch(incomplete):  # else there may be more than are asked for
        filters["name_pattern"] = f"{incomplete}*"
    for agent in _ask(ctx, "instances", **filters):
        is_meant = not states or agent["state"] in states
        if is_meant and ended in {None, agent["state"] in ENDED}:
            name = str(agent["name"] or "")
            yield name if _WORD.fullmatch(name) else str(agent["instance_id"]), str(agent["state"])


def definitions(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Agents that can be run by name."""
    pairs = ((str(known["name"]), str(known["description"] or "")) for known in _ask(ctx, "definitions"))
    return _items(ctx, parameter, incomplete, pairs)


def words_to_run(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """An agent as the first word; after it, and for a command, the shell completes paths."""
    if ctx.params.get(parameter.name or ""):
        return files(ctx, parameter, incomplete)
    return definitions(ctx, parameter, incomplete) or files(ctx, parameter, incomplete)


def tags(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Tags of agents and tasks."""
    agents = _ask(ctx, "instances", limit=_MOST)
    tasks = _ask(ctx, "tasks", limit=_MOST)
    lists = [*(agent["spawn_options"].get("tags") or () for agent in agents), *(task["tags"] for task in tasks)]
    return _items(ctx, parameter, incomplete, ((tag, "") for group in lists for tag in group))


# --- tasks -------------------------------------------------------------------------------------------


def tasks(*states: str) -> Completer:
    """Keys of tasks in these states, or of all."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _items(ctx, parameter, incomplete, _tasks(ctx, states))

    return complete


def _tasks(ctx: click.Context, states: tuple[str, ...] = ()) -> Iterable[tuple[str, str]]:
    state = states[0] if len(states) == 1 else None
    for task in _ask(ctx, "tasks", state=state, include_finished=not states or "accepted" in states, limit=_MOST):
        if not states or task["state"] in states:
            yield str(task["key"]), f"{task['state']}: {task['title']}"


def agents_and_tasks(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _items(ctx, parameter, incomplete, [*_tasks(ctx), *_agents(ctx, incomplete)])


def pull_requests(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    pairs = ((str(pull["number"]), str(pull["title"])) for pull in _ask(ctx, "pull_requests", include_ended=False))
    return _items(ctx, parameter, incomplete, pairs)


# --- the rest ----------------------------------------------------------------------------------------


def crews(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    pairs = ((str(crew["name"]), str(crew["agent"])) for crew in _ask(ctx, "crews"))
    return _items(ctx, parameter, incomplete, pairs)


def waiting(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Agents and tasks that wait for an answer."""
    waits = [wait for wait in _ask(ctx, "waits") if wait["kind"] not in {"backoff", "resume"}]
    names = (str(wait.get("task_key") or wait.get("instance_name") or "") for wait in waits)
    pairs = (
        (name if _WORD.fullmatch(name) else str(wait["wait_id"]), str(wait["reason"] or ""))
        for wait, name in zip(waits, names, strict=True)
    )
    return _items(ctx, parameter, incomplete, pairs)


def tokens(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    pairs = ((str(token["name"]), "") for token in _ask(ctx, "tokens") if token["revoked_at"] is None)
    return _items(ctx, parameter, incomplete, pairs)


def event_types(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ostler.model.events import EVENT_CLASSES  # noqa: PLC0415 - only for completion

    return _items(ctx, parameter, incomplete, ((name, "") for name in EVENT_CLASSES))
