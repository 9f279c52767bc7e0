"""Forks the daemon of a home for every line that it reads, so that a test which kills many pays for its imports once.

It prints the number of each process, and a second line when that process has ended.
"""

from __future__ import annotations

import os
import sys

from ostler.daemon.run import main


def serve(home: str) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(2, 1)
            main(["--home", home])
            os._exit(0)
        print(pid, flush=True)  # noqa: T201 - what its test reads
        os.waitpid(pid, 0)
        print("ended", flush=True)  # noqa: T201 - as above


if __name__ == "__main__":
    serve(sys.argv[1])
