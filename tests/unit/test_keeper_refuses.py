"""The manager's end of the connection to its keeper, against one that does not let it in."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from ostler.errors import InvalidOperationError
from ostler.home import KEEPER
from ostler.isolation import Site
from ostler.isolation.holder import HolderError
from ostler.isolation.process.keeper_client import KeeperHolder, _Connection
from ostler.keeper import protocol

pytestmark = pytest.mark.anyio

SENTENCE = "no agent may speak to its keeper"
REFUSAL = protocol.encode({"id": None, "error": SENTENCE, "kind": "refused"})


def refuse(sock: socket.socket) -> None:
    sock.send(REFUSAL)
    sock.close()


@pytest.mark.parametrize("early", [True, False], ids=["before it asks", "after it asks"])
async def test_a_keeper_that_hangs_up_with_a_reason_is_heard(early: bool) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = _Connection(ours, lambda _: None, lambda: None)
    if early:
        refuse(theirs)
    asking = asyncio.ensure_future(connection.request("hello"))
    if not early:
        await asyncio.sleep(0)  # now it is written
        refuse(theirs)
    with pytest.raises(HolderError, match=SENTENCE) as refused:
        await asking
    assert refused.value.kind == "refused"
    await connection.closed


async def test_a_refusal_is_soon_taken_for_the_last_word(tmp_path: Path) -> None:
    directory = tmp_path / KEEPER
    directory.mkdir()
    loop, listening = asyncio.get_running_loop(), protocol.listen(str(directory), protocol.SOCKET, 8)

    async def refuse_all() -> None:
        while True:
            refuse((await loop.sock_accept(listening))[0])

    refusing, since = asyncio.create_task(refuse_all()), time.monotonic()
    with pytest.raises(InvalidOperationError, match=SENTENCE):
        await KeeperHolder(Site(directory=tmp_path)).open()
    assert time.monotonic() - since < 15, "an agent that opens the home of its own keeper would wait and wait"
    refusing.cancel()
    await asyncio.wait((refusing,))
    listening.close()
