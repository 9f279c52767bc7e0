"""supervisord with startsecs=0 over its XML-RPC on a Unix socket: a program that waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from xmlrpc.client import ServerProxy

from supervisor.xmlrpc import SupervisorTransport

from measured import alive, pss_kb, tell, timed, until

CONFIG = """
[supervisord]
nodaemon=true
logfile={home}/log
pidfile={home}/pid
[unix_http_server]
file={home}/sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""
PROGRAM = """
[program:p{number}]
command=/bin/sleep 1000
startsecs=0
autostart=false
autorestart=true
"""


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        config = Path(home, "conf")
        config.write_text(CONFIG.format(home=home) + "".join(PROGRAM.format(number=n) for n in range(count)))
        command = [str(Path(sys.executable).with_name("supervisord")), "-c", str(config)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            until(lambda: Path(home, "sock").exists())
            proxy: Any = ServerProxy(
                "http://127.0.0.1", transport=SupervisorTransport(None, None, f"unix://{home}/sock")
            )
            try:
                measure(proxy.supervisor, count)
            finally:
                daemon.send_signal(signal.SIGTERM)


def measure(rpc: Any, count: int) -> None:
    spawns: list[float] = []
    restarts: list[float] = []
    ends: list[float] = []
    names = [f"p{number}" for number in range(count)]
    for name in names:
        timed(spawns, partial(rpc.startProcess, name))
    pids = {name: rpc.getProcessInfo(name)["pid"] for name in names}
    memory = pss_kb(list(pids.values()))
    for name in names[: count // 3]:
        timed(restarts, partial(killed, rpc, name, pids[name]))
    for name in names:
        timed(ends, partial(rpc.stopProcess, name))
    tell(spawn=spawns, restart=restarts, terminate=ends, memory=memory, rate=1000 / (sum(spawns) / count))


def killed(rpc: Any, name: str, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        found = rpc.getProcessInfo(name)["pid"]
        return found not in (0, pid) and alive(found)

    until(back)


if __name__ == "__main__":
    main(int(sys.argv[1]))
