"""The plainest template there is: no module to import but what its setup says, and agents that echo.

An agent of it answers each packet with its own pid and what came; "exit N" ends it, "daemon" makes one of its own,
"look" executes a program that lists its descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

SOURCE = sys.argv[1]
sys.path.insert(0, SOURCE)

from ostler.keeper import clone  # noqa: E402 - found by the line above
from ostler.keeper.child_setup import set_up  # noqa: E402 - as above
from ostler.keeper.protocol import AHEAD, receive_packet, send_packet  # noqa: E402 - as above


def main() -> None:
    control = socket.socket(fileno=3)
    setup: dict[str, Any] = {}
    while True:
        message, _ = receive_packet(control, 0)
        if message is None:
            return
        if "setup" in message:
            setup = message["setup"]
            if not get_ready(control, setup):
                sys.exit(1)
        else:
            fork(control, setup, ahead=message["fork"] == AHEAD)


def get_ready(control: socket.socket, setup: Mapping[str, Any]) -> bool:
    if setup.get("begun"):
        with Path(setup["begun"]).open("a", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n")
    while setup.get("until") and not os.path.exists(setup["until"]):  # noqa: PTH110 - no pathlib here
        time.sleep(0.002)
    if setup.get("die"):
        os._exit(9)
    if setup.get("helper"):  # as a module may that is imported
        Path(setup["helper"]).write_text(str(os.posix_spawnp("sleep", ["sleep", "1000"], {})))
    if setup.get("garbage"):
        control.send(setup["garbage"].encode())
        time.sleep(1000)
    if setup.get("fail"):
        send_packet(control, {"failed": setup["fail"] * setup.get("times", 1)})
        return False
    files = {path: [os.stat(path).st_mtime_ns, os.stat(path).st_size] for path in setup.get("files", [])}  # noqa: PTH116
    send_packet(control, {"ready": True, "files": files, "forks": not setup.get("threads"), "why": None})
    return True


def fork(control: socket.socket, setup: Mapping[str, Any], *, ahead: bool) -> None:
    if setup.get("deaf"):
        Path(setup["deaf"]).touch()
        time.sleep(1000)
    if setup.get("refuse"):
        send_packet(control, {"unforked": setup["refuse"]})
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The second way is for kernels that refuse the first.
    pid = clone._fork_twice() if setup.get("twice") else clone.fork_sibling()  # noqa: SLF001 - on purpose
    if pid == 0:
        ours.close()
        if setup.get("stillborn") and not ahead:
            os._exit(6)
        live(theirs, setup)
    theirs.close()
    if setup.get("stillborn") and not ahead:
        wait_for_death(pid)
    named = setup.get("lie", pid)
    send_packet(control, {"forked": named}, [0 if setup.get("file") else ours.fileno()])
    ours.close()


def wait_for_death(pid: int) -> None:
    """Until it is a zombie or the keeper has reaped it: a busy machine lets a killed process live for a while."""
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.002)


def live(control: socket.socket, setup: Mapping[str, Any]) -> NoReturn:
    order, descriptors = receive_packet(control, 3)
    if order is None:
        os._exit(0)
    set_up(order["plan"], stdin=-1, output=descriptors[1], errors=descriptors[2], keep=descriptors[:1], executes=False)
    if "exit" in setup:
        os._exit(setup["exit"])
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(True)
    sys.stdout.write(f"{setup.get('word', 'hello')}\n")
    sys.stdout.flush()
    while True:
        channel, _ = listener.accept()
        with channel:
            channel.setblocking(True)
            while packet := channel.recv(1000).decode():
                answer(channel, packet)


def answer(channel: socket.socket, packet: str) -> None:
    if packet.startswith("exit"):
        os._exit(int(packet.split()[1]))
    if packet == "look":
        os.system("ls -l /proc/self/fd")  # noqa: S605 - what a program gets that it executes
    word = str(daemon()) if packet == "daemon" else packet
    channel.send(f"{os.getpid()} {os.getppid()} {word} {os.environ.get('SAID', '')}".encode())


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
    with contextlib.suppress(ConnectionError):  # the keeper does not need it any more
        main()
