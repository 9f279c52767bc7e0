"""Claude Code: `claude -p --output-format stream-json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from ostler.drivers.base import (
    MAX_MESSAGE,
    Driver,
    Limit,
    Order,
    Reader,
    SessionUsage,
    Tokens,
    first_words,
    number,
    tool_words,
    whole,
)
from ostler.model.text import clipped

_LIMITED = 429
#: Kinds of errors that end by waiting, or by paying.
_LIMITS = frozenset({"rate_limit", "billing_error", "overloaded"})


class ClaudeReader(Reader):
    def __init__(self, driver: Driver, before: SessionUsage | None, max_output_bytes: int) -> None:
        super().__init__(driver, before, max_output_bytes)
        self._seen: str | None = None
        #: Tokens that results have reported, and of the turn since then those that its messages have reported so far.
        self._reported = Tokens()
        self._since = Tokens()

    def _read(self, data: Mapping[str, Any]) -> None:
        self.session = data.get("session_id") or self.session
        match data.get("type"):
            case "assistant":
                self._read_message(data)
            case "rate_limit_event":
                self._read_limit(data.get("rate_limit_info"))
            case "system" if data.get("subtype") == "api_retry":
                self._does(f"tries again: {data.get('error')} ({data.get('error_status')})")
            case "result":
                self._read_result(data)

    def _read_message(self, data: Mapping[str, Any]) -> None:
        self.is_complete = False
        for block in _blocks(data):
            if block.get("type") == "text":
                self._says(str(block.get("text", "")))
            elif block.get("type") == "tool_use":
                self._does(tool_words(str(block.get("name")), block.get("input")))
        if data.get("error") in _LIMITS:
            is_usage = data.get("error") == "billing_error" or data.get("api_error") == "usage_limit_reached"
            self.limit = self.limit or Limit(is_usage=is_usage)
            params = data.get("api_error_params")
            self._read_limit(params.get("rate_limit_info") if isinstance(params, Mapping) else None)
        message = data["message"]
        if message.get("id") != self._seen:  # it comes once for each of its blocks
            self._seen = message.get("id")
            self._since += _tokens(message.get("usage"))
            self.tokens = self._reported + self._since

    def _read_limit(self, info: Any) -> None:
        """Also told while there is room left; only what was refused is a limit, and only one of the plan has a name."""
        if isinstance(info, Mapping) and info.get("status") == "rejected":
            resets = whole(info.get("resetsAt"))
            retry_at = datetime.fromtimestamp(resets, UTC) if resets else None
            self.limit = Limit(retry_at=retry_at, is_usage=bool(resets or info.get("rateLimitType")))

    def _read_result(self, data: Mapping[str, Any]) -> None:
        """One for each turn that it took up; the last one counts."""
        self.is_complete = True
        self.turns += whole(data.get("num_turns"))
        self._count(data)
        if not data.get("is_error") and data.get("subtype") == "success":
            self.message = clipped(str(data.get("result") or ""), MAX_MESSAGE) or self.message
            self.error = self.limit = None
            return
        self._fails(_result_error(data))
        self.was_interrupted = _was_aborted(data)
        if data.get("api_error_status") == _LIMITED:
            self.limit = self.limit or Limit()

    def _count(self, data: Mapping[str, Any]) -> None:
        """Its cost, and in older versions nothing else, counts from the beginning of the session."""
        since = data.get("model_usage_since_last_result")
        if isinstance(since, Mapping):
            models = [usage for usage in since.values() if isinstance(usage, Mapping)]
            for usage in models:
                self._reported += _tokens(usage, _CAMEL)
            self.cost_usd = (self.cost_usd or 0.0) + sum(number(usage.get("costUSD")) for usage in models)
        else:
            self._reported += _tokens(data.get("usage"))
            total, before = number(data.get("total_cost_usd")), self._before.cost_usd or 0.0
            self.cost_usd = total - before if total >= before else total
        self._since = Tokens()
        self.tokens = self._reported


_SNAKE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
_CAMEL = ("inputTokens", "cacheCreationInputTokens", "cacheReadInputTokens", "outputTokens")


def _tokens(usage: Any, names: tuple[str, str, str, str] = _SNAKE) -> Tokens:
    """Its input counts neither what was read from the cache nor what was written to it."""
    if not isinstance(usage, Mapping):
        return Tokens()
    fresh, written, cached, output = (whole(usage.get(name)) for name in names)
    return Tokens(input=fresh + written + cached, output=output, cached=cached)


class Claude(Driver):
    name: ClassVar[str] = "claude"
    install: ClassVar[str] = "npm install -g @anthropic-ai/claude-code"
    variables: ClassVar[tuple[str, ...]] = (
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_MODEL",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_VERTEX",
        "CLAUDE_CONFIG_DIR",
    )
    places: ClassVar[tuple[str, ...]] = ("CLAUDE_CONFIG_DIR",)
    reader_class: ClassVar[type[Reader]] = ClaudeReader

    def argv(self, order: Order) -> list[str]:
        words = [order.program, "-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
        if order.model is not None:
            words += ["--model", order.model]
        if order.session is not None:
            words += ["--resume", order.session]
        return [*words, *order.arguments]

    def session_argv(self, order: Order) -> list[str]:
        model = [] if order.model is None else ["--model", order.model]
        return [order.program, *model, "--resume", order.session or ""]

    def environment(self, order: Order) -> dict[str, str]:
        # As root it refuses to skip permissions unless it is told that it is contained.
        variables = {"DISABLE_AUTOUPDATER": "1", **({"IS_SANDBOX": "1"} if order.is_root else {})}
        return {name: value for name, value in variables.items() if name not in order.env}

    def _render(self, data: Mapping[str, Any]) -> str | None:
        match data.get("type"):
            case "assistant" | "user":
                return "\n".join(_rendered(data)) or None
            case "system" if data.get("subtype") == "api_retry":
                seconds = number(data.get("retry_delay_ms")) / 1000
                return f"! tries again in {seconds:.0f} s: {data.get('error')} ({data.get('error_status')})"
            case "result" if data.get("subtype") != "success":
                return f"! {_result_error(data)}"
        return None


def _blocks(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    message = data.get("message")
    content = message.get("content") if isinstance(message, Mapping) else None
    return [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []


def _rendered(data: Mapping[str, Any]) -> Iterator[str]:
    for block in _blocks(data):
        match block.get("type"):
            case "text" if data.get("type") == "assistant" and str(block.get("text", "")).strip():
                yield str(block["text"]).strip()
            case "tool_use":
                yield f"• {tool_words(str(block.get('name')), block.get('input'))}"
            case "tool_result" if block.get("is_error"):
                yield f"  ! {first_words(_plain(block.get('content')))}"


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content)


def _result_error(data: Mapping[str, Any]) -> str:
    if _was_aborted(data):
        return f"it was interrupted ({data['terminal_reason']})"
    errors = data.get("errors")
    listed = "; ".join(str(error) for error in errors) if isinstance(errors, list) else ""
    return str(data.get("result") or listed or data.get("terminal_reason") or data.get("subtype"))


def _was_aborted(data: Mapping[str, Any]) -> bool:
    return str(data.get("terminal_reason")).startswith("aborted")
