"""Rebuilds what a disk may hold after a power cut.

One run of a program is traced: every write, every sync, every line it acknowledged, in order. A cut after any of
them leaves what was synced before, and of what was written since, any part: each write kept, lost, or torn at a
sector. The images are made from that, without cutting any power.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kill_points import SCENARIO, environment

_SECTOR = 512
_CALL = re.compile(r"^\d+ +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_BYTES = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_PATH = re.compile(r"^\d+<([^>]*)>")


@dataclass(frozen=True)
class Step:
    """One thing the program did: "write", "truncate", "unlink", "sync" of a file, or "ack" of a line."""

    kind: str
    path: str = ""
    data: bytes = b""
    offset: int = 0


@dataclass
class Disk:
    """Per file, what is safe, and what has been written since."""

    safe: dict[str, bytes] = field(default_factory=dict)
    pending: dict[str, list[Step]] = field(default_factory=dict)
    acknowledged: list[dict[str, Any]] = field(default_factory=list)

    def take(self, step: Step) -> None:
        match step.kind:
            case "ack":
                self.acknowledged.append(json.loads(step.data))
            case "sync":
                for one in self.pending.pop(step.path, []):
                    self.safe[step.path] = _written(self.safe.get(step.path, b""), one)
            case "unlink":
                self.safe.pop(step.path, None)
                self.pending.pop(step.path, None)
            case _:
                self.pending.setdefault(step.path, []).append(step)

    def image(self, folder: Path, chance: random.Random) -> None:
        """One of the many states that a cut at this moment may leave."""
        for path in self.safe.keys() | self.pending.keys():
            content = self.safe.get(path, b"")
            for step in self.pending.get(path, []):
                survives = chance.choice(("kept", "lost", "torn"))
                if survives != "lost":
                    content = _written(content, _torn(step, chance) if survives == "torn" else step)
            (folder / Path(path).name).write_bytes(content)


def _written(content: bytes, step: Step) -> bytes:
    if step.kind == "truncate":
        return content[: step.offset].ljust(step.offset, b"\0")
    padded = content.ljust(step.offset, b"\0")
    return padded[: step.offset] + step.data + padded[step.offset + len(step.data) :]


def _torn(step: Step, chance: random.Random) -> Step:
    sectors = len(step.data) // _SECTOR
    kept = chance.randrange(sectors + 1) * _SECTOR if sectors else 0
    return Step(step.kind, step.path, step.data[:kept], step.offset) if step.kind == "write" else step


def recorded(folder: Path, *flags: str) -> list[Step]:
    """What the scenario does to its files, and what it says about it, in order."""
    log, home = folder / "trace", folder / "store"
    home.mkdir(parents=True)
    calls = "pwrite64,write,fdatasync,fsync,ftruncate,unlink"
    tracer = ("strace", "-f", "-y", "-xx", "-s", "200000", "-e", f"trace={calls}", "-o", str(log))
    command = [*tracer, os.path.realpath(sys.executable), str(SCENARIO), str(home), str(folder), *flags]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=50)
    return list(_steps(log, str(home)))


def _steps(log: Path, home: str) -> Iterator[Step]:
    unfinished: dict[str, str] = {}
    for line in log.read_text().splitlines():
        thread = line.split(" ", 1)[0]
        whole = line
        if line.endswith("<unfinished ...>"):
            unfinished[thread] = line.removesuffix("<unfinished ...>").rstrip()
            continue
        if "resumed>" in line:
            whole = unfinished.pop(thread) + line.split("resumed>", 1)[1]
        call = _CALL.match(whole)
        if call:
            yield from _step(call["name"], call["arguments"], home)


def _step(name: str, arguments: str, home: str) -> Iterator[Step]:
    if name == "unlink":
        path = _text(arguments)
        if path.startswith(home):
            yield Step("unlink", path)
        return
    target = _PATH.match(arguments)
    path = bytes.fromhex(target[1].replace("\\x", "")).decode() if target else ""
    if name == "write":
        said = _text(arguments)
        if arguments.startswith("1<") and said.startswith("{"):
            yield Step("ack", data=said.encode())
    elif not path.startswith(home) or path.endswith("-shm"):
        return
    elif name == "pwrite64":
        yield Step("write", path, _text(arguments).encode("latin-1"), int(arguments.rsplit(",", 1)[1]))
    elif name == "ftruncate":
        yield Step("truncate", path, offset=int(arguments.rsplit(",", 1)[1]))
    else:
        yield Step("sync", path)


def _text(arguments: str) -> str:
    found = _BYTES.search(arguments)
    return bytes.fromhex(found[1].replace("\\x", "")).decode("latin-1") if found else ""
