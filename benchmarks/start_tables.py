"""What is waited for once: the start of a daemon, and the first spawn of the library in a new home."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ostler.home import SOCKET_FILE
from program import wait_for_answer
from table import Table, middle, percentile

_SPAWN = """
import asyncio, sys, ostler
class Echo(ostler.Agent):
    async def process(self, request):
        return request
async def main():
    async with ostler.open(sys.argv[1]) as manager:
        await manager.start(Echo, isolation="none")
asyncio.run(main())
"""


def starts(*, quick: bool) -> Table:
    table = Table("Starts, milliseconds", "what", "p50", "p95", "ratio", "goal")
    rounds = 5 if quick else 15
    bare, ours, empty, first = [], [], [], []
    for _ in range(rounds):
        bare.append(_until_answer([str(Path(__file__).with_name("bareapi.py"))], "floor.sock"))
        ours.append(_until_answer(["-P", "-m", "ostler.daemon", "--home"], SOCKET_FILE))
        empty.append(_run("pass"))
        first.append(_run(_SPAWN))
    for what, times, floor, goal in (
        ("bare FastAPI, to its first answer", bare, bare, ""),
        ("daemon in a new home, to its first answer", ours, bare, "1.6"),
        ("python -c pass", empty, empty, ""),
        ("first spawn of the library in a new home, and its end", first, empty, "25"),
    ):
        ratio = f"{middle(times) / middle(floor):.1f}"
        table.add(what, f"{middle(times):.0f}", f"{percentile(times, 0.95):.0f}", ratio, goal)
    return table


def _until_answer(words: list[str], socket: str) -> float:
    with tempfile.TemporaryDirectory() as name:
        where = name if words[-1] == "--home" else str(Path(name) / socket)
        began = time.perf_counter()
        command = [sys.executable, *words, where]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
            wait_for_answer(Path(name) / socket, "/healthz")
            taken = (time.perf_counter() - began) * 1000
            program.terminate()
            program.wait()
        return taken


def _run(code: str) -> float:
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, name], check=True)
        return (time.perf_counter() - began) * 1000
