"""The end of a long log over HTTP beside the end of a short one, and what the daemon answers meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from uuid import uuid4

from ostler.home import LOGS
from ostler.isolation.process.logs import LOG_BYTES
from ostler.keeper.output import Log
from program import Connection, Daemon, daemon
from table import Table, middle, percentile

_MIB = 1024 * 1024
_LINE = b"%08d the agent says what it does, in a line as long as most lines of a program are\n"
_RUNS_OF_ATTEMPT = 3
_ASK_SECONDS = 0.01


def logs(*, quick: bool) -> Table:
    table = Table("The last 10 lines of a log over HTTP, milliseconds", "what", "p50", "p95", "ratio", "goal")
    rounds = 10 if quick else 50
    with daemon() as served:
        short, long = _written(served, 1), _written(served, 100)
        connection = served.connection()
        paths = [f"/v1/instances/{name}/logs?tail=10" for name in (short, long)]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for path, taken in zip(paths, times, strict=True):
                taken.append(connection.milliseconds(path))
        floor = middle(times[0])
        table.add("of 1 MB", f"{floor:.1f}", f"{percentile(times[0], 0.95):.1f}", "1", "")
        ratio = f"{middle(times[1]) / floor:.2f}"
        table.add("of 100 MB", f"{middle(times[1]):.1f}", f"{percentile(times[1], 0.95):.1f}", ratio, "1.5")
        idle = _answer_times(connection, rounds * 10)
        table.add("/healthz, idle", f"{middle(idle):.1f}", f"{percentile(idle, 0.95):.1f}", "1", "")
        for what, path, goal in (
            ("/healthz while the last 10 lines are read", paths[1], "3"),
            ("/healthz while all 100 MB are read", paths[1].removesuffix("?tail=10"), ""),
        ):
            busy = _answer_times_beside(served, path, connection, rounds * 10)
            ratio = f"{middle(busy) / middle(idle):.1f}"
            table.add(what, f"{middle(busy):.1f}", f"{percentile(busy, 0.95):.1f}", ratio, goal)
    return table


def _written(served: Daemon, megabytes: int) -> str:
    """The name of an instance that has written so much, over attempts, runs and files that were turned over."""
    name = f"wrote-{megabytes}"
    instance = served.client.call("spawn", spawn={"command": ["sleep", "100000"], "options": {"name": name}})
    folder = served.home / LOGS / instance["instance_id"]
    attempt = 1
    while megabytes > 0:
        for _ in range(_RUNS_OF_ATTEMPT):
            size = min(2 * LOG_BYTES, megabytes * _MIB)
            _write(folder / f"{attempt}-{uuid4().hex}.log", size)
            megabytes -= size // _MIB
            if megabytes <= 0:
                break
        attempt += 1
    return name


def _write(path: Path, size: int) -> None:
    log, written = Log(str(path), LOG_BYTES), 0
    while written < size:
        piece = b"".join(_LINE % number for number in range(written // 80, written // 80 + 50))
        written += log.write(piece)
    log.close()


def _answer_times(connection: Connection, count: int) -> list[float]:
    """Milliseconds until /healthz is answered, asked every 10 ms: a daemon that stands still is late for all."""
    times, planned = [], time.perf_counter()
    for _ in range(count):
        planned += _ASK_SECONDS
        time.sleep(max(planned - time.perf_counter(), 0))
        connection.get("/healthz")
        times.append((time.perf_counter() - planned) * 1000)
    return times


def _answer_times_beside(served: Daemon, path: str, connection: Connection, count: int) -> list[float]:
    """The same while another connection reads a log again and again."""
    over = threading.Event()

    def read_on() -> None:
        while not over.is_set():
            with contextlib.closing(served.connection()) as reader:
                reader.request("GET", path)
                response = reader.getresponse()
                while not over.is_set() and response.read(1 << 20):
                    pass

    reading = threading.Thread(target=read_on)
    reading.start()
    try:
        return _answer_times(connection, count)
    finally:
        over.set()
        reading.join()
