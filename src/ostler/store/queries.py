"""Reads the named queries from their files, and fits them to a dialect."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

_NAMED = re.compile(r"^-- name: (\w+)\n(.*?)(?=^-- name: |\Z)", re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)\b")


@functools.cache
def queries() -> Mapping[str, str]:
    """Name to SQL, comments stripped."""
    text = (resources.files("ostler.store") / "sql" / "queries.sql").read_text()
    return MappingProxyType({name: _strip(body) for name, body in _NAMED.findall(text)})


def migrations(dialect: str) -> list[tuple[int, str]]:
    """The numbered migration files of a dialect, in order."""
    folder = resources.files("ostler.store") / "sql" / dialect
    found = [(int(entry.name[:4]), entry.read_text()) for entry in folder.iterdir() if entry.name.endswith(".sql")]
    return sorted(found)


def statements(script: str) -> list[str]:
    """A migration file as single statements; none of ours holds a semicolon inside one."""
    return [part.strip() for part in _strip(script).split(";") if part.strip()]


def percent_style(sql: str) -> str:
    """`:name` and `?` as psycopg wants them."""
    return _PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%")).replace("?", "%s")


def _strip(body: str) -> str:
    lines = (line.split(" -- ")[0].rstrip() for line in body.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(line for line in lines if line).strip().rstrip(";")
