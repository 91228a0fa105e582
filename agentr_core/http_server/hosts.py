"""The host that a request names, and who may reach one."""

from __future__ import annotations

import secrets
from typing import Final
from urllib.parse import urlsplit

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
"""The names by which a machine refers to itself."""


def host_in(header: str) -> str | None:
    """Return the host in a `Host` header, without its port; None if it cannot be read."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def token_for(host: str) -> str | None:
    """Return a new token for a server that listens on a host; None if only this machine reaches
    it.
    """
    return None if host in LOOPBACK else secrets.token_urlsafe(24)
