"""What a non-blocking socket does not take at once, written by the loop when it can be."""

from __future__ import annotations

import asyncio
import socket


class SendBuffer:
    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._data = bytearray()

    def write(self, data: bytes) -> None:
        is_waiting = bool(self._data)
        self._data += data
        if not is_waiting:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._data:
                del self._data[: self._sock.send(self._data)]
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError:
            self._data.clear()  # the reader sees the end, after what is still to be read
        self._loop.remove_writer(self._sock.fileno())

    def close(self) -> None:
        """Before the socket is closed. What is not sent by now never is."""
        self._loop.remove_writer(self._sock.fileno())
