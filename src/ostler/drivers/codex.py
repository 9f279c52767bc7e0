"""Codex: `codex exec --json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from ostler.drivers.base import (
    Driver,
    Limit,
    Order,
    Reader,
    Tokens,
    clock_time,
    first_words,
    tool_words,
    whole,
)

#: The name of the model server that variables of the spawn name.
_PROVIDER = "ostler"
_SHELL = re.compile(r"""^\S*sh -l?c (['"]?)(.*)\1$""", re.DOTALL)


class CodexReader(Reader):
    usage_words: ClassVar[re.Pattern[str]] = re.compile(r"usage limit|quota|out of credits", re.IGNORECASE)

    def _read(self, data: Mapping[str, Any]) -> None:
        match data.get("type"):
            case "thread.started":
                self.session = data.get("thread_id") or self.session
            case "turn.started":
                self.turns += 1
                self.is_complete = False
            case "item.started" | "item.completed":
                self._read_item(data["item"])
            case "turn.completed":
                self.is_complete = True
                self.error = self.limit = None
                self._count(data.get("usage"))
            case "turn.failed":
                self.is_complete = True
                self._fails_with_words(str(data["error"].get("message")))
            case "error":  # another try may follow; `turn.failed` is its last word
                self._fails_with_words(str(data.get("message")))

    def _read_item(self, item: Mapping[str, Any]) -> None:
        match item.get("type"):
            case "agent_message":
                self._says(str(item.get("text", "")))
            case "command_execution" | "file_change" | "mcp_tool_call" | "web_search":
                self._does(_item_words(item))

    def _retry_at(self, limit: Limit, now: datetime) -> datetime | None:
        return clock_time(self.error or "", now) if limit.is_usage else None

    def _count(self, usage: Any) -> None:
        """Counted from the beginning of the session."""
        if not isinstance(usage, Mapping):
            return
        total = Tokens(
            input=whole(usage.get("input_tokens")),
            output=whole(usage.get("output_tokens")),
            cached=whole(usage.get("cached_input_tokens")),
        )
        before = self._before.tokens
        self.tokens = total - before if total.input >= before.input and total.output >= before.output else total


class Codex(Driver):
    name: ClassVar[str] = "codex"
    install: ClassVar[str] = "npm install -g @openai/codex"
    variables: ClassVar[tuple[str, ...]] = (
        "CODEX_API_KEY",
        "CODEX_HOME",
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "OPENAI_MODEL",
    )
    places: ClassVar[tuple[str, ...]] = ("CODEX_HOME",)
    reader_class: ClassVar[type[Reader]] = CodexReader

    def argv(self, order: Order) -> list[str]:
        words = [order.program, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        words += [*_model_words(order), *order.arguments]
        return [*words, "resume", order.session, "-"] if order.session is not None else [*words, "-"]

    def session_argv(self, order: Order) -> list[str]:
        return [order.program, *_model_words(order), "resume", order.session or ""]

    def _render(self, data: Mapping[str, Any]) -> str | None:
        if data.get("type") == "error":
            return f"! {data.get('message')}"
        item = data.get("item")
        if not isinstance(item, Mapping):
            return None
        begins, what = data.get("type") == "item.started", _item_words(item)
        match item.get("type"):
            case "agent_message" if not begins:
                return str(item.get("text", "")).strip() or None
            case "error":
                return f"! {item.get('message')}"
            case "command_execution" if not begins:
                code = item.get("exit_code")
                return f"  ! exit code {code}: {_last_line(item.get('aggregated_output'))}" if code else None
            case "file_change" | "web_search" if not begins:
                return f"• {what}"
            case "command_execution" | "mcp_tool_call" if begins:
                return f"• {what}"
        return None


def _model_words(order: Order) -> list[str]:
    """The model, and the server that has it."""
    address, model = order.env.get("OPENAI_BASE_URL"), order.model
    words = _other_server(address) if address else []
    if address:
        model = model or order.env.get("OPENAI_MODEL")
    return words if model is None else [*words, "--model", model]


def _other_server(address: str) -> list[str]:
    """The settings for a model server that is not OpenAI's own; it looks up no other name then."""
    provider = {
        "name": json.dumps(_PROVIDER),
        "base_url": json.dumps(address),
        "wire_api": '"responses"',
        "env_key": '"OPENAI_API_KEY"',
        "supports_websockets": "false",
    }
    settings = {
        **{f"model_providers.{_PROVIDER}.{key}": value for key, value in provider.items()},
        "model_provider": json.dumps(_PROVIDER),
        "check_for_update_on_startup": "false",
        "analytics.enabled": "false",
    }
    words = ["--disable", "plugins", "--disable", "apps"]
    for key, value in settings.items():
        words += ["-c", f"{key}={value}"]
    return words


def _item_words(item: Mapping[str, Any]) -> str:
    """What an item is about, in a few words."""
    match item.get("type"):
        case "command_execution":
            command = str(item.get("command", ""))
            match = _SHELL.match(command)
            return f"shell: {first_words(match[2] if match else command)}"
        case "file_change":
            changes = item.get("changes")
            paths = (
                [str(change.get("path")) for change in changes if isinstance(change, Mapping)]
                if isinstance(changes, list)
                else []
            )
            return first_words(f"edit: {', '.join(paths)}")
        case "mcp_tool_call":
            return tool_words(f"{item.get('server')}.{item.get('tool')}", item.get("arguments"))
        case "web_search":
            return first_words(f"search: {item.get('query')}")
    return str(item.get("type"))


def _last_line(output: Any) -> str:
    lines = str(output or "").strip().splitlines()
    return first_words(lines[-1]) if lines else "no output"
