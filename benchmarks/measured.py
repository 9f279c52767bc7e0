"""What every rival prints: one JSON object with its samples in milliseconds. Runs without Ostler installed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def timed(samples: list[float], act: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    answer = act()
    samples.append((time.perf_counter() - begin) * 1000)
    return answer


def pss_kb(pids: list[int]) -> float:
    """The mean of what is each one's own, with its share of what it shares; in KB."""
    return sum(_pss(pid) for pid in pids) / max(len(pids), 1)


def _pss(pid: int) -> int:
    with Path(f"/proc/{pid}/smaps_rollup").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.perf_counter() + seconds
    while not holds():
        if time.perf_counter() > end:
            raise SystemExit("it did not happen in time")
        time.sleep(0.0005)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)
