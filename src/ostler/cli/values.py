"""A value that somebody typed: a number, a truth, a list where it reads as one, else text."""

from __future__ import annotations

import json
from typing import Any


def parse_value(text: str) -> Any:
    """As JSON if it is JSON, as it stands if not: `0.2` is a number, `"0.2"` and `pause` are text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
