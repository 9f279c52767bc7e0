"""How the demo speaks."""

from __future__ import annotations

import os
import sys
import time

COLOURED = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if COLOURED else f"\n{text}", flush=True)
    time.sleep(0.4 if COLOURED else 0)


def say(text: str = "") -> None:
    print(f"  {text}", flush=True)
