"""What a newcomer and an installer rely on: the pins, the extras, the targets of make, the gate of CI."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def entries(text: str) -> list[str]:
    """Each pin with its hashes, as one line."""
    joined = text.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def pin_faults(text: str) -> Iterator[str]:
    for entry in entries(text):
        before, *hashes = re.split(r"\s+--hash=", entry)
        if not re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.!+]+( *; .+)?", before):
            yield f"{before} is not pinned to one version"
        if not hashes or not all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes):
            yield f"{before} has no hash, or one that is not sha256"
    if re.search(r"://|index-url|find-links|trusted-host|@ *(git|file)", text):
        yield "it names a registry"


def test_every_pin_has_its_hashes_and_no_registry() -> None:
    assert len(entries(CONSTRAINTS)) > 20
    assert not list(pin_faults(CONSTRAINTS))


@pytest.mark.parametrize(
    "text",
    [
        "click==8.2.0",
        "click>=8.2 --hash=sha256:" + "0" * 64,
        "click==8.2.0 --hash=md5:" + "0" * 32,
        "--index-url https://example.invalid/simple",
    ],
)
def test_a_loose_pin_is_found(text: str) -> None:
    assert list(pin_faults(text))


def test_the_pins_cover_the_core_the_tools_and_postgres() -> None:
    pinned: dict[str, list[str]] = {}
    for entry in entries(CONSTRAINTS):
        one = Requirement(re.split(r"\s+--hash=", entry)[0])
        pinned.setdefault(canonicalize_name(one.name), []).append(str(one.specifier).removeprefix("=="))
    for text in (*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["postgres"]):
        wanted = Requirement(text)
        versions = pinned.get(canonicalize_name(wanted.name), [])
        assert versions, f"{text} is not in constraints.txt; run make lock"
        assert all(wanted.specifier.contains(version) for version in versions), f"{text}, but {versions} is pinned"


def test_what_an_installer_reads() -> None:
    assert {"postgres", "dev"} == set(EXTRAS)
    admitted = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(8, 20) if admitted.contains(f"3.{minor}")] == list(range(11, 20)), "no upper bound"
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["scripts"] == {"ostler": "ostler.cli:main"}


def test_make_has_its_targets_and_ci_runs_the_gates() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert {"demo", "test", "check", "bench", "torture", "fmt", "clean"} <= targets
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "it must be executable"
    commands = script.read_text().splitlines()
    assert "set -euo pipefail" in commands, "a gate that fails must fail the run"
    assert commands.index("make check") < commands.index("make test")
