"""Lists over HTTP beside FastAPI alone with the same content."""

from __future__ import annotations

import tempfile

from program import Daemon, daemon, floor
from table import Table, middle, percentile

_COUNT = 100


def answers(*, quick: bool) -> Table:
    table = Table("A list of 100 over HTTP, milliseconds", "what", "p50", "p95", "ratio", "goal")
    with daemon() as served, tempfile.NamedTemporaryFile("wb") as file:
        _spawn(served)
        ours = served.connection()
        file.write(ours.get(f"/v1/instances?limit={_COUNT}"))
        file.flush()
        with floor(file.name) as bare:
            times: list[list[float]] = [[], []]
            for _ in range(50 if quick else 200):
                times[0].append(bare.milliseconds("/list"))
                times[1].append(ours.milliseconds(f"/v1/instances?limit={_COUNT}"))
    low = middle(times[0])
    table.add("JSONResponse of the same", f"{low:.1f}", f"{percentile(times[0], 0.95):.1f}", "1", "")
    ratio = f"{middle(times[1]) / low:.1f}"
    table.add("list of instances", f"{middle(times[1]):.1f}", f"{percentile(times[1], 0.95):.1f}", ratio, "3")
    return table


def _spawn(served: Daemon) -> None:
    """Commands that have written something and go on."""
    for number in range(_COUNT):
        command = ["sh", "-c", "echo it works; exec sleep 100000"]
        served.client.call(
            "spawn", spawn={"command": command, "job": {"request": ""}, "options": {"name": f"agent-{number}"}}
        )
