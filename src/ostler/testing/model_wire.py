"""Turns of the scripted model, and how they look on the wire: Messages, Responses and Chat Completions."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

#: A server-sent event: its name, where the protocol has one, and its data.
Event = tuple[str | None, Mapping[str, Any] | str]
Body = Mapping[str, Any]
Document = dict[str, Any]

_SHELLS = ("Bash", "exec_command", "bash", "shell", "run_shell_command", "shell_command", "run_commands")
_COMMAND_KEYS = ("command", "cmd", "commands", "script")
_WORDS = re.compile(r"\S+\s*|\s+")


class ScriptError(Exception):
    """The script does not fit the request; the program is told so."""


class TurnKind(StrEnum):
    SAY = "say"
    RUN = "run"
    LIMIT = "limit"
    USAGE_LIMIT = "usage_limit"
    HANG = "hang"
    MIDHANG = "midhang"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What the model does with one request. Make one with `say`, `run` and their like."""

    kind: TurnKind
    #: What is said, or the command line that is to be run.
    text: str = ""
    #: How long the answer takes to stream.
    seconds: float = 0.0
    #: Of a limit, in seconds.
    retry_after: float = 1.0
    #: Of a usage limit.
    resets_at: datetime | None = None
    input_tokens: int = 100
    output_tokens: int = 10
    cached_tokens: int = 0

    def using(self, *, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> Turn:
        """The same turn with other token counts."""
        return replace(self, input_tokens=input_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)


class Wire(Protocol):
    """One protocol."""

    #: So many events come before and with the first word.
    FIRST_WORD: ClassVar[int]

    def read(self, body: Body) -> tuple[str, tuple[str, ...]]:
        """The last text of the user, and what tools have answered since."""
        ...

    def events(self, turn: Turn, body: Body) -> list[Event]: ...
    def whole(self, turn: Turn, body: Body) -> Document:
        """The same for a request that does not stream."""
        ...

    def limit(self) -> Document: ...
    def usage_limit(self, turn: Turn) -> tuple[int, Document, Mapping[str, str]]: ...


def shell_call(tools: Sequence[tuple[str, Mapping[str, Any]]], command: str) -> tuple[str, Document]:
    """The name and the arguments of the shell tool among those of the request."""
    schemas = dict(tools)
    name = next((shell for shell in _SHELLS if shell in schemas), None)
    if name is None:
        name = next((tool for tool, schema in tools if _command_key(schema) is not None), None)
    if name is None:
        raise ScriptError(f"the request offers no shell tool, only {sorted(schemas)}; use say() instead of run()")
    schema = schemas[name]
    key = _command_key(schema) or _COMMAND_KEYS[0]
    properties = schema.get("properties") or {}
    is_list = (properties.get(key) or {}).get("type") == "array"
    value: Any = command if not is_list else ["sh", "-c", command] if key == "command" else [command]
    filled = {required: _filler(properties.get(required) or {}) for required in schema.get("required") or ()}
    return name, {**filled, key: value}


def _command_key(schema: Mapping[str, Any]) -> str | None:
    return next((key for key in _COMMAND_KEYS if key in (schema.get("properties") or {})), None)


def _filler(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    fillers = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    return fillers.get(str(schema.get("type")), "scripted")


def _pieces(text: str) -> list[str]:
    return _WORDS.findall(text) or [""]


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:12]}"


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping) and "text" in part)


def _is_run(turn: Turn) -> bool:
    return turn.kind is TurnKind.RUN


def _since(turn: Turn) -> int:
    return int((turn.resets_at or datetime.now(UTC)).timestamp())


class _Messages:
    FIRST_WORD: ClassVar[int] = 3

    def read(self, body: Body) -> tuple[str, tuple[str, ...]]:
        prompt, results = "", list[str]()
        for message in body.get("messages") or ():
            if message.get("role") != "user":
                continue
            blocks = message.get("content")
            blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks or []
            for block in blocks:
                if block.get("type") == "tool_result":
                    results.append(_text_of(block.get("content")))
                elif block.get("type") == "text":
                    prompt, results = block["text"], []
        return prompt, tuple(results)

    def _blocks(self, turn: Turn, body: Body) -> list[Document]:
        if not _is_run(turn):
            return [{"type": "text", "text": turn.text}]
        tools = [(tool["name"], tool.get("input_schema") or {}) for tool in body.get("tools") or () if "name" in tool]
        name, arguments = shell_call(tools, turn.text)
        return [{"type": "tool_use", "id": _id("toolu"), "name": name, "input": arguments}]

    def _message(self, turn: Turn, body: Body) -> Document:
        used = turn.input_tokens - turn.cached_tokens
        return {
            "id": _id("msg"),
            "type": "message",
            "role": "assistant",
            "model": body.get("model"),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": used,
                "cache_read_input_tokens": turn.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": 1,
            },
        }

    def events(self, turn: Turn, body: Body) -> list[Event]:
        return [(str(data["type"]), data) for data in self._data(turn, body)]

    def _data(self, turn: Turn, body: Body) -> Iterator[Document]:
        yield {"type": "message_start", "message": self._message(turn, body)}
        (block,) = self._blocks(turn, body)
        if _is_run(turn):
            yield {"type": "content_block_start", "index": 0, "content_block": {**block, "input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}
        else:
            yield {"type": "content_block_start", "index": 0, "content_block": {**block, "text": ""}}
            for piece in _pieces(turn.text):
                yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
        yield {"type": "content_block_stop", "index": 0}
        reason = "tool_use" if _is_run(turn) else "end_turn"
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": turn.output_tokens},
        }
        yield {"type": "message_stop"}

    def whole(self, turn: Turn, body: Body) -> Document:
        message = self._message(turn, body)
        usage = {**message["usage"], "output_tokens": turn.output_tokens}
        reason = "tool_use" if _is_run(turn) else "end_turn"
        return {**message, "content": self._blocks(turn, body), "stop_reason": reason, "usage": usage}

    def limit(self) -> Document:
        return {"type": "error", "error": {"type": "rate_limit_error", "message": "Too many requests"}}

    def usage_limit(self, turn: Turn) -> tuple[int, Document, Mapping[str, str]]:
        headers = {
            "anthropic-ratelimit-unified-status": "rejected",
            "anthropic-ratelimit-unified-reset": str(_since(turn)),
            "anthropic-ratelimit-unified-representative-claim": "five_hour",
        }
        error = {"type": "rate_limit_error", "message": "This request would exceed your account's rate limit."}
        return 429, {"type": "error", "error": error}, headers


class _Responses:
    FIRST_WORD: ClassVar[int] = 3

    def read(self, body: Body) -> tuple[str, tuple[str, ...]]:
        given = body.get("input")
        if isinstance(given, str):
            return given, ()
        prompt, results = "", list[str]()
        for item in given or ():
            if item.get("type") == "function_call_output":
                output = item.get("output")
                results.append(output if isinstance(output, str) else _text_of(output) or json.dumps(output))
            elif item.get("role") == "user":
                prompt, results = _text_of(item.get("content")), []
        return prompt, tuple(results)

    def _item(self, turn: Turn, body: Body) -> Document:
        if not _is_run(turn):
            content = [{"type": "output_text", "text": turn.text, "annotations": []}]
            return {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed", "content": content}
        tools = [(tool["name"], tool.get("parameters") or {}) for tool in body.get("tools") or () if "name" in tool]
        name, arguments = shell_call(tools, turn.text)
        return {
            "type": "function_call",
            "id": _id("fc"),
            "call_id": _id("call"),
            "name": name,
            "arguments": json.dumps(arguments),
            "status": "completed",
        }

    def whole(self, turn: Turn, body: Body) -> Document:
        return self._response(turn, body, self._item(turn, body))

    def _response(self, turn: Turn, body: Body, item: Document) -> Document:
        return {
            "id": _id("resp"),
            "object": "response",
            "created_at": 0,
            "model": body.get("model"),
            "status": "completed",
            "output": [item],
            "usage": {
                "input_tokens": turn.input_tokens,
                "input_tokens_details": {"cached_tokens": turn.cached_tokens},
                "output_tokens": turn.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.input_tokens + turn.output_tokens,
            },
        }

    def events(self, turn: Turn, body: Body) -> list[Event]:
        return [(str(data["type"]), {**data, "sequence_number": n}) for n, data in enumerate(self._data(turn, body))]

    def _data(self, turn: Turn, body: Body) -> Iterator[Document]:
        item = self._item(turn, body)
        done = self._response(turn, body, item)
        yield {"type": "response.created", "response": {**done, "status": "in_progress", "output": [], "usage": None}}
        empty: Document = {"arguments": ""} if _is_run(turn) else {"content": []}
        begun = {**item, "status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": 0, "item": begun}
        for piece in [] if _is_run(turn) else _pieces(turn.text):
            place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
            yield {"type": "response.output_text.delta", **place, "delta": piece}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        yield {"type": "response.completed", "response": done}

    def limit(self) -> Document:
        return {"error": {"message": "Too many requests", "type": "requests", "code": "rate_limit_exceeded"}}

    def usage_limit(self, turn: Turn) -> tuple[int, Document, Mapping[str, str]]:
        left = max(_since(turn) - int(datetime.now(UTC).timestamp()), 0)
        error = {
            "type": "usage_limit_reached",
            "message": "The usage limit has been reached",
            "plan_type": "plus",
            "resets_at": _since(turn),
            "resets_in_seconds": left,
        }
        return 429, {"error": error}, {}


class _Chat:
    FIRST_WORD: ClassVar[int] = 2

    def read(self, body: Body) -> tuple[str, tuple[str, ...]]:
        prompt, results = "", list[str]()
        for message in body.get("messages") or ():
            if message.get("role") == "tool":
                results.append(_text_of(message.get("content")))
            elif message.get("role") == "user":
                prompt, results = _text_of(message.get("content")), []
        return prompt, tuple(results)

    def _message(self, turn: Turn, body: Body) -> Document:
        if not _is_run(turn):
            return {"role": "assistant", "content": turn.text}
        functions = [tool.get("function") or {} for tool in body.get("tools") or ()]
        name, arguments = shell_call(
            [(function["name"], function.get("parameters") or {}) for function in functions], turn.text
        )
        call = {"id": _id("call"), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def _usage(self, turn: Turn) -> Document:
        return {
            "prompt_tokens": turn.input_tokens,
            "completion_tokens": turn.output_tokens,
            "total_tokens": turn.input_tokens + turn.output_tokens,
            "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
        }

    def _reason(self, turn: Turn) -> str:
        return "tool_calls" if _is_run(turn) else "stop"

    def events(self, turn: Turn, body: Body) -> list[Event]:
        return [*((None, chunk) for chunk in self._chunks(turn, body)), (None, "[DONE]")]

    def _chunks(self, turn: Turn, body: Body) -> Iterator[Document]:
        chunk = {"id": _id("chatcmpl"), "object": "chat.completion.chunk", "created": 0, "model": body.get("model")}

        def choice(delta: Document, reason: str | None = None) -> Document:
            return {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

        message = self._message(turn, body)
        yield choice({"role": "assistant", "content": ""})
        if _is_run(turn):
            yield choice({"tool_calls": [{"index": 0, **message["tool_calls"][0]}]})
        else:
            for piece in _pieces(turn.text):
                yield choice({"content": piece})
        yield choice({}, self._reason(turn))
        yield {**chunk, "choices": [], "usage": self._usage(turn)}

    def whole(self, turn: Turn, body: Body) -> Document:
        choice = {"index": 0, "message": self._message(turn, body), "finish_reason": self._reason(turn)}
        named = {"id": _id("chatcmpl"), "object": "chat.completion", "created": 0, "model": body.get("model")}
        return {**named, "choices": [choice], "usage": self._usage(turn)}

    def limit(self) -> Document:
        return {"error": {"message": "Too many requests", "type": "requests", "code": "rate_limit_exceeded"}}

    def usage_limit(self, turn: Turn) -> tuple[int, Document, Mapping[str, str]]:
        del turn  # it tells no time
        text = "You exceeded your current quota, please check your plan and billing details."
        return 429, {"error": {"message": text, "type": "insufficient_quota", "code": "insufficient_quota"}}, {}


WIRES: Mapping[str, Wire] = MappingProxyType({"messages": _Messages(), "responses": _Responses(), "chat": _Chat()})
