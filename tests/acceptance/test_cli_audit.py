"""`ostler audit verify` on homes from which more was taken than entries."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from cli_ground import ostler, populate, tamper

OTHER = "00000000-0000-7000-8000-00000000beef"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    asyncio.run(populate(tmp_path / "home"))
    return tmp_path / "home"


def test_a_chain_whose_workspace_has_no_row_is_broken(home: Path) -> None:
    tamper(home, "UPDATE audit SET actor = 'nobody' WHERE number = 2")
    tamper(home, "DELETE FROM workspaces")
    done = ostler("audit", "verify", home=home)
    assert done.returncode == 1
    assert "entry 2 was edited" in done.stdout
    assert "there is no row of this workspace itself" in done.stdout
    assert ostler("audit", "verify", "--workspace", "00000000-0000-7000-8000-000000000001", home=home).returncode == 1


def test_a_home_without_its_workspace_is_broken_though_no_chain_is_left(home: Path) -> None:
    for table in ("audit", "workspace_ledgers", "workspaces"):
        tamper(home, f"DELETE FROM {table}")
    done = ostler("audit", "verify", "-o", "json", home=home)
    assert done.returncode == 1
    assert json.loads(done.stdout)["is_sound"] is False


def test_entries_of_a_workspace_that_never_was_are_broken(home: Path) -> None:
    tamper(
        home,
        f"INSERT INTO audit SELECT X'{OTHER.replace('-', '')}', number, occurred_at, actor, action, subject, outcome, "
        "detail, correlation_id, sequence, previous_hash, hash FROM audit WHERE number = 1",
    )
    done = ostler("audit", "verify", home=home)
    assert (done.returncode, f"workspace {OTHER}: broken" in done.stdout) == (1, True)
    assert ostler("audit", "verify", "--workspace", OTHER, home=home).returncode == 1


def test_a_kept_head_is_taken_as_people_write_it_and_refused_if_it_can_be_none(home: Path) -> None:
    kept = ostler("audit", "verify", home=home).stdout.split("head ")[1].strip()
    number, _, digest = kept.partition(":")
    assert ostler("audit", "verify", "--kept-head", f" {number}:{digest.upper()}\n", home=home).returncode == 0
    for wrong in (f"{number}:{digest[:12]}", f"{number}:{digest}0", f"{number}:{'g' * 64}", f"x:{digest}", "", ":"):
        done = ostler("audit", "verify", "--kept-head", wrong, home=home)
        assert (done.returncode, done.stdout) == (2, ""), wrong
        assert "must be NUMBER:HASH with all 64 hexadecimal digits" in done.stderr
