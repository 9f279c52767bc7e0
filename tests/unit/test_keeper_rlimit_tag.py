"""The tag of every process of a unit: it decides whose a process is, and which agent speaks by `ostler signal`."""

from __future__ import annotations

import hashlib
import os
import signal
import uuid
from pathlib import Path

import pytest

from ostler.isolation.process.speaker import is_agent, speaker_of
from ostler.keeper import rlimit_tag
from ostler.keeper.exec_child import exec_child
from ostler.keeper.rlimit_tag import TEMPLATE, is_of_home, tag_for, tag_of

TOKEN = "0123456789abcdef"  # noqa: S105 - no secret: it names a home


def test_its_hash_is_the_standard_one() -> None:
    """A newer keeper must know the processes of an older one by their tags."""
    ours = rlimit_tag.blake2b(b"ostler", digest_size=8)  # type: ignore[attr-defined] # not for others
    assert ours.digest() == hashlib.blake2b(b"ostler", digest_size=8).digest()


def test_a_tag_names_home_and_unit_and_can_only_be_lowered_from_that_of_a_template() -> None:
    tag = tag_for(TOKEN, "a.1")
    assert tag is not None
    assert tag == tag_for(TOKEN, "a.1") != tag_for(TOKEN, "a.2")
    assert tag < (tag_for(TOKEN, f"{TEMPLATE}1") or 0)
    assert is_of_home(tag, TOKEN)
    assert not is_of_home(tag, TOKEN[::-1])


def test_the_tag_decides_who_speaks_whatever_the_environment_says(tmp_path: Path) -> None:
    instance, other = uuid.uuid4(), uuid.uuid4()
    (tmp_path / "keeper").mkdir()
    (tmp_path / "keeper" / "token").write_text(TOKEN)
    unit, foreign = f"{instance.hex}.1", f"{other.hex}.1"
    units = {unit: (instance, 1), foreign: (other, 1)}
    read, write = os.pipe()
    # A grandchild out of its session that claims to be another agent.
    script = f"OSTLER_MARK={TOKEN}:{foreign} setsid sleep 1000 >/dev/null 2>&1 & echo $!; wait"
    plan = {"env": {"PATH": os.environ["PATH"]}, "cwd": "/", "keeper": os.getpid(), "tag": tag_for(TOKEN, unit)}
    pid, report = exec_child(["/bin/sh", "-c", script], plan, output=write)
    os.close(write)
    grandchild = int(os.read(read, 100))
    try:
        assert tag_of(pid) == tag_of(grandchild) == tag_for(TOKEN, unit)
        assert speaker_of(grandchild, tmp_path, units) == (instance, 1)
        assert speaker_of(grandchild, tmp_path, {foreign: (other, 1)}) is None
        assert is_agent(grandchild, tmp_path)
        assert not is_agent(os.getpid(), tmp_path)
        assert speaker_of(os.getpid(), tmp_path, units) is None
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(report)
    assert tag_of(pid) is None


@pytest.mark.parametrize("text", ["", "no token"])
def test_without_a_keeper_nothing_speaks(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "keeper").mkdir()
        (tmp_path / "keeper" / "token").write_text(text)
    assert speaker_of(os.getpid(), tmp_path, {}) is None
