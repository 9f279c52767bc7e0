"""Other programs that are measured beside Ostler, each in the environment of the benchmarks, never in ours."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

_ENVIRONMENT = Path(__file__).parent.parent / ".venv-bench"


def rival_python(name: str, *packages: str) -> str | None:
    """The Python of an environment that has these packages, made once; None where they cannot be installed."""
    python, ready = _ENVIRONMENT / "bin" / "python", _ENVIRONMENT / f".{name}"
    wanted = " ".join(packages)
    if ready.exists() and ready.read_text() == wanted:
        return str(python)
    print(f"installing {wanted} into {_ENVIRONMENT.name}; once, and only for this table")
    if not python.exists():
        venv.create(_ENVIRONMENT, with_pip=True)
    words = [str(python), "-m", "pip", "install", "-q", *packages]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} is left out: {(done.stderr.strip().splitlines() or ['it cannot be installed'])[-1]}")
        return None
    ready.write_text(wanted)
    return str(python)
