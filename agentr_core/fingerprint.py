"""Content ids: canonical JSON to a short SHA-256."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any


def canonical(value: Any) -> str:
    """Return the one JSON text of a value: keys sorted, no spaces; dataclasses as objects, tuples as lists."""
    return _ENCODER.encode(value)


def fingerprint(*parts: Any) -> str:
    """Return 16 hexadecimal digits that identify the given parts by content."""
    return hashlib.sha256(canonical(parts).encode()).hexdigest()[:16]


def derive_seed(*parts: Any) -> int:
    """Return a seed in [0, 2**63) determined by the given parts, for one independent random stream."""
    return int.from_bytes(hashlib.sha256(canonical(parts).encode()).digest()[:8], "big") >> 1


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    raise TypeError(f"cannot fingerprint a {type(value).__name__}")


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)
