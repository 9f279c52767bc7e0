"""A burst of signals to 100 observers over HTTP, beside a bare FastAPI stream."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ostler.home import SOCKET_FILE
from program import wait_for_answer
from table import Table, middle, percentile

_OBSERVERS, _SIGNALS = 100, 200
_AT = re.compile(rb'"at": ?([0-9.]+)')


def streams(*, quick: bool) -> Table:
    title = f"{_OBSERVERS} observers, a burst of {_SIGNALS} signals: milliseconds until an observer has one"
    table = Table(title, "what", "p50", "p95", "ratio", "goal")
    latencies: dict[str, list[list[float]]] = {"bare": [], "ours": []}
    for _ in range(1 if quick else 3):
        for what, script, socket, path in (
            ("bare", "bareapi.py", "floor.sock", "/events"),
            ("ours", "burst_daemon.py", SOCKET_FILE, "/v1/events?follow=true"),
        ):
            with tempfile.TemporaryDirectory() as name:
                where = Path(name) / socket if what == "bare" else Path(name)
                words = [sys.executable, str(Path(__file__).with_name(script)), str(where)]
                with subprocess.Popen(words, stdin=subprocess.PIPE) as program:
                    wait_for_answer(Path(name) / socket, "/healthz")
                    latencies[what].append(asyncio.run(_observe(program, Path(name) / socket, path)))
                    assert program.stdin is not None
                    program.stdin.close()
    tails = {what: middle([percentile(run, 0.95) for run in runs]) for what, runs in latencies.items()}
    middles = {what: middle([middle(run) for run in runs]) for what, runs in latencies.items()}
    table.add("bare FastAPI stream", f"{middles['bare']:.0f}", f"{tails['bare']:.0f}", "1", "")
    ratio = f"{tails['ours'] / tails['bare']:.1f}"
    table.add("events of the daemon", f"{middles['ours']:.0f}", f"{tails['ours']:.0f}", ratio, "3")
    return table


async def _observe(program: subprocess.Popen[bytes], socket: Path, path: str) -> list[float]:
    """Milliseconds from each signal to each observer, of one burst."""
    latencies: list[float] = []

    async def read(reader: asyncio.StreamReader, began: asyncio.Event) -> None:
        count, rest = 0, b""
        while count < _SIGNALS:
            data = rest + await reader.read(1 << 16)
            began.set()
            whole, _, rest = data.rpartition(b"\n")
            moments = _AT.findall(whole)
            now = time.monotonic()
            latencies.extend((now - float(moment)) * 1000 for moment in moments)
            count += len(moments)

    readers = []
    for _ in range(_OBSERVERS):
        reader, writer = await asyncio.open_unix_connection(str(socket))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        began = asyncio.Event()
        readers.append((asyncio.create_task(read(reader, began)), began, writer))
    for _, began, _ in readers:
        await began.wait()
    assert program.stdin is not None
    program.stdin.write(f"{_SIGNALS}\n".encode())
    program.stdin.flush()
    await asyncio.gather(*(task for task, _, _ in readers))
    for _, _, writer in readers:
        writer.close()
    return latencies
