"""A model server that says what a test has written down, for coding agents that are real.

It speaks the Messages, Responses and Chat Completions protocols on 127.0.0.1. A script is a list of turns, or a
function from a request to a turn. Each request takes the next turn; the last turn is repeated.

    async with ScriptedModel([run("echo hi > made.txt"), say("I made it.")]) as model:
        agent = await manager.start("claude", env=model.environment("claude"))
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Self

from ostler.testing.model_wire import WIRES, Event, ScriptError, Turn, TurnKind, Wire

#: A key that opens nothing; programs refuse to start without one.
KEY = "sk-ant-oat01-scripted"
#: A name that Codex has no settings of its own for: for one that it knows it hides its tools in the prompt.
MODEL = "scripted-model"
_TICK_SECONDS = 0.05


def say(text: str, *, seconds: float = 0.0) -> Turn:
    """Say this and end the turn; `seconds` spreads the words over so much time."""
    return Turn(kind=TurnKind.SAY, text=text, seconds=seconds)


def run(command: str, *, seconds: float = 0.0) -> Turn:
    """Call the shell tool that the request offers with this command line."""
    return Turn(kind=TurnKind.RUN, text=command, seconds=seconds)


def limit(*, retry_after: float = 1.0) -> Turn:
    """Refuse with 429, too many requests."""
    return Turn(kind=TurnKind.LIMIT, retry_after=retry_after)


def usage_limit(*, resets_at: datetime | None = None) -> Turn:
    """Refuse because the plan is used up; it is renewed at `resets_at`, by default in an hour."""
    return Turn(kind=TurnKind.USAGE_LIMIT, resets_at=resets_at or datetime.now(UTC) + timedelta(hours=1))


def hang() -> Turn:
    """Take the request and never answer."""
    return Turn(kind=TurnKind.HANG)


def midhang(text: str = "I begin") -> Turn:
    """Begin to answer, then fall silent."""
    return Turn(kind=TurnKind.MIDHANG, text=text)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """One request to the model, as it came."""

    number: int
    #: messages, responses or chat.
    api: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    #: The last text of the user, and what tools have answered since.
    prompt: str
    results: tuple[str, ...]
    #: When it came, and an event that is set when the connection has ended.
    at: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def model(self) -> str:
        return str(self.body.get("model", ""))

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


Script = Sequence[Turn] | Callable[[ModelRequest], Turn]


class ScriptedModel:
    """The server. It listens while it is open, on a port of its own, in threads of its own."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self.closing = threading.Event()
        #: Every request that asked for an answer, in the order in which they came.
        self.requests: list[ModelRequest] = []

    # --- being open ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        handler = type("_BoundHandler", (_Handler,), {"scripted": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_TICK_SECONDS,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up on every program that waits. Safe twice."""
        self.closing.set()
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        server.server_close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *how: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError("the scripted model is not open; use it in a `with` statement")
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, driver: str) -> dict[str, str]:
        """The variables with which the program of this driver talks to this model and to nothing else."""
        if driver == "claude":
            return {
                "ANTHROPIC_BASE_URL": self.url,
                "CLAUDE_CODE_OAUTH_TOKEN": KEY,  # as one has with a plan, which alone has usage limits
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0",
            }
        environment = {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}
        return {**environment, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"} if driver == "pi" else environment

    # --- what came -----------------------------------------------------------------------------------

    async def asked(self, count: int = 1, *, within: float = 30.0) -> ModelRequest:
        """Wait until so many requests have come; the last of them."""
        async with asyncio.timeout(within):
            while len(self.requests) < count:  # noqa: ASYNC110 - they come in threads
                await asyncio.sleep(_TICK_SECONDS)
        return self.requests[count - 1]

    def set_script(self, script: Script) -> None:
        """Go on with another script, from its beginning."""
        with self._lock:
            self._script, self._turns = script, itertools.count()

    def take(self, request: ModelRequest) -> Turn:
        """Note the request and choose its turn."""
        with self._lock:
            self.requests.append(request)
            if callable(self._script):
                return self._script(request)
            if not self._script:
                raise ScriptError("the script of this model is empty")
            return self._script[min(next(self._turns), len(self._script) - 1)]

    def hold(self, connection: socket.socket, *, held: bool) -> None:
        with self._lock:
            (self._connections.add if held else self._connections.discard)(connection)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    scripted: ScriptedModel
    protocol_version = "HTTP/1.1"
    _APIS: Mapping[str, str] = MappingProxyType(
        {"/v1/messages": "messages", "/v1/responses": "responses", "/v1/chat/completions": "chat"}
    )

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Say nothing on standard error."""

    def do_HEAD(self) -> None:
        self._answer_json(200, {})

    def do_GET(self) -> None:
        self._answer_json(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        self.scripted.hold(self.connection, held=True)
        try:
            self._post()
        except OSError:  # the program hung up
            self.close_connection = True
        finally:
            self.scripted.hold(self.connection, held=False)

    def _post(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path.endswith("/count_tokens"):
            self._answer_json(200, {"input_tokens": 100})
            return
        api = self._APIS.get(path)
        if api is None:
            self._answer_json(404, {"error": {"message": f"no such path: {path}"}})
            return
        wire = WIRES[api]
        body = json.loads(raw)
        prompt, results = wire.read(body)
        request = ModelRequest(
            number=len(self.scripted.requests) + 1,
            api=api,
            path=self.path,
            headers=dict(self.headers.items()),
            body=body,
            prompt=prompt,
            results=results,
        )
        try:
            self._play(self.scripted.take(request), wire, request)
        except ScriptError as error:  # not to be tried again
            self._answer_json(400, {"type": "error", "error": {"type": "invalid_request_error", "message": str(error)}})
        finally:
            request.ended.set()

    def _play(self, turn: Turn, wire: Wire, request: ModelRequest) -> None:
        match turn.kind:
            case TurnKind.HANG:
                self._wait_for_hang_up()
            case TurnKind.LIMIT:
                self._answer_json(429, wire.limit(), {"retry-after": f"{turn.retry_after:g}"})
            case TurnKind.USAGE_LIMIT:
                status, document, headers = wire.usage_limit(turn)
                self._answer_json(status, document, headers)
            case _ if not request.streams:
                self._answer_json(200, wire.whole(turn, request.body))
            case _:
                self._stream(turn, wire, request)

    def _stream(self, turn: Turn, wire: Wire, request: ModelRequest) -> None:
        events = wire.events(turn, request.body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if turn.kind is TurnKind.MIDHANG:
            for event in events[: wire.FIRST_WORD]:
                self._send(event)
            self._wait_for_hang_up()
            return
        for event in events:
            self._send(event)
            if self.scripted.closing.wait(turn.seconds / len(events)) if turn.seconds else False:
                return

    def _send(self, event: Event) -> None:
        name, data = event
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write((f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _wait_for_hang_up(self) -> None:
        """Its end-of-file says exactly when the program let go; closing the server says it too."""
        self.close_connection = True
        while not self.scripted.closing.is_set():
            self.connection.settimeout(_TICK_SECONDS)
            try:
                if not self.connection.recv(4096):
                    return
            except TimeoutError:
                continue

    def _answer_json(self, status: int, document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
