"""The output of a program, kept within a bound: its beginning, its end, and how much fell out between."""

from __future__ import annotations

from ostler.model.text import clean_text


class KeptOutput:
    """Takes any amount and never holds more than twice its limit."""

    __slots__ = ("_half", "_head", "_tail", "_tail_dropped")

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._tail_dropped = 0

    def feed(self, chunk: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        # Trimmed only now and then: moving the whole tail for every chunk would cost more than it saves.
        if len(self._tail) > 3 * self._half:
            self._trim()

    @property
    def dropped(self) -> int:
        return self._tail_dropped + max(len(self._tail) - self._half, 0)

    def text(self) -> str:
        self._trim()
        if not self._tail_dropped:
            return _decoded(self._head + self._tail)
        mark = f"\n… ({self._tail_dropped} bytes left out) …\n"
        return _decoded(self._head) + mark + _decoded(self._tail)

    def last_lines(self, count: int, limit: int) -> str:
        """The end of it, for an error message."""
        lines = self.text()[-limit:].rstrip().splitlines()
        return "\n".join(lines[-count:])

    def _trim(self) -> None:
        over = len(self._tail) - self._half
        if over > 0:
            del self._tail[:over]
            self._tail_dropped += over


def _decoded(data: bytes | bytearray) -> str:
    return clean_text(data.decode("utf-8", "replace"))
