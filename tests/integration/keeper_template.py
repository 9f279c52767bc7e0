"""The plainest template there is: no module to import but what its setup says, and agents that echo.

An agent of it answers each packet with its own pid and what came; "exit N" ends it, "daemon" makes one of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

SOURCE = sys.argv[1]
sys.path.insert(0, SOURCE)

from ostler.keeper.settle import settle_in  # noqa: E402 - as above

from ostler.keeper import forking  # noqa: E402 - found by the line above
from ostler.keeper.protocol import Line  # noqa: E402 - as above


def main() -> None:
    line = Line(socket.socket(fileno=3))
    setup: dict[str, Any] = {}
    while True:
        select.select([line], [], [])
        heard = line.receive()
        if heard is None:
            return
        message, fds = heard
        if "setup" in message:
            setup = message["setup"]
            if not set_up(line, setup):
                sys.exit(1)
            give_spare(line, setup)
        elif "spent" in message:
            Path(setup["spent"]).write_text(str(message["spent"]))
        elif "fork" in message:
            fork(line, message, fds, setup)
        else:
            line.send({"forked": message["become"], "pid": os.getpid()})
            live(message["settle"], fds, setup)
        for one in fds:
            os.close(one)


def set_up(line: Line, setup: Mapping[str, Any]) -> bool:
    time.sleep(setup.get("slow", 0))
    if setup.get("die"):
        sys.stderr.write("something broke inside\n")
        sys.stderr.flush()
        os._exit(9)
    if setup.get("helper"):  # as a module may that is imported
        started = os.posix_spawnp("sleep", ["sleep", "1000"], {})
        Path(setup["helper"]).write_text(str(started))
    if setup.get("fail"):
        line.send({"failed": setup["fail"]})
        return False
    files = {path: [os.stat(path).st_mtime_ns, os.stat(path).st_size] for path in setup.get("files", [])}  # noqa: PTH116 - short
    line.send({"ready": True, "files": files, "forks": not setup.get("threads"), "why": None})
    return True


def give_spare(line: Line, setup: Mapping[str, Any]) -> None:
    """One, if it is asked for: a good one, one that is dead, or somebody else."""
    if "spare" not in setup:
        return
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = forking.fork_for_keeper()
    if pid == 0:
        ours.close()
        its.setblocking(True)
        body, fds, _, _ = socket.recv_fds(its, 60_000, 8)
        if not body:
            os._exit(0)
        line.sock.close()
        live(json.loads(body)["settle"], fds, setup)
    its.close()
    if setup["spare"] == "dead":
        os.kill(pid, 9)
        wait_for_death(pid)
    named = setup["spare"] if isinstance(setup["spare"], int) else pid
    wait_for(setup.get("before"))
    line.send({"spare": named}, [ours.fileno() if setup["spare"] != "file" else 0])
    Path(setup["given"]).write_text(str(pid))
    ours.close()
    wait_for(setup.get("after"))


def wait_for_death(pid: int) -> None:
    """Until it is a zombie or the keeper has reaped it: a busy machine lets a killed process live for a while."""
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.002)


def wait_for(path: str | None) -> None:
    while path is not None and not os.path.exists(path):  # noqa: PTH110 - no pathlib here
        time.sleep(0.002)


def fork(line: Line, message: Mapping[str, Any], fds: list[int], setup: Mapping[str, Any]) -> None:
    if setup.get("deaf"):
        Path(setup["deaf"]).touch()
        time.sleep(1000)
    if setup.get("refuse"):
        line.send({"failed": message["fork"], "why": setup["refuse"]})
        return
    # The second way is for kernels that refuse the first.
    pid = forking._fork_twice() if setup.get("twice") else forking.fork_for_keeper()  # noqa: SLF001 - on purpose
    if pid == 0:
        live(message["settle"], fds, setup)
    time.sleep(setup.get("late", 0))
    line.send({"forked": message["fork"], "pid": setup.get("lie", pid)})


def live(settle: Mapping[str, Any], fds: list[int], setup: Mapping[str, Any]) -> NoReturn:
    settle_in(settle, stdin=-1, stdout=fds[1], stderr=fds[1], keep=fds[:1])
    if "exit" in setup:
        os._exit(setup["exit"])
    channel = socket.socket(fileno=fds[0])
    sys.stdout.write(f"{setup.get('word', 'hello')}\n")
    sys.stdout.flush()
    while True:
        packet = channel.recv(1000).decode()
        if not packet:
            os._exit(70)
        if packet.startswith("exit"):
            os._exit(int(packet.split()[1]))
        if packet == "daemon":
            channel.send(str(daemon()).encode())
            continue
        channel.send(f"{os.getpid()} {os.getppid()} {packet} {os.environ.get('SAID', '')}".encode())


def daemon() -> int:
    """Its parents dead, its session its own, nothing executed; quicker than anybody looks."""
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        os.closerange(0, 64)
        time.sleep(1000)
    os.waitpid(middle, 0)
    return int(os.read(read, 32))


if __name__ == "__main__":
    main()
