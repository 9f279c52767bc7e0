"""The manager's end of the line to its keeper, against one that does not let it in."""

from __future__ import annotations

import socket

import pytest
from ostler.isolation.process.link import KeeperError, Link
from ostler.keeper.serving import turn_away

from ostler.keeper.protocol import REFUSED

pytestmark = pytest.mark.anyio

SENTENCE = "no agent may speak to its keeper"


@pytest.mark.parametrize("early", [True, False], ids=["before it asks", "after it asks"])
async def test_a_keeper_that_hangs_up_with_a_reason_is_heard(early: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(ours, lambda _: None, lambda: None)
    if early:
        turn_away(theirs, SENTENCE)
    answer = link.ask("hello")
    if not early:
        turn_away(theirs, SENTENCE)
    with pytest.raises(KeeperError, match=SENTENCE) as refused:
        await answer
    assert refused.value.kind == REFUSED
    await link.over
