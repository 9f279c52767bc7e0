"""Parses the targets of health probes. Each function raises `ValueError` with words that follow the field's name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

_SCHEMES = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpTarget:
    host: str
    port: int
    tls: bool
    #: Path and query, as they are sent.
    path: str
    #: The host as its header names it: in brackets where it needs them, with the port where it is unusual.
    authority: str


def http_target(text: str) -> HttpTarget:
    """From a URL without credentials, of characters that may stand in a request line."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be a URL of printable ASCII characters without spaces")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("must be a URL with a host and a port from 1 to 65535") from None
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ValueError("must be a URL that begins with http:// or https:// and names a host")
    if "@" in parts.netloc:
        raise ValueError("must not contain a user name or password")
    if port == 0:
        raise ValueError("must be a URL with a host and a port from 1 to 65535")
    usual = _SCHEMES[parts.scheme]
    host = parts.hostname
    named = f"[{host}]" if ":" in host else host
    return HttpTarget(
        host=host,
        port=port or usual,
        tls=parts.scheme == "https",
        path=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        authority=named if port in {None, usual} else f"{named}:{port}",
    )


def tcp_target(text: str) -> tuple[str, int]:
    """From host:port; the host in brackets where it holds colons itself."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("must put an IPv6 address into brackets, as in [::1]:80")
    if not colon or not host or not host.isascii() or not host.isprintable() or set(host) & set(" []/@"):
        raise ValueError("must be host:port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise ValueError("must end with a port from 1 to 65535")
    return host, int(port)


def command_target(text: str) -> tuple[str, ...]:
    """From a command line, split as a shell splits it; no shell runs it."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"must be a command line that splits into words ({str(error).lower()})") from None
    if not words or not words[0]:
        raise ValueError("must name a program")
    if any("\0" in word for word in words):
        raise ValueError("must not contain NUL")
    return words
