"""pi: `pi --mode json -p`. It ends with exit code 0 also when it has failed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from ostler.drivers.base import (
    Driver,
    Limit,
    Order,
    Reader,
    Tokens,
    first_words,
    number,
    tool_words,
    whole,
)

#: Loaded into pi before its own code: it keeps pi from repeating all that was said with every word.
QUIET = Path(__file__).with_name("pi_quiet.mjs")
#: The name of the model server that variables of the spawn name.
_PROVIDER = "ostler"
_DEFAULT_MODEL = "default"
#: Lines that repeat what others say; most of the output of a pi that could not be quietened.
_REPEATS = ('{"type":"message_update"', '{"type":"tool_execution_update"')
_MINUTES = re.compile(r"in ~?(\d+) min", re.IGNORECASE)


class PiReader(Reader):
    usage_words: ClassVar[re.Pattern[str]] = re.compile(r"usage limit|quota|billing|credit", re.IGNORECASE)
    rate_words: ClassVar[re.Pattern[str]] = re.compile(r"\b429\b|rate.?limit|too many requests", re.IGNORECASE)

    def feed(self, line: str) -> list[Any]:
        return [] if line.startswith(_REPEATS) else super().feed(line)

    def _read(self, data: Mapping[str, Any]) -> None:
        match data.get("type"):
            case "session":
                self.session = data.get("id") or self.session
            case "turn_start":
                self.turns += 1
                self.is_complete = False
            case "message_end" if _is_assistant(data.get("message")):
                self._read_message(data["message"])
            case "tool_execution_start":
                self._does(tool_words(str(data.get("toolName")), data.get("args")))
            case "auto_retry_start":
                self._does(f"tries again: {data.get('errorMessage')}")
            case "auto_retry_end" if not data.get("success"):
                self._fails_with_words(str(data.get("finalError")))
            case "agent_end":
                self.is_complete = True

    def _read_message(self, message: Mapping[str, Any]) -> None:
        self._says(_text_of(message))
        usage = message.get("usage")
        if isinstance(usage, Mapping):
            fresh, cached, written, output = (
                whole(usage.get(name)) for name in ("input", "cacheRead", "cacheWrite", "output")
            )
            self.tokens += Tokens(input=fresh + cached + written, output=output, cached=cached)
            cost = usage.get("cost")
            total = number(cost.get("total")) if isinstance(cost, Mapping) else 0.0
            self.cost_usd = (self.cost_usd or 0.0) + total
        if message.get("stopReason") in {"error", "aborted"}:
            self._fails_with_words(str(message.get("errorMessage") or message.get("stopReason")))
            self.was_interrupted = message.get("stopReason") == "aborted"
        else:
            self.error = self.limit = None

    def _retry_at(self, limit: Limit, now: datetime) -> datetime | None:
        minutes = _MINUTES.search(self.error or "")
        return limit.retry_at if minutes is None else now + timedelta(minutes=int(minutes[1]))


class Pi(Driver):
    name: ClassVar[str] = "pi"
    install: ClassVar[str] = "npm install -g @mariozechner/pi-coding-agent"
    variables: ClassVar[tuple[str, ...]] = (
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_OAUTH_TOKEN",
        "GEMINI_API_KEY",
        "GROQ_API_KEY",
        "MISTRAL_API_KEY",
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "OPENAI_MODEL",
        "OPENROUTER_API_KEY",
        "PI_CODING_AGENT_DIR",
        "PI_OFFLINE",
        "PI_TELEMETRY",
        "XAI_API_KEY",
    )
    places: ClassVar[tuple[str, ...]] = ("PI_CODING_AGENT_DIR",)
    reader_class: ClassVar[type[Reader]] = PiReader

    def argv(self, order: Order) -> list[str]:
        words = [order.program, "--mode", "json", "-p", *_model_words(order)]
        if order.session is not None:
            words += ["--session", order.session]
        return [*words, *order.arguments]

    def session_argv(self, order: Order) -> list[str]:
        return [order.program, *_model_words(order), "--session", order.session or ""]

    def environment(self, order: Order) -> dict[str, str]:
        before = order.env.get("NODE_OPTIONS")
        return {"NODE_OPTIONS": f"{before} {_preload()}" if before else _preload()}

    def home_files(self, order: Order) -> dict[str, str]:
        if not _has_other_server(order):
            return {}
        model = {"id": _model(order), "name": _model(order), "contextWindow": 200_000, "maxTokens": 32_000}
        provider = {
            "baseUrl": order.env["OPENAI_BASE_URL"],
            "api": "openai-completions",
            "apiKey": "OPENAI_API_KEY",  # the name of the variable
            "models": [model],
        }
        return {".pi/agent/models.json": json.dumps({"providers": {_PROVIDER: provider}}, indent=2)}

    def render(self, line: str) -> str | None:
        return None if line.startswith(_REPEATS) else super().render(line)

    def _render(self, data: Mapping[str, Any]) -> str | None:
        match data.get("type"):
            case "message_end":
                message = data.get("message")
                return _text_of(message) or None if _is_assistant(message) else None
            case "tool_execution_start":
                return f"• {tool_words(str(data.get('toolName')), data.get('args'))}"
            case "tool_execution_end" if data.get("isError"):
                return f"  ! {first_words(_text_of(data.get('result')))}"
            case "auto_retry_start":
                seconds = number(data.get("delayMs")) / 1000
                return f"! tries again in {seconds:.0f} s: {data.get('errorMessage')}"
            case "auto_retry_end" if not data.get("success"):
                return f"! {data.get('finalError')}"
        return None


def _model_words(order: Order) -> list[str]:
    if _has_other_server(order):
        return ["--provider", _PROVIDER, "--model", _model(order)]
    return [] if order.model is None else ["--model", order.model]


def _has_other_server(order: Order) -> bool:
    """Where its models are is written in its home, so only a private one can name another server."""
    return order.private_home is not None and bool(order.env.get("OPENAI_BASE_URL"))


def _model(order: Order) -> str:
    return order.model or order.env.get("OPENAI_MODEL") or _DEFAULT_MODEL


def _preload() -> str:
    return f"--import={QUIET.as_uri()}"


def _is_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _text_of(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else []
    texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return "\n".join(texts).strip()
