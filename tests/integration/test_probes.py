"""Probes against real sockets and real processes; only the clock is ours."""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from ostler.clock import SystemClock
from ostler.lifecycle import probes
from ostler.lifecycle.probes import MAX_DETAILS, MAX_HEAD, MAX_OUTPUT, probe
from ostler.model.spawn import HealthCheckConfig
from ostler.model.states import ProbeType
from ostler.policy.health import ProbeOutcome, ProbeResult
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

PASSED, FAILED, UNABLE = ProbeOutcome.PASSED, ProbeOutcome.FAILED, ProbeOutcome.UNABLE
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def config(kind: ProbeType, target: str | None) -> HealthCheckConfig:
    return HealthCheckConfig(probe=kind, target=target, timeout=timedelta(seconds=3))


async def look(kind: ProbeType, target: str | None) -> ProbeResult:
    """With a clock that stands still: nothing here may end by time-out."""
    return await probe(config(kind, target), ManualClock())


@asynccontextmanager
async def serving(answer: Answer, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server on a free port, whose answers are over when this is."""
    running: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            running.discard(task)

    server = await asyncio.start_server(handle, host, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def saying(answer: bytes, heard: list[bytes] | None = None) -> Answer:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heard is not None:
            heard.append(head)
        writer.write(answer)
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        await reader.read()

    return handle


class Silence:
    """Takes a request and never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        self.asked.set()
        await reader.read()


# --- http --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "outcome", "details"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", PASSED, "HTTP status 200"),
        (b"HTTP/1.0 204 No Content\r\n\r\n", PASSED, "HTTP status 204"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", PASSED, "HTTP status 302"),
        (b"HTTP/1.1 200\r\n\r\n", PASSED, "HTTP status 200"),
        (b"HTTP/1.1 200 OK\nA: b\n\n", PASSED, "HTTP status 200"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", PASSED, "HTTP status 200"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 50, FAILED, "the answer is not HTTP"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", FAILED, "HTTP status 404"),
        (b"HTTP/1.1 503 Busy\r\n\r\n", FAILED, "HTTP status 503"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", FAILED, "the answer is not HTTP"),
        (b"HTTP/1.1 +20 OK\r\n\r\n", FAILED, "the answer is not HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", FAILED, "the answer is not HTTP"),
        (b"\r\n\r\n", FAILED, "the answer is not HTTP"),
        (b"", FAILED, "the answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 10 * MAX_HEAD, FAILED, "the answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * MAX_HEAD + b"\r\n", FAILED, "the answer is not HTTP"),
        (b"x" * 10 * MAX_HEAD, FAILED, "the answer is not HTTP"),
    ],
)
async def test_an_http_probe_goes_by_the_status(answer: bytes, outcome: ProbeOutcome, details: str) -> None:
    async with serving(saying(answer)) as port:
        result = await look(ProbeType.HTTP, f"http://127.0.0.1:{port}/health")
    assert (result.outcome, result.details) == (outcome, details)


async def test_an_http_probe_asks_for_what_the_url_names() -> None:
    heard: list[bytes] = []
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\n", heard)) as port:
        await look(ProbeType.HTTP, f"http://LocalHost:{port}/a%20b/?deep=1&x=#part")
        await look(ProbeType.HTTP, f"http://127.0.0.1:{port}")
    first, second = (head.decode().split("\r\n") for head in heard)
    assert first[:2] == ["GET /a%20b/?deep=1&x= HTTP/1.1", f"Host: localhost:{port}"]
    assert second[:2] == ["GET / HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    assert "Connection: close" in first


async def test_a_server_that_does_not_answer_fails_at_the_time_out() -> None:
    clock, silence = ManualClock(), Silence()
    async with serving(silence) as port:
        looking = asyncio.create_task(probe(config(ProbeType.HTTP, f"http://127.0.0.1:{port}/"), clock))
        await silence.asked.wait()
        clock.advance(2.9)
        await asyncio.sleep(0)
        assert not looking.done()
        clock.advance(0.1)
        result = await looking
    assert (result.outcome, result.details) == (FAILED, "no answer within 3 s")


async def test_a_cancelled_probe_is_cancelled_not_failed() -> None:
    silence = Silence()
    async with serving(silence) as port:
        looking = asyncio.create_task(look(ProbeType.HTTP, f"http://127.0.0.1:{port}/"))
        await silence.asked.wait()
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking


async def test_https_to_a_server_without_tls_fails() -> None:
    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with serving(refuse) as port:
        result = await look(ProbeType.HTTP, f"https://127.0.0.1:{port}/")
    assert result.outcome is FAILED


async def test_a_server_that_does_not_shake_hands_fails_at_the_time_out() -> None:
    clock, silence = ManualClock(), Silence()
    async with serving(silence) as port:
        looking = asyncio.create_task(probe(config(ProbeType.HTTP, f"https://127.0.0.1:{port}/"), clock))
        await silence.asked.wait()
        clock.advance(3)
        assert (await looking).outcome is FAILED


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    key, made = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return made, key


async def test_https_passes_only_with_a_certificate_that_verifies(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\n"), tls=tls) as port:
        unknown = await look(ProbeType.HTTP, f"https://localhost:{port}/")
        monkeypatch.setattr(probes, "_tls", lambda: ssl.create_default_context(cafile=str(certificate[0])))
        known = await look(ProbeType.HTTP, f"https://localhost:{port}/")
        wrong_name = await look(ProbeType.HTTP, f"https://127.0.0.1:{port}/")
    assert (unknown.outcome, unknown.details) == (FAILED, "no TLS connection: CERTIFICATE_VERIFY_FAILED")
    assert known.outcome is PASSED
    assert wrong_name.outcome is FAILED


# --- tcp ---------------------------------------------------------------------------------------------


async def test_a_tcp_probe_passes_when_somebody_listens_and_fails_when_nobody_does() -> None:
    async with serving(Silence()) as port:
        assert (await look(ProbeType.TCP, f"127.0.0.1:{port}")).outcome is PASSED
        assert (await look(ProbeType.TCP, f"localhost:{port}")).outcome is PASSED
    gone = await look(ProbeType.TCP, f"127.0.0.1:{port}")
    assert gone.outcome is FAILED
    assert "no connection" in (gone.details or "")


async def test_a_tcp_probe_knows_addresses_in_brackets() -> None:
    try:
        async with serving(Silence(), host="::1") as port:
            assert (await look(ProbeType.TCP, f"[::1]:{port}")).outcome is PASSED
    except OSError:
        pytest.skip("no IPv6 here")


async def test_a_name_that_does_not_resolve_says_nothing_about_the_agent() -> None:
    # Longer than a label of a name may be: refused before any name server is asked.
    result = await look(ProbeType.TCP, f"{'a' * 70}.example:80")
    assert result.outcome is UNABLE


@pytest.mark.parametrize("kind", [ProbeType.HTTP, ProbeType.TCP, ProbeType.COMMAND])
@pytest.mark.parametrize("target", [None, "", "'", "   ", "http://", "a:b:c"])
async def test_a_bad_target_is_no_verdict_and_was_refused_before(kind: ProbeType, target: str | None) -> None:
    if kind is ProbeType.COMMAND and target in {"http://", "a:b:c"}:
        target = "/no/such/program"
    else:
        assert not config(kind, target).validate()
    result = await look(kind, target)
    assert result.outcome is UNABLE
    assert result.details


@pytest.mark.parametrize("kind", [ProbeType.HEARTBEAT, ProbeType.CUSTOM])
async def test_what_the_agent_itself_answers_is_not_asked_here(kind: ProbeType) -> None:
    assert (await look(kind, None)).outcome is UNABLE


# --- command -----------------------------------------------------------------------------------------


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("command", "outcome", "details"),
    [
        ("true", PASSED, None),
        ("echo all 'is  well'", PASSED, "all is  well"),
        ("false", FAILED, "the command ended with exit code 1"),
        ("sh -c 'echo too hot >&2; exit 3'", FAILED, "the command ended with exit code 3: too hot"),
        ("sh -c 'kill -TERM $$'", FAILED, "the command ended with signal 15"),
        ("echo $HOME | cat", PASSED, "$HOME | cat"),
        ("ostler-no-such-program", UNABLE, "cannot run ostler-no-such-program: No such file or directory"),
        ("/", UNABLE, "cannot run /: Permission denied"),
    ],
)
async def test_a_command_probe_goes_by_the_exit_code(command: str, outcome: ProbeOutcome, details: str | None) -> None:
    result = await look(ProbeType.COMMAND, command)
    assert (result.outcome, result.details) == (outcome, details)


async def test_a_command_sees_no_secret_of_ours_and_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("LC_ALL", "C")
    code = "import os, sys; print(sorted(set(os.environ) - {'LC_CTYPE'}), repr(sys.stdin.read()))"
    said = (await look(ProbeType.COMMAND, python(code))).details or ""
    assert "TOKEN" not in said
    assert "'LC_ALL'" in said
    assert "'PATH'" in said
    assert said.endswith("''")


async def test_a_command_has_a_session_of_its_own() -> None:
    said = (await look(ProbeType.COMMAND, python("import os; print(os.getsid(0) == os.getpid())"))).details
    assert said == "True"


async def test_output_is_cut_and_cleaned() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\0\\xff' + b'x' * 100_000)"
    result = await look(ProbeType.COMMAND, python(code))
    assert result.outcome is PASSED
    assert len(result.details or "") < MAX_DETAILS + 50
    assert "\0" not in (result.details or "")


async def test_a_command_that_never_stops_writing_is_ended() -> None:
    result = await look(ProbeType.COMMAND, "yes")
    assert (result.outcome, result.details) == (FAILED, f"the command wrote more than {MAX_OUTPUT} bytes and was ended")


def dead_within(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


async def test_at_the_time_out_the_whole_group_is_killed(tmp_path: Path) -> None:
    clock, fifo = ManualClock(), tmp_path / "fifo"
    os.mkfifo(fifo)
    command = f"sh -c 'sleep 1000 & echo $$ $! > {fifo}; trap \"\" TERM; wait'"
    looking = asyncio.create_task(probe(config(ProbeType.COMMAND, command), clock))
    leader, child = map(int, (await asyncio.to_thread(fifo.read_text)).split())
    watched = os.pidfd_open(child)
    try:
        clock.advance(3)
        result = await looking
        assert (result.outcome, result.details) == (FAILED, "no answer within 3 s")
        assert await asyncio.to_thread(dead_within, watched, 20)
    finally:
        os.close(watched)
    with pytest.raises(ProcessLookupError):
        os.kill(leader, 0)


async def test_what_a_command_leaves_in_the_background_ends_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = f"sh -c 'sleep 1000 & echo $! > {fifo}; read word < {fifo}; echo fine'"
    looking = asyncio.create_task(look(ProbeType.COMMAND, command))
    watched = os.pidfd_open(int(await asyncio.to_thread(fifo.read_text)))
    try:
        await asyncio.to_thread(fifo.write_text, "go\n")
        result = await looking
        assert (result.outcome, result.details) == (PASSED, "fine")
        assert await asyncio.to_thread(dead_within, watched, 20)
    finally:
        os.close(watched)


async def test_a_cancelled_command_is_killed_and_collected(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    looking = asyncio.create_task(look(ProbeType.COMMAND, f"sh -c 'echo $$ > {fifo}; exec sleep 1000'"))
    pid = int(await asyncio.to_thread(fifo.read_text))
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_probing_leaves_no_file_open() -> None:
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\n")) as port:
        targets = [
            (ProbeType.COMMAND, "true"),
            (ProbeType.COMMAND, "ostler-no-such-program"),
            (ProbeType.COMMAND, "yes"),
            (ProbeType.TCP, f"127.0.0.1:{port}"),
            (ProbeType.HTTP, f"http://127.0.0.1:{port}/"),
            (ProbeType.TCP, "127.0.0.1:1"),
        ]

        async def round_of_all() -> None:
            for kind, target in targets:
                await probe(config(kind, target), SystemClock())

        await round_of_all()
        before = open_files()
        for _ in range(5):
            await round_of_all()
        # The server's own ends close a moment later than ours.
        assert open_files() <= before + len(targets)
