"""The scripted model on the wire: each protocol, whole and streamed, with its limits and its silences."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from ostler.testing import ModelRequest, ScriptedModel, Turn, hang, limit, midhang, run, say, usage_limit

SHELL = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "why": {"type": "string"}},
    "required": ["why"],
}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"name": "Read", "input_schema": {}}, {"name": "Bash", "input_schema": SHELL}],
    },
    "/v1/responses": {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "web_search"}, {"type": "function", "name": "exec_command", "parameters": SHELL}],
    },
    "/v1/chat/completions": {
        "model": "m",
        "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "terminal", "parameters": SHELL}}],
    },
}
EVERY_API = pytest.mark.parametrize("path", ASKED)


def post(model: ScriptedModel, path: str, **more: Any) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(model.url.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", path, json.dumps({**ASKED[path], **more}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, response.read().decode()
    finally:
        connection.close()


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


@EVERY_API
def test_it_says_its_turns_in_order_and_the_last_one_again(path: str) -> None:
    with ScriptedModel([say("one"), say("two").using(input_tokens=70, output_tokens=7, cached_tokens=30)]) as model:
        said = [post(model, path)[2] for _ in range(3)]
    assert ["one" in text for text in said] == [True, False, False]
    assert ["two" in text for text in said] == [False, True, True]
    whole = json.loads(said[1])["usage"]
    counted = {
        "/v1/messages": {"input_tokens": 40, "cache_read_input_tokens": 30, "output_tokens": 7},
        "/v1/responses": {"input_tokens": 70, "output_tokens": 7},
        "/v1/chat/completions": {"prompt_tokens": 70, "completion_tokens": 7},
    }[path]
    assert counted.items() <= whole.items()


@EVERY_API
def test_it_streams_word_by_word(path: str) -> None:
    with ScriptedModel([say("one two three")]) as model:
        status, headers, text = post(model, path, stream=True)
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    found = events(text)
    assert "one two three" in "".join(_delta(one) for one in found)
    assert len(found) > 5


def _delta(event: dict[str, Any]) -> str:
    delta = event.get("delta")
    if isinstance(delta, str):
        return delta
    if isinstance(delta, dict):
        return str(delta.get("text", ""))
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


@EVERY_API
@pytest.mark.parametrize("streams", [True, False])
def test_it_calls_the_shell_tool_of_the_request(path: str, streams: bool) -> None:
    with ScriptedModel([run("make test")]) as model:
        _, _, text = post(model, path, stream=streams)
    name = {"/v1/messages": "Bash", "/v1/responses": "exec_command", "/v1/chat/completions": "terminal"}[path]
    assert f'"{name}"' in text
    assert "make test" in text
    assert "scripted" in text, "what the tool requires is filled in"


@pytest.mark.parametrize("streams", [True, False])
def test_a_script_that_does_not_fit_is_told_to_the_program(streams: bool) -> None:
    with ScriptedModel([run("ls")]) as model:
        tools = [{"name": "Read", "input_schema": {}}]
        status, _, text = post(model, "/v1/messages", tools=tools, stream=streams)
        assert (status, "offers no shell tool, only ['Read']" in text) == (400, True)
        model.set_script([])
        assert "the script of this model is empty" in post(model, "/v1/messages", stream=streams)[2]


@EVERY_API
def test_limits_look_as_they_do_in_life(path: str) -> None:
    resets = datetime(2026, 11, 18, 3, 0, tzinfo=UTC)
    with ScriptedModel([limit(retry_after=7), usage_limit(resets_at=resets)]) as model:
        status, headers, text = post(model, path)
        assert (status, headers["retry-after"]) == (429, "7")
        assert "rate_limit" in text
        status, headers, text = post(model, path)
    assert status == 429
    seconds = str(int(resets.timestamp()))
    told = {
        "/v1/messages": headers.get("anthropic-ratelimit-unified-reset") == seconds,
        "/v1/responses": f'"resets_at": {seconds}' in text,
        "/v1/chat/completions": "insufficient_quota" in text,
    }
    assert told[path]


@EVERY_API
def test_one_that_hangs_notices_who_hangs_up(path: str) -> None:
    with ScriptedModel([hang(), midhang("I begin")]) as model:
        for number, streams in enumerate((False, True)):
            connection = http.client.HTTPConnection(model.url.removeprefix("http://"), timeout=0.3)
            connection.request("POST", path, json.dumps({**ASKED[path], "stream": streams}))
            responses: list[http.client.HTTPResponse] = []
            with pytest.raises(TimeoutError):
                _read_all(connection, responses)
            assert not model.requests[number].ended.is_set()
            connection.close()
            for response in responses:
                response.close()
            assert model.requests[number].ended.wait(60)


def _read_all(connection: http.client.HTTPConnection, opened: list[http.client.HTTPResponse]) -> None:
    opened.append(connection.getresponse())
    opened[0].read()


def _post_in_vain(model: ScriptedModel) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        post(model, "/v1/messages")


def test_closing_hangs_up() -> None:
    with ScriptedModel([hang()]) as model:
        asking = threading.Thread(target=_post_in_vain, args=(model,))
        asking.start()
        while not model.requests:
            time.sleep(0.01)
    asking.join(5)
    assert not asking.is_alive()


def test_a_function_may_choose_the_turn() -> None:
    def script(request: ModelRequest) -> Turn:
        return say("done") if request.results else run(f"echo {request.prompt}")

    with ScriptedModel(script) as model:
        assert "echo hi" in post(model, "/v1/messages")[2]
        answered = [
            *ASKED["/v1/messages"]["messages"],
            {"role": "user", "content": [{"type": "tool_result", "content": "fine", "tool_use_id": "t"}]},
        ]
        assert "done" in post(model, "/v1/messages", messages=answered)[2]
    assert [(one.api, one.prompt, one.results) for one in model.requests] == [
        ("messages", "hi", ()),
        ("messages", "hi", ("fine",)),
    ]


def test_it_answers_what_programs_ask_beside() -> None:
    with ScriptedModel([say("x")]) as model:
        connection = http.client.HTTPConnection(model.url.removeprefix("http://"), timeout=10)
        for method, path, status in (("HEAD", "/", 200), ("GET", "/v1/models", 200), ("POST", "/nowhere", 404)):
            connection.request(method, path, "{}" if method == "POST" else None)
            response = connection.getresponse()
            response.read()
            assert response.status == status
        connection.close()
        assert model.requests == []
    with pytest.raises(RuntimeError, match="not open"):
        _ = model.url


@pytest.mark.anyio
async def test_a_test_waits_for_what_is_asked() -> None:
    async with ScriptedModel([say("x")]) as model:
        threading.Thread(target=post, args=(model, "/v1/responses")).start()
        assert (await model.asked()).model == "m"
        with pytest.raises(TimeoutError):
            await model.asked(2, within=0.1)
