"""The umask of this program, which its agents have too. The keeper has another: its own files are private."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_NAME = "Umask:"


def own_umask() -> int | None:
    """Read and not set, for other threads may be making files; None where the kernel does not tell."""
    try:
        lines = _STATUS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.removeprefix(_NAME), 8) for line in lines if line.startswith(_NAME)), None)
