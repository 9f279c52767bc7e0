"""A process that a template has forked ahead of its time: the next agent takes it over at once.

It waits at the other end of a line for its order: how to settle in, and its descriptors. When the line is closed it
ends by itself.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ostler.keeper.children import Children, Ended
from ostler.keeper.protocol import Line, ProtocolError


class Spare:
    """The keeper's end. `line` is a descriptor, which belongs to it. Raises `OSError` when that is no line."""

    def __init__(self, children: Children, pid: int, line: int) -> None:
        self.pid = pid
        self._line = Line(socket.socket(fileno=line))
        self._lives = True
        children.add(pid, self._ended, self)

    def hand_over(self, settle: Mapping[str, Any], fds: Sequence[int]) -> bool:
        """Whether it took the order; one that has died meanwhile cannot. It is not used again either way."""
        taken = False
        if self._lives:
            try:
                self._line.send({"settle": settle}, fds)
                taken = not self._line.is_waiting
            except (OSError, ProtocolError):
                taken = False
        self.dismiss()
        return taken

    def dismiss(self) -> None:
        """Harmless when it was done before."""
        self._line.close()

    def _ended(self, _ended: Ended) -> None:
        self._lives = False
