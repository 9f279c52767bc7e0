"""circus over its own client: one watcher per program, with its checks every second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from circus.client import CircusClient

from measured import alive, pss_kb, tell, timed, until

CONFIG = """
[circus]
endpoint = ipc://{home}/end
pubsub_endpoint = ipc://{home}/sub
check_delay = 1
"""


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        config = Path(home, "circus.ini")
        config.write_text(CONFIG.format(home=home))
        command = [str(Path(sys.executable).with_name("circusd")), str(config)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            client = CircusClient(endpoint=f"ipc://{home}/end", timeout=20)
            client.send_message("list")
            try:
                measure(client, count)
            finally:
                daemon.send_signal(signal.SIGTERM)


def measure(client: Any, count: int) -> None:
    spawns: list[float] = []
    restarts: list[float] = []
    ends: list[float] = []
    names = [f"p{number}" for number in range(count)]
    for name in names:
        timed(spawns, partial(start, client, name))
    for name in names:
        until(partial(is_up, client, name))
    pids = {name: pid_of(client, name) for name in names}
    memory = pss_kb(list(pids.values()))
    for name in names[: max(count // 10, 3)]:
        timed(restarts, partial(killed, client, name, pids[name]))
    for name in names:
        timed(ends, partial(end, client, name))
    tell(spawn=spawns, restart=restarts, terminate=ends, memory=memory, rate=1000 / (sum(spawns) / count))


def start(client: Any, name: str) -> None:
    client.send_message("add", name=name, cmd="/bin/sleep 1000", start=True, waiting=True)
    until(lambda: client.send_message("status", name=name).get("status") == "active")


def is_up(client: Any, name: str) -> bool:
    return pid_of(client, name) > 0


def end(client: Any, name: str) -> None:
    client.send_message("stop", name=name, waiting=True)
    until(lambda: client.send_message("status", name=name).get("status") == "stopped")


def pid_of(client: Any, name: str) -> int:
    pids = client.send_message("list", name=name).get("pids") or [0]
    return int(pids[0])


def killed(client: Any, name: str, pid: int) -> None:
    if pid <= 0:
        raise SystemExit("there is no process to kill")
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid_of(client, name) not in (0, pid) and alive(pid_of(client, name)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
