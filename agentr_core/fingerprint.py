"""Content ids: a short SHA-256 of canonical JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any


def canonical(value: Any) -> str:
    """Return the canonical JSON text of a value: keys sorted, no spaces; dataclasses as objects,
    tuples as lists.
    """
    return _ENCODER.encode(value)


def fingerprint(*parts: Any) -> str:
    """Return 16 hexadecimal digits that identify the given parts by content."""
    return hashlib.sha256(canonical(parts).encode()).hexdigest()[:16]


def derive_seed(*parts: Any) -> int:
    """Return a seed in [0, 2**63) determined by the given parts, for one independent random
    stream.
    """
    return int.from_bytes(hashlib.sha256(canonical(parts).encode()).digest()[:8], "big") >> 1


# With these, recipes can gain fields while all earlier runs keep their ids. The default of such a
# field must never change.
def later_field(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field that is left out of ids while it has its default: for fields that
    were added after values of the class had been stored.
    """
    return dataclasses.field(default=default, default_factory=default_factory, metadata=_LATER)


def omitted_fields(value: Any) -> frozenset[str]:
    """Return the names of the fields of a dataclass that are left out of ids, since they were added
    later and have their default.
    """
    return frozenset(
        field.name
        for field in dataclasses.fields(value)
        if field.metadata == _LATER and getattr(value, field.name) == default_of(field)
    )


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass field, or `MISSING` if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        omitted = omitted_fields(value)
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in omitted}
    raise TypeError(f"cannot fingerprint a {type(value).__name__}")


_LATER = {"agentr": "in no id with its default"}
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_as_json)


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
