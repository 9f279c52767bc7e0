"""The socket of the keeper: who may speak, in which order, and what happens to nonsense."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostler.keeper.asking import Asked, RefusedError, Reply
from ostler.keeper.loop import READ, WRITE, Loop
from ostler.keeper.peers import Peer
from ostler.keeper.protocol import REFUSED, Line, ProtocolError

#: So many messages of one peer are read in a turn; then it is the others' turn.
_AT_ONCE = 64
_MOST_PEERS = 32
#: A peer that does not say who it is within this is hung up on.
_HELLO_SECONDS = 10.0
_REST_SECONDS = 1.0
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})

Handler = Callable[[Asked, list[int], Reply], None]
Hello = Callable[["Connection", Asked, Reply], None]


class Connection:
    """One peer. `is_manager` once it has said hello and was believed; `peer` holds fast who has connected."""

    def __init__(self, server: Server, sock: socket.socket, peer: Peer) -> None:
        self._server = server
        self._line = Line(sock)
        self._peer = peer
        self.is_manager = False
        self.is_open = True
        self._watch()
        if peer.pidfd >= 0:
            server.loop.watch(peer.pidfd, self._peer_ended)
        else:
            server.loop.later(0, self._peer_ended)

    def refusal(self) -> str:
        """Asked again when it says who it is: a connection may be left to another. But we see the end of a manager."""
        return "" if self.is_manager else self._peer.refusal()

    def _peer_ended(self) -> None:
        """Whoever has a copy of its end, such as a child that it forked, is another and no manager."""
        if self.is_manager:
            self._hear()  # what it said last was still its own
        self.close()

    @property
    def is_waiting(self) -> bool:
        return self._line.is_waiting

    def fileno(self) -> int:
        return self._line.fileno()

    def _watch(self) -> None:
        more = WRITE if self._line.is_waiting else 0
        self._server.loop.watch(self._line.fileno(), self._hear, READ | more)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """To one that is gone: nothing."""
        if not self.is_open:
            return
        try:
            self._send(message, fds)
        except (OSError, ProtocolError) as error:
            self._server.warn(f"a peer is given up: {error}")
            self.close()
            return
        if self._line.is_waiting:
            self._watch()

    def _send(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        try:
            self._line.send(message, fds)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR or message.get("id") is None:
                raise
            sentence = f"the keeper could not send its answer: {error.strerror}"
            self._line.send({"id": message["id"], "error": sentence, "kind": "descriptors"})

    def flush(self) -> None:
        try:
            self._line.flush()
        except OSError:
            self.close()

    def _hear(self) -> None:
        try:
            if self._line.is_waiting:
                self._line.flush()
                self._watch()
            for _ in range(_AT_ONCE):
                heard = self._line.receive() if self.is_open else None
                if heard is None:
                    self.close()
                    return
                self._take(*heard)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._server.warn(f"a peer is given up: {error}")
            self.close()

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        reply = Reply(message.get("id"), self.send)
        try:
            self._server.answer(self, message, fds, reply)
        except RefusedError as refused:
            reply.refuse(refused.kind, str(refused))
        finally:
            for one in fds:
                os.close(one)

    def close_if_silent(self) -> None:
        if not self.is_manager:
            self.close()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._server.loop.unwatch(self._peer.pidfd)
            self._peer.close()
            self._server.loop.unwatch(self._line.fileno())
            self._line.close()
            self._server.left(self)


class Server:
    """`hello` decides who is the manager, the handlers serve it, and `gone` is told when it has left."""

    def __init__(self, loop: Loop, listener: socket.socket, warn: Callable[[str], None]) -> None:
        self.loop = loop
        self.warn = warn
        self.handlers: Mapping[str, Handler] = {}
        self.hello: Hello | None = None
        self.gone: Callable[[], None] = lambda: None
        self.manager: Connection | None = None
        self.listener: socket.socket | None = listener
        self._peers: set[Connection] = set()
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if self.listener is not None:
            self.loop.watch(self.listener.fileno(), self._accept)

    def _accept(self) -> None:
        while self.listener is not None:
            try:
                sock = self.listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, most likely: it would fail again at once, and for ever.
                self.warn(f"nobody can be let in: {error}")
                self.loop.unwatch(self.listener.fileno())
                self.loop.later(_REST_SECONDS, self._listen)
                return
            peer = Peer(sock)
            refusal = peer.refusal()
            if refusal or len(self._peers) >= _MOST_PEERS:
                turn_away(sock, refusal)
                peer.close()
                continue
            connection = Connection(self, sock, peer)
            self._peers.add(connection)
            self.loop.later(_HELLO_SECONDS, connection.close_if_silent)

    def answer(self, peer: Connection, message: Mapping[str, Any], fds: list[int], reply: Reply) -> None:
        op = message.get("op")
        asked = Asked(message)
        if op == "hello" and self.hello is not None:
            if refusal := peer.refusal():
                raise RefusedError(REFUSED, refusal)
            self.hello(peer, asked, reply)
            return
        if not peer.is_manager:
            raise RefusedError("request", "say hello first")
        handler = self.handlers.get(op) if isinstance(op, str) else None
        if handler is None:
            raise RefusedError("request", f"there is no request {op!r:.100}")
        handler(asked, fds, reply)

    def promote(self, peer: Connection) -> None:
        """From now on it is the manager; the one before it is hung up on."""
        before, self.manager = self.manager, peer
        peer.is_manager = True
        if before is not None and before is not peer:
            before.is_manager = False
            before.close()

    def adopt(self, sock: socket.socket) -> Connection:
        """The manager of the keeper before us, which never noticed."""
        peer = Connection(self, sock, Peer(sock))
        self._peers.add(peer)
        self.promote(peer)
        return peer

    def tell(self, event: Mapping[str, Any]) -> None:
        if self.manager is not None:
            self.manager.send(event)

    def left(self, peer: Connection) -> None:
        self._peers.discard(peer)
        if peer is self.manager:
            self.manager = None
            self.gone()

    def stop_listening(self) -> None:
        if self.listener is not None:
            self.loop.unwatch(self.listener.fileno())
            self.listener.close()
            self.listener = None


def turn_away(sock: socket.socket, sentence: str) -> None:
    """Whether it is heard or not, nobody waits for that. Without a sentence it may come again."""
    line = Line(sock)
    with contextlib.suppress(OSError, ProtocolError):
        if sentence:
            line.send({"event": REFUSED, "error": sentence, "kind": REFUSED})
            # What is left unread when a line is closed would come back as an error, and that before the sentence.
            sock.shutdown(socket.SHUT_RD)
            while sock.recv(1):
                pass
    line.close()
