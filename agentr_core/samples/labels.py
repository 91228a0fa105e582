"""The label that marks a token without loss."""

from __future__ import annotations

IGNORED = -100
"""What torch's cross entropy skips by default."""
