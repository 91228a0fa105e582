"""Which replica serves which session: rendezvous hashing."""

from __future__ import annotations

import hashlib


def replica_of(session: str, replicas: int) -> int:
    """Return the number of the replica, below `replicas`, that all requests of a session go to.

    With one replica more or fewer, only the sessions of that replica move.
    """
    return max(range(replicas), key=lambda number: hashlib.sha256(f"{number}:{session}".encode()).digest())
