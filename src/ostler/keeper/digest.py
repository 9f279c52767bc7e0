"""The hash by which the keeper names things, without the library of ciphers that `hashlib` loads before anything."""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # an interpreter that was built another way
    from hashlib import blake2b

__all__ = ["blake2b"]
