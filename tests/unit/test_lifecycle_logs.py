"""Reading the files of output that the keeper writes."""

from __future__ import annotations

import struct
from pathlib import Path

from ostler.lifecycle.logs import _LogReader


def test_a_line_that_was_cut_when_its_file_was_turned_over_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "1.log.1").write_bytes(b"first\nsec")
    (tmp_path / "1.log").write_bytes(b"ond\nthi")
    (tmp_path / "1.log.times").write_bytes(struct.pack(">QQ", 9, 0))
    reader = _LogReader(tmp_path, None, None)
    assert [line.text for line in reader.read(last=False)] == ["first", "sec", "ond"]
    assert [line.text for line in reader.read(last=True)] == ["thi"]
